"""A layout into a configuration file: what changes, what stays, and what is refused."""

from __future__ import annotations

import os
import stat
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from launcher.base.errors import LauncherError
from launcher.config.loading import load_config
from launcher.config.schema import Strategy
from launcher.measure.tune import apply
from launcher.measure.tune.apply import apply_layout, layout_toml
from launcher.measure.tune.model import Layout

NOW = datetime(2026, 11, 22, 17, 30, tzinfo=UTC)
LAYOUT = Layout(strategy=Strategy.CONTIGUOUS, instances_per_socket=4, reserve_cores=2)
TUNED = replace(LAYOUT, max_num_seqs=256, max_num_batched_tokens=4096)
CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))
TEXT = """\
# ours
[[models]]
name = "a"          # what clients send
path = "/srv/a"
max_num_seqs = 32   # measured in May

[[models]]
name = "b"
path = "/srv/b"

[layout]
instances_per_socket = "auto"  # one per 64 cores
use_smt = true

# secrets below
[proxy]
listen = ["127.0.0.1:1"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(TEXT)
    file.chmod(0o640)
    return file


def test_only_the_keys_of_the_layout_change(file: Path) -> None:
    done = apply_layout(file, TUNED, now=NOW)
    assert file.read_text() == (
        TEXT.replace("max_num_seqs = 32 ", "max_num_seqs = 256 ")
        .replace("# measured in May\n", "# measured in May\nmax_num_batched_tokens = 4096\n")
        .replace('path = "/srv/b"\n', 'path = "/srv/b"\nmax_num_seqs = 256\nmax_num_batched_tokens = 4096\n')
        .replace('instances_per_socket = "auto"', "instances_per_socket = 4")
        .replace("use_smt = true\n", 'use_smt = true\nstrategy = "contiguous"\nreserve_cores = 2\n')
    )
    assert done.changed == (
        'layout.strategy: not set → "contiguous"',
        'layout.instances_per_socket: "auto" → 4',
        "layout.reserve_cores: not set → 2",
        "models.0.max_num_seqs: 32 → 256",
        "models.0.max_num_batched_tokens: not set → 4096",
        "models.1.max_num_seqs: not set → 256",
        "models.1.max_num_batched_tokens: not set → 4096",
    )


def test_the_old_file_is_kept_with_its_mode(file: Path) -> None:
    kept = apply_layout(file, LAYOUT, now=NOW).kept
    assert kept == file.with_name("config.toml.before-20261122T173000Z")
    assert kept.read_text() == TEXT
    assert {stat.S_IMODE(path.stat().st_mode) for path in (kept, file)} == {0o640}
    assert {path.name for path in file.parent.iterdir()} == {file.name, kept.name}


def test_limits_that_were_not_tuned_are_not_written(file: Path) -> None:
    apply_layout(file, LAYOUT, now=NOW)
    assert [model.get("max_num_seqs") for model in tomllib.loads(file.read_text())["models"]] == [32, None]


def test_the_same_layout_again_writes_nothing(file: Path) -> None:
    apply_layout(file, LAYOUT, now=NOW)
    before = file.stat()
    done = apply_layout(file, LAYOUT, now=NOW)
    after = file.stat()
    assert (done.kept, done.changed) == (None, ())
    assert (after.st_ino, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )


@pytest.mark.parametrize("example", CONFIGS, ids=lambda path: path.name)
def test_every_example(example: Path, tmp_path: Path) -> None:
    file = tmp_path / example.name
    file.write_bytes(example.read_bytes())
    apply_layout(file, TUNED, now=NOW)
    before, after = load_config(example, environ={}), load_config(file, environ={})
    assert (after.layout.strategy, after.layout.instances_per_socket) == (Strategy.CONTIGUOUS, 4)
    assert {model.max_num_seqs for model in after.models} == {256}
    assert (after.proxy, after.engine, after.memory) == (before.proxy, before.engine, before.memory)
    comments = [line for line in example.read_text().splitlines() if line.startswith("#")]
    assert [line for line in file.read_text().splitlines() if line.startswith("#")] == comments


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[layout]\n",
        'layout.strategy = "per-node"\n',
        'layout = {strategy = "per-node", use_smt = true}\n',
        'models = [{name = "a", path = "/a"}]\n[layout]\nspan_nodes = true\n',
        '[[models]]\nname = "a"\npath = "/a"',  # no line feed at the end
        '\r\n[layout]\r\nstrategy = "per-node" # x\r\n',
    ],
)
def test_any_form_of_toml(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(text.encode())
    apply_layout(file, TUNED, now=NOW)
    before, after = tomllib.loads(text), tomllib.loads(file.read_bytes().decode())
    assert after["layout"] == before.get("layout", {}) | {
        "strategy": "contiguous", "instances_per_socket": 4, "reserve_cores": 2,
        **({"span_nodes": False} if "span_nodes" in before.get("layout", {}) else {}),
    }  # fmt: skip
    assert [model["max_num_seqs"] for model in after.get("models", ())] == [256] * len(
        before.get("models", ())
    )


@given(
    st.sampled_from(Strategy),
    st.integers(1, 64) | st.just("auto"),
    st.integers(0, 64) | st.just("auto"),
    st.booleans(),
)
def test_the_fragment_says_the_layout(strategy: Strategy, count: Any, reserved: Any, span: bool) -> None:
    layout = Layout(strategy=strategy, instances_per_socket=count, reserve_cores=reserved, span_nodes=span)
    tree = tomllib.loads(layout_toml(layout))["layout"]
    assert {"span_nodes": False} | tree == {
        "strategy": strategy.value, "instances_per_socket": count, "reserve_cores": reserved, "span_nodes": span
    }  # fmt: skip


def test_the_fragment_names_the_limits_of_models() -> None:
    assert layout_toml(TUNED).endswith(
        "reserve_cores = 2\n\n# in each [[models]], and not in engine.args:\n"
        "max_num_seqs = 256\nmax_num_batched_tokens = 4096\n"
    )


def test_a_link_stays_a_link(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "etc" / "config.toml"
    link.parent.mkdir()
    link.symlink_to(file)
    done = apply_layout(link, LAYOUT, now=NOW)
    assert link.is_symlink()
    assert "contiguous" in file.read_text()
    assert done.kept is not None
    assert done.kept.parent == file.parent


def test_a_file_that_changes_meanwhile_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = apply._write_like

    def edited(model: Path, facts: os.stat_result, path: Path, data: bytes) -> None:
        write(model, facts, path, data)
        file.write_text(TEXT + "# edited\n")

    monkeypatch.setattr(apply, "_write_like", edited)
    with pytest.raises(LauncherError, match="another program changed it meanwhile") as caught:
        apply_layout(file, LAYOUT, now=NOW)
    assert caught.value.remedy == "run tune --apply again"
    assert file.read_text() == TEXT + "# edited\n"
    assert list(file.parent.iterdir()) == [file]


def test_a_write_that_fails_leaves_nothing_behind(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LauncherError, match=r"cannot write .*: no space left on device"):
        apply_layout(file, LAYOUT, now=NOW)
    assert file.read_text() == TEXT
    assert list(file.parent.iterdir()) == [file]


def test_a_file_that_may_not_be_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, and a rename needs only the folder: the permission of the file itself is asked for."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(LauncherError, match=r"cannot write .*: permission denied") as caught:
        apply_layout(file, LAYOUT, now=NOW)
    assert "as a user who may write the file" in caught.value.remedy
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("text", "why"),
    [(b"[layout\n", "cannot change"), (b"layout = 3\n", "cannot change"), (b"\xff\xfe", "cannot change"),
     (b"models = 4\n", "cannot change"), (b'[engine]\nkind = "vlm"\n', "cannot change"),
     (b"[models]\nname = 3\n", "cannot change")],
)  # fmt: skip
def test_what_is_no_configuration_is_refused(text: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(text)
    with pytest.raises(LauncherError, match=why):
        apply_layout(file, TUNED, now=NOW)
    assert file.read_bytes() == text


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"cannot read .*: no such file"):
        apply_layout(tmp_path / "none.toml", LAYOUT, now=NOW)
    with pytest.raises(LauncherError, match="it is not a regular file"):
        apply_layout(tmp_path, LAYOUT, now=NOW)


def test_another_engine_is_written_by_hand(file: Path) -> None:
    with pytest.raises(LauncherError, match=r"cannot write stack 'llama\.cpp'") as caught:
        apply_layout(file, replace(LAYOUT, stack="llama.cpp"), now=NOW)
    assert 'engine.kind = "llama.cpp"' in caught.value.remedy


def test_another_stack_is_no_setting(file: Path) -> None:
    with pytest.raises(LauncherError, match="cannot write stack 'zentorch'"):
        apply_layout(file, replace(LAYOUT, stack="zentorch"), now=NOW)


ENGINE = """\

[engine]
args = [
    "--enforce-eager",      # keep
    "--max_num_seqs=8",
    "--max-num-batched-tokens", "1k",
    "--seed", "1",          # and this
]
"""


def test_limits_in_engine_args_give_way(file: Path) -> None:
    file.write_text(TEXT + ENGINE)
    done = apply_layout(file, TUNED, now=NOW)
    config = load_config(file, environ={})
    assert config.engine.args == ("--enforce-eager", "--seed", "1")
    assert "# keep" in file.read_text()
    assert {model.max_num_seqs for model in config.models} == {256}
    assert "engine.args: without --max_num_seqs=8 --max-num-batched-tokens 1k" in done.changed
    assert apply_layout(file, TUNED, now=NOW + timedelta(seconds=1)).changed == ()


def test_engine_args_stay_where_no_limit_was_tuned_or_the_engine_is_another(file: Path) -> None:
    file.write_text(TEXT + ENGINE)
    apply_layout(file, LAYOUT, now=NOW)
    assert ENGINE in file.read_text()
    other = ENGINE.replace("args = [", 'kind = "command"\ncommand = ["x"]\nargs = [')
    file.write_text(TEXT + other)
    apply_layout(file, TUNED, now=NOW + timedelta(seconds=1))
    assert other in file.read_text()
