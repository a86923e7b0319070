"""`numa-launcher audit verify|anchor`: what they print, and their exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.audit_trails import Clock, a_writer, last_file, stop, write, write_trail

from launcher.accounts.audit_verify import HEAD
from launcher.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_trail(tmp_path / "trail")
    return tmp_path / "trail"


def ran(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main(["audit", *map(str, args)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_whole_trail(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, out, _ = ran(capsys, "verify", folder)
    assert code == 0
    assert f"audit trail in {folder}: nothing was changed, removed or put in" in out
    assert "3 files, 2026-09-21 to 2026-09-23; lines 1 to 21" in out
    assert "requests 12, control actions 3, starts 2" in out
    assert "anchors compared: none" in out


def test_a_changed_byte_is_named(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    path = last_file(folder)
    path.write_bytes(path.read_bytes().replace(b'"output_tokens":2', b'"output_tokens":9'))
    code, out, _ = ran(capsys, "verify", folder)
    assert code == 1
    assert out.startswith(f"{path}:4: changed: its hash is not that of its bytes\n")
    assert "lines up to 18 of the trail are right" in out


def test_json(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    code, out, _ = ran(capsys, "verify", folder, "--json")
    shown = json.loads(out)
    assert (code, shown["intact"], shown["wrong"], shown["last"]) == (0, True, None, 21)
    last_file(folder).unlink()
    code, out, _ = ran(capsys, "verify", folder, "--json")
    shown = json.loads(out)
    assert (code, shown["intact"]) == (1, False)
    assert shown["wrong"]["file"] == "audit-2026-09-23-000003.jsonl"


def test_an_anchor_is_printed_and_compared(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    code, out, _ = ran(capsys, "anchor", folder)
    assert code == 0
    assert re.fullmatch(r"21:[0-9a-f]{64} audit-2026-09-23-000003\.jsonl:6 2026-\S+Z\n", out)
    (tmp_path / "anchors").write_text(out * 2)
    code, text, _ = ran(
        capsys, "verify", folder, "--anchors", tmp_path / "anchors", "--anchor", out.split()[0]
    )
    assert code == 0
    assert "anchors compared: 3" in text
    code, shown, _ = ran(capsys, "anchor", folder, "--json")
    assert json.loads(shown)["n"] == 21
    assert json.loads(shown)["line"] == 6


def test_a_trail_written_again_is_found_by_an_anchor(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    anchor = ran(capsys, "anchor", folder)[1].split()[0]
    write_trail(tmp_path / "other", requests=5)
    assert ran(capsys, "verify", tmp_path / "other")[0] == 0
    code, out, _ = ran(capsys, "verify", tmp_path / "other", "--anchor", anchor)
    assert code == 1
    assert "is not the line 21 that the anchor names" in out


@pytest.mark.parametrize("action", ["verify", "anchor"])
def test_where_the_trail_is(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, action: str
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[[models]]\nname = "m"\npath = "/m"\n[audit]\npath = "{folder}"\n')
    assert ran(capsys, action, "-c", config)[0] == 0
    config.write_text('[[models]]\nname = "m"\npath = "/m"\n')
    code, _, err = ran(capsys, action, "-c", config)
    assert code == 2
    assert "the configuration does not set audit.path" in err
    code, _, err = ran(capsys, action, tmp_path / "nowhere")
    assert code == 2
    assert err.startswith("cannot ")
    code, _, err = ran(capsys, action, tmp_path)
    assert code == 2
    assert "audit trail" in err or HEAD in err


def test_what_is_no_anchor(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    (tmp_path / "anchors").write_text("\nhello\n")
    code, _, err = ran(capsys, "verify", folder, "--anchors", tmp_path / "anchors")
    assert code == 2
    assert "cannot use line 2 of" in err
    code, _, err = ran(capsys, "verify", folder, "--anchors", tmp_path / "none")
    assert code == 2
    assert "no such file" in err
    with pytest.raises(SystemExit) as found:
        main(["audit", "verify", str(folder), "--anchor", "x"])
    assert found.value.code == 2


def test_no_anchor_of_a_damaged_trail(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    path = last_file(folder)
    path.write_bytes(path.read_bytes()[:-10])
    code, _, err = ran(capsys, "anchor", folder)
    assert code == 2
    assert "does not have line 21" in err


def test_what_is_missing_and_recorded_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    clock = Clock()
    writer = a_writer(tmp_path / "trail", clock)
    write(writer, range(2))
    writer.close()
    writer = a_writer(tmp_path / "trail", clock)
    writer.lost(17, clock(), "no space left on device")
    stop(writer)
    code, out, _ = ran(capsys, "verify", tmp_path / "trail")
    assert code == 0
    assert "17 entries are missing: the daemon could not write them, and recorded that" in out
    assert "killed or crashed 1 times" in out
