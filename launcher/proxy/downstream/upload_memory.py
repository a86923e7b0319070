"""Memory for the request bodies that are being received, over all clients: bounded, without deadlock.

A body takes memory in steps, before it is read. The first FREE_BYTES of each are not counted. A step comes from the
pool (the total less `largest`) unless an earlier body waits. When the pool is used up, bodies wait unread, and one at
a time, the earliest, takes what it needs from the reserve of `largest` bytes. The reserve holds any body, so that one
never waits again: it completes or is refused, and its memory goes to the next. So one body can always proceed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FREE_BYTES = 65536  # of each body; most requests are smaller
STEP_BYTES = 1 << 20
MAX_WAITING = 256  # each holds what was read with its head, 256 KiB at most


class UploadMemory:
    def __init__(self, total: int, largest: int) -> None:
        """`total` bytes, of which `largest`, the size of the largest body, are the reserve."""
        self._pool = max(0, total - largest)
        self._pooled = 0  # taken from the pool
        self._waiting: dict[Share, None] = {}
        self._favoured: Share | None = None
        self._number = 0
        self.used = 0  # bytes
        self.refused = 0  # bodies

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def share(self, on_granted: Callable[[], None]) -> Share:
        """A body's share; `on_granted` is called when it has waited and may be read again."""
        self._number += 1
        return Share(self._number, on_granted)

    def ask(self, share: Share) -> bool:
        """Take one step. False: wait for `on_granted`."""
        if not self._may_go_on(share):
            self._waiting[share] = None
            return False
        self._grant(share)
        return True

    def _may_go_on(self, share: Share) -> bool:
        if share is self._favoured:
            return True
        if any(other.number < share.number for other in self._waiting):
            return False
        if self._pooled + STEP_BYTES <= self._pool:
            return True
        if self._favoured is None:
            self._favoured = share
            return True
        return False

    def _grant(self, share: Share) -> None:
        share.granted += STEP_BYTES
        self.used += STEP_BYTES
        if share is not self._favoured:
            share.pooled += STEP_BYTES
            self._pooled += STEP_BYTES

    def give_back(self, share: Share) -> None:
        """Free it; bodies that wait take it. A second call does nothing."""
        self._waiting.pop(share, None)
        self.used -= share.granted
        self._pooled -= share.pooled
        share.granted = share.pooled = 0
        if share is self._favoured:
            self._favoured = None
        while self._waiting:
            first = min(self._waiting, key=lambda waiting: waiting.number)
            if not self._may_go_on(first):
                break
            del self._waiting[first]
            self._grant(first)
            first.on_granted()


@dataclass(slots=True, eq=False)
class Share:
    """One body's memory, in bytes."""

    number: int  # in order of arrival
    on_granted: Callable[[], None]  # called when it has waited and may be read again
    granted: int = 0
    pooled: int = 0  # of `granted`, from the pool
