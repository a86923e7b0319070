"""The usage ledger's file as its one writer has it open."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger_repair import locked, parts
from launcher.accounts.ledger_schema import HISTOGRAMS, INTEGERS, MODE, SECONDS, DamagedLedgerError, migrate
from launcher.accounts.sums import Columns, HourOf, Row, Sums

Metered = Mapping[tuple[str, int, str], float]
"""(what, hour, name) -> amount."""

# Entries in one row of `entries`, which is read as a whole.
MOST_IN_ROW: Final = 512
# A statement takes and gives back Python's lock once, and beside a busy event loop each takes milliseconds to come back:
# the rows of many are one statement. SQLite allows 32,766 values in one.
_ROWS: Final = 50
_COLUMNS: Final = 3 + len(INTEGERS) + len(SECONDS) + len(HISTOGRAMS)
# Chunks deleted, and pages given back to the file system, in one transaction: some milliseconds.
_DELETED: Final = 50
_FREED: Final = 500
# Less unused space than this stays in the file for later entries.
_UNUSED_SHARE: Final = 0.25
_UNUSED_PAGES: Final = 4096
_LOG_BYTES: Final = 16 << 20
# For readers on disks that hang; the writer retries what took longer.
_BUSY_S: Final = 2.0
# Bytes of the file's header: rollback journal or write-ahead log, for writers and for readers.
_FORMATS: Final = slice(18, 20)


class LedgerFile:
    """Raises LauncherError where the file cannot be used, and sqlite3.Error and OSError where it cannot be written."""

    def __init__(self, path: Path, zone: str, hour_of: HourOf, now: float) -> None:
        self.path = path
        self._resources = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            # Two writers would overwrite each other's sums.
            self._resources.enter_context(locked(path))
            _create(path)
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._resources.callback(self._connection.close)
            migrate(self._connection, path)
            try:
                self._connection.execute("PRAGMA journal_mode = WAL").fetchone()
                self._connection.execute("PRAGMA synchronous = NORMAL")
                self._connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}").fetchone()
                self._describe(zone, now)
            except sqlite3.OperationalError as error:
                self.close()
                if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_READONLY:
                    _check_header(path)
                raise
            self._inode = path.stat().st_ino
            undo.pop_all()
        self._sums = Sums(hour_of, self._stored)

    def close(self) -> None:
        self._resources.close()

    @property
    def replaced(self) -> bool:
        """Whether somebody removed or replaced the file: what is written now would be lost."""
        try:
            return self.path.stat().st_ino != self._inode
        except FileNotFoundError:
            return True

    @property
    def size(self) -> int:
        """Bytes of the file and its write-ahead log."""
        return sum(part.stat().st_size for part in parts(self.path) if part.exists())

    def write(self, batch: Sequence[EndedRequest], metered: Metered, *, per_row: int = MOST_IN_ROW) -> None:
        """All of it or nothing. After an error the file must be closed: the sums are ahead of it."""
        with self._transaction():
            if batch:
                columns = Columns.of(batch)
                rows = [
                    _row_of(columns.part(slice(begin, begin + per_row)))
                    for begin in range(0, len(batch), per_row)
                ]
                self._put("INSERT INTO entries (first_at, last_at, count, data) VALUES", rows, "")
                self._put("INSERT OR REPLACE INTO hourly VALUES", self._sums.add(columns), "")
            self._put(
                "INSERT INTO metered VALUES",
                [(*key, amount) for key, amount in metered.items()],
                "ON CONFLICT DO UPDATE SET amount = amount + excluded.amount",
            )

    def prune(self, before: float) -> bool:
        """Delete some of the entries that ended before; whether there may be more of them."""
        with self._transaction() as connection:
            deleted = connection.execute(
                "DELETE FROM entries WHERE id IN (SELECT id FROM entries WHERE last_at < ? ORDER BY last_at LIMIT ?)",
                (before, _DELETED),
            ).rowcount
        if deleted:
            return True
        [unused] = self._connection.execute("PRAGMA freelist_count").fetchone()
        [pages] = self._connection.execute("PRAGMA page_count").fetchone()
        if unused < max(_UNUSED_PAGES, pages * _UNUSED_SHARE):
            return False
        self._connection.execute(f"PRAGMA incremental_vacuum({_FREED})").fetchall()
        return True

    def _describe(self, zone: str, now: float) -> None:
        """Written at every start: what cannot be written is noticed before there is anything to write."""
        if not self._connection.execute("UPDATE meta SET zone = ?", (zone,)).rowcount:
            self._connection.execute("INSERT INTO meta VALUES (?, ?)", (zone, now))

    def _stored(self, dimension: str, hour: int) -> list[Row]:
        return self._connection.execute(
            "SELECT * FROM hourly WHERE dimension = ? AND hour = ?", (dimension, hour)
        ).fetchall()

    def _put(self, insert: str, rows: Sequence[tuple[Any, ...]], then: str) -> None:
        for begin in range(0, len(rows), _ROWS):
            part = rows[begin : begin + _ROWS]
            marks = f"({', '.join('?' * len(part[0]))})"
            values = [value for row in part for value in row]
            self._connection.execute(f"{insert} {', '.join([marks] * len(part))} {then}", values)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # a full disk may have ended it
                self._connection.rollback()
            raise


def _row_of(entries: Columns) -> tuple[float, float, int, bytes]:
    ended_at = entries.times[:, 0]
    return float(ended_at.min()), float(ended_at.max()), len(ended_at), entries.to_bytes()


def _create(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE))


def _check_header(path: Path) -> None:
    """SQLite takes a file of another format for one that cannot be written (sqlite.org/fileformat2.html, 1.3.3).

    Not while this process has a connection to it: closing any descriptor of a file takes from a process all locks of
    SQLite's on it (fcntl(2)). Another program that ends with the ledger would take itself for the last that has it, and
    remove its write-ahead log (sqlite.org/howtocorrupt.html, 2.2)."""
    with path.open("rb") as file:
        formats = file.read(_FORMATS.stop)[_FORMATS]
    if set(formats) - {1, 2}:
        raise DamagedLedgerError(path, f"its header is damaged (format {formats.hex(' ')})")
