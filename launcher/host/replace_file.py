"""Replaces a file atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path


def replace_file(path: Path, data: bytes, *, mode: int = 0o600, folder_mode: int = 0o700) -> None:
    """Write a file as a whole: a reader, or a process killed meanwhile, leaves the old content or the new.

    The file never has wider permissions than `mode`; its folder is made if needed. Raises OSError, PermissionError where
    other users may write into the folder."""
    path.parent.mkdir(mode=folder_mode, parents=True, exist_ok=True)
    _check_owner(path.parent)
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def _check_owner(folder: Path) -> None:
    facts = folder.stat()
    owners = {folder.lstat().st_uid, facts.st_uid}
    if not owners <= {os.geteuid(), 0} or facts.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
        raise PermissionError(errno.EPERM, "other users may write there", str(folder))
