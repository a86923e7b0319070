"""The last lines of an instance, kept for `logs`, diagnosis and followers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

# A follower that falls this many lines behind loses the oldest ones.
FOLLOWER_LINES: Final = 1000


@dataclass(frozen=True, slots=True)
class LogLine:
    time: float
    """Seconds since the epoch."""
    generation: int
    text: str


class LogTail:
    def __init__(self, lines: int) -> None:
        self._lines: deque[LogLine] = deque(maxlen=lines)
        self._followers: set[asyncio.Queue[LogLine]] = set()

    def add(self, line: LogLine) -> None:
        self._lines.append(line)
        for queue in self._followers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(line)

    def last(self, count: int, generation: int | None = None) -> list[LogLine]:
        """The last `count` lines, oldest first; of one generation where `generation` is given."""
        lines = [line for line in self._lines if generation is None or line.generation == generation]
        return lines[-count:] if count > 0 else []

    async def follow(self, count: int = 0) -> AsyncIterator[LogLine]:
        """The last `count` lines, then new ones, until the caller closes the iterator."""
        queue: asyncio.Queue[LogLine] = asyncio.Queue(FOLLOWER_LINES)
        self._followers.add(queue)
        try:
            for line in self.last(count):  # a snapshot of the moment when the queue began
                yield line
            while True:
                yield await queue.get()
        finally:
            self._followers.discard(queue)
