"""The history in the usage ledger's file: written, read by the next process, kept when the file is damaged or replaced."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from support.hand_clock import DAY_S, HandClock
from support.history_rows import NOON, row, slot, value
from support.ledger_file import entries
from support.written import written

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger import Ledger
from launcher.accounts.ledger_file import check, open_reader, restore
from launcher.accounts.report_values import Question
from launcher.accounts.usage_report import report
from launcher.base.errors import LauncherError
from launcher.config.schema import Usage
from launcher.telemetry.history_columns import Row, row_of
from launcher.telemetry.load_table import LoadTable

LATER = NOON + 60_000


def table() -> LoadTable:
    return LoadTable(lambda: LATER)


def rows_of(found: LoadTable, span: str = "1h") -> list[Row]:
    return [row_of(text) for text in found.find(span, 0).rows]


def add(to: LoadTable, *numbers: int) -> None:
    to.add(row(NOON + 2000 * number, slot(0), queued=number) for number in numbers)


def numbers(found: LoadTable) -> list[float]:
    return [value(each, "queued") or 0.0 for each in rows_of(found)]


@contextmanager
def opened(path: Path) -> Iterator[tuple[LoadTable, Ledger]]:
    """By a process that writes what it has when it flushes, and at its end."""
    found = table()
    with written(Ledger(Usage(), path, mirrored=[found]), by_flush=True) as ledger:
        assert ledger.flush(20)
        yield found, ledger


def test_the_next_process_has_the_rows_of_all_spans(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with opened(path) as (first, _):
        add(first, *range(1, 31))
        expected = {span: rows_of(first, span) for span in ("1h", "1d", "90d")}
    with opened(path) as (second, _):
        assert {span: rows_of(second, span) for span in ("1h", "1d", "90d")} == expected
        assert len(expected["1h"]) == 30
        assert [each.seconds for each in expected["1d"]] == [60]
        assert not second.waiting
    assert check(path) == ""


def test_rows_can_be_read_with_sqlite(tmp_path: Path) -> None:
    with opened(tmp_path / "usage.db") as (found, _):
        add(found, 1, 2)
    with closing(open_reader(tmp_path / "usage.db")) as reader:
        [texts] = reader.execute(
            "SELECT json_group_array(json_extract(row, '$[1]')) FROM load WHERE span = '1h'"
        ).fetchone()
        assert texts == "[2,2]"


def test_rows_that_are_gone_are_deleted(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with opened(path) as (found, ledger):
        found.add(row(NOON - 4_000_000 + 2000 * number) for number in range(1, 1802))
        assert ledger.flush(20)
        with closing(open_reader(path)) as reader:
            query = "SELECT count(*), min(ended_ms) FROM load WHERE span = '1h'"
            assert reader.execute(query).fetchone() == (1800, NOON - 4_000_000 + 4000)


def test_a_file_that_is_replaced_or_removed_gets_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with opened(path) as (found, ledger):
        add(found, 1, 2)
        assert ledger.flush(20)
        path.unlink()
        add(found, 3)
        assert ledger.flush(20)
        assert path.exists()
    with opened(path) as (second, _):
        assert numbers(second) == [1, 2, 3]


def test_a_damaged_file_that_is_moved_aside_costs_no_row(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with opened(path) as (found, ledger):
        ledger.put(EndedRequest(NOON / 1000, "r"))
        add(found, 1, 2)
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE meta SET zone = 'Mars'")
    with written(Ledger(Usage(), path, mirrored=[again := table()]), by_flush=True) as ledger:
        ledger.suspect()
        ledger.flush(20)
        assert ledger.flush(20)
        assert ledger.moved_to is not None
        assert numbers(again) == [1, 2]
    with opened(path) as (third, _):
        assert numbers(third) == [1, 2]


Damage = Callable[[sqlite3.Connection], object]
DAMAGES: dict[str, Damage] = {
    "a digit": lambda file: file.execute("UPDATE load SET row = replace(row, '2,[', '3,[') WHERE number = 2"),
    "no JSON": lambda file: file.execute("UPDATE load SET row = 'x' WHERE number = 2"),
    "another time": lambda file: file.execute("UPDATE load SET ended_ms = ended_ms + 1 WHERE number = 2"),
    "another span": lambda file: file.execute("UPDATE load SET span = '1d' WHERE number = 2"),
    "bytes": lambda file: file.execute("UPDATE load SET row = x'FFFE' WHERE number = 2"),
    "text for a time": lambda file: file.execute("UPDATE load SET ended_ms = 'noon' WHERE number = 2"),
    "the checksum": lambda file: file.execute("UPDATE load SET checksum = checksum + 1 WHERE number = 2"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_row_is_left_out_said_once_and_no_reason_for_a_new_ledger(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "usage.db"
    caplog.set_level(logging.WARNING, "launcher.history")
    with opened(path) as (found, ledger):
        ledger.put(EndedRequest(NOON / 1000, "r"))
        add(found, 1, 2, 3)
    with closing(sqlite3.connect(path)) as file, file:
        DAMAGES[damage](file)
    assert check(path) == ""
    with opened(path) as (second, ledger):
        assert numbers(second) == [1, 3]
        assert ledger.moved_to is None
    with opened(path) as (third, _):
        assert numbers(third) == [1, 3]
    assert [line for line in caplog.messages if "history" in line] == [
        "1 rows of the history are damaged and left out"
    ]


def test_a_file_that_cannot_be_used_is_given_the_rows_when_it_can(tmp_path: Path) -> None:
    path = tmp_path / "usage" / "usage.db"
    path.parent.write_text("a file")
    with written(Ledger(Usage(), path, mirrored=[found := table()]), by_flush=True) as ledger:
        add(found, 1)
        assert not ledger.flush()
        assert ledger.problem is not None
        assert numbers(found) == [1]
        path.parent.unlink()
        add(found, 2)
        assert ledger.flush(20)
    with opened(path) as (second, _):
        assert numbers(second) == [1, 2]


def test_a_backup_that_is_restored_takes_no_row_of_the_history(tmp_path: Path) -> None:
    path, backup = tmp_path / "usage.db", tmp_path / "backup.db"
    with opened(path) as (found, ledger):
        ledger.put(EndedRequest(NOON / 1000, "r"))
        add(found, 1, 2)
        assert ledger.flush(20)
        with closing(open_reader(path)) as reader, closing(sqlite3.connect(backup)) as into:
            reader.backup(into)
        add(found, 3)
    restore(path, backup, LATER / 1000)
    with opened(path) as (second, _):
        assert numbers(second) == [1, 2, 3]
    with closing(open_reader(path)) as reader:
        assert [entry.request_id for entry in entries(reader, 0, 2**40)] == ["r"]


def test_without_the_history_its_rows_stay_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with opened(path) as (found, _):
        add(found, 1)
    with written(Ledger(Usage(), path), by_flush=True) as ledger:
        assert ledger.flush(20)
    with opened(path) as (again, _):
        assert numbers(again) == [1]


def test_rows_of_others_and_more_than_are_kept_are_deleted(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with opened(path) as (found, _):
        add(found, 1)
    with closing(sqlite3.connect(path)) as file, file:
        [(row_text, checksum)] = file.execute("SELECT row, checksum FROM load WHERE span = '1h'").fetchall()
        file.execute("DELETE FROM load")
        insert = "INSERT INTO load (span, ended_ms, row, checksum) VALUES (?, ?, ?, ?)"
        file.executemany(insert, (("1h", NOON - number, row_text, checksum) for number in range(30_000)))
        file.executemany(insert, (("5y", number, row_text, checksum) for number in range(30_000)))
        file.execute(insert, ("1h", NOON + 2000, row_text, checksum))
    with opened(path) as (second, ledger):
        assert numbers(second) == [1]
        assert ledger.problem is None
    with closing(open_reader(path)) as reader:
        assert reader.execute("SELECT count(*) FROM load").fetchone() == (1,)


def test_a_write_that_fails_loses_no_row(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with opened(path) as (found, ledger):
        add(found, 1)
        assert ledger.flush(20)
        file = ledger._file
        assert file is not None
        connection = file.database.connection
        [pages] = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}").fetchone()
        found.add(row(NOON - 2_000_000 + 2000 * number, slot(0), queued=number) for number in range(2, 1000))
        assert not ledger.flush(20)
        assert ledger.problem is not None
        assert "full" in ledger.problem.why
        found.add([row(NOON, slot(0), queued=1000)])
        assert ledger.flush(20)
    with opened(path) as (second, _):
        assert sorted(numbers(second)) == list(range(1, 1001))


def test_where_no_ledger_is_kept_an_earlier_ones_rows_stay(tmp_path: Path) -> None:
    path, now = tmp_path / "usage.db", NOON / 1000
    clock = HandClock(now)
    with written(Ledger(Usage(), path, clock), by_flush=True) as ledger:
        ledger.put(EndedRequest(now - 29 * DAY_S, "old"))
        assert ledger.flush(20)
    clock = HandClock(now + 40 * DAY_S)
    off = Usage(enabled=False, zone="Asia/Kolkata")
    with written(Ledger(off, path, clock, [found := table()]), by_flush=True) as ledger:
        clock.settle()
        add(found, 1)
        assert ledger.flush(20)
        clock.wait(DAY_S)
        assert ledger.flush(20)
    with closing(open_reader(path)) as reader:
        assert [entry.request_id for entry in entries(reader, 0, 2**40)] == ["old"]
        assert reader.execute("SELECT zone FROM meta").fetchall() == [(Usage().zone,)]


def test_a_ledger_begins_when_it_is_enabled(tmp_path: Path) -> None:
    """Not when the history alone began to be kept in its file."""
    path, clock = tmp_path / "usage.db", HandClock(NOON / 1000)
    with written(Ledger(Usage(enabled=False), path, clock, [found := table()]), by_flush=True) as ledger:
        add(found, 1)
        assert ledger.flush(20)
    with pytest.raises(LauncherError, match="nothing was entered yet"):
        report(path, Question(), clock.at, "USD")
    clock.wait(DAY_S)
    with written(Ledger(Usage(), path, clock), by_flush=True) as ledger:
        assert ledger.flush(20)
    with closing(open_reader(path)) as reader:
        assert reader.execute("SELECT began FROM meta").fetchall() == [(clock.at,)]
