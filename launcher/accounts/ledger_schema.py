"""The usage ledger's SQLite file: its tables, their versions, and the steps from one version to the next.

`hourly` has one row for each hour, dimension and name:

    dimension   name
    all         ""
    key         name of the API key; "" where keys are not required
    model       name of the model
    slot        number of the slot that answered; "" where no instance did
    overflow    name of the overflow endpoint; "" for requests served here

Each request counts once in each dimension, so the rows of a dimension sum up to those of `all`. `hour` is the Unix time
at which the hour began in the zone of [usage]. `prefill_s` is the time from sending a request to an instance until its
first byte, `decode_s` from there to its end (of a response with output tokens that is not streamed neither: its first byte
is at its end), `queued_s` before. The histograms are launcher.accounts.latency's.

`metered` has what was measured over an hour besides requests: ("ready_s", slot), ("busy_s", slot), ("joules", package),
("lost", ""): entries of requests that could not be written.
`entries` has the single requests, those of a batch in one row: launcher.accounts.sums.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Final

from launcher.base.errors import LauncherError
from launcher.config.schema import Usage

# "numa", in the header of the file (PRAGMA application_id): another program's database is never changed.
APPLICATION: Final = 0x6E756D61
# Its owner's group may read it: the names of keys are in it.
MODE: Final = 0o640

DIMENSIONS: Final = ("all", "key", "model", "slot", "overflow")
# Sums of `hourly`, in the order of its columns.
INTEGERS: Final = (
    "requests", "completed", "client_aborted", "rejected", "failed", "continued", "overflowed", "inexact",
    "prompt_tokens", "cached_tokens", "output_tokens", "picos", "overflow_picos",
)  # fmt: skip
SECONDS: Final = ("prefill_s", "decode_s", "queued_s")
HISTOGRAMS: Final = ("queued", "first_byte", "duration")

_FIRST: Final = f"""
CREATE TABLE meta (zone TEXT NOT NULL, began REAL NOT NULL);
CREATE TABLE hourly (
    dimension TEXT NOT NULL, hour INTEGER NOT NULL, name TEXT NOT NULL,
    {", ".join(f"{column} INTEGER NOT NULL" for column in INTEGERS)},
    {", ".join(f"{column} REAL NOT NULL" for column in SECONDS)},
    {", ".join(f"{column} BLOB NOT NULL" for column in HISTOGRAMS)},
    PRIMARY KEY (dimension, hour, name)
) WITHOUT ROWID;
CREATE TABLE metered (
    what TEXT NOT NULL, hour INTEGER NOT NULL, name TEXT NOT NULL, amount REAL NOT NULL,
    PRIMARY KEY (what, hour, name)
) WITHOUT ROWID;
CREATE TABLE entries (
    id INTEGER PRIMARY KEY, first_at REAL NOT NULL, last_at REAL NOT NULL, count INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE INDEX entries_by_time ON entries (last_at);
"""
# Step n makes version n + 1 of version n; version 0 is an empty file. Each step changes the text of a definition: a file
# with the tables of the newest version and another version's number is damaged.
STEPS: Final = (_FIRST,)

LOST: Final = "lost"
"""In `metered`: entries that are missing in the hour's sums."""
BROKEN: Final = ".broken-"
"""A broken file is renamed to its name, this, and the time."""


def ledger_path(settings: Usage, state: Path | None) -> Path:
    """The file of the ledger; `state`: the state folder, which is not used where [usage] names a file."""
    if settings.path is not None:
        return Path(settings.path).absolute()
    assert state is not None  # noqa: S101  the caller's part
    # A folder of its own: instances may write into that of the service.
    return state / "usage" / "usage.db"


class DamagedLedgerError(LauncherError):
    """What was read of a ledger is nothing that was ever written."""

    def __init__(self, path: Path | None, why: object) -> None:
        name = "" if path is None else f" '{path}'"
        super().__init__(
            f"cannot read the usage ledger{name}: {why}",
            "the daemon moves a damaged ledger aside, see its log; `numa-launcher usage restore` puts a backup in its place",
        )


class ForeignFileError(LauncherError):
    """The file is another program's, or a newer launcher's: it is never changed."""


def version_of(connection: sqlite3.Connection, path: Path, steps: Sequence[str] = STEPS) -> int:
    """The version of a ledger; 0 for an empty file. Raises ForeignFileError, and DamagedLedgerError for a header or tables
    that no version has."""
    [application] = connection.execute("PRAGMA application_id").fetchone()
    [version] = connection.execute("PRAGMA user_version").fetchone()
    [tables] = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if not (application or version or tables):
        return 0
    ours = application == APPLICATION
    defined = definitions(connection) == definitions_of(tuple(steps))
    if ours and version == len(steps) and not defined:
        raise DamagedLedgerError(path, "its tables are not those of a usage ledger")
    if ours and 0 < version <= len(steps):
        return int(version)
    if (ours and version < 1) or defined:
        raise DamagedLedgerError(
            path, f"its header is damaged (application {application}, version {version})"
        )
    if not ours:
        raise ForeignFileError(
            f"cannot use '{path}': the database is not a usage ledger", "name another file in [usage] path"
        )
    raise ForeignFileError(
        f"cannot use the usage ledger '{path}': a newer numa-launcher made it "
        f"(schema version {version}, this one knows {len(steps)})",
        "update numa-launcher, or name another file in [usage] path",
    )


def definitions(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    """Type, name and text of each table and index."""
    query = "SELECT type, name, sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY 1, 2"
    return connection.execute(query).fetchall()


@lru_cache(maxsize=1)
def definitions_of(steps: tuple[str, ...] = STEPS) -> list[tuple[str, str, str]]:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as fresh:
        migrate(fresh, Path(":memory:"), steps)
        return definitions(fresh)


def migrate(connection: sqlite3.Connection, path: Path, steps: Sequence[str] = STEPS) -> int:
    """Bring a ledger to the newest version; return the one that it had. An older ledger is copied first, to
    `<path>.v<version>`. Each step is a transaction. Raises ForeignFileError, DamagedLedgerError, sqlite3.Error."""
    version = version_of(connection, path, steps)
    if version == 0:
        # Pages of entries that were kept long enough can be given back; to be said before the first table.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    elif version < len(steps):
        connection.execute("VACUUM INTO ?", (str(_new_file(path, f"v{version}")),))
    for number in range(version, len(steps)):
        script = (
            f"BEGIN IMMEDIATE; {steps[number]}; PRAGMA application_id = {APPLICATION};"
            f" PRAGMA user_version = {number + 1}; COMMIT;"
        )
        try:
            connection.executescript(script)
        except sqlite3.Error:
            if connection.in_transaction:
                connection.rollback()
            raise
    return version


def _new_file(path: Path, suffix: str) -> Path:
    """An empty file beside the ledger, readable by the same users: the names of keys are in it."""
    for number in count(1):
        found = path.with_name(f"{path.name}.{suffix}" + (f".{number}" if number > 1 else ""))
        with contextlib.suppress(FileExistsError):
            os.close(os.open(found, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE))
            return found
    raise AssertionError
