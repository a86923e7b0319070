"""The lines that an instance prints: how many are taken, and the last ones, kept for `logs`, diagnosis and followers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Final, Generic, TypeVar

from msgspec import Struct

# Lines of one instance that are taken at once, after a calm time: a start with tracebacks prints fewer.
BURST_LINES: Final = 5000
# Lines a second that are taken in the long run; each costs about 30 us of CPU.
LINES_PER_S: Final = 500.0
# Of the lines beyond, the last ones are held until there is room: the diagnosis of an exit reads as many.
HELD_LINES: Final = 400
# A follower that falls this many lines behind loses the oldest ones.
FOLLOWER_LINES: Final = 1000
T = TypeVar("T")


class LogLine(Struct, frozen=True):
    time: float
    """Seconds since the epoch."""
    generation: int
    text: str


def left_out_text(count: int) -> str:
    """The line in the place of so many."""
    return f"numa-launcher: {count} lines were left out here: more than {LINES_PER_S:.0f} a second"


class LineLimit(Generic[T]):
    """How many lines of one instance are taken: a token bucket. Of those beyond, the last ones are taken later, all others
    are left out. Pure: `now` in seconds."""

    def __init__(self, now: float) -> None:
        self._free = float(BURST_LINES)
        self._at = now
        self._held: deque[T] = deque(maxlen=HELD_LINES)
        self._left_out = 0

    @property
    def holding(self) -> bool:
        """Lines are held: `take` wants to be called again soon, also without new ones."""
        return bool(self._held)

    def take(self, lines: Sequence[T], now: float) -> tuple[int, Sequence[T]]:
        """Lines to take now, oldest first, and the number of those left out before them."""
        self._free = min(BURST_LINES, self._free + (now - self._at) * LINES_PER_S)
        self._at = now
        if self._held:
            self._hold(lines)
            return self.rest() if self._free >= HELD_LINES else (0, ())
        room = int(self._free)
        taken = lines[:room]
        self._free -= len(taken)
        self._hold(lines[room:])
        return 0, taken

    def rest(self) -> tuple[int, Sequence[T]]:
        """All lines that are held, and the number of those left out before them."""
        left_out, taken = self._left_out, tuple(self._held)
        self._held.clear()
        self._free, self._left_out = max(0.0, self._free - len(taken)), 0
        return left_out, taken

    def _hold(self, lines: Sequence[T]) -> None:
        self._left_out += max(0, len(self._held) + len(lines) - HELD_LINES)
        self._held.extend(lines)


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

    async def follow(self, count: int = 0) -> AsyncGenerator[LogLine, None]:
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
