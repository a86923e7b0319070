"""Free space of the file systems into which the daemon writes."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DiskSpace:
    free_bytes: int
    """What this user may still write (statvfs(3): f_bavail)."""
    size_bytes: int


def disk_space(folder: Path) -> DiskSpace | None:
    """Of the file system of a folder, or of the nearest one above it that exists. Blocking. None where it cannot be read."""
    for path in (folder, *folder.parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                found = os.statvfs(path)
            except (PermissionError, TimeoutError):
                return None
            return DiskSpace(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
    return None
