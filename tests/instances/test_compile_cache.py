"""Compile caches on a real file system: who may start from whose copy."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from launcher.address import UnixAddress
from launcher.engines.base import Launch
from launcher.instances.compile_cache import FORGOTTEN_S, STAMP, CompileCaches


def launch(root: Path, slot: int, *more: str, stack: str = "vllm1", cpus: str = "0-3") -> Launch:
    folder = root / stack / f"slot{slot}"
    argv = (
        "numactl", f"--physcpubind={cpus}", f"--membind={slot}", "vllm", "serve", "/m", "--uds", f"/run/{slot}.sock", *more,
    )  # fmt: skip
    env = {
        "VLLM_CACHE_ROOT": f"{folder}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "VLLM_CPU_OMP_THREADS_BIND": cpus,
    }
    return Launch(argv=argv, env=env, secrets=frozenset(), address=UnixAddress("/x"))


def compile_into(of: Launch, text: str = "code") -> Path:
    file = Path(of.env["TORCHINDUCTOR_CACHE_DIR"]) / "aa" / "x.so"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return file


def test_the_second_starts_from_a_copy_of_the_first(tmp_path: Path) -> None:
    caches, first, second = CompileCaches(), launch(tmp_path, 0), launch(tmp_path, 1, cpus="4-7")
    assert not caches.warm(0, first)
    caches.prepare(0, first)
    compile_into(first)
    assert not caches.warm(1, second), "an engine has not come up with it yet"
    caches.keep(0, first)
    assert caches.warm(0, first)
    assert caches.warm(1, second)
    caches.prepare(1, second)
    assert (Path(second.env["TORCHINDUCTOR_CACHE_DIR"]) / "aa" / "x.so").read_text() == "code"
    assert sorted(path.name for path in (tmp_path / "vllm1").iterdir()) == ["slot0", "slot1"]


@pytest.mark.parametrize("other", [{"cpus": "4-6"}, {"stack": "vllm2"}])
def test_another_number_of_threads_or_another_stack_compiles_for_itself(
    tmp_path: Path, other: dict[str, str]
) -> None:
    caches, first = CompileCaches(), launch(tmp_path, 0)
    compile_into(first)
    caches.keep(0, first)
    assert not caches.warm(1, launch(tmp_path, 1, **other))
    assert not caches.warm(1, launch(tmp_path, 1, "--max-num-seqs", "8"))


def test_who_compiles_nothing_waits_for_nobody(tmp_path: Path) -> None:
    assert CompileCaches().warm(1, launch(tmp_path, 1, "--enforce-eager"))


def test_what_was_compiled_for_something_else_is_emptied(tmp_path: Path) -> None:
    caches, first = CompileCaches(), launch(tmp_path, 0)
    file = compile_into(first)
    caches.keep(0, first)
    caches.prepare(0, first)
    assert file.exists()
    caches.prepare(0, launch(tmp_path, 0, "--quantization", "awq"))
    assert not file.exists()


def test_purge(tmp_path: Path) -> None:
    caches, first = CompileCaches(), launch(tmp_path, 0)
    file = compile_into(first)
    caches.purge(0, first)
    caches.purge(0, first)
    assert not file.exists()


def test_old_stacks_are_forgotten(tmp_path: Path) -> None:
    caches, old = CompileCaches(), launch(tmp_path, 0, stack="vllm0")
    compile_into(old)
    caches.keep(0, old)
    (tmp_path / "somebody's").mkdir()
    caches.prepare(0, launch(tmp_path, 0))
    assert (tmp_path / "vllm0").exists()
    long_ago = (tmp_path / "vllm0" / "slot0" / STAMP).stat().st_mtime - FORGOTTEN_S - 10
    os.utime(tmp_path / "vllm0" / "slot0" / STAMP, (long_ago, long_ago))
    caches.prepare(0, launch(tmp_path, 0))
    assert not (tmp_path / "vllm0").exists()
    assert (tmp_path / "somebody's").exists()


def test_a_damaged_stamp_is_none(tmp_path: Path) -> None:
    caches, first = CompileCaches(), launch(tmp_path, 0)
    compile_into(first)
    for text in ("", "[]", json.dumps({"time": 1})):
        (tmp_path / "vllm1" / "slot0" / STAMP).write_text(text)
        assert not caches.warm(0, first)


def test_an_engine_with_no_cache_of_ours(tmp_path: Path) -> None:
    caches = CompileCaches()
    for env in ({}, {"VLLM_CACHE_ROOT": f"{tmp_path}/a/v", "TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/b/i"}):
        plain = Launch(argv=("x",), env=env, secrets=frozenset(), address=UnixAddress("/x"))
        assert caches.warm(0, plain)
        caches.prepare(0, plain)
        caches.keep(0, plain)
        caches.purge(0, plain)
    caches.keep(0, launch(tmp_path, 0))
    assert list(tmp_path.iterdir()) == [], "nothing was compiled, so nothing is stamped"


def test_a_full_disk_only_costs_the_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caches, first, second = CompileCaches(), launch(tmp_path, 0), launch(tmp_path, 1)
    compile_into(first)
    caches.keep(0, first)
    (tmp_path / "vllm1" / f".slot1.{os.getpid()}").write_text("in the way")
    caches.prepare(1, second)
    assert "cannot copy a compile cache" in caplog.text
