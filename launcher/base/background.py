"""Background tasks that restart after a failure; of consecutive failures only the first is logged.

And the time in which the event loop ran, which time limits of others' silence are measured by.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar, cast

from launcher.base.errors import LauncherError

# Before a retry: a shortage of descriptors or threads lasts seconds.
RETRY_S: Final = 1.0
# Between two readings of a RunningClock: an event loop that runs reads it as often as READ_S.
MOST_STEP_S: Final = 0.5
READ_S: Final = 0.25
# A gap that is worth a line of the log.
SAID_S: Final = 5.0
T = TypeVar("T")
Work = Callable[[], Awaitable[T]]


class Failures:
    """Consecutive failures of one task. The first is logged, and the next success."""

    def __init__(self, log: logging.Logger, what: str, **fields: object) -> None:
        self.what = what
        self._log = log
        self._fields = fields
        self.count = 0
        """Since the last success."""
        self.last = ""
        """Why the last try failed; empty after a success."""

    def add(self, error: BaseException) -> None:
        self.last = error.message if isinstance(error, LauncherError) else str(error) or type(error).__name__
        self.count += 1
        if self.count > 1:
            return
        expected = isinstance(error, OSError | LauncherError | asyncio.CancelledError)
        remedy = f" ({error.remedy})" if isinstance(error, LauncherError) else ""
        self._log.error(
            "%s failed: %s%s; trying again", self.what, self.last, remedy, extra=self._fields,
            exc_info=None if expected else error,
        )  # fmt: skip

    def end(self) -> None:
        if self.count:
            self._log.info("%s works again, after %d failures", self.what, self.count, extra=self._fields)
        self.count, self.last = 0, ""


async def attempt(work: Work[object], failures: Failures) -> None:
    """Try once; an error goes to `failures`."""
    try:
        await work()
    except Exception as error:
        failures.add(error)
    else:
        failures.end()


async def persist(work: Work[T], failures: Failures) -> T:
    """The result of `work`, which is tried again RETRY_S after each failure, until this task is cancelled.

    Work that loops calls `failures.end` itself after each successful turn."""
    while True:
        try:
            found = await work()
        except Exception as error:
            failures.add(error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            failures.add(error)  # what it awaited was cancelled, not this task
        else:
            failures.end()
            return found
        await asyncio.sleep(RETRY_S)


class Running:
    def __init__(self, work: Work[object], wanted: Callable[[], bool], failures: Failures) -> None:
        self.work = work
        self.wanted = wanted
        self.failures = failures
        self.task: asyncio.Task[object] | None = None

    def begin(self) -> asyncio.Task[object]:
        self.task = asyncio.create_task(persist(self.work, self.failures), name=self.failures.what)
        return self.task

    @property
    def alive(self) -> bool:
        """It runs, or waits for its next try."""
        return self.task is not None and not self.task.done()


class Background:
    """Runs tasks until `close`. `owner` is the prefix of their names; `fields` go into the log."""

    def __init__(self, log: logging.Logger, owner: str, **fields: object) -> None:
        self._log = log
        self._owner = owner
        self._fields = fields
        self._running: set[Running] = set()
        self._closed = False

    def start(self, work: Work[object], name: str, wanted: Callable[[], bool] = lambda: True) -> Running:
        """Run `work` until it returns. It restarts after a failure, and, while it is `wanted`, when its task is cancelled by
        other code than `close`."""
        failures = Failures(self._log, f"{self._owner}: {name}", **self._fields)
        running = Running(work, wanted, failures)
        self._running.add(running)
        self._begin(running)
        return running

    def _begin(self, running: Running) -> None:
        running.begin().add_done_callback(lambda task: self._ended(running, task))

    def _ended(self, running: Running, task: asyncio.Task[object]) -> None:
        if task.cancelled() and not self._closed and running.wanted():
            running.failures.add(asyncio.CancelledError("its task was cancelled"))
            self._begin(running)
        else:
            self._running.discard(running)

    async def close(self) -> None:
        self._closed = True
        tasks = [running.task for running in self._running if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RunningClock:
    """Monotonic seconds without the gaps in which the event loop did not run.

    After a pause of the host, a container's freezer or SIGSTOP the loop wakes far too late. Whoever it watches may have been
    frozen too, and what it said meanwhile is still unread: no time limit of its silence counts the gap. A step between two
    readings counts as MOST_STEP_S at most, so a loop that is always late still lets time pass."""

    def __init__(self, raw: Callable[[], float] = time.monotonic) -> None:
        self._raw = raw
        self._read_at = raw()
        self._skipped = 0.0

    def __call__(self) -> float:
        now = self._raw()
        self._skipped += max(0.0, now - self._read_at - MOST_STEP_S)
        self._read_at = now
        return now - self._skipped

    def skipped(self) -> float:
        """Seconds of all gaps so far; it never falls."""
        self()
        return self._skipped

    async def run(self, log: logging.Logger) -> None:
        """Read it READ_S after READ_S, and log gaps, until cancelled."""
        before = self.skipped()
        while True:
            await asyncio.sleep(READ_S)
            if (gap := self.skipped() - before) > SAID_S:
                log.warning(
                    "the event loop did not run for %.0f s (host paused, process stopped, or starved of cpu): "
                    "time-outs do not count them", gap, extra={"gap_s": round(gap, 1)},
                )  # fmt: skip
            before += gap


@asynccontextmanager
async def time_limit(clock: Callable[[], float], seconds: float) -> AsyncIterator[None]:
    """As asyncio.timeout, in seconds of `clock`. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    end = clock() + seconds
    async with asyncio.timeout(None) as limit:
        timer: asyncio.Handle

        def look() -> None:
            nonlocal timer
            if (left := end - clock()) > 0:
                timer = loop.call_later(left, look)
            else:
                limit.reschedule(loop.time())

        timer = loop.call_soon(look)
        try:
            yield
        finally:
            timer.cancel()


# --- What a peer sent reaches a protocol in pieces, one for each turn of the event loop. ---
#
# One read holds up to 256 KiB, and uvloop reads up to 32 times before it looks at other connections. A protocol that takes
# all of it at once, as aiohttp's do, holds up every other connection for as long.

# At most 4 ms of CPU in aiohttp's parser and in its readers (chunks of one byte). Usual requests are smaller.
TURN_BYTES: Final = 2_048
# Between two turns: threads that others wait for get the interpreter.
TURN_PAUSE_S: Final = 0.001
# Of a body that waits for its reader in aiohttp (read_bufsize): it is joined in one turn, and may be in chunks of a byte, of
# which aiohttp takes a sixteenth of this number before it stops reading.
READ_BYTES: Final = 8_192


class InTurns(asyncio.Protocol):
    """Stands before a protocol and passes on all that happens to its connection."""

    def __init__(self, inner: asyncio.Protocol) -> None:
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._planned = False  # a turn is scheduled
        self._wanted = True  # `inner` has not paused reading

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._inner.connection_made(cast("asyncio.Transport", _Transport(self._transport, self)))

    def data_received(self, data: bytes) -> None:
        if len(data) <= TURN_BYTES and not self._rest:
            self._inner.data_received(data)
            return
        self._rest += data
        if self._transport is not None:
            self._transport.pause_reading()
        self._read_on()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport, self._rest = None, b""
        self._inner.connection_lost(exc)

    def pause_reading(self) -> None:
        self._wanted = False
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._wanted = True
        self._read_on()

    def _read_on(self) -> None:
        if self._rest and not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_later(TURN_PAUSE_S, self._turn)
        elif not self._rest and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _turn(self) -> None:
        self._planned = False
        if not self._wanted or not self._rest:
            return
        piece, self._rest = self._rest[:TURN_BYTES], self._rest[TURN_BYTES:]
        self._inner.data_received(piece)
        if self._wanted:
            self._read_on()


class _Transport:
    """The connection's own, but that reading is paused and resumed in turns."""

    def __init__(self, transport: asyncio.Transport, turns: InTurns) -> None:
        self._transport = transport
        self.pause_reading = turns.pause_reading
        self.resume_reading = turns.resume_reading

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
