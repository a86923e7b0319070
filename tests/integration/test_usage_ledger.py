"""The usage ledger after SIGKILL: whole, and without the last moment only."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.daemon_process import SOON_S, DaemonProcess, eventually
from support.ledger_file import entries

from launcher.accounts.latency import merged
from launcher.accounts.ledger import BATCH_S
from launcher.accounts.ledger_file import open_reader, open_sums
from launcher.accounts.sums import DIMENSIONS, INTEGERS
from launcher.base.database import NoDataError
from launcher.telemetry.history import HOUR

BUSY_LEDGER = Path(__file__).parents[1] / "support" / "busy_ledger.py"
KILLED_AT_COMMIT = BUSY_LEDGER.with_name("killed_at_commit.py")
FOREVER = 1e12
# A turn begins so long after the end of the one before, and writes all that ended before it began. Its commit takes
# milliseconds; other jobs may use the cpus.
LOST_S = 0.1


def whole(path: Path) -> list[Any]:
    """The entries of a ledger that is intact, and whose hourly sums are theirs."""
    with closing(open_sums(path)) as reader:
        assert reader.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        found = list(entries(reader, 0, FOREVER))
        for dimension in DIMENSIONS:
            sums = dict(zip(INTEGERS, summed(reader, dimension), strict=True))
            assert sums["requests"] == len(found), dimension
            assert sums["completed"] == sum(entry.outcome == "completed" for entry in found)
            for column in ("prompt_tokens", "cached_tokens", "output_tokens", "picos"):
                assert sums[column] == sum(getattr(entry, column) for entry in found), (dimension, column)
            durations = reader.execute("SELECT duration FROM hourly WHERE dimension = ?", (dimension,))
            assert merged(data for (data,) in durations).sum() == sums["completed"]
    return found


def summed(reader: sqlite3.Connection, dimension: str) -> tuple[int, ...]:
    columns = ", ".join(f"coalesce(sum({column}), 0)" for column in INTEGERS)
    select = f"SELECT {columns} FROM hourly WHERE dimension = ?"  # noqa: S608  columns are constants
    row: tuple[int, ...] = reader.execute(select, (dimension,)).fetchone()
    return row


def killed(path: Path, first: int, batch_s: float, after_s: float) -> tuple[float, int]:
    """Fill a ledger, and kill the writer. When that was, and how many entries the last turn that ended must have written."""
    process = subprocess.Popen(
        [sys.executable, str(BUSY_LEDGER), str(path), str(first), str(batch_s)], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        time.sleep(after_s)
    finally:
        at = time.time()
        process.kill()
        told, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL
    return at, written_by_turns(told.split(), first)


def written_by_turns(told: Sequence[bytes | str], first: int) -> int:
    """Count of entries, as ToldLedger told, that were there when the last turn began that has ended, `first` without one."""
    return int(told[-2]) if len(told) > 1 else first


@pytest.mark.parametrize(
    "kills", [pytest.param(5, id="5"), pytest.param(50, id="50", marks=pytest.mark.release)]
)
@pytest.mark.long
def test_sigkill_at_random_moments(tmp_path: Path, kills: int) -> None:
    """Each next writer goes on with the file. Every second one commits 50 times a second, so that kills hit commits."""
    chance, path = random.Random(kills), tmp_path / "usage.db"  # noqa: S311
    known, worst_s = 0, 0.0
    assert BATCH_S == LOST_S
    for turn in range(kills):
        often = turn % 2
        at, least = killed(
            path, known, 0.02 if often else LOST_S, chance.uniform(0.05, 0.4 if often else 2.2)
        )
        if not path.exists():
            continue
        found = whole_if_begun(path)
        assert [int(entry.request_id) for entry in found] == list(range(len(found)))  # no gap, none twice
        if len(found) > known:
            worst_s = max(worst_s, at - found[-1].ended_at)
        assert len(found) >= least
        known = len(found)
    assert known
    print(f"{kills} kills, {known} entries, at most {worst_s:.2f} s lost")


def test_sigkill_at_each_commit(tmp_path: Path) -> None:
    """The file has what was committed, the sum of a budget at least as much (what it knows of entries that are lost counts),
    and the history's rows of the same time. What is missing ended after the turn before had begun. The next process goes on,
    whatever the one before had not added to the hourly sums."""
    path, known = tmp_path / "usage.db", 0
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[1:3]))}
    with subprocess.Popen(
        [sys.executable, str(KILLED_AT_COMMIT), str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
    ) as writers:  # fmt: skip
        assert writers.stdin is not None
        assert writers.stdout is not None
        for number, when in product(range(1, 7), ("before", "after")):
            print(known, number, when, file=writers.stdin, flush=True)
            *told, count, ended = until_one_ended(writers.stdout)
            assert ended == f"ended {-signal.SIGKILL}"
            found = whole(path)
            assert len(found) == int(count) >= written_by_turns(told, known)
            assert [int(entry.request_id) for entry in found] == list(range(len(found)))  # no gap, none twice
            known = len(found)
            assert stored_sum(path) >= known
            load = history_of(path)
            assert load == list(range(min(load, default=0), max(load, default=-1) + 1))
            assert max(load, default=0) >= known - 1
            assert len(load) >= min(HOUR.most, known - 1)
        writers.stdin.close()
    assert writers.returncode == 0
    assert known > 0


def until_one_ended(lines: Iterator[str]) -> Iterator[str]:
    """The lines up to the one that says how a process ended."""
    for line in lines:
        yield line.strip()
        if line.startswith("ended "):
            return


def stored_sum(path: Path) -> int:
    """Of the budget; 0 before its first commit."""
    with closing(open_reader(path)) as reader:
        rows = reader.execute("SELECT amount FROM spent").fetchall()
    return int(rows[0][0]) if rows else 0


def history_of(path: Path) -> list[int]:
    """Numbers of the entries that rows of 2 s were added with."""
    with closing(open_reader(path)) as reader:
        query = "SELECT ended_ms / ? FROM load WHERE span = ? ORDER BY ended_ms"
        return [number for (number,) in reader.execute(query, (HOUR.step_ms, HOUR.name))]


def whole_if_begun(path: Path) -> list[Any]:
    """None, where there is no table yet. Read as all readers do: a connection that may write would repair and remove the
    write-ahead log, which is the daemon's part."""
    try:
        return whole(path)
    except NoDataError:
        return []


def test_the_daemon_enters_requests_and_a_killed_one_loses_a_second(
    start: Callable[..., DaemonProcess],
) -> None:
    daemon = start(instances=1)
    path = daemon.folder / "state" / "usage" / "usage.db"
    daemon.wait_ready(1)
    assert all(daemon.answers() for _ in range(20))
    try:
        eventually(lambda: len(whole_if_begun(path)) == 20)
    except AssertionError as error:
        names = sorted(part.name for part in path.parent.glob("*"))
        counted = [line for line in daemon.metrics().splitlines() if "usage_ledger" in line]
        raise AssertionError(
            f"{len(whole_if_begun(path))} of 20 entries in {names}, {counted}\n{daemon.log.read_text()}"
        ) from error
    shown = daemon.metrics()
    assert "numa_launcher_usage_ledger_entries_total 20.0" in shown
    assert "numa_launcher_usage_ledger_ok 1.0" in shown
    assert "numa_launcher_log_lines_dropped_total 0.0" in shown
    daemon.process.kill()
    daemon.process.wait()
    daemon.nothing_left()
    again = start(instances=1, environ={"STATE_DIRECTORY": str(daemon.folder / "state")})
    again.wait_ready(1)
    assert all(again.answers() for _ in range(5))
    again.process.send_signal(signal.SIGTERM)
    again.process.wait(SOON_S)
    found = whole(path)
    assert len(found) == 25
    assert {(entry.model, entry.outcome, entry.status) for entry in found} == {("fake", "completed", 200)}
    with closing(open_reader(path)) as reader:
        seconds = reader.execute("SELECT what, sum(amount) FROM metered GROUP BY what").fetchall()
    assert dict(seconds)["ready_s"] > 0


def test_a_folder_that_cannot_be_written_is_said_and_requests_are_served(
    start: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    daemon = start(instances=1, environ={"STATE_DIRECTORY": str(tmp_path / "file")})
    daemon.wait_ready(1)
    assert daemon.answers()
    [warning] = eventually(lambda: [text for text in daemon.status()["warnings"] if "1 entries wait" in text])
    assert "cannot write the usage ledger" in warning
    assert "cannot write the usage ledger" in daemon.cli("status").stdout
    assert daemon.log.read_text().count("cannot write the usage ledger") == 1
