"""The usage ledger's SQLite file: its tables, as its one writer has it open, and as readers see it.

`entries` has the single requests, those of a batch in one row: launcher.accounts.sums, as `hourly`.
`metered` has what was measured over an hour besides requests: ("ready_s", slot), ("busy_s", slot), ("joules", package),
("lost", ""): entries of requests that could not be written.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.latency import merged_by
from launcher.accounts.report_values import zone_of
from launcher.accounts.sums import (
    HISTOGRAMS,
    HOURLY,
    INTEGERS,
    SECONDS,
    Columns,
    DamagedSumsError,
    HourOf,
    Row,
    Sums,
)
from launcher.base import database, database_repair
from launcher.base.database import DamagedError, Database, FileKind, Tables
from launcher.base.database_repair import Restored
from launcher.base.errors import LauncherError
from launcher.config.schema import Usage

Metered = Mapping[tuple[str, int, str], float]
"""(what, hour, name) -> amount."""

LOST: Final = "lost"
"""In `metered`: entries that are missing in the hour's sums."""
# Entries in one row of `entries`, which is read as a whole.
MOST_IN_ROW: Final = 512
# Chunks deleted in one transaction: some milliseconds.
_DELETED: Final = 50
# More than any hourly sum: a larger one is damage, and a few of them could not be added up.
_MOST: Final = 1 << 60
# Rows whose values are looked at together: numpy keeps the interpreter's lock for some milliseconds.
_CHUNK: Final = 256

_TABLES: Final = f"""
CREATE TABLE meta (zone TEXT NOT NULL, began REAL NOT NULL);
{HOURLY}
CREATE TABLE metered (
    what TEXT NOT NULL, hour INTEGER NOT NULL, name TEXT NOT NULL, amount REAL NOT NULL,
    PRIMARY KEY (what, hour, name)
) WITHOUT ROWID;
CREATE TABLE entries (
    id INTEGER PRIMARY KEY, first_at REAL NOT NULL, last_at REAL NOT NULL, count INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE INDEX entries_by_time ON entries (last_at);
"""


def ledger_path(settings: Usage, state: Path | None) -> Path:
    """The file of the ledger; `state`: the state folder, which is not used where [usage] names a file."""
    if settings.path is not None:
        return Path(settings.path).absolute()
    assert state is not None  # noqa: S101  the caller's part
    # A folder of its own: instances may write into that of the service.
    return state / "usage" / "usage.db"


class DamagedLedgerError(DamagedError):
    """What was read of a ledger is nothing that was ever written."""

    def __init__(self, path: Path | None, why: object) -> None:
        name = "" if path is None else f" '{path}'"
        super().__init__(
            f"cannot read the usage ledger{name}: {why}",
            "the daemon moves a damaged ledger aside, see its log; `numa-launcher usage restore` puts a backup in its place",
        )


def _check_rows(reader: sqlite3.Connection) -> str:
    return _check_meta(reader) or _check_hourly(reader) or _check_entries(reader)


def _check_meta(reader: sqlite3.Connection) -> str:
    meta = reader.execute("SELECT zone, began FROM meta").fetchall()
    if len(meta) > 1:
        return "it has several time zones"
    for zone, began in meta:
        try:
            zone_of(zone)
        except LauncherError as error:
            return error.message
        float(began)
    return ""


def _check_hourly(reader: sqlite3.Connection) -> str:
    odd = " OR ".join(
        [
            f"typeof({column}) != 'integer' OR {column} NOT BETWEEN 0 AND {_MOST}"
            for column in ("hour", *INTEGERS)
        ]
        + [f"typeof({column}) != 'real'" for column in SECONDS]
    )
    [wrong] = reader.execute(f"SELECT count(*) FROM hourly WHERE {odd}").fetchone()  # noqa: S608  columns of ours
    if wrong:
        return f"{wrong} hourly sums are no sums"
    rows = reader.execute(f"SELECT {', '.join(HISTOGRAMS)} FROM hourly")  # noqa: S608  columns of ours
    while some := rows.fetchmany(_CHUNK):
        for column in zip(*some, strict=True):
            merged_by(column, [0] * len(column), 1)
    return ""


def _check_entries(reader: sqlite3.Connection) -> str:
    for count, data in reader.execute("SELECT count, data FROM entries"):
        columns = Columns.from_bytes(data)
        groups = columns.group_of
        if not count == len(columns.ids) == len(groups) or (count and groups.max() >= len(columns.groups)):
            return "entries of requests are incomplete"
    return ""


LEDGER: Final = FileKind(
    noun="usage ledger",
    # "numa"
    application=0x6E756D61,
    tables=(Tables((_TABLES,), _check_rows),),
    damaged=DamagedLedgerError,
    rename="name another file in [usage] path",
    choose="name another file with --file",
    begin="start the daemon with [usage] enabled = true, or name the file with --file",
    fill="send the daemon a request first",
)


class LedgerFile:
    """Raises LauncherError where the file cannot be used, and sqlite3.Error and OSError where it cannot be written."""

    def __init__(self, path: Path, zone: str, hour_of: HourOf, now: float) -> None:
        self.path = path
        self.database = Database(LEDGER, path)
        try:
            with self.database.transaction() as connection:
                if not connection.execute("UPDATE meta SET zone = ?", (zone,)).rowcount:
                    connection.execute("INSERT INTO meta VALUES (?, ?)", (zone, now))
        except BaseException:
            self.close()
            raise
        self._sums = Sums(hour_of, self._stored)

    def close(self) -> None:
        self.database.close()

    @property
    def replaced(self) -> bool:
        """Whether somebody removed or replaced the file: what is written now would be lost."""
        return self.database.replaced

    @property
    def size(self) -> int:
        """Bytes of the file and its write-ahead log."""
        return self.database.size

    def write(self, batch: Sequence[EndedRequest], metered: Metered, *, per_row: int = MOST_IN_ROW) -> None:
        """All of it or nothing. After an error the file must be closed: the sums are ahead of it."""
        insert = self.database.insert
        with self.database.transaction():
            if batch:
                columns = Columns.of(batch)
                rows = [
                    _row_of(columns.part(slice(begin, begin + per_row)))
                    for begin in range(0, len(batch), per_row)
                ]
                insert("INSERT INTO entries (first_at, last_at, count, data) VALUES", rows)
                try:
                    insert("INSERT OR REPLACE INTO hourly VALUES", self._sums.add(columns))
                except DamagedSumsError as error:
                    raise DamagedLedgerError(self.path, error) from None
            insert(
                "INSERT INTO metered VALUES",
                [(*key, amount) for key, amount in metered.items()],
                "ON CONFLICT DO UPDATE SET amount = amount + excluded.amount",
            )

    def prune(self, before: float) -> bool:
        """Delete some of the entries that ended before; whether there may be more of them."""
        with self.database.transaction() as connection:
            deleted = connection.execute(
                "DELETE FROM entries WHERE id IN (SELECT id FROM entries WHERE last_at < ? ORDER BY last_at LIMIT ?)",
                (before, _DELETED),
            ).rowcount
        return bool(deleted) or self.database.give_back()

    def _stored(self, dimension: str, hour: int) -> list[Row]:
        return self.database.connection.execute(
            "SELECT * FROM hourly WHERE dimension = ? AND hour = ?", (dimension, hour)
        ).fetchall()


def _row_of(entries: Columns) -> tuple[float, float, int, bytes]:
    ended_at = entries.times[:, 0]
    return float(ended_at.min()), float(ended_at.max()), len(ended_at), entries.to_bytes()


# --- readers, repair ---------------------------------------------------------------------------------


def open_reader(path: Path) -> sqlite3.Connection:
    """A read-only connection to a ledger, also while a daemon writes it. Raises LauncherError."""
    return database.open_reader(LEDGER, path)


def entries(reader: sqlite3.Connection, since: float, until: float) -> Iterator[EndedRequest]:
    """The entries of the requests that ended in [since, until), Unix seconds, in the order of their ends."""
    chunks = reader.execute(
        "SELECT data FROM entries WHERE last_at >= ? AND first_at < ? ORDER BY last_at, id", (since, until)
    )
    for (data,) in chunks:
        yield from (entry for entry in unpacked(data) if since <= entry.ended_at < until)


def packed(batch: Sequence[EndedRequest]) -> bytes:
    """The entries of a batch in one row's form."""
    return Columns.of(batch).to_bytes()


def unpacked(data: bytes) -> list[EndedRequest]:
    return list(Columns.from_bytes(data).entries())


def check(path: Path) -> str:
    """What is damaged in a ledger; "" for a whole one. Reads all of it. Raises LauncherError where it cannot be read for
    another reason, or is no ledger that this version knows."""
    return database_repair.check(LEDGER, path)


def move_aside(path: Path, now: float) -> Path:
    """Rename a damaged ledger, so that a new one can begin. Returns the new name. Raises LauncherError, OSError."""
    return database_repair.move_aside(LEDGER, path, now)


def restore(path: Path, backup: Path, now: float) -> tuple[Restored, float | None]:
    """Put a copy of a backup in the place of the ledger; also return when its last request ended, Unix time (None: it has
    none). Raises LauncherError."""
    found = database_repair.restore(LEDGER, path, backup, now)
    with contextlib.closing(open_reader(path)) as reader:
        [last] = reader.execute("SELECT max(last_at) FROM entries").fetchone()
    return found, last
