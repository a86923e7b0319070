"""Reading the usage ledger: a connection that cannot write, beside a daemon that does; entries of requests."""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger_schema import DamagedLedgerError, version_of
from launcher.accounts.sums import Columns
from launcher.base.errors import LauncherError, reason

# A writer holds the file for milliseconds; a checkpoint on a slow disk for longer.
BUSY_S: Final = 5.0

# What a whole file raises, too: another try may succeed. Everything else that SQLite says of a file is damage.
_TRANSIENT: Final = frozenset({
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_ABORT, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS, sqlite3.SQLITE_AUTH,
})  # fmt: skip


class NoLedgerError(LauncherError):
    """Nothing was entered yet."""


def is_damage(error: BaseException) -> bool:
    """Whether what was raised while a ledger was read or written may come from damage of the file: a flipped bit of a
    table's definition is "no such column", or text that is no UTF-8."""
    if isinstance(error, DamagedLedgerError):
        return True
    if not isinstance(error, sqlite3.Error):
        return isinstance(error, (ValueError, TypeError, ArithmeticError, LookupError, zlib.error))
    code = getattr(error, "sqlite_errorcode", None)
    # Without a code Python found it: text in a column that is no UTF-8.
    return isinstance(error, sqlite3.OperationalError) if code is None else code & 0xFF not in _TRANSIENT


def open_reader(path: Path) -> sqlite3.Connection:
    """A read-only connection to a ledger, also while a daemon writes it. Raises LauncherError."""
    try:
        path.stat()
    except FileNotFoundError:
        raise NoLedgerError(
            f"cannot read the usage ledger '{path}': no such file",
            "start the daemon with [usage] enabled = true, or name the file with --file",
        ) from None
    except OSError as hidden:
        raise LauncherError(
            f"cannot read the usage ledger '{path}': {reason(hidden)}",
            "run as a user who may read it, such as root, or name another file with --file",
        ) from None
    # A ledger without write-ahead log has no writer. Its folder may be one in which the reader cannot make the log.
    modes = ["mode=ro"] if _log_of(path).exists() else ["mode=ro", "mode=ro&immutable=1"]
    error: Exception | None = None
    for mode in modes:
        try:
            return _opened(path, mode)
        except (
            sqlite3.Error,
            ValueError,
        ) as failed:  # ValueError: a message that quotes a damaged name is no UTF-8
            error = failed
    if error is not None and is_damage(error):
        raise DamagedLedgerError(path, error)
    raise LauncherError(
        f"cannot read the usage ledger '{path}': {error}",
        "run as a user who may read it, such as root; check that it is a usage ledger of numa-launcher",
    )


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


def _opened(path: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=BUSY_S, isolation_level=None
    )
    with contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        if version_of(connection, path) == 0:
            raise NoLedgerError(
                f"cannot read the usage ledger '{path}': nothing was entered yet",
                "send the daemon a request first",
            )
        undo.pop_all()
    return connection


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")
