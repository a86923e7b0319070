"""Damaged ledgers: found whatever reading them raises, moved aside, replaced by a backup."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from support.hand_clock import HandClock, at
from support.ledger_file import entries
from support.written import written

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger import Ledger
from launcher.accounts.ledger_file import LedgerFile, check, move_aside, open_reader, restore
from launcher.accounts.report_values import Question, hour_begin
from launcher.accounts.spent_before import Lookup, read_before, read_past
from launcher.accounts.spent_sums import SpentSums
from launcher.accounts.usage_report import report
from launcher.base.database import parts
from launcher.base.database_repair import lost_at
from launcher.base.errors import LauncherError
from launcher.config.schema import Usage

UTC = ZoneInfo("UTC")
NOW = time.time()


@contextmanager
def started(path: Path) -> Iterator[Ledger]:
    # An hour may begin while the tests run.
    with written(Ledger(Usage(), path, HandClock(NOW)), by_flush=True) as ledger:
        yield ledger


def write(path: Path, *ids: str) -> None:
    with started(path) as ledger:
        for request_id in ids:
            ledger.put(entry(request_id))
        assert ledger.flush()


def entry(request_id: str) -> EndedRequest:
    return EndedRequest(NOW, request_id, "ann", duration_s=1.0, outcome="completed", output_tokens=5)


def ids(path: Path) -> list[str]:
    with closing(open_reader(path)) as reader:
        return [found.request_id for found in entries(reader, 0, 2**40)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage" / "usage.db"


@pytest.fixture
def backup(tmp_path: Path, path: Path) -> Path:
    """Of a ledger that went on afterwards."""
    write(path, "a", "b")
    found = tmp_path / "backup.db"
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(found)) as into:
        source.backup(into)
    write(path, "c")
    return found


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute("PRAGMA ignore_check_constraints = ON")
        file.execute(statement)


# --- damage ------------------------------------------------------------------------------------------


def test_a_flipped_bit_stops_no_daemon_and_is_found(path: Path) -> None:
    """In the page of the tables' definitions, whose names SQLite's errors quote, text that is no UTF-8 included."""
    write(path, "a")
    whole = path.read_bytes()
    changed = path.with_name("flipped.db")
    found = 0
    for offset in range(2860, 4096, 7):
        for bit in (1, 128):
            changed.write_bytes(whole[:offset] + bytes([whole[offset] ^ bit]) + whole[offset + 1 :])
            before = read_before(changed, UTC, Lookup(at(NOW), NOW, ("cloud",)))
            past = before.keys
            assert (before.endpoints["cloud"].picos is None) == past.unreadable
            if past.unreadable:
                assert past.damaged, past.why
                assert check(changed)
                found += 1
    assert found > 50
    assert check(path) == ""


@pytest.mark.parametrize(
    ("offset", "bit"), [(18, 4), (60, 128), (61, 1), (63, 1), (63, 2), (68, 1), (71, 128)]
)
def test_a_flipped_bit_in_the_header_is_no_other_programs_file(path: Path, offset: int, bit: int) -> None:
    """Format, version and application: no sum counts as 0, and the next ledger gets all that follows."""
    write(path, "a")
    content = bytearray(path.read_bytes())
    content[offset] ^= bit
    path.write_bytes(content)
    past = read_past(path, UTC, NOW)
    assert offset == 18 or (past.unreadable, past.damaged, past.lost_at) == (True, True, NOW)
    with started(path) as ledger:
        ledger.put(entry("b"))
        assert not ledger.flush()
        assert ledger.flush()
        assert ledger.moved_to is not None
    assert ids(path) == ["b"]


@pytest.mark.parametrize("bit", [1, 16])
def test_changed_definitions_are_damage_before_anything_is_read(path: Path, bit: int) -> None:
    """SQLite may read other values through them, and raises nothing."""
    write(path, "a")
    content = bytearray(path.read_bytes())
    content[content.index(b"TEXT NOT NULL, amount REAL")] ^= bit
    path.write_bytes(content)
    assert read_past(path, UTC, NOW).damaged
    assert "its tables are not" in check(path)


def test_a_broken_file_of_a_time_to_come_is_of_now(path: Path) -> None:
    """A clock that was wrong wrote it. Else budgets were unknown until that time."""
    write(path, "a")
    broken = path.with_name(f"{path.name}.broken-20290101T000000Z")
    broken.write_bytes(b"broken")
    os.utime(broken, (NOW, NOW + 3 * 365 * 86_400))
    assert lost_at(path, NOW) == NOW
    os.utime(broken, (NOW, NOW - 60))
    assert lost_at(path, NOW) == NOW - 60


DAMAGE = {
    "a histogram": "UPDATE hourly SET duration = x'ffff01'",
    "a bucket that is none": "UPDATE hourly SET duration = x'ffff01000000'",
    "a sum": "UPDATE hourly SET requests = 'many'",
    "a sum below zero": "UPDATE hourly SET prompt_tokens = -5",
    "a sum that adds up to none": "UPDATE hourly SET prompt_tokens = 9223372036854775807",
    "a time zone": "UPDATE meta SET zone = 'Europe/Nowhere'",
    "a request": "UPDATE request SET duration_s = 'long'",
    "a kind": "UPDATE request_kind SET outcome = CAST(x'ff' AS BLOB)",
    "a table": "DROP TABLE metered",
}


@pytest.mark.parametrize("statement", DAMAGE.values(), ids=DAMAGE)
def test_what_a_check_finds(path: Path, statement: str) -> None:
    write(path, "a")
    change(path, statement)
    assert check(path)


@pytest.mark.parametrize("what", ["a histogram", "a bucket that is none", "a sum", "a table"])
def test_no_entry_is_dropped_because_what_it_is_added_to_is_damaged(
    path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, "a")
    change(path, DAMAGE[what])
    with started(path) as ledger:
        for request_id in ("b", "c", "d"):
            ledger.put(entry(request_id))
            ledger.meter([("joules", "", 1.0)])
            if not ledger.flush():
                assert "was broken" in ledger.problem.text
        assert ledger.flush()
        assert ledger.problem is None
    assert ids(path) == ["b", "c", "d"]
    assert (ledger.lost, ledger.recorded) == (0, 3)
    assert ledger.moved_to is not None
    assert ledger.moved_to.exists()
    assert "stop the daemon, numa-launcher usage restore BACKUP, start it" in caplog.text


def test_damage_that_a_reader_finds_is_moved_aside(path: Path) -> None:
    """The writer does not read the sums of past hours."""
    write(path, "a")
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute("UPDATE hourly SET hour = hour - 360000, duration = x'ffff01'")
    with started(path) as ledger:
        ledger.put(entry("b"))
        assert ledger.flush()
        with pytest.raises(LauncherError, match="cannot read the usage ledger") as refused:
            report(path, Question(since="30d"), NOW, "USD")
        assert "numa-launcher usage restore" in refused.value.remedy
        ledger.suspect()
        assert not ledger.flush()
        ledger.put(entry("c"))
        assert ledger.flush()
        assert ledger.moved_to is not None
    assert ids(path) == ["b", "c"]  # b was not summed up


def test_a_whole_ledger_that_is_suspected_stays(path: Path) -> None:
    with started(path) as ledger:
        ledger.put(entry("a"))
        ledger.suspect()
        assert ledger.flush()
        assert ledger.moved_to is None
    assert ids(path) == ["a"]


def test_the_state_is_not_ok_while_entries_are_lost(path: Path) -> None:
    with started(path) as ledger:
        ledger.put(EndedRequest(NOW, "\ud800"))
        assert not ledger.flush()
        assert ((ledger.problem is None), ledger.lost) == (False, 1)
        assert "cannot write 1 entries" in ledger.problem.text
        assert ledger.flush()
    assert report(path, Question(since="2h"), time.time(), "USD").lost == 1


# --- restore -----------------------------------------------------------------------------------------


def test_a_backup_takes_the_place_and_broken_files_count_no_longer(path: Path, backup: Path) -> None:
    path.write_bytes(b"broken" * 1000)
    with started(path) as ledger:
        while not ledger.flush():
            pass
        ledger.put(entry("new"))
    assert lost_at(path, NOW + 60) is not None
    content = backup.read_bytes()
    found, until = restore(path, backup, NOW)
    assert (ids(path), lost_at(path, NOW)) == (["a", "b"], None)
    assert found.replaced is not None
    assert ids(found.replaced) == ["new"]
    assert [retired.read_bytes()[:6] for retired in found.retired] == [b"broken"]
    assert until == NOW
    assert backup.read_bytes() == content
    past = read_past(path, UTC, NOW)
    assert (past.lost_at, past.unreadable) == (None, False)
    write(path, "d")
    assert ids(path) == ["a", "b", "d"]


def test_a_write_ahead_log_that_a_killed_daemon_left_stays_out_of_it(path: Path, backup: Path) -> None:
    left = {}
    with started(path) as ledger:
        ledger.put(entry("late"))
        assert ledger.flush()
        left = {part: part.read_bytes() for part in parts(path)}
    for part, content in left.items():
        part.write_bytes(content)
    assert parts(path)[1].exists()
    found, _ = restore(path, backup, NOW)
    assert ids(path) == ["a", "b"]
    assert check(path) == ""
    assert found.replaced is not None
    assert ids(found.replaced) == ["a", "b", "c", "late"]


def test_a_running_daemon_is_in_the_way(path: Path, backup: Path) -> None:
    with started(path) as ledger:
        ledger.put(entry("d"))
        assert ledger.flush()
        with pytest.raises(LauncherError, match="a daemon writes it") as refused:
            restore(path, backup, NOW)
        assert "systemctl stop numa-launcher" in refused.value.remedy
        ledger.put(entry("e"))
        assert ledger.flush()
    assert ids(path) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("statement", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_backup_changes_nothing(path: Path, backup: Path, statement: str) -> None:
    change(backup, statement)
    before = sorted(path.parent.iterdir())
    with pytest.raises(LauncherError, match="cannot restore from"):
        restore(path, backup, NOW)
    assert sorted(path.parent.iterdir()) == before
    assert ids(path) == ["a", "b", "c"]


def test_what_is_no_backup(path: Path, backup: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database at all\n" * 300)
    subprocess.run(["cp", str(backup), str(tmp_path / "other.db")], check=True)
    change(tmp_path / "other.db", "PRAGMA application_id = 5")
    for wrong in (tmp_path / "text", tmp_path / "other.db", tmp_path / "none", path):
        with pytest.raises(LauncherError, match="cannot"):
            restore(path, wrong, NOW)
    assert ids(path) == ["a", "b", "c"]


def test_a_ledger_that_is_gone(path: Path, backup: Path) -> None:
    for part in parts(path):
        part.unlink(missing_ok=True)
    assert restore(path, backup, NOW)[0].replaced is None
    assert ids(path) == ["a", "b"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_what_root_restores_is_its_owner_s(path: Path, backup: Path) -> None:
    """A daemon of another user must be able to lock and write it."""
    for part in path.parent.iterdir():
        part.unlink()
    os.chown(path.parent, 1234, 1234)
    restore(path, backup, NOW)
    assert {(made.stat().st_uid, made.stat().st_gid) for made in path.parent.iterdir()} == {(1234, 1234)}


def test_entries_that_were_not_summed_up_are_not_lost_with_damaged_sums(path: Path) -> None:
    """They are in the file that is moved aside, and enter the next one again."""
    write(path, "before")
    with started(path) as ledger:
        for request_id in ("a", "b"):
            ledger.put(entry(request_id))
            assert ledger.flush()
        change(path, "UPDATE hourly SET hour = hour - 360000, duration = x'ffff01'")
        ledger.put(entry("c"))
        ledger.suspect()
        assert not ledger.flush()
        assert ledger.moved_to is not None
        ledger.put(entry("d"))
        assert ledger.flush()
        assert (ledger.recorded, ledger.lost, ledger.waiting) == (4, 0, 0)
    assert ids(path) == ["a", "b", "c", "d"]
    assert check(path) == ""


def test_a_backup_gives_no_spending_back(path: Path, backup: Path) -> None:
    """The sums of the file that it replaces, and of damaged ones, go into it where they are larger."""
    sums = SpentSums()
    for name, amount in (("ann", 900), ("bob", 7)):
        sums.slot("key", name, "x").store(1000, amount)
    with closing(LedgerFile(path, "UTC", partial(hour_begin, zone=UTC), NOW, [sums])) as file:
        file.write([], {})
    move_aside(path, NOW)
    with closing(LedgerFile(path, "UTC", partial(hour_begin, zone=UTC), NOW, [other := SpentSums()])) as file:
        other.slot("key", "bob", "x").store(1000, 70)
        file.write([], {})
    restore(path, backup, NOW)
    found = SpentSums()
    found.read(path)
    assert {name.name: sum_.amount for name, sum_ in found.found.items()} == {"ann": 900, "bob": 70}
    assert check(path) == ""
