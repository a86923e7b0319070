"""When a file counts as changed, and what state it is in."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import TypeVar

import pytest
from support.fakes import SOON_S, looked
from support.hand_clock import STEPS_S

from launcher.base import watched_file
from launcher.base.errors import LauncherError
from launcher.base.files import excess_mode
from launcher.base.watched_file import (
    NOTICE_S,
    RETRY_S,
    FileCondition,
    FileThatMayCome,
    WatchedFile,
    WatchedFiles,
)

T = TypeVar("T")


def newest(file: WatchedFile[T], now: float) -> T:
    """Its value once the look that begins now has ended."""
    file.latest(now)
    looked()
    return file.value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "f"
    made.write_text("one")
    return made


class Reader(WatchedFile[str]):
    """Counts how often its file is read."""

    def __init__(self, path: Path) -> None:
        self.reads = 0
        self._now = 0.0
        super().__init__("word", lambda: self._read_word(path), str(path))

    def _read_word(self, path: Path) -> str:
        self.reads += 1
        try:
            return path.read_text()
        except OSError as error:
            raise LauncherError(f"cannot read it: {error}", "write it") from None

    def later(self) -> str:
        self._now += 2.0
        return newest(self, self._now)


def test_a_change_is_read_once(path: Path) -> None:
    file = Reader(path)
    assert newest(file, 1.0) == "one"
    path.write_text("three")
    assert newest(file, 1.4) == "one"  # twice a second
    assert newest(file, 1.5) == newest(file, 4.0) == "three"
    assert file.reads == 2


def test_a_replaced_file_of_the_same_size_and_time(path: Path) -> None:
    file = Reader(path)
    times = path.stat()
    fresh = path.with_name("fresh")
    fresh.write_text("two")
    os.utime(fresh, ns=(times.st_atime_ns, times.st_mtime_ns))
    fresh.replace(path)
    assert file.later() == "two"


def test_coming_and_going(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = Reader(path)
    path.unlink()
    assert file.later() == file.later() == "one"
    assert file.reads == 2
    file._now += RETRY_S
    assert file.later() == "one"
    assert file.reads == 3
    assert caplog.text.count("keeping the word read before (write it)") == 1
    path.write_text("two")
    assert file.later() == "two"


def test_a_symlink_that_moves(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("two")
    link = tmp_path / "link"
    link.symlink_to(path)
    file = Reader(link)
    link.unlink()
    link.symlink_to(other)
    assert file.later() == "two"


def test_either_of_two_files(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    file = WatchedFile("words", lambda: [path.read_text(), other.exists()], str(path), str(other))
    other.write_text("two")
    assert newest(file, 1.0) == ["one", True]


DAY = 86_400.0


class Dated(WatchedFile[str]):
    """Counts from its first to its second number."""

    def __init__(self, path: Path) -> None:
        self.now = 1000 * DAY
        super().__init__(
            "paper", lambda: self._read_dates(path), str(path), validity=self._bounds, wall=lambda: self.now
        )

    def _read_dates(self, path: Path) -> str:
        try:
            text = path.read_text()
            self._bounds(text)
        except (OSError, ValueError) as error:
            raise LauncherError(f"cannot read it: {error}", "write it") from None
        return text

    def _bounds(self, text: str) -> tuple[float, float]:
        begin, end = map(float, text.split())
        return begin * DAY, end * DAY


@pytest.mark.parametrize(
    ("dates", "condition", "since", "why"),
    [
        ("910 2000", FileCondition.IN_USE, 1000 * DAY, ""),
        ("910 1001", FileCondition.EXPIRING, 1001 * DAY - NOTICE_S, "paper '{}' expires at 1972-09-28 00:00 UTC"),
        ("999 1002", FileCondition.IN_USE, 1000 * DAY, ""),
        ("998 1000.25", FileCondition.EXPIRING, 999.875 * DAY, "paper '{}' expires at 1972-09-27 06:00 UTC"),
        ("10 990", FileCondition.EXPIRED, 990 * DAY, "paper '{}' expired at 1972-09-17 00:00 UTC: clients refuse it"),
        (
            "1001 1100",
            FileCondition.NOT_YET_VALID,
            1000 * DAY,
            "paper '{}' is not valid before 1972-09-28 00:00 UTC: clients refuse it",
        ),
    ],
)  # fmt: skip
def test_validity(path: Path, dates: str, condition: FileCondition, since: float, why: str) -> None:
    """Notice is two weeks, and a sixth of a short life."""
    path.write_text(dates)
    state = Dated(path).state()
    assert (state.what, state.path, state.state) == ("paper", str(path), condition)
    assert state.since == pytest.approx(since)
    assert state.why == why.format(path)
    assert bool(state.remedy) == bool(why)


@pytest.mark.parametrize("step_s", STEPS_S)
def test_the_clock_is_set_and_back(path: Path, caplog: pytest.LogCaptureFixture, step_s: float) -> None:
    """A certificate of three months is judged by the clock as it is; nothing of a wrong time stays, or is read again."""
    path.write_text("960 1050")
    file = Dated(path)
    files = WatchedFiles([file])
    files.look(1.0)
    file.now += step_s
    files.look(2.0)
    if abs(step_s) < DAY:
        there = FileCondition.IN_USE
    elif step_s < 0:
        there = FileCondition.NOT_YET_VALID
    else:
        there = FileCondition.EXPIRING if step_s < 50 * DAY else FileCondition.EXPIRED
    assert (file.state().state, file.latest(3.0)) == (there, "960 1050")
    file.now -= step_s
    files.look(4.0)
    assert (file.state().state, file.state().why) == (FileCondition.IN_USE, "")
    assert len(caplog.records) == (there is not FileCondition.IN_USE)


def test_a_file_that_cannot_be_used_has_a_state(path: Path) -> None:
    path.write_text("910 2000")
    file = Dated(path)
    file.now += 60
    path.write_text("nonsense")
    assert newest(file, 2.0) == "910 2000"
    file.now += 60
    state = file.state()
    assert (state.state, state.since) == (FileCondition.UNUSABLE, 1000 * DAY + 60)
    assert state.why.startswith("cannot read it: ")
    assert state.why.endswith("; the paper read before stays in force")
    assert state.remedy == "write it"
    path.write_text("910 2001")
    newest(file, 4.0)
    assert (file.state().state, file.state().since) == (FileCondition.IN_USE, 1000 * DAY + 120)


def test_the_old_one_expires_while_the_new_one_cannot_be_used(path: Path) -> None:
    path.write_text("910 1001")
    file = Dated(path)
    path.write_text("nonsense")
    newest(file, 2.0)
    file.now += 2 * DAY
    state = file.state()
    assert state.state is FileCondition.EXPIRED
    assert "expired at" in state.why
    assert "cannot read it" in state.why
    assert state.remedy == "write it"


def test_it_is_tried_again_without_a_change(path: Path) -> None:
    """The reason may have been the process's own, such as no descriptor left."""
    broken = [True]

    def read() -> str:
        if broken and path.read_text() == "two":
            raise LauncherError("cannot read it: too many open files", "wait")
        return path.read_text()

    file = WatchedFile("word", read, str(path))
    path.write_text("two")
    assert newest(file, 2.0) == "one"
    broken.clear()
    assert newest(file, 2.0 + RETRY_S / 2) == "one"
    assert newest(file, 2.0 + RETRY_S) == "two"


def test_what_expires_is_logged_once_without_a_request(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text("910 1001")
    file = Dated(path)
    files = WatchedFiles([file])
    for now in (1.0, 1.5, 2.5):
        files.look(now)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "expires at" in caplog.text
    file.now += DAY
    for now in (4.0, 6.0):
        files.look(now)
    looked()
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    path.write_text("910 2000")
    files.look(8.0)
    looked()
    assert files.states()[0].state is FileCondition.IN_USE


def test_a_file_that_hangs_holds_up_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The value before stays, and the state and the log say so until it can be read again."""
    caplog.set_level("INFO")
    monkeypatch.setattr(watched_file, "DISK_S", 0.05)
    file = Reader(path)
    files = WatchedFiles([file])
    path.unlink()
    os.mkfifo(path)
    began = time.monotonic()
    for now in (1.0, 2.0, 3.0):
        files.look(now)
        assert file.value == "one"
        time.sleep(0.06)
    state = file.state()
    assert state.state is FileCondition.UNUSABLE
    said = f"cannot read word '{path}': no look at it has ended within 0.05 s; the word read before stays in force"
    assert state.why == said
    assert 0 < time.time() - state.since <= time.monotonic() - began + 0.1
    assert [record.getMessage() for record in caplog.records] == [f"{said}; see whether its disk answers"]
    fifo = path.rename(path.with_name("fifo"))
    path.write_text("two")
    fifo.write_text("")  # the look ends
    looked()
    assert file.reads == 2  # one look at a time
    monkeypatch.setattr(watched_file, "DISK_S", SOON_S)
    files.look(4.0)
    looked()
    assert (file.latest(4.0), file.state().state) == ("two", FileCondition.IN_USE)
    assert f"word '{path}' can be looked at again" in caplog.text


def test_without_a_thread_the_state_says_that_nobody_looks(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_file, "DISK_S", 0.0)

    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    file = Reader(path)
    with monkeypatch.context() as patch:
        patch.setattr(watched_file.Looks, "start", start)
        path.write_text("two")
        assert file.latest(1.0) == "one"
        assert file.state().state is FileCondition.UNUSABLE
    file.latest(2.0)
    looked()
    assert (file.value, file.state().state) == ("two", FileCondition.IN_USE)


def test_the_thread_ends_with_its_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_file, "_ALIVE_S", 0.01)
    file = Reader(path)
    newest(file, 1.0)
    [thread] = (
        it for it in threading.enumerate() if isinstance(it, watched_file.Looks) and it._look() == file._look
    )
    del file
    gc.collect()
    thread.join(SOON_S)
    assert not thread.is_alive()


def test_a_file_that_may_come(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.rename(away := path.with_name("away"))
    file = FileThatMayCome("word", str(path), lambda: Reader(path))
    assert file.state().state is FileCondition.UNUSABLE
    for now in (1.0, 2.0):
        assert file.latest(now) is None
        looked()
    assert caplog.text.count("cannot read it") == 1
    away.rename(path)
    assert file.latest(3.0) is None  # it is looked for in a thread
    looked()
    assert (file.latest(4.0), file.state().state) == ("one", FileCondition.IN_USE)


def test_modes(path: Path) -> None:
    path.chmod(0o640)
    assert excess_mode(path.stat(), 0o640) is None
    path.chmod(0o604)
    assert excess_mode(path.stat(), 0o640) == "0604"
