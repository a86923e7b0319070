"""The audit trail of a running daemon: takes entries at once, and one thread writes them."""

from __future__ import annotations

import datetime as dt
import errno
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

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
from launcher.config.schema import Audit

log = logging.getLogger("launcher.audit")


# --- Writes an audit trail: lines into a buffer, the buffer to the disk, files by day and size. Blocking; of one
# thread.

_DAY_S: Final = 86_400
_FLAGS: Final = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class Writer:
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
# A write that takes longer: the disk hangs.
STALL_S: Final = 5.0
# For the first write at the start of the daemon, and the last at its end.
START_S: Final = 5.0
STOP_S: Final = 10.0

_NOT_OPEN: Final = "it is not open yet"
_FULL: Final = "more entries than could be written"


class AuditState(NamedTuple):
    lines: int
    lost: int
    why: str  # it cannot be written; "" where it can


class AuditTrail:
    """`record` and `control` are called in the event loop, never wait and never raise."""

    def __init__(self, folder: Path, settings: Audit, version: str, clock: Clock | None = None) -> None:
        self._folder = folder
        self._strict = settings.strict
        self._clock = clock = clock or Clock()
        self._writer = Writer(folder, settings, version, clock)
        self._waiting: deque[EndedRequest | ControlEntry] = deque()
        self._lost = 0
        """Written by the event loop only."""
        self._lost_recorded = 0
        """Written by the thread only, as all that follows."""
        self._why = _NOT_OPEN
        self._failed_since = clock.wall()
        self._turn_began: float | None = None
        self._first_turn = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)

    # --- the event loop's side -----------------------------------------------------------------------

    def record(self, entry: EndedRequest | ControlEntry) -> None:
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(entry)
        else:
            self._lost += 1

    def refusal(self) -> str | None:
        """With `strict`: why no request may be served now."""
        return (self._problem() or None) if self._strict else None

    @property
    def state(self) -> AuditState:
        return AuditState(self._writer.lines, self._lost + self._writer.unfit, self._problem())

    def _problem(self) -> str:
        began = self._turn_began
        if self._why or began is None or time.monotonic() - began <= STALL_S:
            return self._why
        return f"a write takes longer than {STALL_S:g} s"

    def start(self) -> None:
        """Begin to write; returns when the first line is on the disk, or when it could not be written."""
        self._thread.start()
        self._first_turn.wait(START_S)

    def stop(self) -> None:
        """Write what waits, and the line that says that nothing is missing. Also without `start`, and again."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)
        if left := len(self._waiting) + self._writer.unsaved:
            log.error("audit trail '%s': %d entries could not be written", self._folder, left)

    # --- the thread's side ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(TURN_S if self._first_turn.is_set() else 0):
            self._try(last=False)
            self._first_turn.set()
        self._try(last=True)
        self._writer.close()

    def _try(self, *, last: bool) -> None:
        self._turn_began = time.monotonic()
        try:
            self._turn(last=last)
        except OSError as error:
            self._fail(reason(error), None)
        except Exception as error:  # the thread must not end: nothing would be recorded any longer
            self._fail(f"{type(error).__name__}: {error}", error)
        else:
            if self._why and self._why is not _NOT_OPEN:
                log.info("audit trail '%s' is written again", self._folder)
            self._why = ""
        self._turn_began = None

    def _fail(self, why: str, error: Exception | None) -> None:
        if not self._why or self._why is _NOT_OPEN:
            self._failed_since = self._clock.wall()
            then = "requests are refused" if self._strict else "requests are served unrecorded"
            log.error(
                "cannot write the audit trail in '%s': %s; %s until it can be written again",
                self._folder, why, then, exc_info=error,
            )  # fmt: skip
        self._why = why

    def _turn(self, *, last: bool) -> None:
        writer, waiting = self._writer, self._waiting
        writer.turn()
        while waiting:
            count = min(len(waiting), MAX_BATCH)
            for _ in range(0, count, _LINES_AT_ONCE):
                writer.add(_taken(waiting, _LINES_AT_ONCE))
                time.sleep(0)  # others run
            writer.store()
        if (lost := self._lost + writer.unfit) > self._lost_recorded:
            writer.lost(lost - self._lost_recorded, self._failed_since, self._why or _FULL)
            self._lost_recorded = lost
        if last:
            writer.stopped()
        writer.store()


def _taken(waiting: deque[EndedRequest | ControlEntry], most: int) -> Iterator[EndedRequest | ControlEntry]:
    for _ in range(min(most, len(waiting))):
        yield waiting.popleft()
