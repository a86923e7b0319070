"""Work on a disk that may hang: whoever waits for it has a deadline, and no exit of the process waits for its thread."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Generic, TypeVar

from launcher.base.errors import BusyError, LauncherError, reason

# A disk that works answers in milliseconds, a busy one within a second or two; one whose server is away may never.
DISK_S: Final = 5.0
DISK_REMEDY: Final = "see whether its disk answers"
_THREADS_REMEDY: Final = (
    "compare TasksCurrent with TasksMax: systemctl show -p TasksCurrent,TasksMax numa-launcher"
)
T = TypeVar("T")
_LOG: Final = logging.getLogger(__name__)


def within(seconds: float, what: str, work: Callable[[], T]) -> T | None:
    """The result of `work`; None where it has none in that time, or raised. `what`: it does, for the log: "read the clock's
    last time". Blocks. The thread goes on, and ends with the process."""
    found: list[T] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            expected = isinstance(error, OSError | LauncherError)
            why = reason(error) if isinstance(error, OSError) else str(error) or type(error).__name__
            remedy = f" ({error.remedy})" if isinstance(error, LauncherError) else ""
            _LOG.warning(
                "cannot %s: %s%s; going on without", what, why, remedy, exc_info=None if expected else error
            )

    thread = threading.Thread(target=run, name="within", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        _LOG.warning("cannot %s: its disk does not answer within %g s; going on without", what, seconds)
    return found[0] if found else None


def read_apart(read: Callable[[], T], name: str) -> asyncio.Future[T]:
    """The result of `read`, or what it raised, from a thread of its own called `name`; BusyError where none can be had."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    # Nobody may wait for it any more.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())

    def settle(found: list[T], error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(found[0])
        else:
            future.set_exception(error)

    def run() -> None:
        found: list[T] = []
        failed = None
        try:
            found.append(read())
        except Exception as error:
            failed = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, found, failed)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        future.set_exception(BusyError(f"cannot read in a thread: {error}", _THREADS_REMEDY))
    return future


class OneRead(Generic[T]):
    """A read that one thread at a time makes, however many ask; all that ask meanwhile have its result."""

    def __init__(self, read: Callable[[], T], name: str) -> None:
        self._read = read
        self._name = name
        self._reading: asyncio.Future[T] | None = None
        self._began = 0.0

    async def result(self, within_s: float) -> T:
        """Raises TimeoutError where there is none `within_s` after the read has begun: at once, where it hangs already; what
        the read raises; BusyError where no thread can be had."""
        reading = self._reading
        if reading is None:
            self._reading = reading = read_apart(self._read, self._name)
            self._began = time.monotonic()
            reading.add_done_callback(self._end)
        left_s = max(0.0, self._began + within_s - time.monotonic())
        done, _ = await asyncio.wait({reading}, timeout=left_s)
        if not done:
            raise TimeoutError
        return reading.result()

    def _end(self, _: object) -> None:
        self._reading = None
