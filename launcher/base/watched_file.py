"""Files that are read again when they change, without a task and without a restart, and the state of each.

They are looked at in threads: a disk that hangs holds up no event loop, and what was read before stays in force.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from queue import Empty, SimpleQueue
from typing import Final, Generic, Protocol, TypeVar

from launcher.base.disk import DISK_REMEDY, DISK_S
from launcher.base.errors import LauncherError

_LOG: Final = logging.getLogger(__name__)

# A change is in force within a second, with the event loop's tick and the time to read it.
LOOK_EVERY_S: Final = 0.5
# Between two questions of a thread whether its owner is still there.
_ALIVE_S: Final = 10.0
# A file that cannot be used is tried again without a change: the process may have had no descriptor left.
RETRY_S: Final = 10.0
# Before its end, what a file says is reported; ACME clients renew at a third of a certificate's lifetime, so that at a
# sixth several attempts have failed, also of one that is valid for days only.
NOTICE_S: Final = 14 * 86_400.0
NOTICE_SHARE: Final = 1 / 6

T = TypeVar("T")
Validity = tuple[float, float]
"""Begin and end, seconds since the epoch."""


class FileCondition(StrEnum):
    IN_USE = "in use"
    UNUSABLE = "unusable"
    """As it is now; what was read before stays in force."""
    EXPIRING = "expiring"
    EXPIRED = "expired"
    NOT_YET_VALID = "not yet valid"

    @property
    def fails(self) -> bool:
        """Whether clients are refused because of it."""
        return self in {FileCondition.EXPIRED, FileCondition.NOT_YET_VALID}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """A file that the daemon reads again when it changes."""

    what: str
    """Its use, such as "TLS certificate"."""
    path: str
    """Its path; of two that are read together the first."""
    state: FileCondition
    """in use; unusable: what was read before stays in force; expiring; expired; not yet valid."""
    since: float
    """Begin of the state, seconds since the epoch."""
    why: str = ""
    """What is wrong; empty in use."""
    remedy: str = ""
    """What to do about it; empty in use."""


def unusable(what: str, path: str, error: LauncherError, since: float) -> FileState:
    """The state of a file that was never read."""
    return FileState(
        what=what,
        path=path,
        state=FileCondition.UNUSABLE,
        since=since,
        why=error.message,
        remedy=error.remedy,
    )


class Looks(threading.Thread):
    """Calls a method of its owner in this thread, one call at a time, at most every LOOK_EVERY_S. Ends with its owner."""

    def __init__(self, look: Callable[[float], None]) -> None:
        super().__init__(name="watched file", daemon=True)
        self._look = weakref.WeakMethod(look)
        self._asked: SimpleQueue[float] = SimpleQueue()
        self._at = 0.0
        self.since: float | None = None
        """When the look in progress was asked for, by time.monotonic(); None between two of them."""

    def begin(self, now: float) -> None:
        """Look, if it is time to; `now` is a monotonic clock's. Does not wait, but for the thread's start."""
        if now < self._at:
            return
        self._at = now + LOOK_EVERY_S
        if self.since is None:
            self.since = time.monotonic()
            self._asked.put(now)
        if self.ident is None:
            with contextlib.suppress(RuntimeError):  # no thread can be had now: the next call tries again
                self.start()

    def hangs_s(self) -> float:
        """For how long the look in progress has hung; 0 for none."""
        since = self.since  # the thread may set it now
        taken_s = 0.0 if since is None else time.monotonic() - since
        return taken_s if taken_s > DISK_S else 0.0

    def run(self) -> None:
        while True:
            now = None
            with contextlib.suppress(Empty):
                now = self._asked.get(timeout=_ALIVE_S)
            look = self._look()
            if look is None:
                self.since = None
                return
            if now is not None:
                try:
                    look(now)
                except Exception:
                    _LOG.exception("cannot look at a watched file")
                self.since = None
            del look


def _hung(path: str, what: str) -> LauncherError:
    why = f"no look at it has ended within {DISK_S:g} s"
    return LauncherError(f"cannot read {what} '{path}': {why}", DISK_REMEDY)


class WatchedFile(Generic[T]):
    """What one or more files say. Files that cannot be used change nothing; the reason is logged once, and is the state's.

    A change is another inode (a file replaced by rename, a Kubernetes secret's symlink), time or size. Looking for one
    costs a comparison per call, and twice a second a stat(2) of each file in a thread.
    """

    def __init__(
        self,
        what: str,
        read: Callable[[], T],
        *paths: str,
        validity: Callable[[T], Validity | None] = lambda _: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`read` is called here, and in a thread after each change. `validity`: from when to when what was read counts.
        Raises LauncherError."""
        self._what = what
        self._read = read
        self._paths = dict.fromkeys(paths)
        self._validity = validity
        self._wall = wall
        self._looks = Looks(self._look)
        self._try_at = 0.0
        self._trouble: LauncherError | None = None
        self._identity = self._identify()
        self.value = read()
        self._since = wall()

    def latest(self, now: float) -> T:
        """The value as last read. Does not wait: where it is time to look for a change, that begins.
        `now` is a monotonic clock's."""
        self._looks.begin(now)
        return self.value

    def _look(self, now: float) -> None:
        found = self._identify()
        if found != self._identity or (self._trouble is not None and now >= self._try_at):
            self._identity = found
            self._try_at = now + RETRY_S
            self._read_again()

    def _read_again(self) -> None:
        before = self._trouble
        try:
            self.value = self._read()
        except LauncherError as error:
            if before is None or error.message != before.message:
                text, note = "%s; keeping the %s read before (%s)", {"reason": error.message}
                _LOG.error(text, error.message, self._what, error.remedy, extra=note)
            if before is None:
                self._since = self._wall()
            self._trouble = error
            return
        self._trouble, self._since = None, self._wall()
        _LOG.info("%s read from %s", self._what, ", ".join(self._paths))

    def state(self) -> FileState:
        """As of the last look."""
        path, now, trouble, begun = next(iter(self._paths)), self._wall(), self._trouble, self._since
        if hangs_s := self._looks.hangs_s():
            trouble, begun = _hung(path, self._what), now - hangs_s
        kept = "" if trouble is None else f"{trouble.message}; the {self._what} read before stays in force"
        condition, since, why = self._of_validity(path, now)
        if condition is FileCondition.IN_USE and trouble is not None:
            condition, since = FileCondition.UNUSABLE, begun
        remedy = "" if condition is FileCondition.IN_USE else _RENEW
        return FileState(
            what=self._what, path=path, state=condition, since=since, why="; ".join(filter(None, (why, kept))),
            remedy=remedy if trouble is None else trouble.remedy,
        )  # fmt: skip

    @property
    def hangs(self) -> bool:
        """Whether a look at it does not end."""
        return self._looks.hangs_s() > 0

    def _of_validity(self, path: str, now: float) -> tuple[FileCondition, float, str]:
        """Condition, its begin, and why; IN_USE while the value counts and will for long enough."""
        bounds = self._validity(self.value)
        if bounds is None:
            return FileCondition.IN_USE, self._since, ""
        begin, end = bounds
        notice_s = min(NOTICE_S, (end - begin) * NOTICE_SHARE)
        named = f"{self._what} '{path}'"
        if now >= end:
            return FileCondition.EXPIRED, end, f"{named} expired at {_utc(end)}: clients refuse it"
        if now < begin:
            return (
                FileCondition.NOT_YET_VALID,
                self._since,
                f"{named} is not valid before {_utc(begin)}: clients refuse it",
            )
        if now >= end - notice_s:
            return FileCondition.EXPIRING, end - notice_s, f"{named} expires at {_utc(end)}"
        return FileCondition.IN_USE, self._since, ""

    def _identify(self) -> list[tuple[int, ...] | None]:
        return [_identity_of(path) for path in self._paths]


_RENEW: Final = "renew it; the daemon reads the new file by itself"


class Watched(Protocol):
    """A file that has a state."""

    @property
    def hangs(self) -> bool: ...
    def latest(self, now: float) -> object: ...
    def state(self) -> FileState: ...


class FileThatMayCome(Generic[T]):
    """A WatchedFile that need not be there at first: what is read of it is None until it can be used."""

    def __init__(self, what: str, path: str, watch: Callable[[], WatchedFile[T]]) -> None:
        """`watch`: makes the WatchedFile; raises LauncherError. It is called here, and in a thread until it succeeds."""
        self.what, self.path = what, path
        self._watch = watch
        self._file: WatchedFile[T] | None = None
        self._unread: FileState | None = None
        self._looks = Looks(self._look)
        self._look(0.0)

    def latest(self, now: float) -> T | None:
        """As `WatchedFile.latest`."""
        if self._file is None:
            self._looks.begin(now)
            return None
        return self._file.latest(now)

    def _look(self, _now: float) -> None:
        try:
            self._file = self._watch()
        except LauncherError as error:
            before = self._unread
            since = time.time() if before is None else before.since
            self._unread = unusable(self.what, self.path, error, since)
            if before is None or before.why != error.message:
                _LOG.error("%s (%s)", error.message, error.remedy)

    def state(self) -> FileState:
        """As of the last look."""
        if self._file is not None:
            return self._file.state()
        if hangs_s := self._looks.hangs_s():
            return unusable(self.what, self.path, _hung(self.path, self.what), time.time() - hangs_s)
        assert self._unread is not None  # noqa: S101  it was looked at
        return self._unread

    @property
    def hangs(self) -> bool:
        """Whether a look at it does not end."""
        return self._looks.hangs_s() > 0 if self._file is None else self._file.hangs


class WatchedFiles:
    """All files that a process watches: looks at them without a request, too, and logs when one expires or hangs."""

    def __init__(self, files: Iterable[Watched]) -> None:
        self._files = tuple(files)
        self._look_at = 0.0
        self._before = [FileCondition.IN_USE for _ in self._files]
        self._hung = [False for _ in self._files]

    def look(self, now: float) -> None:
        """At most every LOOK_EVERY_S; `now` as for `WatchedFile.latest`."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        for index, file in enumerate(self._files):
            file.latest(now)
            hangs, hung = file.hangs, self._hung[index]
            state = file.state()
            hangs = hangs and bool(state.why)  # the look may have ended between the two
            if hung and not hangs:
                _LOG.info("%s '%s' can be looked at again", state.what, state.path)
            if hangs and not hung:
                _LOG.error("%s; %s", state.why, state.remedy)
            elif state.state not in {self._before[index], FileCondition.IN_USE, FileCondition.UNUSABLE}:
                log = _LOG.error if state.state.fails else _LOG.warning
                log("%s; %s", state.why, state.remedy)
            self._before[index], self._hung[index] = state.state, hangs

    def states(self) -> tuple[FileState, ...]:
        return tuple(file.state() for file in self._files)


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def _identity_of(path: str) -> tuple[int, ...] | None:
    try:
        status = os.stat(path)  # noqa: PTH116 - twice as fast as Path.stat
    except OSError:
        return None
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
