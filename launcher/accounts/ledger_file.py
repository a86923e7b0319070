"""The usage ledger's SQLite file: its tables, as its one writer has it open, and as readers see it.

`request` and `request_kind` have the single requests: launcher.accounts.request_rows. `hourly` has their sums, but for the
requests with ids above `summed_to` of `meta`: the writer sums up many at a time, and a reader adds the rest (`open_sums`).
`metered` has what was measured over an hour besides requests: ("ready_s", slot), ("busy_s", slot), ("joules", package),
("lost", ""): entries of requests that could not be written. `load` has the history: launcher.telemetry.load_table.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.latency import merged_by
from launcher.accounts.report_values import hour_begin, zone_of
from launcher.accounts.request_rows import INSERT, MOST_KINDS, REQUESTS, Kinds, rows_after, rows_of
from launcher.accounts.spent_sums import SPENT, SpentSums
from launcher.accounts.sums import (
    HISTOGRAMS,
    HOURLY,
    INTEGERS,
    SECONDS,
    DamagedSumsError,
    HourlyRow,
    HourOf,
    Sums,
)
from launcher.base import database, database_repair
from launcher.base.database import DamagedError, Database, FileKind, MirroredTable, Tables
from launcher.base.database_repair import Restored
from launcher.base.errors import LauncherError
from launcher.config.schema import Usage
from launcher.telemetry.load_table import LOAD, LoadTable

Metered = Mapping[tuple[str, int, str], float]
"""(what, hour, name) -> amount."""

LOST: Final = "lost"
"""In `metered`: entries that are missing in the hour's sums."""
# Between two additions of requests to the hourly sums, and how many may wait for one: numpy keeps the interpreter's lock for
# some milliseconds, and a reader adds what waits itself.
_FOLD_S: Final = 5.0
_FOLD_ROWS: Final = 2_000
# Requests deleted in one transaction: some 10 ms.
_DELETED: Final = 2_000
# More than any hourly sum: a larger one is damage, and a few of them could not be added up.
_MOST: Final = 1 << 60
# Rows whose values are looked at together: numpy keeps the interpreter's lock for some milliseconds.
_CHUNK: Final = 256

_TABLES: Final = f"""
CREATE TABLE meta (zone TEXT NOT NULL, began REAL NOT NULL, summed_to INTEGER NOT NULL);
{HOURLY}
CREATE TABLE metered (
    what TEXT NOT NULL, hour INTEGER NOT NULL, name TEXT NOT NULL, amount REAL NOT NULL,
    PRIMARY KEY (what, hour, name)
) WITHOUT ROWID;
"""


def ledger_path(settings: Usage, state: Path | None) -> Path:
    """The file of the ledger; `state`: the state folder, which is not used where [usage] names a file."""
    if settings.path is not None:
        return Path(settings.path).absolute()
    assert state is not None  # noqa: S101  the caller's part
    # A folder of its own: instances may write into that of the service.
    return state / "usage" / "usage.db"


class DamagedLedgerError(DamagedError):
    """A ledger holds something that was never written."""

    def __init__(self, path: Path | None, why: object) -> None:
        name = "" if path is None else f" '{path}'"
        super().__init__(
            f"cannot read the usage ledger{name}: {why}",
            "the daemon moves a damaged ledger aside, see its log; `numa-launcher usage restore` puts a backup in its place",
        )


def _check_rows(reader: sqlite3.Connection) -> str:
    return _check_meta(reader) or _check_hourly(reader)


def _check_meta(reader: sqlite3.Connection) -> str:
    meta = reader.execute("SELECT zone, began, summed_to FROM meta").fetchall()
    if len(meta) > 1:
        return "it has several time zones"
    for zone, began, summed_to in meta:
        try:
            zone_of(zone)
        except LauncherError as error:
            return error.message
        float(began)
        if not isinstance(summed_to, int):
            return "it does not say which requests are summed up"
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


LEDGER: Final = FileKind(
    noun="usage ledger",
    # "numa"
    application=0x6E756D61,
    tables=(Tables((_TABLES,), _check_rows), REQUESTS, SPENT, LOAD),
    damaged=DamagedLedgerError,
    rename="name another file in [usage] path",
    choose="name another file with --file",
    begin="start the daemon with [usage] enabled = true, or name the file with --file",
    fill="send the daemon a request first",
)


class LedgerFile:
    """`zone`: None where no requests are kept, only the `mirrored` tables. Raises LauncherError where the file cannot be
    used, and sqlite3.Error and OSError where it cannot be written. After an error it must be closed."""

    def __init__(
        self,
        path: Path,
        zone: str | None,
        hour_of: HourOf,
        now: float,
        mirrored: Sequence[MirroredTable] = (),
    ) -> None:
        self.path = path
        self._keeps_requests = zone is not None
        self._mirrored = mirrored
        self.database = Database(LEDGER, path)
        self._connection = self.database.connection
        self._kinds = Kinds(self._connection)
        self._sums = Sums(hour_of, self._stored)
        self.unsummed: list[EndedRequest] = []
        """Entries of this process that are written, and not in the hourly sums yet. They are lost with a file whose sums are
        damaged."""
        self._last = 0
        # Rows of `request` that the hourly sums lack.
        self._to_fold: list[tuple[Any, ...]] = []
        self._folded_at = time.monotonic()
        try:
            with self._transaction():
                if zone is not None:
                    self._begin(zone, now)
                for table in self._mirrored:
                    table.opened(self.database)
                if zone is not None:  # damage of the sums is found before a request is entered
                    self._sums.read(hour_of(now))
        except BaseException:
            self.database.close()
            raise

    def _begin(self, zone: str, now: float) -> None:
        connection = self._connection
        connection.execute(
            "INSERT INTO meta SELECT ?, ?, 0 WHERE NOT EXISTS (SELECT 1 FROM meta)", (zone, now)
        )
        connection.execute("UPDATE meta SET zone = ?", (zone,))
        [summed_to, last] = connection.execute(
            "SELECT summed_to, (SELECT coalesce(max(id), 0) FROM request) FROM meta"
        ).fetchone()
        self._last = max(summed_to, last)
        # A daemon that was killed did not sum them up.
        self._to_fold, kinds = rows_after(connection, summed_to)
        for number, kind in kinds.items():
            self._kinds.learn(number, kind)
        self._fold()

    def close(self) -> None:
        try:
            # What cannot be summed up now is when the file is opened again.
            if not self.database.failed:
                with contextlib.suppress(sqlite3.Error, LauncherError), self._transaction():
                    self._fold()
        finally:
            self.database.close()

    @property
    def replaced(self) -> bool:
        """Whether somebody removed or replaced the file: what is written now would be lost."""
        return self.database.replaced

    @property
    def size(self) -> int:
        """Bytes of the file and its write-ahead log."""
        return self.database.size

    def write(self, batch: Sequence[EndedRequest], metered: Metered) -> None:
        """All of it or nothing."""
        with self._transaction():
            for table in self._mirrored:
                table.write(self.database)
            if not self._keeps_requests:
                return
            rows = rows_of(batch, self._last + 1, self._kinds)
            self.database.insert(INSERT, rows)
            self._last += len(rows)
            self._to_fold += rows
            if len(self._to_fold) >= _FOLD_ROWS or time.monotonic() - self._folded_at >= _FOLD_S:
                self._fold()
            self.database.insert(
                "INSERT INTO metered VALUES",
                [(*key, amount) for key, amount in metered.items()],
                "ON CONFLICT DO UPDATE SET amount = amount + excluded.amount",
            )
        if self._to_fold:
            self.unsummed += batch
        else:
            self.unsummed = []

    def prune(self, before: float) -> bool:
        """Delete some of the requests that ended before; whether there may be more of them."""
        if not self._keeps_requests:
            return False
        with self._transaction():
            self._fold()
            deleted = self._connection.execute(
                "DELETE FROM request WHERE id IN (SELECT id FROM request WHERE ended_at < ? ORDER BY ended_at LIMIT ?)",
                (before, _DELETED),
            ).rowcount
        self.unsummed = []
        return bool(deleted) or self.database.give_back()

    def _fold(self) -> None:
        """Add to the hourly sums what they lack, in the transaction that says so."""
        if self._to_fold:
            rows = self._sums.add(self._to_fold, self._kinds.by_id)
            self.database.insert("INSERT OR REPLACE INTO hourly VALUES", rows)
            self._connection.execute("UPDATE meta SET summed_to = ?", (self._last,))
            self._to_fold = []
            if len(self._kinds) > MOST_KINDS:
                self._kinds.clear()
        self._folded_at = time.monotonic()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            with self.database.transaction():
                yield
        except DamagedSumsError as error:
            raise DamagedLedgerError(self.path, error) from None

    def _stored(self, dimension: str, hour: int) -> list[HourlyRow]:
        return self._connection.execute(
            "SELECT * FROM hourly WHERE dimension = ? AND hour = ?", (dimension, hour)
        ).fetchall()


# --- readers, repair ---------------------------------------------------------------------------------


def open_reader(path: Path) -> sqlite3.Connection:
    """A read-only connection to a ledger, also while a daemon writes it. Raises LauncherError."""
    return database.open_reader(LEDGER, path)


def open_sums(path: Path) -> sqlite3.Connection:
    """The same, in one transaction: what is entered meanwhile is in all sums or in none. Its `hourly` has all requests, also
    those that the writer has not summed up; a name may have several rows of an hour. Raises whatever reading raises."""
    with contextlib.ExitStack() as undo:
        reader = undo.enter_context(contextlib.closing(open_reader(path)))
        reader.execute("PRAGMA temp_store = MEMORY")
        reader.execute("BEGIN")
        meta = reader.execute("SELECT zone, summed_to FROM meta").fetchone()
        rows, kinds = rows_after(reader, meta[1]) if meta is not None else ([], {})
        if rows:
            sums = Sums(partial(hour_begin, zone=zone_of(meta[0])), lambda _dimension, _hour: ())
            added = sums.add(rows, kinds)
            reader.execute("CREATE TEMP TABLE unsummed AS SELECT * FROM main.hourly WHERE false")
            marks = ", ".join("?" * len(added[0]))
            reader.executemany(f"INSERT INTO unsummed VALUES ({marks})", added)  # noqa: S608  marks alone
            reader.execute(
                "CREATE TEMP VIEW hourly AS SELECT * FROM main.hourly UNION ALL SELECT * FROM temp.unsummed"
            )
        undo.pop_all()
    return reader


def check(path: Path) -> str:
    """The damage of a ledger; "" for a whole one. Reads all of it. Raises LauncherError where it cannot be read for
    another reason, or is no ledger that this version knows."""
    return database_repair.check(LEDGER, path)


def move_aside(path: Path, now: float) -> Path:
    """Rename a damaged ledger, so that a new one can begin. Returns the new name. Raises LauncherError, OSError."""
    return database_repair.move_aside(LEDGER, path, now)


def restore(path: Path, backup: Path, now: float) -> tuple[Restored, float | None]:
    """Put a copy of a backup in the place of the ledger; also return when its last request ended, Unix time (None: it has
    none). What budgets and caps have spent is not restored: the larger sums of the files before count. The history gets the
    rows of all files. Raises LauncherError."""
    found = database_repair.restore(LEDGER, path, backup, now)
    mirrored: tuple[MirroredTable, ...] = (SpentSums(), LoadTable(lambda: int(now * 1000)))
    for before in filter(None, (found.replaced, *reversed(found.retired))):  # the newest first
        for table in mirrored:
            table.rescue(before)
    try:
        with contextlib.closing(Database(LEDGER, path)) as file, file.transaction():
            for table in mirrored:
                table.opened(file)
                table.write(file)
    except (sqlite3.Error, OSError) as error:
        raise LauncherError(
            f"restored '{path}', but cannot keep what budgets have spent, and the load, since: {error}",
            f"see that the disk of '{path.parent}' has space, and restore the backup again",
        ) from None
    with contextlib.closing(open_reader(path)) as reader:
        [last] = reader.execute("SELECT max(ended_at) FROM request").fetchone()
    return found, last
