"""Sinks, each with a thread that writes: a folder of files, a database, a collector of traces.

The event loop only appends to the sink's bounded queue. The thread gives the sink its turn, again and again; what cannot be
written now waits and is tried again. A sink that is full, gone or hangs costs what comes beyond its bound, which is counted,
and never a request. Each problem is said once in the log.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

from launcher.base.disk import DISK_REMEDY, DISK_S
from launcher.base.errors import LauncherError, reason

# Between a failure and the next try.
RETRY_S: Final = 1.0
# At the end, for a last turn that does not keep to its time.
_LATE_S: Final = 1.0
T = TypeVar("T")


class Problem(NamedTuple):
    """Why a sink is not written."""

    why: str
    """A few words: "no space left on device"."""
    text: str
    """For people, with the name of what is not written."""
    remedy: str = ""


class Sink(ABC, Generic[T]):
    """Entries of type T that wait, and how they are written.

    `title`: what is written, for people: "usage ledger '/var/lib/…/usage.db'". `most`: entries that wait. `every_s`: between
    two turns. `meanwhile`: what the log adds to a problem. `longest_retry_s`: the pause after failures doubles up to it."""

    level: int = logging.ERROR
    """The log level of a problem."""

    def __init__(
        self,
        log: logging.Logger,
        title: str,
        *,
        most: int,
        every_s: float,
        meanwhile: str,
        longest_retry_s: float = RETRY_S,
    ) -> None:
        self.title = title
        self.every_s = every_s
        self.longest_retry_s = longest_retry_s
        self.refused = 0
        """Entries that were not taken since the start, as `most` others waited."""
        self.writer: Writer | None = None
        self._log = log
        self._meanwhile = meanwhile
        self._most = most
        self._queue: deque[T] = deque()
        self._taken: list[T] = []
        self._put = self._done = 0
        """Entries that were ever taken by `put`, and those of them that do not wait any more."""
        self._problem: Problem | None = None
        self._said = ""

    # --- the event loop's side -----------------------------------------------------------------------

    def put(self, entry: T) -> None:
        """Take an entry, or count it as refused. Never waits, never raises."""
        if len(self._queue) + len(self._taken) < self._most:
            self._queue.append(entry)
            self._put += 1
        else:
            self.refused += 1

    @property
    def waiting(self) -> int:
        """Entries that are not written yet."""
        return len(self._queue) + len(self._taken)

    @property
    def lost(self) -> int:
        """Entries that were not written since the start, and never will be."""
        return self.refused

    @property
    def problem(self) -> Problem | None:
        """That of the last turn. While it had none: the present turn hangs."""
        if self._problem is not None:
            return self._problem
        since = None if self.writer is None else self.writer.turn_since
        if since is None or time.monotonic() - since <= DISK_S:
            return None
        why = f"a write takes longer than {DISK_S:g} s"
        return Problem(why, f"{self.title}: {why}", DISK_REMEDY)

    def look(self) -> None:
        """Say once that a turn takes long: the thread can only after it. To be called now and then.

        A warning: the disk hangs, or the turn reads a large file first."""
        problem = self.problem
        if problem is not None and self._problem is None:
            self._say(logging.WARNING, problem, self._meanwhile)

    def flush(self, within_s: float = DISK_S) -> bool:
        """Write what waits now; whether all that was put before is written. Blocks: not for the event loop."""
        put, until = self._put, time.monotonic() + within_s
        while self.writer is not None and self.writer.turn(until - time.monotonic()):
            if self._problem is not None or self._done >= put:
                return self._problem is None
        return False

    # --- the thread's side ---------------------------------------------------------------------------

    @abstractmethod
    def write(self) -> Problem | None:
        """A turn: `take`, write, `done`. What it raises is a failure, with a pause before the next turn; a problem that it
        returns is told likewise, without a pause."""

    def end(self, until: float) -> Problem | None:  # noqa: ARG002  the implementations' choice
        """The last turn, to be over `until`, by time.monotonic(): write, and close what is open."""
        return self.write()

    def take(self, most: int) -> Sequence[T]:
        """The next entries in their order; the same ones again until they are `done`."""
        taken, queue = self._taken, self._queue
        while queue and len(taken) < most:
            taken.append(queue.popleft())
        return taken

    def done(self, left: Sequence[T] = ()) -> None:
        """All that was taken is written, or given up, but for `left`."""
        self._done += len(self._taken) - len(left)
        self._taken = list(left)

    def failed(self, error: Exception) -> Problem:
        """Put an error of `write` into words. Sinks that have something to tidy up then extend it."""
        if isinstance(error, LauncherError):
            return Problem(error.message, error.message, error.remedy)
        why, remedy = repr(error), "report this with the daemon's log"
        if isinstance(error, OSError):
            why, remedy = reason(error), ""
        elif not self._said:
            self._log.error("%s: unexpected error", self.title, exc_info=error)
        return Problem(why, f"cannot write {self.title}: {why}", remedy)

    def recovered(self) -> str:
        """For the log, after a problem."""
        return f"{self.title} is written again"

    def given_up(self, left: int) -> None:
        """The daemon ends, and so many entries could not be written."""
        self._log.error("%s: the daemon stops, %d entries are lost", self.title, left)

    def judge(self, problem: Problem | None, *, paused: bool) -> None:
        """How a turn went; `paused`: it failed, and there is a pause."""
        if problem is not None:
            self._say(self.level, problem, self._meanwhile if paused else "")
        elif self._said:
            self._log.info("%s", self.recovered())
            self._said = ""
        self._problem = problem

    def _say(self, level: int, problem: Problem, meanwhile: str) -> None:
        """Once in a row."""
        if problem.text != self._said:
            self._log.log(level, "%s", "; ".join(filter(None, (problem.text, problem.remedy, meanwhile))))
            self._said = problem.text


class Writer:
    """The thread of a sink."""

    def __init__(self, name: str, sink: Sink[Any]) -> None:
        self.turn_since: float | None = None
        """When the turn in progress began, by time.monotonic(); None between turns."""
        self._sink = sink
        sink.writer = self
        self._due_at = time.monotonic() + sink.every_s
        self._retry_s = 0.0
        self._asked = self._answered = 0
        """Turns that were asked for, and how many of these calls a turn has answered."""
        self._changed = threading.Condition()
        self._until: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def stopping(self) -> bool:
        return self._until is not None

    def start(self) -> None:
        self._thread.start()

    def stop(self, within_s: float) -> None:
        """Give the sink its last turn. Blocks, for about `within_s` at most; also without `start`, and again."""
        if self._thread.ident is None or self._until is not None:
            return
        with self._changed:
            self._until = time.monotonic() + within_s
            self._changed.notify_all()
        self._thread.join(within_s + _LATE_S)
        if left := self._sink.waiting:
            self._sink.given_up(left)

    def turn(self, within_s: float) -> bool:
        """Whether a turn that began after this call has ended."""
        with self._changed:
            self._asked = mine = self._asked + 1
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._answered >= mine, within_s)

    def _run(self) -> None:
        while self._until is None:
            if self._asked > self._answered or time.monotonic() >= self._due_at:
                self._turn(self._sink.write)
            with self._changed:
                self._changed.wait_for(self._is_asked, max(0.0, self._due_at - time.monotonic()))
        self._turn(partial(self._sink.end, self._until))

    def _is_asked(self) -> bool:
        return self._until is not None or self._asked > self._answered

    def _turn(self, work: Callable[[], Problem | None]) -> None:
        sink, asked = self._sink, self._asked
        self.turn_since = time.monotonic()
        pause_s = sink.every_s
        try:
            problem = work()
            self._retry_s = 0.0
        except Exception as error:  # the thread must not end: nothing would be written any longer
            try:
                problem = sink.failed(error)
            except Exception as worse:
                problem = Sink.failed(sink, worse)
            self._retry_s = pause_s = min(sink.longest_retry_s, self._retry_s * 2 or RETRY_S)
        sink.judge(problem, paused=self._retry_s > 0)
        self.turn_since = None
        self._due_at = time.monotonic() + pause_s
        with self._changed:
            self._answered = asked
            self._changed.notify_all()
