"""A file that is read again when it changes, without a task and without a restart."""

from __future__ import annotations

import os
import stat
from typing import Final

LOOK_EVERY_S: Final = 1.0


class WatchedFile:
    """Detects changes of a file. Costs one comparison per call and one stat(2) per second.

    A change is another inode (a file replaced by rename, a Kubernetes secret's symlink), time or size.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._look_at = 0.0
        self._identity: tuple[int, ...] | None = None

    def changed(self, now: float) -> bool:
        """True once after each change, checked at most once a second; `now` is a monotonic clock's."""
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_EVERY_S
        return self.look()

    def look(self) -> bool:
        """Check now: True if the file changed, appeared or disappeared since the last check."""
        found = self._identify()
        if found == self._identity:
            return False
        self._identity = found
        return True

    def _identify(self) -> tuple[int, ...] | None:
        try:
            status = os.stat(self.path)  # noqa: PTH116 - twice as fast as Path.stat
        except OSError:
            return None
        return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)


def excess_mode(status: os.stat_result, allowed: int) -> str | None:
    """The file's mode in octal when it grants more than `allowed`, else None."""
    mode = stat.S_IMODE(status.st_mode)
    return f"{mode:04o}" if mode & ~allowed else None
