"""Sums that budgets and daily caps have spent, in the usage ledger's file.

The event loop replaces a sum with each request that ends; the ledger's thread writes it in the transaction that enters the
request: SIGKILL loses the same moment of both. Of a damaged file that is moved aside, the sums that can still be read
go into the next one: each has a checksum.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from launcher.base.database import Database, Tables, read_only
from launcher.base.database_repair import moved_aside

# SQLite's largest integer.
_MOST: Final = (1 << 63) - 1
_SELECT: Final = "SELECT kind, name, unit, begin, amount, checksum FROM spent"


class Name(NamedTuple):
    """("key", "ann", "tokens/month"), ("overflow", "cloud", "day")."""

    kind: str
    name: str
    unit: str


class Sum(NamedTuple):
    begin: int
    """Begin of the period, Unix seconds."""
    amount: int
    """Tokens or picos."""


class DamagedSumError(ValueError):
    """A row that was never written so."""


def _row_of(name: Name, sum_: Sum) -> tuple[str, str, str, int, int, int]:
    return (*name, *sum_, zlib.crc32(repr((*name, *sum_)).encode(errors="surrogatepass")))


def _parsed(row: tuple[str, str, str, int, int, int]) -> tuple[Name, Sum]:
    name, sum_ = Name(*row[:3]), Sum(*row[3:5])
    if _row_of(name, sum_) != row:
        raise DamagedSumError("a stored sum of a budget or cap is damaged")
    return name, sum_


def _check(reader: sqlite3.Connection) -> str:
    try:
        for row in reader.execute(_SELECT):
            _parsed(row)
    except DamagedSumError as error:
        return str(error)
    return ""


_TABLE: Final = """
CREATE TABLE spent (
    kind TEXT NOT NULL, name TEXT NOT NULL, unit TEXT NOT NULL, begin INTEGER NOT NULL, amount INTEGER NOT NULL,
    checksum INTEGER NOT NULL, PRIMARY KEY (kind, name, unit)
) WITHOUT ROWID;
"""
SPENT: Final = Tables((_TABLE,), _check)


class SpentSlot:
    """The sum of one budget or cap."""

    def __init__(self, sums: SpentSums, name: Name) -> None:
        self._sums = sums
        self._name = name

    def amount(self, begin: int) -> int | None:
        """The sum of the period that began at `begin`, Unix seconds, as the files had it. None: they had none."""
        found = self._sums.found.get(self._name)
        return found.amount if found is not None and found.begin == begin else None

    def store(self, begin: int, amount: int) -> None:
        """Replace it."""
        self._sums.store(self._name, Sum(begin, min(amount, _MOST)))


class SpentSums:
    """Sums in memory; the event loop stores them, the ledger's thread reads and writes their table."""

    def __init__(self) -> None:
        self.found: Mapping[Name, Sum] = {}
        """As the files had them before this process wrote any."""
        self._is_read = False
        self._known: dict[Name, Sum] = {}
        """In a file, or in one before: what the next file must have."""
        self._changed: dict[Name, Sum] = {}
        """Not in the file yet."""
        self._lock = threading.Lock()

    def slot(self, kind: str, name: str, unit: str) -> SpentSlot:
        return SpentSlot(self, Name(kind, name, unit))

    def store(self, name: Name, sum_: Sum) -> None:
        with self._lock:
            self._changed[name] = sum_

    # --- the ledger's thread, see MirroredTable ------------------------------------------------------

    @property
    def waiting(self) -> bool:
        return bool(self._changed)

    def read(self, path: Path) -> None:
        """Once, before anything is written: what can be read of the file and of damaged ones that were moved aside; also of
        a file that cannot be written, or not be opened as a ledger. Never raises."""
        if self._is_read:
            return
        for other in moved_aside(path):
            self.rescue(other)
        self._is_read = self.rescue(path)
        self.found = dict(self._known)

    def rescue(self, path: Path) -> bool:
        """Returns whether it has such a table."""
        with contextlib.suppress(Exception), contextlib.closing(read_only(path)) as reader:
            for row in reader.execute(_SELECT):
                with contextlib.suppress(DamagedSumError):
                    self._keep(*_parsed(row))
            return True
        return False

    def _keep(self, name: Name, sum_: Sum) -> None:
        """Between several files the newest period counts, and in it the larger sum; this process knows its own last one."""
        known = self._known.get(name)
        if known is None or (known < sum_ and not self._is_read):
            self._known[name] = sum_

    def opened(self, database: Database) -> None:
        """Raises DamagedSumError, too."""
        there = dict(map(_parsed, database.connection.execute(_SELECT)))
        for name, sum_ in there.items():
            self._keep(name, sum_)
        with self._lock:
            for name, sum_ in self._known.items():
                changed = self._changed.get(name)
                # What was stored before anything was read does not know what the file has.
                unaware = changed is not None and changed < sum_ and not self._is_read
                if unaware or (changed is None and there.get(name) != sum_):
                    self._changed[name] = sum_
        if not self._is_read:
            self.found, self._is_read = dict(self._known), True

    def write(self, database: Database) -> None:
        with self._lock:
            changed, self._changed = self._changed, {}
        self._known |= changed
        rows = [_row_of(name, sum_) for name, sum_ in changed.items()]
        database.insert("INSERT OR REPLACE INTO spent VALUES", rows)
