"""The latest requests, for whoever asks what became of one: all for a short time, failed and late ones for longer."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Final

from launcher.proxy.request.actions import Outcome
from launcher.proxy.request.record import Request
from launcher.timeline import Ended
from launcher.usage.entry import Entry

# About 5 MiB in all: 0.7 KiB each, an unusual one 2 KiB.
RECENT: Final = 4096
UNUSUAL: Final = 1024  # failed, retried, continued, or sent to an overflow endpoint
LATE: Final = 128  # those that waited longest, in each half-hour; two half-hours are kept
LATE_S: Final = 1800.0

_Late = tuple[float, int, Ended]  # seconds waited, a number, the request


def so_far(request: Request, entry: Entry) -> Ended:
    """What is known of a request."""
    admitted, trace = request.admitted, request.trace
    return Ended(
        entry,
        request.reason,
        request.generation,
        None if admitted is None else admitted - request.started,
        request.steps,
        None if trace is None or not trace.sampled else trace,
    )


class Timelines:
    """A bounded number of ended requests. One event loop, no other owner."""

    def __init__(self) -> None:
        self._recent: deque[Ended] = deque(maxlen=RECENT)
        self._unusual: deque[Ended] = deque(maxlen=UNUSUAL)
        self._late: list[_Late] = []  # a heap, the shortest wait first
        self._late_before: list[_Late] = []  # of the half-hour before
        self._late_from_s = 0.0  # a shorter wait is not among the longest
        self._late_until = 0.0  # loop time at which the half-hour ends
        self._number = 0

    def keep(self, request: Request, entry: Entry, now: float) -> Ended:
        """A request has ended. `now`: loop time."""
        ended = so_far(request, entry)
        self._recent.append(ended)
        if request.steps is not None or request.outcome is Outcome.FAILED:
            self._unusual.append(ended)
        # What its client waited for: a stream's first token, and before any other response the queue.
        waited_until = request.first_byte if request.tracker is not None else request.bound
        if waited_until is not None:
            waited_s = waited_until - request.started
            if waited_s > self._late_from_s or now >= self._late_until:
                self._keep_late(waited_s, ended, now)
        return ended

    def _keep_late(self, waited_s: float, ended: Ended, now: float) -> None:
        if now >= self._late_until:
            self._late_before = self._late if now < self._late_until + LATE_S else []
            self._late, self._late_from_s, self._late_until = [], 0.0, now + LATE_S
        self._number += 1
        heapq.heappush(self._late, (waited_s, self._number, ended))
        if len(self._late) > LATE:
            heapq.heappop(self._late)
            self._late_from_s = self._late[0][0]

    def find(self, request_id: str) -> list[Ended]:
        """Every ended request with this id, the latest first."""
        found = {id(ended): ended for ended in self._all() if ended.entry.request_id == request_id}
        return sorted(found.values(), key=lambda ended: ended.entry.ended_at, reverse=True)

    def _all(self) -> Iterator[Ended]:
        yield from self._recent
        yield from self._unusual
        for _, _, ended in self._late:
            yield ended
        for _, _, ended in self._late_before:
            yield ended

    @property
    def complete_since(self) -> float | None:
        """Unix time of the earliest end from which on every request is kept; None: none is missing."""
        return self._recent[0].entry.ended_at if len(self._recent) == RECENT else None

    def __len__(self) -> int:
        """Requests that are kept for a short time."""
        return len(self._recent)
