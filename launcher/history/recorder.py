"""Records the history of the machine every 2 s, and answers from it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from launcher.background import Failures
from launcher.errors import LauncherError, reason
from launcher.history.answer import Reply
from launcher.history.columns import Row
from launcher.history.file import HistoryFile
from launcher.history.history import Found, History
from launcher.history.rings import HOUR, MemoryStore
from launcher.history.sample import Sample, Sampling

log = logging.getLogger("launcher.history")

# Between two tries to open a file that could not be used, and two looks whether it is still there.
LOOK_S: Final = 60.0
_STEP_S: Final = HOUR.step_ms / 1000
# For a row that is being written.
_CLOSE_S: Final = 5.0
_REMEDY: Final = "see that the disk of [telemetry] history_path works"
T = TypeVar("T")


class Recorder:
    """`path`: None keeps the history in memory. `sample` reads the daemon and the machine.

    The file is read and written in one thread, so that a slow disk holds up no request."""

    def __init__(
        self,
        path: Path | None,
        sample: Callable[[], Awaitable[Sample]],
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._path = path
        self._sample = sample
        self._clock = clock
        self._sleep = sleep
        self._sampling = Sampling()
        self._thread = ThreadPoolExecutor(1, "history")
        self._file: HistoryFile | None = None
        self._history: History | None = None
        self._look_at = 0.0
        self.problem = ""
        """Why the history is in memory only; empty where it is in the file."""
        self.failures = Failures(log, "record the history")

    async def run(self) -> None:
        """Until it is cancelled."""
        ms = await self._next(0)
        while True:
            sample = await self._sample()
            await self._in_thread(partial(self._add, self._sampling.rows(sample, ms)))
            self.failures.end()
            ms = await self._next(ms)

    async def _next(self, last: int) -> int:
        """Sleep until a step after `last` ends; its end. The clock may be set meanwhile."""
        now = self._clock()
        wait_s = _STEP_S - now % _STEP_S
        if round((now + wait_s) / _STEP_S) * HOUR.step_ms == last:
            wait_s += _STEP_S  # it woke up a moment before the step's end
        await self._sleep(wait_s)
        return round(self._clock() / _STEP_S) * HOUR.step_ms

    async def answer(self, span: str, after: int, slots: str) -> bytes:
        """The reply of ``GET /v1/history``. Raises LauncherError."""
        found = await self._in_thread(partial(self._find, span, after))
        reply = Reply(found, slots)
        text = bytearray(reply.head)
        for part in reply.parts:
            text += reply.rows(await self._in_thread(partial(self._read, found, *part)), part[1])
        return bytes(text + reply.tail)

    async def close(self) -> None:
        """After `run` has ended. Also without it, and again."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._thread.shutdown), _CLOSE_S)
        if self._file is not None:
            self._file.close()
        self._file = self._history = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with it now."""
        failed = f"the history is not recorded: {self.failures.last}" if self.failures.count else ""
        return tuple(filter(None, (self.problem, failed)))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # --- in the thread -------------------------------------------------------------------------

    def _find(self, span: str, after: int) -> Found:
        return self._opened().find(span, after, self._now_ms())

    def _read(self, found: Found, after: int, until: int) -> bytes:
        try:
            return found.ring.read(after, until)
        except OSError as error:
            raise LauncherError(f"cannot read the history '{self._path}': {reason(error)}", _REMEDY) from None

    def _add(self, rows: Sequence[Row]) -> None:
        self._opened().add(rows)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _opened(self) -> History:
        """With the rows so far, where the file was removed or could not be used before."""
        if self._history is None or (self._path is not None and time.monotonic() >= self._look_at):
            self._look_at = time.monotonic() + LOOK_S
            self._look()
        if self._history is None:
            self._history = History(MemoryStore(), self._now_ms())
        return self._history

    def _look(self) -> None:
        before = self._file
        if self._path is None or (before is not None and not before.replaced):
            return
        try:
            file = HistoryFile(self._path)
        except LauncherError as error:
            self._complain(error)
            return
        try:
            history = History(file, self._now_ms())
            if self._history is not None:
                history.take(self._history)
        except OSError as error:
            file.close()
            self._complain(LauncherError(f"cannot read the history '{self._path}': {reason(error)}", _REMEDY))
            return
        self._file, self._history = file, history
        if before is not None:
            before.close()
            log.warning("history '%s' was removed; a new one begins", self._path)
        self._report(file)

    def _complain(self, error: LauncherError) -> None:
        problem = f"{error.message}; {error.remedy}; the history is kept in memory"
        if problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem

    def _report(self, file: HistoryFile) -> None:
        if file.moved_to is not None:
            log.warning(
                "history '%s' is broken or of another version: moved to '%s', a new one begins",
                self._path,
                file.moved_to,
            )
        if self.problem:
            log.info("history '%s' is written", self._path)
        self.problem = ""
