"""Answers of the daemon that several pages share for a short time: each is asked for once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")
# Kept at once: what is asked for is chosen by pages.
MAX_KEPT: Final = 64


class Shared(Generic[T]):
    """Results by key. A failed one is kept for nobody, but those who wait for it get its error."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, tuple[float, asyncio.Task[T]]] = OrderedDict()

    async def get(self, key: str, keep_s: float, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of `ask` that is at most `keep_s` seconds old. Raises what `ask` raises."""
        until, task = self._kept.get(key, (0.0, None))
        if task is None or (task.done() and (self._clock() >= until or _failed(task))):
            task = asyncio.ensure_future(ask())
            task.add_done_callback(_failed)  # looks at the error, also when nobody waits for it
            self._kept[key] = (self._clock() + keep_s, task)
            self._kept.move_to_end(key)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        # A page that leaves ends only its own wait.
        return await asyncio.shield(task)


def _failed(task: asyncio.Task[T]) -> bool:
    return task.cancelled() or task.exception() is not None
