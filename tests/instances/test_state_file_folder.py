"""What is kept for the next daemon, also where nothing can be written."""

from __future__ import annotations

import asyncio
import stat
import threading
from pathlib import Path

import pytest

from launcher.base.files import replace_file
from launcher.instances import state_file
from launcher.instances.state_file import Record, StateFile, StateFolder

ONE = Record(slot=0, generation=2, unit="numa-launcher-slot0.service", digest="d", socket="/run/s", pid=7)
TWO = Record(slot=1, generation=1, unit="numa-launcher-slot1.service", digest="e", port=4000)


def seen(path: Path) -> tuple[str, int, int] | None:
    """Text and mode of a file, and the mode of its folder; None without one."""
    if not path.exists():
        return None
    modes = (stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent))
    return path.read_text(), *modes  # type: ignore[return-value]


def names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]


async def test_the_next_daemon_knows_what_runs(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    await folder.remember(ONE)
    await folder.remember(TWO)
    await folder.forget(1)
    await folder.forget(1)
    assert StateFolder(tmp_path / "state").records == {0: ONE}


async def test_a_full_disk_keeps_nothing_from_starting_and_is_made_good_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = StateFolder(tmp_path / "state")
    await folder.remember(ONE)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("launcher.instances.state_file.replace_file", full)
        await folder.remember(TWO)
        await folder.forget(0)
    path = tmp_path / "state" / "instances.json"
    assert caplog.messages == [
        f"cannot write '{path}': no space left on device; a daemon that starts now would restart slot 1",
        f"cannot write '{path}': no space left on device",
    ]
    assert StateFile(path).records == {0: ONE}
    await folder.remember(TWO)
    assert StateFile(path).records == {1: TWO}


async def test_secrets_are_there_for_root_alone_and_only_until_the_unit_has_started(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "state")
    async with folder.secrets(3, {"HF_TOKEN": "x"}) as path:
        assert path is not None
        assert seen(Path(path)) == ('HF_TOKEN="x"\n', 0o600, 0o700)
    assert seen(Path(path)) is None
    async with folder.secrets(3, {}) as nothing:
        assert nothing is None


async def test_of_a_start_that_fails_no_secret_stays(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    with pytest.raises(ZeroDivisionError):
        async with folder.secrets(3, {"HF_TOKEN": "x"}):
            raise ZeroDivisionError
    assert names(tmp_path) == []


async def test_a_disk_that_stalls_holds_up_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsync(2) may take minutes; the event loop has streams to relay. The newest records are what is written."""
    folder, back = StateFolder(tmp_path / "state"), threading.Event()

    def stalled(path: Path, data: bytes) -> None:
        assert back.wait(60)
        replace_file(path, data)

    monkeypatch.setattr(state_file, "replace_file", stalled)
    writing = [asyncio.create_task(folder.remember(record)) for record in (ONE, TWO)]
    await asyncio.sleep(0)
    writing.append(asyncio.create_task(folder.forget(0)))
    await asyncio.sleep(0)
    assert folder.records == {1: TWO}
    assert not any(task.done() for task in writing)
    back.set()
    await asyncio.gather(*writing)
    assert StateFolder(tmp_path / "state").records == {1: TWO}
