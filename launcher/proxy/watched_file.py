"""Files that are read again when they change, without a task and without a restart."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from launcher.errors import LauncherError

LOOK_EVERY_S: Final = 1.0

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class WatchedFile(Generic[T]):
    """What one or more files say. Files that cannot be used change nothing; the reason is logged once.

    A change is another inode (a file replaced by rename, a Kubernetes secret's symlink), time or size. Looking for one
    costs a comparison per call and a stat(2) of each file per second.
    """

    def __init__(self, what: str, read: Callable[[], T], *paths: str) -> None:
        """`read` is called here and after each change. Raises LauncherError."""
        self._what = what
        self._read = read
        self._paths = dict.fromkeys(paths)
        self._look_at = 0.0
        self._complaint = ""
        self._identity = self._identify()
        self.value = read()

    def latest(self, now: float) -> T:
        """What the files say, checked at most once a second; `now` is a monotonic clock's."""
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            if (found := self._identify()) != self._identity:
                self._identity = found
                self.reload()
        return self.value

    def reload(self) -> bool:
        """Read the files now. False: they cannot be used."""
        try:
            self.value = self._read()
        except LauncherError as error:
            if error.message != self._complaint:
                text, note = "%s; keeping the %s read before (%s)", {"reason": error.message}
                _LOG.error(text, error.message, self._what, error.remedy, extra=note)
            self._complaint = error.message
            return False
        self._complaint = ""
        _LOG.info("%s read from %s", self._what, ", ".join(self._paths))
        return True

    def _identify(self) -> list[tuple[int, ...] | None]:
        return [_identity_of(path) for path in self._paths]


def _identity_of(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - twice as fast as Path.stat
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)


def excess_mode(status: os.stat_result, allowed: int) -> str | None:
    """The file's mode in octal when it grants more than `allowed`, else None."""
    mode = stat.S_IMODE(status.st_mode)
    return f"{mode:04o}" if mode & ~allowed else None
