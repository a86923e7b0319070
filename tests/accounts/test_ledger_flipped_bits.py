"""A bit of the ledger's file flips while no daemon runs: the next one serves, enters what comes, and says what is lost."""

from __future__ import annotations

import random
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.hand_clock import HandClock
from support.history_rows import row
from support.written import written

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger import Ledger
from launcher.accounts.ledger_file import check, open_reader, open_sums
from launcher.base.errors import LauncherError
from launcher.config.schema import Usage
from launcher.telemetry.load_table import LoadTable

ENTRIES = 400
NOW = time.time()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with rows in all tables."""
    path = tmp_path_factory.mktemp("whole") / "usage.db"
    load = LoadTable(lambda: int(NOW * 1000))
    with written(Ledger(Usage(), path, HandClock(NOW), [load]), by_flush=True) as ledger:
        for number in range(ENTRIES):
            ledger.put(EndedRequest(
                NOW - 40_000 + number * 100, f"r{number}", f"key {number % 9}", model=f"m{number % 3}", slot=number % 4,
                prompt_tokens=number, output_tokens=number, picos=number, first_byte_s=0.1, duration_s=1.0,
            ))  # fmt: skip
        ledger.meter([("ready_s", "0", 1.0)])
        ledger.spent.slot("key", "ann", "tokens/month").store(int(NOW), 7)
        load.add(row(int(NOW) // 2 * 2000 - 400_000 + 2000 * number) for number in range(100))
        assert ledger.flush(60)
    return path


def page_size(path: Path) -> int:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
        [size] = file.execute("PRAGMA page_size").fetchone()
    return int(size)


def flips(path: Path, each: int) -> Iterator[tuple[int, int]]:
    """Bytes and their bits: in each page the type at its begin and others, by chance."""
    chance, size = random.Random(1), page_size(path)  # noqa: S311
    for begin in range(0, path.stat().st_size, size):
        for offset in (0, *(chance.randrange(size) for _ in range(each - 1))):
            yield begin + offset, 1 << chance.randrange(8)


def with_flip(whole: Path, path: Path, at: int, bit: int) -> None:
    path.parent.mkdir()
    shutil.copyfile(whole, path)
    with path.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def ids(path: Path) -> list[str]:
    with closing(open_reader(path)) as reader:
        return [name for (name,) in reader.execute("SELECT request_id FROM request ORDER BY id")]


def requests(path: Path) -> int:
    """By the sums."""
    with closing(open_sums(path)) as reader:
        [count] = reader.execute("SELECT sum(requests) FROM hourly WHERE dimension = 'all'").fetchone()
    return int(count or 0)


@pytest.mark.parametrize("each", [2, pytest.param(40, marks=pytest.mark.release)])
def test_a_flipped_bit_in_each_page(whole: Path, tmp_path: Path, each: int) -> None:
    before = ids(whole)
    assert len(before) == requests(whole) == ENTRIES
    for number, (at, bit) in enumerate(flips(whole, each)):
        path = tmp_path / f"{number}" / "usage.db"
        with_flip(whole, path, at, bit)
        load = LoadTable(lambda: int(NOW * 1000))
        with written(Ledger(Usage(), path, HandClock(NOW), [load]), by_flush=True) as ledger:
            ledger.put(EndedRequest(NOW, "new 1"))
            ledger.flush(60)
            # Whoever reads damage says so.
            try:
                ids(path), requests(path)
            except (LauncherError, sqlite3.Error, ValueError):
                ledger.suspect()
            ledger.put(EndedRequest(NOW, "new 2"))
            ledger.flush(60)
            assert ledger.flush(60), (at, bit, ledger.problem)
            assert (ledger.lost, ledger.waiting) == (0, 0)
            moved = ledger.moved_to
        found = ids(path)
        assert [name for name in found if str(name).startswith("new")] == ["new 1", "new 2"], (at, bit)
        if moved is None:
            assert len(found) == ENTRIES + 2, (at, bit)
        else:
            assert check(path) == ""
            assert (found, requests(path)) == (["new 1", "new 2"], 2), (at, bit)
        shutil.rmtree(path.parent)
