"""Damaged usage ledgers: recognized, moved aside, replaced by a backup.

`usage.db.broken-TIME` is a damaged ledger that was moved aside. While one is there, nobody knows what keys spent before;
after `restore` its name is `usage.db.retired-TIME`, and it has no effect.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from launcher.accounts.latency import merged_by
from launcher.accounts.ledger_reader import is_damage, open_reader
from launcher.accounts.ledger_schema import (
    BROKEN,
    HISTOGRAMS,
    INTEGERS,
    MODE,
    SECONDS,
    DamagedLedgerError,
    definitions,
    definitions_of,
    migrate,
    version_of,
)
from launcher.accounts.report_values import zone_of
from launcher.accounts.sums import Columns
from launcher.base.errors import LauncherError, reason

RETIRED: Final = ".retired-"
"""A broken file is renamed so once a backup is in its place."""
REPLACED: Final = ".replaced-"
"""The ledger that a backup took the place of."""
_RESTORING: Final = ".restoring"
_DATABASES: Final = frozenset({".db", ".sqlite", ".sqlite3"})
_PROVEN: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# More than any hourly sum: a larger one is damage, and a few of them could not be added up.
_MOST: Final = 1 << 60
# Rows whose values are looked at together: numpy keeps the interpreter's lock for some milliseconds.
_CHUNK: Final = 256


def parts(path: Path) -> list[Path]:
    """The file, its write-ahead log, and the log's index."""
    return [path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm")]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """The ledger's lock: a daemon that writes it has it. It ends with the process, however that ends. Raises OSError, and
    LauncherError where another process has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(_lock_of(path), flags, MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise LauncherError(
            f"cannot write the usage ledger '{path}': another daemon writes it",
            "stop that daemon, or name another file in [usage] path",
        ) from None
    finally:
        os.close(fd)


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


# --- damage ------------------------------------------------------------------------------------------


def is_proven(error: BaseException) -> bool:
    """Whether there is no need to `check` the file."""
    code = getattr(error, "sqlite_errorcode", 0)
    return isinstance(error, DamagedLedgerError) or (code or 0) & 0xFF in _PROVEN


def check(path: Path) -> str:
    """What is damaged in a ledger; "" for a whole one. Reads all of it. Raises LauncherError where it cannot be read for
    another reason, or is no ledger that this version knows."""
    try:
        with closing(open_reader(path)) as reader:
            return _check_tables(reader) or _check_rows(reader)
    except DamagedLedgerError as error:
        return error.message
    except LauncherError:
        raise
    except Exception as error:
        if is_damage(error):
            return f"{error}"
        raise LauncherError(
            f"cannot read the usage ledger '{path}': {error}", "see that its disk works, and try again"
        ) from None


def _check_tables(reader: sqlite3.Connection) -> str:
    if definitions(reader) != definitions_of():
        return "its tables are not those of a usage ledger"
    [found] = reader.execute("PRAGMA integrity_check(1)").fetchone()
    return "" if found == "ok" else str(found)


def _check_rows(reader: sqlite3.Connection) -> str:
    meta = reader.execute("SELECT zone, began FROM meta").fetchall()
    if len(meta) > 1:
        return "it has several time zones"
    for zone, began in meta:
        try:
            zone_of(zone)
        except LauncherError as error:
            return error.message
        float(began)
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
    for count, data in reader.execute("SELECT count, data FROM entries"):
        columns = Columns.from_bytes(data)
        groups = columns.group_of
        if not count == len(columns.ids) == len(groups) or (count and groups.max() >= len(columns.groups)):
            return "entries of requests are incomplete"
    return ""


# --- moved aside, and restored -----------------------------------------------------------------------


def move_aside(path: Path, now: float) -> Path:
    """Rename a damaged file and its log, so that a new one can begin. Returns the new name.

    Raises LauncherError for a file whose name is not a database's: it may be another program's."""
    if path.suffix not in _DATABASES or not stat.S_ISREG(path.lstat().st_mode):
        raise LauncherError(
            f"cannot use '{path}': the file is not a database", "name another file in [usage] path"
        )
    moved = _unused(path, BROKEN, now)
    for part in parts(path):
        _rename(part, moved.with_name(moved.name + part.name.removeprefix(path.name)))
    return moved


def lost_at(path: Path, now: float) -> float | None:
    """When the last ledger that was moved aside was written last, Unix time; None: none was, or a backup took its place.
    `now` for one of a time to come, which a clock that was wrong gave it."""
    times = []
    for broken in _broken(path):
        with contextlib.suppress(OSError):
            times.append(min(now, broken.stat().st_mtime))
    return max(times, default=None)


class Restored(NamedTuple):
    ledger: Path
    replaced: Path | None
    """Where the ledger is now that was there before."""
    retired: tuple[Path, ...]
    """Broken files, by their new names."""
    until: float | None
    """When the last request that the backup has ended, Unix time; None: it has none."""


def restore(path: Path, backup: Path, now: float) -> Restored:
    """Put a copy of a backup in the place of the ledger at `path`. The backup itself is not changed.

    The copy is checked before anything is renamed, and takes its place in one step: a ledger is there at every moment. The
    write-ahead log of the ledger before is moved first: SQLite would write it into the copy. Raises LauncherError."""
    try:
        if backup.resolve() in {part.resolve() for part in parts(path)}:
            raise LauncherError(
                f"cannot restore '{path}' from itself",
                "name the backup, such as one made by sqlite3's .backup",
            )
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with _stopped(path):
            copy = path.with_name(path.name + _RESTORING)
            try:
                until = _copied(backup, copy, path)
                replaced = _replace(path, copy, now)
            finally:
                for part in parts(copy):
                    part.unlink(missing_ok=True)
            return Restored(path, replaced, _retire(path), until)
    except OSError as error:
        raise LauncherError(
            f"cannot restore '{path}' from '{backup}': {reason(error)}",
            f"run as a user who may write in '{path.parent}', such as root; see that its disk has space",
        ) from None
    except sqlite3.Error as error:
        raise LauncherError(
            f"cannot restore '{path}' from '{backup}': {error}",
            "give another backup; see that the disk works and has space",
        ) from None


@contextlib.contextmanager
def _stopped(path: Path) -> Iterator[None]:
    try:
        lock = contextlib.ExitStack()
        lock.enter_context(locked(path))
    except LauncherError:
        raise LauncherError(
            f"cannot restore '{path}': a daemon writes it",
            "stop it (systemctl stop numa-launcher), restore, and start it again",
        ) from None
    with lock:
        yield


def _copied(backup: Path, copy: Path, path: Path) -> float | None:
    """A checked copy; the end of its last request. Raises LauncherError, OSError, sqlite3.Error."""
    for part in parts(copy):  # of an earlier try that was killed
        part.unlink(missing_ok=True)
    os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE))
    until = None
    try:
        with (
            closing(open_reader(backup)) as source,
            closing(sqlite3.connect(copy, isolation_level=None)) as into,
        ):
            source.backup(into)
            into.execute("PRAGMA journal_mode = DELETE").fetchone()
            version_of(into, backup)
            migrate(into, copy)
            [until] = into.execute("SELECT max(last_at) FROM entries").fetchone()
        damage = check(copy)
    except DamagedLedgerError as error:
        damage = error.message
    except (ValueError, TypeError) as error:
        damage = f"{error}"
    except sqlite3.Error as error:
        if not is_damage(error):
            raise
        damage = f"{error}"
    if damage:
        raise LauncherError(
            f"cannot restore from '{backup}': {damage.removeprefix('cannot ')}",
            "give another backup; nothing was changed",
        )
    owner = path.stat() if path.exists() else path.parent.stat()
    if os.geteuid() == 0:  # the lock may be new
        for made in (copy, _lock_of(path)):
            os.chown(made, owner.st_uid, owner.st_gid, follow_symlinks=False)
    _synchronize(copy)
    return None if until is None else float(until)


def _replace(path: Path, copy: Path, now: float) -> Path | None:
    replaced = _unused(path, REPLACED, now)
    for part in parts(path)[1:]:
        _rename(part, replaced.with_name(replaced.name + part.name.removeprefix(path.name)))
    with contextlib.suppress(FileNotFoundError):
        os.link(path, replaced)
    copy.replace(path)
    _synchronize(path.parent)
    return replaced if replaced.exists() else None


def _retire(path: Path) -> tuple[Path, ...]:
    retired = []
    for broken in sorted(_broken(path)):
        name = broken.with_name(broken.name.replace(BROKEN, RETIRED, 1))
        _rename(broken, name)
        if not name.name.endswith(("-wal", "-shm")):
            retired.append(name)
    _synchronize(path.parent)
    return tuple(retired)


def _broken(path: Path) -> list[Path]:
    start = path.name + BROKEN
    return [found for found in path.parent.glob("*") if found.name.startswith(start)]


def _unused(path: Path, suffix: str, now: float) -> Path:
    """A name beside the ledger, by the time in UTC, that no file has."""
    name = f"{path.name}{suffix}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}"
    found, number = path.with_name(name), 1
    while found.exists():
        number += 1
        found = path.with_name(f"{name}.{number}")
    return found


def _rename(part: Path, name: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        part.rename(name)


def _synchronize(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
