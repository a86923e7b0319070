"""Sums of budgets and caps in the ledger's file: across SIGKILL, damage, files that are replaced, and threads."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.written import written

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger import Ledger
from launcher.accounts.ledger_file import LedgerFile, check
from launcher.accounts.report_values import hour_begin
from launcher.accounts.spent_sums import DamagedSumError, Name, SpentSums, Sum, _parsed, _row_of
from launcher.config.schema import Usage

KEY = ("key", "ann", "tokens/month")
BEGIN = 1_793_000_000
HOUR_OF = partial(hour_begin, zone=ZoneInfo("UTC"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.db"


@contextmanager
def daemon(path: Path, sums: SpentSums) -> Iterator[LedgerFile]:
    with closing(LedgerFile(path, "UTC", HOUR_OF, time.time(), [sums])) as file:
        yield file


def found(path: Path, *words: str, begin: int = BEGIN) -> int | None:
    """What a new daemon finds."""
    sums = SpentSums()
    with daemon(path, sums):
        return sums.slot(*(words or KEY)).amount(begin)


def test_a_sum_is_found_again_for_its_period_alone(path: Path) -> None:
    sums = SpentSums()
    slot = sums.slot(*KEY)
    with daemon(path, sums) as file:
        assert slot.amount(BEGIN) is None
        slot.store(BEGIN, 5)
        slot.store(BEGIN, 7)
        sums.slot("overflow", "ann", "usd/day").store(BEGIN, 10**18)
        sums.slot("key", "\ud800", "x").store(BEGIN, 1 << 70)
        assert sums.waiting
        with pytest.raises(UnicodeEncodeError):
            file.write([], {})
    sums = SpentSums()
    with daemon(path, sums) as file:
        for words, amount in (
            (KEY, 7),
            (("overflow", "ann", "usd/day"), 10**18),
            (("key", "b", "x"), 1 << 70),
        ):
            sums.slot(*words).store(BEGIN, amount)
        file.write([], {})
        assert not sums.waiting
    assert found(path) == 7
    assert found(path, "overflow", "ann", "usd/day") == 10**18
    assert found(path, "key", "b", "x") == (1 << 63) - 1
    assert found(path, begin=BEGIN + 86400) is None
    assert found(path, "key", "bob", "tokens/month") is None


def test_what_was_found_stays_what_was_found(path: Path) -> None:
    """A period that began before asks for it while it is replaced."""
    first, second = SpentSums(), SpentSums()
    with daemon(path, first) as file:
        first.slot(*KEY).store(BEGIN, 5)
        file.write([], {})
    with daemon(path, second) as file:
        second.slot(*KEY).store(BEGIN, 9)
        file.write([], {})
        assert second.slot(*KEY).amount(BEGIN) == 5
    with daemon(path, second):
        assert second.slot(*KEY).amount(BEGIN) == 5
    assert found(path) == 9


def test_a_batch_that_fails_loses_no_sum(path: Path) -> None:
    sums = SpentSums()
    with daemon(path, sums) as file:
        sums.slot(*KEY).store(BEGIN, 5)
        with pytest.raises(sqlite3.IntegrityError):
            file.write([EndedRequest(ended_at="no time", request_id="r")], {})  # type: ignore[arg-type]
    assert found(path) is None
    with daemon(path, sums) as file:
        assert sums.waiting
        file.write([], {})
    assert found(path) == 5


def test_the_next_file_gets_the_sums_of_the_one_before(path: Path) -> None:
    """Moved aside under way, or removed by somebody."""
    with written(Ledger(Usage(), path), by_flush=True) as ledger:
        ledger.spent.slot(*KEY).store(BEGIN, 5)
        assert ledger.flush()
        for part in path.parent.glob("usage.db*"):
            if not part.name.endswith((".lock", ".clock")):
                part.unlink()
        assert ledger.flush()
    assert found(path) == 5


def test_a_damaged_files_readable_sums_are_found(path: Path) -> None:
    sums = SpentSums()
    with daemon(path, sums) as file:
        for number in range(3):
            sums.slot("key", f"key {number}", "x").store(BEGIN, number)
        file.write([EndedRequest(ended_at=time.time(), request_id="r")], {})
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE hourly SET requests = -1")
        connection.execute("UPDATE spent SET amount = 7000 WHERE name = 'key 1'")
    assert check(path)
    with written(Ledger(Usage(), path), by_flush=True) as ledger:
        ledger.suspect()
        assert not ledger.flush()
        assert ledger.moved_to is not None
        assert ledger.flush()
        amounts = [ledger.spent.slot("key", f"key {number}", "x").amount(BEGIN) for number in range(3)]
    assert amounts == [0, None, 2]
    assert [found(path, "key", f"key {number}", "x") for number in range(3)] == [0, None, 2]


def test_a_changed_sum_is_damage(path: Path) -> None:
    sums = SpentSums()
    with daemon(path, sums) as file:
        sums.slot(*KEY).store(BEGIN, 5)
        file.write([], {})
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE spent SET amount = 4")
    assert check(path) == "a stored sum of a budget or cap is damaged"
    with written(Ledger(Usage(), path), by_flush=True) as ledger:
        assert not ledger.flush()
        assert ledger.flush()
        assert ledger.moved_to is not None


texts = st.text(max_size=20)


@given(
    st.builds(Name, texts, texts, texts),
    st.builds(Sum, st.integers(), st.integers()),
    st.integers(0, 5),
    st.integers(0, 63),
)
def test_any_flipped_bit_of_a_row_is_noticed(name: Name, sum_: Sum, place: int, bit: int) -> None:
    row = list(_row_of(name, sum_))
    assert _parsed(tuple(row)) == (name, sum_)  # type: ignore[arg-type]
    before = row[place]
    row[place] = before ^ (1 << bit) if isinstance(before, int) else f"{before}x"
    with pytest.raises(DamagedSumError):
        _parsed(tuple(row))  # type: ignore[arg-type]


def test_a_store_while_the_thread_writes_is_never_lost(path: Path) -> None:
    sums, ended = SpentSums(), threading.Event()
    slots = [sums.slot("key", str(number), "x") for number in range(20)]

    def store() -> None:
        for amount in range(3000):
            for slot in slots:
                slot.store(BEGIN, amount)
        ended.set()

    with daemon(path, sums) as file:
        thread = threading.Thread(target=store)
        thread.start()
        while not ended.is_set() or sums.waiting:
            file.write([], {})
        thread.join()
    assert {found(path, "key", str(number), "x") for number in range(20)} == {2999}
