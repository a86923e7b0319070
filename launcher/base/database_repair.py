"""Damaged files of launcher.base.database: checked, moved aside, replaced by a backup. Files beside `usage.db`:

usage.db.broken-TIME      a damaged file that was moved aside: nobody knows what it held
usage.db.retired-TIME     the same, after a backup was restored: it has no effect
usage.db.replaced-TIME    the file that a backup took the place of
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from launcher.base.database import (
    MODE,
    DamagedError,
    FileKind,
    definitions,
    definitions_of,
    is_damage,
    lock_of,
    locked,
    migrate,
    open_reader,
    parts,
    version_of,
)
from launcher.base.errors import LauncherError, reason

_BROKEN: Final = ".broken-"
_RETIRED: Final = ".retired-"
_REPLACED: Final = ".replaced-"
_RESTORING: Final = ".restoring"
_DATABASES: Final = frozenset({".db", ".sqlite", ".sqlite3"})


def check(kind: FileKind, path: Path) -> str:
    """The damage of a file; "" for a whole one. Reads all of it. Raises LauncherError where it cannot be read for
    another reason, or is of no version that this one knows."""
    try:
        with closing(open_reader(kind, path)) as reader:
            return _check_tables(kind, reader) or _check_rows(kind, reader)
    except DamagedError as error:
        return error.message
    except LauncherError:
        raise
    except Exception as error:
        if is_damage(error):
            return f"{error}"
        raise LauncherError(
            f"cannot read the {kind.noun} '{path}': {error}", "see that its disk works, and try again"
        ) from None


def _check_tables(kind: FileKind, reader: sqlite3.Connection) -> str:
    if definitions(reader) != definitions_of(kind):
        return f"its tables are not those of a {kind.noun}"
    [found] = reader.execute("PRAGMA integrity_check(1)").fetchone()
    return "" if found == "ok" else str(found).splitlines()[-1]


def _check_rows(kind: FileKind, reader: sqlite3.Connection) -> str:
    return next((why for tables in kind.tables if (why := tables.check(reader))), "")


def move_aside(kind: FileKind, path: Path, now: float) -> Path:
    """Rename a damaged file and its log, so that a new one can begin. Returns the new name.

    Raises LauncherError for a file whose name is not a database's: it may be another program's."""
    if path.suffix not in _DATABASES or not stat.S_ISREG(path.lstat().st_mode):
        raise LauncherError(f"cannot use '{path}': the file is not a database", kind.rename)
    moved = _unused(path, _BROKEN, now)
    for part in parts(path):
        _rename(part, moved.with_name(moved.name + part.name.removeprefix(path.name)))
    return moved


def lost_at(path: Path, now: float) -> float | None:
    """When the last file that was moved aside was written last, Unix time; None: none was, or a backup took its place.
    `now` for one of a time to come, which a clock that was wrong gave it."""
    times = []
    for broken in _broken(path):
        with contextlib.suppress(OSError):
            times.append(min(now, broken.stat().st_mtime))
    return max(times, default=None)


# --- backups -----------------------------------------------------------------------------------------


class Restored(NamedTuple):
    path: Path
    replaced: Path | None
    """The file that was there before, by its new name."""
    retired: tuple[Path, ...]
    """Broken files, by their new names."""


def restore(kind: FileKind, path: Path, backup: Path, now: float) -> Restored:
    """Put a copy of a backup in the place of the file at `path`. The backup itself is not changed.

    The copy is checked before anything is renamed, and takes its place in one step: a file is there at every moment. The
    write-ahead log of the file before is moved first: SQLite would write it into the copy. Raises LauncherError."""
    try:
        if backup.resolve() in {part.resolve() for part in parts(path)}:
            raise LauncherError(
                f"cannot restore '{path}' from itself",
                "name the backup, such as one made by sqlite3's .backup",
            )
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with _stopped(kind, path):
            copy = path.with_name(path.name + _RESTORING)
            try:
                _copy(kind, backup, copy, path)
                replaced = _replace(path, copy, now)
            finally:
                for part in parts(copy):
                    part.unlink(missing_ok=True)
            return Restored(path, replaced, _retire(path))
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
def _stopped(kind: FileKind, path: Path) -> Iterator[None]:
    lock = contextlib.ExitStack()
    try:
        lock.enter_context(locked(kind, path))
    except LauncherError:
        raise LauncherError(
            f"cannot restore '{path}': a daemon writes it",
            "stop it (systemctl stop numa-launcher), restore, and start it again",
        ) from None
    with lock:
        yield


def _copy(kind: FileKind, backup: Path, copy: Path, path: Path) -> None:
    """Make a checked copy. Raises LauncherError, OSError, sqlite3.Error."""
    for part in parts(copy):  # of an earlier try that was killed
        part.unlink(missing_ok=True)
    os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE))
    try:
        with (
            closing(open_reader(kind, backup)) as source,
            closing(sqlite3.connect(copy, isolation_level=None)) as into,
        ):
            source.backup(into)
            into.execute("PRAGMA journal_mode = DELETE").fetchone()
            version_of(kind, into, backup)
            migrate(kind, into, copy)
        damage = check(kind, copy)
    except DamagedError as error:
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
        for made in (copy, lock_of(path)):
            os.chown(made, owner.st_uid, owner.st_gid, follow_symlinks=False)
    _synchronize(copy)


def _replace(path: Path, copy: Path, now: float) -> Path | None:
    replaced = _unused(path, _REPLACED, now)
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
        name = broken.with_name(broken.name.replace(_BROKEN, _RETIRED, 1))
        _rename(broken, name)
        if not name.name.endswith(("-wal", "-shm")):
            retired.append(name)
    _synchronize(path.parent)
    return tuple(retired)


def moved_aside(path: Path) -> list[Path]:
    """Damaged files that were moved aside, and that no backup took the place of; the last one last. Never raises."""
    with contextlib.suppress(OSError):
        return sorted(found for found in _broken(path) if not found.name.endswith(("-wal", "-shm")))
    return []


def _broken(path: Path) -> list[Path]:
    start = path.name + _BROKEN
    return [found for found in path.parent.glob("*") if found.name.startswith(start)]


def _unused(path: Path, suffix: str, now: float) -> Path:
    """A name beside the file, by the time in UTC, that no file has."""
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
