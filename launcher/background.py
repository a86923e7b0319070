"""Background work that must not end by itself: a failure is logged once in a row of failures, and the work tried again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from launcher.errors import LauncherError

# Before work that has failed is tried again: a shortage of descriptors or threads lasts seconds.
RETRY_S: Final = 1.0

T = TypeVar("T")
Work = Callable[[], Awaitable[T]]


class Failures:
    """Failures in a row of one thing that is tried again and again. The first of a row is logged, and the row's end."""

    def __init__(self, log: logging.Logger, what: str, **fields: object) -> None:
        self.what = what
        self._log = log
        self._fields = fields
        self.count = 0
        """In this row."""
        self.last = ""
        """Why the last try of this row failed; empty while no row is under way."""

    def add(self, error: BaseException) -> None:
        """One more try has failed."""
        self.last = error.message if isinstance(error, LauncherError) else str(error) or type(error).__name__
        self.count += 1
        if self.count > 1:
            return
        expected = isinstance(error, OSError | LauncherError | asyncio.CancelledError)
        self._log.error(
            "%s failed: %s; trying again", self.what, self.last, extra=self._fields,
            exc_info=None if expected else error,
        )  # fmt: skip

    def end(self) -> None:
        """A try has succeeded."""
        if self.count:
            self._log.info("%s works again, after %d failures", self.what, self.count, extra=self._fields)
        self.count, self.last = 0, ""


async def attempt(work: Work[object], failures: Failures) -> None:
    """One try; what it meets is noted, not raised."""
    try:
        await work()
    except Exception as error:
        failures.add(error)
    else:
        failures.end()


async def persist(work: Work[T], failures: Failures) -> T:
    """What `work` returns; work that fails is begun again after RETRY_S, until it succeeds or this task is cancelled.

    Work that loops ends a row of failures itself (`failures.end`) whenever one turn has succeeded.
    """
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
    """One task of a `Background`."""

    def __init__(self, work: Work[object], wanted: Callable[[], bool], failures: Failures) -> None:
        self.work = work
        self.wanted = wanted
        self.failures = failures
        self.task: asyncio.Task[object] | None = None

    @property
    def alive(self) -> bool:
        """It runs, or waits before its next try."""
        return self.task is not None and not self.task.done()


class Background:
    """Owner of tasks that must not end by themselves. `owner` begins their names; `fields` go into the log."""

    def __init__(self, log: logging.Logger, owner: str, **fields: object) -> None:
        self._log = log
        self._owner = owner
        self._fields = fields
        self._running: set[Running] = set()
        self._closed = False

    def start(self, work: Work[object], name: str, wanted: Callable[[], bool] = lambda: True) -> Running:
        """Run `work` until it returns. Where it fails it is begun again; where its task is cancelled by anybody but this
        owner, too, for as long as it is `wanted`."""
        failures = Failures(self._log, f"{self._owner}: {name}", **self._fields)
        running = Running(work, wanted, failures)
        self._running.add(running)
        self._begin(running)
        return running

    def _begin(self, running: Running) -> None:
        running.task = asyncio.create_task(
            persist(running.work, running.failures), name=running.failures.what
        )
        running.task.add_done_callback(lambda task: self._ended(running, task))

    def _ended(self, running: Running, task: asyncio.Task[object]) -> None:
        if task.cancelled() and not self._closed and running.wanted():
            running.failures.add(asyncio.CancelledError("its task was cancelled"))
            self._begin(running)
        else:
            self._running.discard(running)

    async def close(self) -> None:
        """Cancel all and wait for their end."""
        self._closed = True
        tasks = [running.task for running in self._running if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
