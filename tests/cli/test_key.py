"""`numa-launcher key`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main, options
from launcher.proxy.auth.api_keys import ApiKeys

Output = pytest.CaptureFixture[str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def run(file: Path, *words: str) -> int:
    return main(["key", *words, "--file", str(file)])


def listed(file: Path, capsys: Output) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run(file, "list", "--json") == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_add_prints_the_key_once_and_keeps_no_copy(file: Path, capsys: Output) -> None:
    assert run(file, "add", "ann") == 0
    shown = capsys.readouterr()
    key = shown.out.strip()
    assert key.startswith("nl-")
    assert "not shown again" in shown.err
    assert key not in file.read_text()
    assert key[12:] not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    entry = ApiKeys(str(file)).check(f"Bearer {key}", None, 0.0)
    assert entry is not None
    assert entry.record.name == "ann"


def test_add_with_everything(file: Path, capsys: Output) -> None:
    assert run(
        file, "add", "bob", "--concurrency", "4", "--requests-per-minute", "60", "--tokens-per-minute", "100_000",
        "--model", "a", "--model", "org/b", "--local-only", "--json",
    ) == 0  # fmt: skip
    made = json.loads(capsys.readouterr().out)
    (record,) = listed(file, capsys)
    assert made.pop("key").startswith(f"nl-{record['id']}-")
    assert made == record
    assert record["revoked"] is None
    assert (record["concurrency"], record["requests_per_minute"], record["tokens_per_minute"]) == (
        4,
        60,
        100_000,
    )
    assert record["models"] == ["a", "org/b"]
    assert record["local_only"] is True
    assert "hash" not in record
    assert "salt" not in record


def test_list_for_people(file: Path, capsys: Output) -> None:
    run(file, "add", "ann", "--tokens-per-minute", "100000", "--local-only")
    run(file, "add", "bob", "--model", "m")
    run(file, "revoke", "bob")
    capsys.readouterr()
    assert run(file, "list") == 0
    head, ann, bob = capsys.readouterr().out.splitlines()
    assert head.split() == ["ID", "NAME", "CREATED", "LIMITS", "MODELS"]
    assert "100,000 tokens/min, local only" in ann
    assert ann.endswith("  all")
    assert "revoked 20" in bob


def test_revoke_by_name_and_id(file: Path, capsys: Output) -> None:
    keys = []
    for name in ("ann", "bob"):
        capsys.readouterr()
        run(file, "add", name)
        keys.append(capsys.readouterr().out.strip())
    ann, bob = listed(file, capsys)
    assert run(file, "revoke", "ann") == 0
    assert run(file, "revoke", bob["id"]) == 0
    assert all(record["revoked"] for record in listed(file, capsys))
    when = [record["revoked"] for record in listed(file, capsys)]
    assert run(file, "revoke", ann["id"]) == 0  # again: done already
    assert [record["revoked"] for record in listed(file, capsys)] == when
    assert not list(ApiKeys(str(file)))
    assert run(file, "add", "ann") == 0  # the name is free again
    assert [record["name"] for record in listed(file, capsys)] == ["ann", "bob", "ann"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["add", "ann"], "cannot add key 'ann': the name is in use"),
        (["revoke", "zed"], "cannot revoke key 'zed': no key has this id or name"),
        (["add", ""], "cannot make key ''"),
        (["add", "a\nb"], "cannot make key"),
        (["add", "x" * 65], "cannot make key"),
    ],
)
def test_errors(file: Path, capsys: Output, words: list[str], error: str) -> None:
    run(file, "add", "ann")
    before = file.read_text()
    assert run(file, *words) == 2
    said = capsys.readouterr().err
    assert error in said
    assert file.read_text() == before


def test_a_missing_file(file: Path, capsys: Output) -> None:
    assert run(file, "list") == 2
    assert f"numa-launcher key add NAME --file {file}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["add"],
        ["explode"],
        ["add", "a", "--concurrency", "0"],
        ["add", "a", "--tokens-per-minute", "many"],
    ],
)
def test_usage_errors(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["key", *words])
    assert caught.value.code == 2


def test_the_configuration_names_the_file(file: Path, tmp_path: Path, capsys: Output) -> None:
    config = tmp_path / "config.toml"
    models = '[[models]]\nname = "m"\npath = "/m"\n'
    config.write_text(f'{models}[proxy]\napi_keys_file = "{file}"\n')
    assert main(["key", "add", "ann", "-c", str(config)]) == 0
    assert file.exists()
    config.write_text(models)
    assert main(["key", "list", "-c", str(config)]) == 2
    assert 'api_keys_file = "/etc/numa-launcher/api-keys"' in capsys.readouterr().err


def test_no_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setattr(options, "DEFAULT_CONFIG", tmp_path / "none.toml")
    assert main(["key", "list"]) == 2
    assert "--file FILE" in capsys.readouterr().err
