"""The audit trail of a running daemon: takes entries at once, and one thread writes them."""

from __future__ import annotations

import datetime as dt
import errno
import logging
import os
import stat
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from launcher.accounts import audit_verify as folder_io
from launcher.accounts.audit_chain import (
    FORMAT,
    ControlEntry,
    FileBegan,
    FileName,
    Head,
    Line,
    Link,
    Lost,
    Pruned,
    Started,
    Stopped,
    Torn,
    moment,
    of_control,
    of_request,
    seal,
)
from launcher.accounts.ended_request import EndedRequest
from launcher.base.clock import Clock
from launcher.base.errors import reason
from launcher.base.writer import Problem, Sink
from launcher.config.schema import Audit

log = logging.getLogger("launcher.audit")


# --- Writes an audit trail: lines into a buffer, the buffer to the disk, files by day and size. Blocking; of one
# thread.

_DAY_S: Final = 86_400
_FLAGS: Final = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class TrailFile:
    """`open` first; then `turn`, entries, `store`, again and again. What raises OSError can be called again."""

    def __init__(self, folder: Path, settings: Audit, version: str, clock: Clock) -> None:
        self._folder = folder
        self._settings = settings
        self._version = version
        self._clock = clock
        self._lock: folder_io.Lock | None = None
        self._fd = -1
        self._name: FileName | None = None
        self._last: Link | None = None
        """The last line in the buffer, or else in the file. None: never opened."""
        self._end = 0
        """Bytes of the file that are on the disk; the buffer follows."""
        self._buffer = bytearray()
        self._head_due = False
        self._prune_due = False
        self.lines = 0
        """Entries on the disk."""
        self.unsaved = 0
        """Entries in the buffer."""
        self.unfit = 0
        """Entries that could not be encoded."""

    @property
    def last(self) -> Link | None:
        return self._last

    def open(self) -> None:
        """Lock the folder and continue its trail. Raises OSError."""
        self._folder.mkdir(folder_io.FOLDER_MODE, parents=True, exist_ok=True)
        _check_owner(self._folder)
        lock = folder_io.Lock(self._folder)
        try:
            if self._last is None:
                self._continue(lock)
            else:  # the folder was removed below this process
                self._begin_file()
        except BaseException:
            lock.close()
            raise
        self._lock = lock
        self.store()

    def _continue(self, lock: folder_io.Lock) -> None:
        raw = lock.content()
        found = folder_io.recover(self._folder, raw)
        if found.why:
            log.error(
                "audit trail '%s' is damaged: %s; see `numa-launcher audit verify`", self._folder, found.why
            )
        self._last = found.last
        try:
            if found.file is None:
                if not raw:
                    self._write_head(lock)
                self._begin_file(found.number)
            else:
                self._reopen(found.file, found.end)
        except BaseException:
            self._last, self._buffer = None, bytearray()
            raise
        self._add(Started(*self._next(), self._version, os.getpid(), found.head))

    def _reopen(self, name: FileName, end: int) -> None:
        path = self._folder / str(name)
        fd = os.open(path, _FLAGS)
        size = os.fstat(fd).st_size
        self._use(fd, name, size)
        if size > end:
            digest = folder_io.hash_of(path, end, size)
            log.warning(
                "audit trail: %d bytes of an incomplete write at the end of %s are marked", size - end, name
            )
            self._buffer += b"\n"
            self._add(Torn(*self._next(), size - end, digest))
        if end == 0:
            self._add(FileBegan(*self._next(), FORMAT, name.day, name.number))

    def _use(self, fd: int, name: FileName, end: int) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._name, self._end = fd, name, end

    def _begin_file(self, after: int = 0) -> None:
        """`after`: the least number that came before. Raises OSError; nothing has changed then."""
        self.store()
        numbers = [after, *(name.number for name in folder_io.files_in(self._folder))]
        if self._name is not None:
            numbers.append(self._name.number)
        name = FileName(max(numbers) + 1, self._today())
        fd = os.open(self._folder / str(name), _FLAGS | os.O_CREAT | os.O_EXCL, folder_io.FILE_MODE)
        _sync_folder(self._folder)
        self._use(fd, name, 0)
        self._add(FileBegan(*self._next(), FORMAT, name.day, name.number))

    def _today(self) -> str:
        return moment(self._clock.wall()).date().isoformat()

    def turn(self) -> None:
        """Write what an earlier turn could not; then, if it is due, begin a new file and remove old ones. Raises OSError."""
        if self._lock is not None and self._lock.lost():
            log.error("audit trail '%s': %s was removed by another program", self._folder, folder_io.HEAD)
            self._lock.close()
            self._lock = None
        if self._lock is None:
            self.open()
        self.store()
        name = self._name
        assert name is not None  # noqa: S101  open
        facts = os.fstat(self._fd)
        if facts.st_nlink == 0 or facts.st_size < self._end:
            log.error("audit trail: %s was removed or cut by another program; continuing in a new file", name)
            self._begin_file()
        elif self._today() != name.day or self._end >= self._settings.max_bytes:
            self._begin_file()
            self._prune_due = True
        if self._prune_due:
            self._prune()
        self.store()

    def _prune(self) -> None:
        """Record the removal of files past keep_days, then remove them."""
        keep = self._settings.keep_days
        before = self._clock.delete_before(keep * _DAY_S) if keep else None
        if before is None and keep:
            return  # a clock that was set a moment ago deletes nothing
        self._prune_due = False
        names = folder_io.files_in(self._folder)
        gone = [] if before is None else _older(names, moment(before).date().isoformat(), self._today())
        if not gone:
            return
        self.store()  # the first line of a file that has just begun is still in the buffer
        kept = names[len(gone)]
        header = folder_io.begun(self._folder / str(kept))
        if header is None:
            log.error("audit trail: old files are kept: the first line of %s is damaged", kept)
            return
        self._add(Pruned(*self._next(), gone[-1].number, header.n - 1, header.prev))
        self.store()
        for name in gone:
            try:
                (self._folder / str(name)).unlink(missing_ok=True)
            except OSError as error:
                log.warning("audit trail: cannot remove %s: %s", name, reason(error))
        _sync_folder(self._folder)

    # --- lines ---------------------------------------------------------------------------------------

    def add(self, entries: Iterable[EndedRequest | ControlEntry]) -> None:
        """Into the buffer."""
        assert self._last is not None  # noqa: S101  open
        buffer, count, (n, digest) = self._buffer, 0, self._last
        for entry in entries:
            try:
                to_line = of_request if isinstance(entry, EndedRequest) else of_control
                digest = seal(buffer, to_line(n + 1, digest, entry))  # type: ignore[arg-type]  # as was asked
            except Exception:  # one entry must not keep the others from being recorded
                log.exception("audit trail: an entry cannot be recorded")
                self.unfit += 1
                continue
            n += 1
            count += 1
        self._last = Link(n, digest)
        self.unsaved += count

    def lost(self, count: int, since: float, why: str) -> None:
        self._add(Lost(*self._next(), count, moment(since), why))

    def stopped(self) -> None:
        self._add(Stopped(*self._next()))

    def _next(self) -> tuple[int, str, dt.datetime]:
        assert self._last is not None  # noqa: S101  open
        return self._last.n + 1, self._last.hash, moment(self._clock.wall())

    def _add(self, line: Line) -> None:
        self._last = Link(line.n, seal(self._buffer, line))

    # --- the disk ------------------------------------------------------------------------------------

    def store(self) -> None:
        """Buffer to the file and the disk, then the head. Raises OSError; the buffer stays then and is written again at the
        same place, whole: after a failed fsync the kernel may have dropped what was written (fsync(2))."""
        if self._buffer:
            _write_at(self._fd, self._buffer, self._end)
            os.fdatasync(self._fd)
            self._end += len(self._buffer)
            self._buffer = bytearray()
            self.lines, self.unsaved = self.lines + self.unsaved, 0
            self._head_due = True
        if self._head_due and self._lock is not None:
            self._write_head(self._lock)
            self._head_due = False

    def _write_head(self, lock: folder_io.Lock) -> None:
        assert self._last is not None  # noqa: S101  open
        name = self._name or FileName(1, self._today())
        lock.write(Head(self._last.n, self._last.hash, moment(self._clock.wall()), str(name), self._end))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _older(names: Sequence[FileName], oldest: str, today: str) -> list[FileName]:
    """The first files that end before a day. No file is older than those before it, whatever day a clock that was wrong gave
    it; one of a day to come is as old as the file that follows it."""
    gone: list[FileName] = []
    latest = ""
    for name, following in pairwise(names):
        latest = max(latest, name.day if name.day <= today else following.day)
        if latest >= oldest:
            break
        gone.append(name)
    return gone


def _write_at(fd: int, data: bytearray, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        if done == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view, at = view[done:], at + done


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_owner(folder: Path) -> None:
    facts = folder.stat()
    if facts.st_uid not in {os.geteuid(), 0} or facts.st_mode & stat.S_IWOTH:
        raise PermissionError(errno.EPERM, "other users may write there", str(folder))


# Between writes: what SIGKILL may lose.
TURN_S: Final = 1.0
# Entries that wait for the disk, about 0.5 KB each; more are lost, and counted.
MAX_WAITING: Final = 100_000
# Lines for one write and fsync.
MAX_BATCH: Final = 4096
# Lines encoded before other threads may run: 0.3 ms, where the interpreter itself would let them wait 5 ms.
_LINES_AT_ONCE: Final = 128

_NOT_OPEN: Final = "it is not open yet"
_FULL: Final = "more entries than could be written"


class AuditTrail(Sink[EndedRequest | ControlEntry]):
    """An entry is on the disk TURN_S after its `put`."""

    def __init__(self, folder: Path, settings: Audit, version: str, clock: Clock | None = None) -> None:
        then = "requests are refused" if settings.strict else "requests are served unrecorded"
        super().__init__(
            log, f"the audit trail in '{folder}'", most=MAX_WAITING, every_s=TURN_S,
            meanwhile=f"{then} until it can be written again",
        )  # fmt: skip
        self._strict = settings.strict
        self._clock = clock = clock or Clock()
        self._file = TrailFile(folder, settings, version, clock)
        self._failed_since = clock.wall()
        self._lost_recorded = 0

    def refusal(self) -> str | None:
        """With `strict`: why no request may be served now."""
        if not self._strict:
            return None
        problem = self.problem
        if problem is not None:
            return problem.why
        return None if self._file.last is not None else _NOT_OPEN

    @property
    def lines(self) -> int:
        """Entries on the disk."""
        return self._file.lines

    @property
    def lost(self) -> int:
        """Entries that could not be written."""
        return self.refused + self._file.unfit

    @property
    def waiting(self) -> int:
        return super().waiting + self._file.unsaved

    # --- the thread's side ---------------------------------------------------------------------------

    def write(self) -> Problem | None:
        file = self._file
        file.turn()
        for _ in range(0, super().waiting, _LINES_AT_ONCE):
            file.add(self.take(_LINES_AT_ONCE))
            self.done()
            if file.unsaved >= MAX_BATCH:
                file.store()
            time.sleep(0)  # others run
        file.store()
        if (lost := self.lost) > self._lost_recorded:
            why = _FULL if self._problem is None else self._problem.why
            file.lost(lost - self._lost_recorded, self._failed_since, why)
            self._lost_recorded = lost
            file.store()
        return None

    def end(self, until: float) -> Problem | None:
        try:
            problem = super().end(until)
            self._file.stopped()
            self._file.store()
        finally:
            self._file.close()
        return problem

    def failed(self, error: Exception) -> Problem:
        if self._problem is None:
            self._failed_since = self._clock.wall()
        return super().failed(error)
