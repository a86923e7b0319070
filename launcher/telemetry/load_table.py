"""The history as a table of the usage ledger's file. All of its rows are in memory too: an answer reads no disk, and a file
that cannot be used, or is replaced by another, costs none of them while the daemon runs.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from launcher.base.database import Database, Tables, read_only
from launcher.telemetry.history import SPANS, Found, History, Key
from launcher.telemetry.history_columns import Row

log = logging.getLogger("launcher.history")

_TABLE: Final = """
CREATE TABLE load (
    number INTEGER PRIMARY KEY, span TEXT NOT NULL, ended_ms INTEGER NOT NULL, row TEXT NOT NULL, checksum INTEGER NOT NULL,
    UNIQUE (span, ended_ms)
);
"""
# The newest, of all spans. As bytes: a damaged text may be no UTF-8, which Python refuses.
_SELECT: Final = """
SELECT number, CAST(span AS BLOB), CAST(ended_ms AS BLOB), CAST(row AS BLOB), checksum
FROM load ORDER BY number DESC LIMIT ?
"""
_MOST: Final = sum(span.most for span in SPANS)
_INSERT: Final = "INSERT OR REPLACE INTO load (span, ended_ms, row, checksum) VALUES"
_DELETE: Final = "DELETE FROM load WHERE (span, ended_ms) IN (VALUES"
_DELETE_NUMBERS: Final = "DELETE FROM load WHERE number IN (VALUES"
_NAMES: Final = tuple(span.name for span in SPANS)
# What no daemon of this version leaves in the file: other spans, and more than are kept of one.
_DELETE_OTHERS: Final = "DELETE FROM load WHERE span NOT IN (?, ?, ?)"
_DELETE_EXCESS: Final = """
DELETE FROM load WHERE span = ?1 AND number <= (
    SELECT number FROM load WHERE span = ?1 ORDER BY number DESC LIMIT 1 OFFSET ?2
)
"""

LOAD: Final = Tables(
    (_TABLE,),
    # A row that was never written so is left out when it is read: no reason to begin a new ledger.
    check=lambda _reader: "",
)


def _checksum(span: bytes, row: bytes) -> int:
    return zlib.crc32(row, zlib.crc32(span))


class LoadTable:
    """The history, for the recorder and its readers, and for the ledger's thread. Nothing of it is for the event loop, which
    would wait for the others. `now_ms`: milliseconds since the epoch."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._history = History()
        self._lock = threading.Lock()
        self._told = 0
        """Damaged rows, when they were told of last."""

    def add(self, rows: Iterable[Row]) -> None:
        """Rows of 2 s."""
        with self._lock:
            self._history.add(rows)

    def find(self, span: str, after: int) -> Found:
        with self._lock:
            return self._history.find(span, after, self._now_ms())

    # --- the ledger's thread, see MirroredTable ------------------------------------------------------

    @property
    def waiting(self) -> bool:
        return bool(self._history.changes)

    def rescue(self, path: Path) -> None:
        there: dict[Key, bytes] = {}
        with contextlib.suppress(Exception), contextlib.closing(read_only(path)) as reader:
            _read(reader, there)
        with self._lock:
            self._history.take(there, self._now_ms())

    def opened(self, database: Database) -> None:
        database.connection.execute(_DELETE_OTHERS, _NAMES)
        for span in SPANS:
            database.connection.execute(_DELETE_EXCESS, (span.name, span.most))
        there: dict[Key, bytes] = {}
        damaged = _read(database.connection, there)
        database.insert(_DELETE_NUMBERS, [(number,) for number in damaged], ")")
        with self._lock:
            count = len(damaged) + self._history.take(there, self._now_ms())
        if count and count != self._told:
            log.warning("%d rows of the history are damaged and left out", count)
        self._told = count

    def write(self, database: Database) -> None:
        with self._lock:
            changes = self._history.changed()
        database.insert(_DELETE, [key for key, text in changes.items() if text is None], ")")
        rows = [
            (*key, text.decode(), _checksum(key.span.encode(), text))
            for key, text in changes.items()
            if text is not None
        ]
        database.insert(_INSERT, rows)


def _read(reader: sqlite3.Connection, there: dict[Key, bytes]) -> list[int]:
    """Take the rows into `there`, in the order in which they were added; return the numbers of damaged ones."""
    damaged, found = [], []
    try:
        for number, span, ended_ms, text, checksum in reader.execute(_SELECT, (_MOST,)):
            try:
                key = Key(span.decode(), int(ended_ms))
                if _checksum(span, text) != checksum or not text.startswith(b"[%d," % key.ms):
                    raise ValueError(key)
                found.append((key, text))
            except (ValueError, TypeError, AttributeError):
                damaged.append(number)
    finally:  # with those before an error
        there.update(reversed(found))
    return damaged
