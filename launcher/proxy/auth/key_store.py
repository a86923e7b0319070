"""The API keys' file: checked when read, replaced atomically under a lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from launcher.errors import LauncherError, reason
from launcher.proxy.auth import key_record
from launcher.proxy.auth.key_record import KeyRecord
from launcher.proxy.watched_file import excess_mode

ALLOWED_MODE: Final = 0o640  # who can write to it can add keys
MAX_BYTES: Final = 64 << 20
_NAME_THE_FILE: Final = "name the file that `numa-launcher key add` writes in [proxy] api_keys_file"

Change = Callable[[tuple[KeyRecord, ...]], Iterable[KeyRecord]]


def read(path: str) -> tuple[KeyRecord, ...]:
    """The file's records. Raises LauncherError: missing, unreadable, accessible to others, malformed."""
    return key_record.parse(text(path), path)


def text(path: str) -> str:
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
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise LauncherError(f"cannot read API keys '{path}': not UTF-8 text", _NAME_THE_FILE) from None


def update(path: str, change: Change) -> tuple[KeyRecord, ...]:
    """Replace the records by `change(records)`, as `rewrite`. Returns the new ones."""
    records: tuple[KeyRecord, ...] = ()

    def changed(old: str) -> str:
        nonlocal records
        records = tuple(change(key_record.parse(old, path)))
        return key_record.to_text(records)

    rewrite(path, changed)
    return records


def rewrite(path: str, change: Callable[[str], str]) -> str:
    """Replace the file's text by `change(text)`, atomically. Returns the new one.

    A missing file is created with mode 0600; an existing one keeps owner, group and mode. Writers exclude each other. If
    `change` raises, the file stays as it was. Raises LauncherError.
    """
    try:
        with _locked(path):
            new = change(text(path))
            _replace(Path(path).resolve(), new.encode())
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


def _replace(path: Path, data: bytes) -> None:
    status = path.stat()
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
