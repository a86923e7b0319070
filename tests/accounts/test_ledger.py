"""The ledger's thread when its file cannot be written: nothing raises, each problem is said once, entries wait."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.ledger_file import entries
from support.written import written

from launcher.accounts import ledger as module
from launcher.accounts import ledger_file
from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger import Ledger
from launcher.accounts.ledger_file import LEDGER, open_reader, open_sums
from launcher.accounts.report_values import Question
from launcher.accounts.usage_report import report
from launcher.base import writer
from launcher.base.clock import SETTLED_S, Clock
from launcher.base.database import parts
from launcher.base.errors import LauncherError
from launcher.config.schema import Usage

NOW = time.time()
FULL = "database or disk is full"


@contextmanager
def started(path: Path, clock: Clock | None = None, *, by_flush: bool = True) -> Iterator[Ledger]:
    with written(Ledger(Usage(), path, clock), by_flush=by_flush) as ledger:
        yield ledger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.db"


def record(ledger: Ledger, count: int = 1) -> None:
    for _ in range(count):
        ledger.put(EndedRequest(ended_at=NOW, request_id="r", key="a"))


def recorded(path: Path) -> int:
    """Entries of a whole ledger, whose sums agree with them."""
    with closing(open_sums(path)) as reader:
        assert reader.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        found = len(list(entries(reader, 0, 2 * NOW)))
        [summed] = reader.execute("SELECT sum(requests) FROM hourly WHERE dimension = 'all'").fetchone()
    assert (summed or 0) == found
    return found


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.ERROR) -> list[str]:
    return [found.getMessage() for found in caplog.records if found.levelno >= level]


def test_what_waits_at_the_end_is_written(path: Path) -> None:
    with started(path) as ledger:
        record(ledger, 3)
        ledger.meter([("joules", "0", 1.0), ("joules", "0", 2.0)])
    assert (recorded(path), ledger.recorded, ledger.waiting) == (3, 3, 0)
    with closing(open_reader(path)) as reader:
        assert reader.execute("SELECT what, name, amount FROM metered").fetchall() == [("joules", "0", 3.0)]


def test_a_batch_is_written_a_moment_later(path: Path) -> None:
    with started(path, by_flush=False) as ledger:
        record(ledger)
        deadline = time.monotonic() + 60
        while ledger.waiting and time.monotonic() < deadline:
            time.sleep(0.01)
        assert recorded(path) == 1


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, entries wait, and the ledger begins when it can."""
    (tmp_path / "folder").write_text("a file")
    with started(tmp_path / "folder" / "usage.db") as ledger:
        record(ledger, 2)
        assert not ledger.flush()
        assert not ledger.flush()
        assert "cannot write the usage ledger" in ledger.problem.text
        assert ledger.waiting == 2
        [said] = messages(caplog)
        assert "file exists" in said
        assert "their entries wait in memory" in said
        (tmp_path / "folder").unlink()
        with caplog.at_level(logging.INFO):
            assert ledger.flush()
        assert "is written again" in messages(caplog, logging.INFO)[-1]
    assert recorded(ledger.path) == 2


class HangingFile(ledger_file.LedgerFile):
    """A disk that stops to answer."""

    goes_on = threading.Event()
    began = threading.Event()

    def write(self, *given: Any, **more: Any) -> None:
        self.began.set()
        assert self.goes_on.wait(60)
        super().write(*given, **more)


def test_while_the_disk_hangs_memory_is_bounded_and_it_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread never comes to a bound of its own; what is lost is in the file once the disk answers."""
    monkeypatch.setattr(module, "MOST_WAITING", 10)
    monkeypatch.setattr(writer, "DISK_S", 0.05)
    monkeypatch.setattr(module, "LedgerFile", HangingFile)
    HangingFile.goes_on.clear()
    HangingFile.began.clear()
    with started(path, by_flush=False) as ledger:
        try:
            record(ledger, 4)
            assert HangingFile.began.wait(60)
            record(ledger, 10)
            for _ in range(20):
                ledger.meter([("joules", "0", 1.0)])
            assert caplog.text.count("lacks seconds of slots and energy from now on: 10 amounts wait") == 1
            eventually(lambda: ledger.problem)
            assert (ledger.waiting, ledger.lost) == (10, 4)
            assert "a write takes longer than 0.05 s" in ledger.problem.text
            assert str(path) in ledger.problem.text
            assert not ledger.flush(0.1)
        finally:
            HangingFile.goes_on.set()
        assert ledger.flush()
        assert (ledger.waiting, ledger.lost, ledger.recorded) == (0, 4, 10)
        record(ledger)
        assert ledger.flush()
        assert ledger.lost == 4
    assert recorded(path) == 11
    assert report(path, Question(since="2h"), time.time(), "USD").lost == 4


def test_beyond_the_bound_entries_are_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 10)
    (tmp_path / "folder").write_text("a file")
    with started(tmp_path / "folder" / "usage.db") as ledger:
        record(ledger, 13)
        ledger.flush()
        assert (ledger.waiting, ledger.lost) == (10, 3)
        record(ledger, 2)
        ledger.flush()
        assert (ledger.waiting, ledger.lost) == (10, 5)
        assert len(messages(caplog)) == 2
        (tmp_path / "folder").unlink()
        assert ledger.flush()
        assert ledger.flush()
    assert recorded(ledger.path) == 10
    now = time.time()
    assert report(ledger.path, Question(since="2h"), now, "USD").lost == 5
    assert report(ledger.path, Question(since="2h", key="a"), now, "USD").lost == 5


def test_a_file_that_breaks_under_way_moves_aside(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with started(path) as ledger:
        record(ledger, 2)
        assert ledger.flush()
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff" * (path.stat().st_size - 100))
    with started(path) as ledger:
        record(ledger, 3)
        while not ledger.flush():
            pass
        moved = ledger.moved_to
        assert moved is not None
        assert moved.name.startswith("usage.db.broken-")
        assert moved.exists()
        assert [text for text in messages(caplog) if ".recover" in text]
    assert recorded(path) == 3


def test_a_removed_file_begins_anew(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with started(path) as ledger:
        record(ledger, 2)
        assert ledger.flush()
        for part in parts(path):
            part.unlink()
        record(ledger, 3)
        assert ledger.flush()
        assert "was removed by somebody" in messages(caplog)[0]
    assert recorded(path) == 3


def test_a_newer_ledger_is_not_changed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"PRAGMA application_id = {LEDGER.application}; PRAGMA user_version = 99")
    before = path.read_bytes()
    with started(path) as ledger:
        record(ledger)
        assert not ledger.flush()
        assert "a newer numa-launcher made it" in ledger.problem.text
        assert "update numa-launcher" in ledger.problem.remedy
    assert path.read_bytes() == before
    assert "1 entries are lost" in messages(caplog)[-1]


def test_a_second_ledger_waits_until_the_first_ends(path: Path) -> None:
    with started(path) as first:
        record(first)
        assert first.flush()
        with started(path) as second:
            record(second)
            assert not second.flush()
            assert "another daemon writes it" in second.problem.text
            first.writer.stop(20)
            assert second.flush()
    assert recorded(path) == 2


@pytest.mark.parametrize(
    "bad",
    [
        EndedRequest(ended_at=NOW, request_id="\ud800"),
        EndedRequest(ended_at=NOW, request_id="", key=None),  # type: ignore[arg-type]
        EndedRequest(ended_at=NOW, request_id="", prompt_tokens=2**64),
        EndedRequest(ended_at=NOW, request_id="", prompt_tokens="many"),  # type: ignore[arg-type]
        EndedRequest(ended_at=float("inf"), request_id=""),
        EndedRequest(ended_at=NOW, request_id="", duration_s=float("inf")),
        EndedRequest(ended_at=NOW, request_id="", slot="a"),  # type: ignore[arg-type]
    ],
)
def test_an_entry_that_no_file_can_take_takes_no_other_with_it(
    path: Path, caplog: pytest.LogCaptureFixture, bad: EndedRequest
) -> None:
    with started(path) as ledger:
        record(ledger, 2)
        ledger.put(bad)
        record(ledger, 2)
        ledger.flush()
        assert ledger.flush()
        assert (ledger.recorded, ledger.lost) == (4, 1)
        assert report(ledger.path, Question(since="2h"), time.time(), "USD").lost == 1
        assert len(messages(caplog)) == 2
    assert recorded(path) == 4


def test_an_unexpected_error_ends_no_thread(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> bool:
        raise MemoryError

    with started(path) as ledger:
        with monkeypatch.context() as patch:
            patch.setattr(ledger_file.LedgerFile, "write", fails)
            record(ledger, 2)
            assert not ledger.flush()
            assert not ledger.flush()
        assert "MemoryError" in ledger.problem.text
        assert ledger.flush()
        assert len(messages(caplog)) == 2
    assert recorded(path) == 2


def test_a_backlog_is_written_in_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLICE", 7)
    with started(path) as ledger:
        for number in range(200):
            ledger.put(EndedRequest(ended_at=NOW + number / 1000, request_id=str(number)))
        while ledger.waiting:
            assert ledger.flush()
    with closing(open_reader(path)) as reader:
        assert [entry.request_id for entry in entries(reader, 0, 2 * NOW)] == [str(n) for n in range(200)]


def test_entries_older_than_keep_days_go(path: Path) -> None:
    with started(path) as ledger:
        ledger.put(EndedRequest(ended_at=NOW - 31 * 86_400, request_id="old"))
        assert ledger.flush()
    now = [NOW]
    with started(path, Clock(lambda: now[0], lambda: now[0])) as ledger:
        record(ledger)
        now[0] += SETTLED_S
        assert ledger.flush()
    with closing(open_reader(path)) as reader:
        assert [entry.request_id for entry in entries(reader, 0, 2 * NOW)] == ["r"]
        assert reader.execute("SELECT sum(requests) FROM hourly WHERE dimension = 'all'").fetchone() == (2,)


def test_an_unknown_zone_is_refused_at_once(path: Path) -> None:
    with pytest.raises(LauncherError, match="time zone 'Europe/Nowhere'"):
        Ledger(Usage(zone="Europe/Nowhere"), path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only root may mount a file system; the limit on file sizes below stands for it")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all that is left."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 512):
            pass
    return ballast


def eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_disk_filled_to_its_last_block_and_freed(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = small_disk / "usage" / "usage.db"
    with started(path) as ledger:
        record(ledger, 100)
        assert ledger.flush()
        ballast = fill(small_disk)
        assert not shutil.disk_usage(small_disk).free
        for number in range(3000):
            ledger.put(EndedRequest(ended_at=NOW, request_id=f"{number * 7919:x}", key=f"key {number}"))
        eventually(lambda: not ledger.flush())
        assert FULL in ledger.problem.text
        ledger.flush()
        assert [text for text in messages(caplog) if FULL in text] == messages(
            caplog
        )  # once, and nothing else
        assert len(messages(caplog)) == 1
        assert recorded(path) + ledger.waiting == 3100
        ballast.unlink()
        eventually(ledger.flush)
        assert ledger.lost == 0
        eventually(lambda: not ledger.waiting)
        assert recorded(path) == 3100


def test_a_daemon_that_starts_on_a_full_disk(small_disk: Path) -> None:
    ballast = fill(small_disk)
    with started(small_disk / "usage.db") as ledger:
        record(ledger, 5)
        assert not ledger.flush()
        ballast.unlink()
        assert ledger.flush()
        assert recorded(ledger.path) == 5


LIMITED = """
import sys; sys.path[:0] = sys.argv[2:]
import resource, logging; from pathlib import Path
from test_ledger import NOW, record, recorded, started
from launcher.accounts.ended_request import EndedRequest
with started(Path(sys.argv[1])) as ledger:
    record(ledger, 10)
    assert ledger.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (ledger.path.stat().st_size + 4096, resource.RLIM_INFINITY))
    for number in range(3000):
        ledger.put(EndedRequest(ended_at=NOW, request_id=f"{number * 7919:x}", key=f"key {number}"))
    assert not ledger.flush(), ledger.problem
    assert ledger.waiting
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    while ledger.waiting:
        assert ledger.flush(), ledger.problem
    assert recorded(ledger.path) == 3010
"""


def test_a_limit_on_file_sizes(path: Path) -> None:
    """What a quota looks like; no file system of one's own is needed for it."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    command = [
        sys.executable,
        "-c",
        LIMITED,
        str(path),
        str(Path(__file__).parent),
        str(Path(__file__).parents[1]),
    ]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=os.environ | {"TZ": "UTC"}
    )
    assert done.returncode == 0, done.stderr
