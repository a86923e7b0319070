"""Background tasks that restart after a failure; of consecutive failures only the first is logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from launcher.errors import LauncherError

# Before a retry: a shortage of descriptors or threads lasts seconds.
RETRY_S: Final = 1.0
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
