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

import msgspec

from launcher.base.database import Database, Tables, read_only
from launcher.telemetry.history import SPANS, Found, History, Key
from launcher.telemetry.history_columns import Row, row_of

log = logging.getLogger("launcher.history")

_TABLE: Final = """
CREATE TABLE load (
    number INTEGER PRIMARY KEY, span TEXT NOT NULL, ended_ms INTEGER NOT NULL, row TEXT NOT NULL, checksum INTEGER NOT NULL,
    UNIQUE (span, ended_ms)
);
"""
# As bytes: a damaged text may be no UTF-8, which Python refuses.
_SELECT: Final = """
SELECT number, CAST(span AS BLOB), CAST(ended_ms AS BLOB), CAST(row AS BLOB), checksum FROM load ORDER BY number
"""
_INSERT: Final = "INSERT OR REPLACE INTO load (span, ended_ms, row, checksum) VALUES"
_DELETE: Final = "DELETE FROM load WHERE span = ? AND ended_ms = ?"
_DELETE_DAMAGED: Final = "DELETE FROM load WHERE number = ?"
_NAMES: Final = frozenset(span.name for span in SPANS)

LOAD: Final = Tables(
    (_TABLE,),
    # A row that was never written so is left out when it is read: no reason to begin a new ledger.
    check=lambda _reader: "",
)


def _checksum(span: bytes, row: bytes) -> int:
    return zlib.crc32(row, zlib.crc32(span))


class LoadTable:
    """The history, for the event loop and for the ledger's thread. `now_ms`: milliseconds since the epoch."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._history = History()
        self._lock = threading.Lock()

    def add(self, rows: Iterable[Row]) -> None:
        """Rows of 2 s. Takes some milliseconds when a longer step ends: not for the event loop."""
        with self._lock:
            self._history.add(rows)

    def find(self, span: str, after: int) -> Found:
        with self._lock:
            return self._history.find(span, after, self._now_ms())

    # --- the ledger's thread, see MirroredTable ------------------------------------------------------

    @property
    def waiting(self) -> bool:
        return bool(self._history.changes)

    def rescue(self, path: Path) -> bool:
        there: dict[Key, bytes] = {}
        found = False
        with contextlib.suppress(Exception), contextlib.closing(read_only(path)) as reader:
            _read(reader, there)
            found = True
        with self._lock:
            self._history.take(there, self._now_ms())
        return found

    def opened(self, connection: sqlite3.Connection) -> None:
        there: dict[Key, bytes] = {}
        damaged = _read(connection, there)
        connection.executemany(_DELETE_DAMAGED, ((number,) for number in damaged))
        with self._lock:
            self._history.take(there, self._now_ms())

    def write(self, database: Database) -> None:
        with self._lock:
            changes = self._history.changed()
        database.connection.executemany(_DELETE, [key for key, text in changes.items() if text is None])
        rows = [
            (*key, text.decode(), _checksum(key.span.encode(), text))
            for key, text in changes.items()
            if text is not None
        ]
        database.insert(_INSERT, rows)


def _read(reader: sqlite3.Connection, there: dict[Key, bytes]) -> list[int]:
    """Take the rows into `there`, those before an error too; return the numbers of damaged ones."""
    damaged = []
    for number, span, ended_ms, text, checksum in reader.execute(_SELECT):
        try:
            key = Key(span.decode(), int(ended_ms))
            if _checksum(span, text) != checksum or key.span not in _NAMES or row_of(text).ms != key.ms:
                raise ValueError(key)
            there[key] = text
        except (ValueError, TypeError, AttributeError, msgspec.MsgspecError):
            damaged.append(number)
    if damaged:
        log.warning("%d rows of the history are damaged and left out", len(damaged))
    return damaged
