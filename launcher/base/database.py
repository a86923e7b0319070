"""An SQLite file that the daemon writes: one writer, readers beside it, numbered schema versions, errors of damage.

A file may hold the tables of several owners; `FileKind` names them all. Files beside `usage.db`:

    usage.db.lock             the writer's lock
    usage.db.vN               a copy that was made before the file was brought from version N to the newest

launcher.base.database_repair checks a file, moves it aside, and restores a backup.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol

from msgspec import Struct

from launcher.base.errors import LauncherError, reason

# The owner's group may read it.
MODE: Final = 0o640
# A writer holds the file for milliseconds; a checkpoint on a slow disk for longer.
_READER_BUSY_S: Final = 5.0
# For readers on disks that hang; the writer retries what took longer.
_WRITER_BUSY_S: Final = 2.0
_LOG_BYTES: Final = 16 << 20
# A statement takes and gives back Python's lock once, and beside a busy event loop each takes milliseconds to come back:
# several rows are one statement. SQLite allows 32,766 values in one.
_ROWS: Final = 50
# Less unused space than this stays in the file for later rows.
_UNUSED_SHARE: Final = 0.25
_UNUSED_PAGES: Final = 4096
# Pages given back to the file system in one transaction: some milliseconds.
_FREED: Final = 500
# Bytes of the file's header: rollback journal or write-ahead log, for writers and for readers.
_FORMATS: Final = slice(18, 20)
# What a whole file raises, too: another try may succeed. Everything else that SQLite says of a file is damage.
_TRANSIENT: Final = frozenset({
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_ABORT, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS, sqlite3.SQLITE_AUTH,
})  # fmt: skip
_PROVEN: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class DamagedError(LauncherError):
    """A file holds something that was never written."""


class ForeignFileError(LauncherError):
    """The file is another program's, or a newer launcher's: it is never changed."""


class NoDataError(LauncherError):
    """There is no file, or nothing was written into it yet."""


class Tables(Struct, frozen=True):
    """The tables of one owner."""

    steps: tuple[str, ...]
    """Step n is the SQL that brings them from version n of the file to n + 1; "" where they stay as they are."""
    check: Callable[[sqlite3.Connection], str]
    """Returns what is wrong with rows that SQLite itself takes for whole; "" for nothing."""


class MirroredTable(Protocol):
    """A table whose rows are all in memory, too, and change there: the file has them for the next process. The methods are
    for the thread that writes the file."""

    @property
    def waiting(self) -> bool:
        """Whether there is something to `write`."""

    def rescue(self, path: Path) -> object:
        """Take what can be read of a damaged or replaced file. Never raises."""

    def opened(self, database: Database) -> None:
        """A file was opened for writing: take what it has, and `write` what it lacks. Within a transaction. Raises
        sqlite3.Error, DamagedError."""

    def write(self, database: Database) -> None:
        """Within a transaction. Where that fails, the file must be opened again. Raises sqlite3.Error."""


class FileKind(Struct, frozen=True):
    """The tables of files of one kind, and their names in messages."""

    noun: str
    application: int
    """PRAGMA application_id, in the file's header: a file with another is never changed."""
    tables: tuple[Tables, ...]
    damaged: Callable[[Path | None, object], DamagedError]
    """The error of a damaged file, from its path and the reason."""
    rename: str
    """Remedy for a path that cannot be used, such as "name another file in [usage] path"."""
    choose: str
    """The same for a reader, such as "name another file with --file"."""
    begin: str
    """Remedy where there is no file."""
    fill: str
    """Remedy where nothing was written into it yet."""

    @property
    def steps(self) -> tuple[str, ...]:
        """Step n makes version n + 1 of version n; version 0 is an empty file. Each step must change the text of a
        definition: a file with the newest version's tables and another version's number is damaged."""
        newest = max(len(tables.steps) for tables in self.tables)
        return tuple(
            "\n".join(tables.steps[number] for tables in self.tables if number < len(tables.steps))
            for number in range(newest)
        )


# --- versions ----------------------------------------------------------------------------------------


def version_of(kind: FileKind, connection: sqlite3.Connection, path: Path) -> int:
    """The version of a file; 0 for an empty one. Raises ForeignFileError, and DamagedError for a header or tables that no
    version has."""
    newest = len(kind.steps)
    [application] = connection.execute("PRAGMA application_id").fetchone()
    [version] = connection.execute("PRAGMA user_version").fetchone()
    [tables] = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if not (application or version or tables):
        return 0
    ours = application == kind.application
    defined = definitions(connection) == definitions_of(kind)
    if ours and version == newest and not defined:
        raise kind.damaged(path, f"its tables are not those of a {kind.noun}")
    if ours and 0 < version <= newest:
        return int(version)
    if (ours and version < 1) or defined:
        raise kind.damaged(path, f"its header is damaged (application {application}, version {version})")
    if not ours:
        raise ForeignFileError(f"cannot use '{path}': the database is not a {kind.noun}", kind.rename)
    raise ForeignFileError(
        f"cannot use the {kind.noun} '{path}': a newer numa-launcher made it "
        f"(schema version {version}, this one knows {newest})",
        f"update numa-launcher, or {kind.rename}",
    )


def definitions(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    """Type, name and text of each table and index."""
    query = "SELECT type, name, sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY 1, 2"
    return connection.execute(query).fetchall()


@lru_cache(maxsize=4)
def definitions_of(kind: FileKind) -> list[tuple[str, str, str]]:
    """Those of the newest version."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as fresh:
        migrate(kind, fresh, Path(":memory:"))
        return definitions(fresh)


def migrate(kind: FileKind, connection: sqlite3.Connection, path: Path) -> int:
    """Bring a file to the newest version; return the one that it had. An older file is copied first, to `<path>.v<version>`.
    Each step is a transaction. Raises ForeignFileError, DamagedError, sqlite3.Error."""
    version, steps = version_of(kind, connection, path), kind.steps
    if version == 0:
        # Pages of deleted rows can be given back; to be said before the first table.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    elif version < len(steps):
        connection.execute("VACUUM INTO ?", (str(_new_file(path, f"v{version}")),))
    for number in range(version, len(steps)):
        script = (
            f"BEGIN IMMEDIATE; {steps[number]}; PRAGMA application_id = {kind.application};"
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
    """An empty file beside another, readable by the same users."""
    for number in count(1):
        found = path.with_name(f"{path.name}.{suffix}" + (f".{number}" if number > 1 else ""))
        with contextlib.suppress(FileExistsError):
            os.close(os.open(found, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE))
            return found
    raise AssertionError


# --- the writer --------------------------------------------------------------------------------------


def parts(path: Path) -> list[Path]:
    """The file, its write-ahead log, and the log's index."""
    return [path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm")]


@contextlib.contextmanager
def locked(kind: FileKind, path: Path) -> Iterator[None]:
    """The writer's lock. It ends with the process, however that ends. Raises OSError, and LauncherError where another
    process has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(lock_of(path), flags, MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise LauncherError(
            f"cannot write the {kind.noun} '{path}': another daemon writes it",
            f"stop that daemon, or {kind.rename}",
        ) from None
    finally:
        os.close(fd)


def lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


class Database:
    """A file open for writing, brought to the newest version. Not for two threads at a time. After a transaction that failed
    it is to be closed: what its users remember may be ahead of it.

    Raises LauncherError where the file cannot be used, and sqlite3.Error and OSError where it cannot be written."""

    def __init__(self, kind: FileKind, path: Path) -> None:
        self.path = path
        self.failed = False
        """Whether a transaction was undone."""
        self._resources = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            # Two writers would overwrite each other's sums.
            self._resources.enter_context(locked(kind, path))
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE))
            self.connection = sqlite3.connect(
                path, timeout=_WRITER_BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._resources.callback(self.connection.close)
            migrate(kind, self.connection, path)
            try:
                self.connection.execute("PRAGMA journal_mode = WAL").fetchone()
                self.connection.execute("PRAGMA synchronous = NORMAL")
                self.connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}").fetchone()
                # A write: a file that cannot be written is noticed before there is anything to write.
                self.connection.execute(f"PRAGMA user_version = {len(kind.steps)}")
            except sqlite3.OperationalError as error:
                self.close()
                if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_READONLY:
                    _check_header(kind, path)
                raise
            self._inode = path.stat().st_ino
            undo.pop_all()

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

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All that is written within is there, or nothing. Inside another transaction it is a part of that."""
        if self.connection.in_transaction:
            yield self.connection
            return
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield self.connection
            self.connection.execute("COMMIT")
        except BaseException:
            self.failed = True
            if self.connection.in_transaction:  # a full disk may have ended it
                self.connection.rollback()
            raise

    def insert(self, insert: str, rows: Sequence[tuple[Any, ...]], then: str = "") -> None:
        """`insert`: a statement up to VALUES, also "DELETE ... IN (VALUES"; `then`: what follows the rows, such as ON
        CONFLICT."""
        for begin in range(0, len(rows), _ROWS):
            part = rows[begin : begin + _ROWS]
            marks = f"({', '.join('?' * len(part[0]))})"
            values = [value for row in part for value in row]
            self.connection.execute(f"{insert} {', '.join([marks] * len(part))} {then}", values)

    def give_back(self) -> bool:
        """Give some unused pages back to the file system; whether there may be more of them."""
        [unused] = self.connection.execute("PRAGMA freelist_count").fetchone()
        [pages] = self.connection.execute("PRAGMA page_count").fetchone()
        if unused < max(_UNUSED_PAGES, pages * _UNUSED_SHARE):
            return False
        self.connection.execute(f"PRAGMA incremental_vacuum({_FREED})").fetchall()
        return True


def _check_header(kind: FileKind, path: Path) -> None:
    """SQLite takes a file of another format for one that cannot be written (sqlite.org/fileformat2.html, 1.3.3).

    Not while this process has a connection to it: closing any descriptor of a file takes from a process all locks of
    SQLite's on it (fcntl(2)). Another program that closes the file would take itself for the last that has it, and remove
    its write-ahead log (sqlite.org/howtocorrupt.html, 2.2)."""
    with path.open("rb") as file:
        formats = file.read(_FORMATS.stop)[_FORMATS]
    if set(formats) - {1, 2}:
        raise kind.damaged(path, f"its header is damaged (format {formats.hex(' ')})")


# --- readers -----------------------------------------------------------------------------------------


def open_reader(kind: FileKind, path: Path) -> sqlite3.Connection:
    """A read-only connection, also while a daemon writes the file. Raises LauncherError."""
    try:
        path.stat()
    except FileNotFoundError:
        raise NoDataError(f"cannot read the {kind.noun} '{path}': no such file", kind.begin) from None
    except OSError as hidden:
        raise LauncherError(
            f"cannot read the {kind.noun} '{path}': {reason(hidden)}",
            f"run as a user who may read it, such as root, or {kind.choose}",
        ) from None
    # A file without write-ahead log has no writer. Its folder may be one in which the reader cannot make the log.
    modes = ["mode=ro"] if parts(path)[1].exists() else ["mode=ro", "mode=ro&immutable=1"]
    error: Exception | None = None
    for mode in modes:
        try:
            return _opened(kind, path, mode)
        # ValueError: a message that quotes a damaged name is no UTF-8
        except (sqlite3.Error, ValueError) as failed:
            error = failed
    if error is not None and is_damage(error):
        raise kind.damaged(path, error)
    raise LauncherError(
        f"cannot read the {kind.noun} '{path}': {error}",
        f"run as a user who may read it, such as root; check that it is a {kind.noun} of numa-launcher",
    )


def read_only(path: Path, mode: str = "mode=ro") -> sqlite3.Connection:
    """A connection that cannot write, to any SQLite file. `mode`: parameters of SQLite's URI. Raises sqlite3.Error."""
    uri = f"{path.absolute().as_uri()}?{mode}"
    return sqlite3.connect(uri, uri=True, timeout=_READER_BUSY_S, isolation_level=None)


def _opened(kind: FileKind, path: Path, mode: str) -> sqlite3.Connection:
    connection = read_only(path, mode)
    with contextlib.ExitStack() as undo:
        undo.callback(connection.close)
        if version_of(kind, connection, path) == 0:
            raise NoDataError(f"cannot read the {kind.noun} '{path}': nothing was entered yet", kind.fill)
        undo.pop_all()
    return connection


# --- damage ------------------------------------------------------------------------------------------


def is_damage(error: BaseException) -> bool:
    """Whether what was raised while a file was read or written may come from damage of the file: a flipped bit of a table's
    definition is "no such column", or text that is no UTF-8."""
    if isinstance(error, DamagedError):
        return True
    if not isinstance(error, sqlite3.Error):
        return isinstance(error, (ValueError, TypeError, ArithmeticError, LookupError))
    code = getattr(error, "sqlite_errorcode", None)
    # Without a code Python found it: text in a column that is no UTF-8.
    return isinstance(error, sqlite3.OperationalError) if code is None else code & 0xFF not in _TRANSIENT


def is_proven(error: BaseException) -> bool:
    """Whether there is no need to `check` the file."""
    code = getattr(error, "sqlite_errorcode", 0)
    return isinstance(error, DamagedError) or (code or 0) & 0xFF in _PROVEN
