"""The API keys' file: checked when read, replaced atomically under a lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from launcher.base.errors import LauncherError, RefusedError, reason
from launcher.base.files import excess_mode
from launcher.base.text_files import decoded
from launcher.keys import key_record
from launcher.keys.key_record import FLEET_HEAD, KeyRecord

_LOG: Final = logging.getLogger(__name__)

ALLOWED_MODE: Final = 0o640  # who can write to it can add keys
_MOST_COPIES: Final = 1000
MAX_BYTES: Final = 64 << 20
_NAME_THE_FILE: Final = "name the file that `numa-launcher key add` writes in [proxy] api_keys_file"

Change = Callable[[tuple[KeyRecord, ...]], Iterable[KeyRecord]]


def read(path: str) -> tuple[KeyRecord, ...]:
    """The file's records. Raises LauncherError: missing, unreadable, accessible to others, malformed."""
    return key_record.parse(text_of(path), path)


def text_of(path: str) -> str:
    """The file as it is. Raises LauncherError: missing, unreadable, accessible to others."""
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise LauncherError(f"cannot read API keys '{path}': {reason(error)}", _remedy(path, error)) from None
    if (mode := excess_mode(status, ALLOWED_MODE)) and stat.S_ISREG(status.st_mode):
        raise LauncherError(
            f"cannot use API keys '{path}': mode {mode} lets other users add keys", f"chmod 640 {path}"
        )
    if len(data) > MAX_BYTES:
        raise LauncherError(f"cannot read API keys '{path}': larger than {MAX_BYTES:,} bytes", _NAME_THE_FILE)
    return decoded(data, f"API keys '{path}'")


def update(path: str, change: Change) -> tuple[KeyRecord, ...]:
    """Replace the records by `change(records)`, as `rewrite`. Returns the new ones. Raises RefusedError for the file of
    a fleet: that of its other hosts would replace it within seconds."""
    records: tuple[KeyRecord, ...] = ()

    def changed(old: str) -> str:
        nonlocal records
        if key_record.FLEET_HEAD.match(old):
            raise RefusedError(
                f"cannot change API keys '{path}': a fleet has this file, and would undo a change of this host's alone",
                "use numa-launcher fleet key add|set|revoke; on a host that left its fleet remove the file's first line",
            )
        records = tuple(change(key_record.parse(old, path)))
        return key_record.to_text(records)

    rewrite(path, changed)
    return records


def copied(path: str, suffix: str) -> str:
    """Copy the file as it is, owner, group and mode included: the copy's name, `path`, `suffix`, and a number where another
    copy has that name. Raises OSError."""
    source, data = Path(path).resolve(), Path(path).read_bytes()
    for number in range(1, _MOST_COPIES):
        copy = source.with_name(f"{source.name}{suffix}" + (f".{number}" if number > 1 else ""))
        with contextlib.suppress(FileExistsError):
            os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            _replace(copy, data, source.stat())
            return str(copy)
        if copy.read_bytes() == data:
            return str(copy)
    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), str(source))


def rewrite(path: str, change: Callable[[str], str]) -> str:
    """Replace the file's text by `change(text)`, atomically. Returns the new one.

    A missing file is created with mode 0600; an existing one keeps owner, group and mode. Writers exclude each other. If
    `change` raises, the file stays as it was. Raises LauncherError.
    """
    try:
        with _locked(path):
            new = change(text_of(path))
            file = Path(path).resolve()
            _replace(file, new.encode(), file.stat())
    except OSError as error:
        raise LauncherError(
            f"cannot write API keys '{path}': {reason(error)}", _remedy(path, error)
        ) from None
    return new


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the lock of the file that is at `path` now; another may have replaced it while we waited."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # noqa: PTH116
                    yield
                    return
        finally:
            os.close(descriptor)


def _replace(path: Path, data: bytes, status: os.stat_result) -> None:
    """`status`: owner, group and mode that it gets."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            made = os.fstat(file.fileno())
            if (made.st_uid, made.st_gid) != (status.st_uid, status.st_gid):
                os.fchown(file.fileno(), status.st_uid, status.st_gid)
            os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode))
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # the rename itself outlives a power cut
    finally:
        os.close(folder)


def _remedy(path: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"numa-launcher key add NAME --file {path}"
    if isinstance(error, PermissionError):
        return f"let the daemon's group read it: chgrp GROUP {path}; chmod 640 {path}"
    return "set [proxy] api_keys_file to a file"


# --- Which of several API keys files is the latest. One that hosts share begins with the line `# fleet VERSION`; the
# highest version is the fleet's, whichever hosts have it, so that no host is needed to keep it.

BEFORE: Final = ".before-fleet"
"""Behind the name of a keys file: the copy of one whose keys the fleet's file lacks."""
NONE: Final = "0 -"
"""The stamp of a host without a keys file."""


def stamp(text: str) -> str:
    """Version and SHA-256 of a file; version 0: it is not the fleet's."""
    head = FLEET_HEAD.match(text)
    return f"{head[1] if head else 0} {hashlib.sha256(text.encode()).hexdigest()}" if text else NONE


def version(stamp: str) -> int:
    return int(stamp.partition(" ")[0])


def stamped(text: str, version: int) -> str:
    return f"# fleet {version}\n{unstamped(text)}"


def unstamped(text: str) -> str:
    """The records alone."""
    return FLEET_HEAD.sub("", text, count=1)


def newest(stamps: Mapping[str, str]) -> str | None:
    """The host whose file is the fleet's; None: no host has such a file."""
    host = max(stamps, key=lambda host: (version(stamps[host]), stamps[host]), default=None)
    return host if host is not None and version(stamps[host]) else None


def stamp_of(path: str) -> str:
    """Raises LauncherError."""
    return stamp(text_of(path)) if Path(path).exists() else NONE


def stored(path: str, text: str | None = None) -> str:
    """The file at `path`, after `text` has replaced it; of a file with keys that `text` lacks a copy stays. Raises
    LauncherError; RefusedError if the file there is newer."""
    if text is None:
        return text_of(path) if Path(path).exists() else ""
    key_record.parse(text, "the fleet's API keys")

    def change(old: str) -> str:
        if old != text and version(stamp(old)) >= version(stamp(text)):
            raise RefusedError(
                "cannot store API keys: they were changed meanwhile", "start the command again"
            )
        if version(stamp(text)) and _loses(old, text):
            copy = copied(path, BEFORE)
            _LOG.warning("the fleet's API keys replace keys that they lack; a copy is in %s", copy)
        return text

    return rewrite(path, change)


def _loses(old: str, new: str) -> bool:
    """Whether `new` lacks keys of `old`. A fleet's file keeps the lines of revoked keys, so one of another fleet, or of the
    other side of a partition, has keys that the new one never had. A file of this host alone: any line counts."""
    if not version(stamp(old)):
        return not set(old.splitlines()) <= set(new.splitlines())
    try:
        return not _ids(old) <= _ids(new)
    except LauncherError:
        return True


def _ids(text: str) -> set[str]:
    return {record.id for record in key_record.parse(text, "API keys")}
