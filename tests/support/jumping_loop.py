"""An event loop whose time is virtual: it stands still while anything runs, and jumps to the next timer when nothing does.

For tests of time limits in which all parties live in one event loop: sockets between them are real, waits are not. Such a
test takes no longer and fails no sooner on a busy machine. Whoever is asked over a socket from outside of the loop (another
process, a thread of the test's own) would be given no time to answer.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Mapping
from typing import Any

# Seconds of real time that bytes on their way through the kernel get to arrive, before time jumps.
SETTLE_S = 0.001
# A wait that ends later than this: others have the CPUs, and the kernel may be as late. So many such waits at most.
LATE_S = 0.002
LATE_WAITS = 20
# The same for a thread of the loop's executor, which may answer at any time.
THREAD_S = 0.05


class _Clock:
    def __init__(self) -> None:
        self.now = time.monotonic()
        self.threads: set[Any] = set()  # what runs in the loop's executor


class _JumpingSelector(selectors.BaseSelector):
    """Waits for nothing but sockets that are ready, threads, and the end of its patience."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if ready := self._real.select(0):
            return ready
        if timeout is None:  # there is no timer to jump to
            return self._real.select(None)
        if timeout <= 0:
            return []
        if self._clock.threads:
            return self._real.select(THREAD_S)
        ready = self._settled()
        if not ready:
            self._clock.now += timeout
        return ready

    def _settled(self) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready after SETTLE_S."""
        for _ in range(LATE_WAITS):
            began = time.monotonic()
            if (ready := self._real.select(SETTLE_S)) or time.monotonic() - began < LATE_S:
                return ready
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.get_key(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Clock()
        super().__init__(_JumpingSelector(self._virtual))

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """As usual. Time stands still until the thread has answered."""
        future = super().run_in_executor(executor, func, *args)
        self._virtual.threads.add(future)
        future.add_done_callback(self._virtual.threads.discard)
        return future
