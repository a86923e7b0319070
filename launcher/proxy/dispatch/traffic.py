"""What one instance has been asked and has not answered yet: its progress, its silence."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from launcher.proxy.balancing.upstreams import Upstream
from launcher.proxy.observability.counters import SlotCounters
from launcher.proxy.request.record import Request
from launcher.proxy.upstream.attempt import Attempt
from launcher.proxy.upstream.pool import ConnectionPool

DEATH_MEMORY_S = 2.0  # from a connection's break to the supervisor's word that the process is gone


class Traffic:
    """An upstream, its connections, and the attempts on it. An instance that is removed and comes again is another one."""

    __slots__ = (
        "_left_lately", "_moved_at", "_reads", "_seen", "attempts", "pool", "probe_fits", "silence_told", "sums", "upstream"
    )  # fmt: skip

    def __init__(self, upstream: Upstream, pool: ConnectionPool, sums: SlotCounters, now: float) -> None:
        self.upstream = upstream
        self.pool = pool
        self.sums = sums  # of its slot
        self.attempts: dict[Attempt, Request] = {}
        self._reads = 0  # by attempts that have left
        self._seen = 0  # reads at the last tick
        self._moved_at = now  # when there were more, or nothing was owed
        self.silence_told = False
        self.probe_fits = False  # in this silence, for the supervisor's probe
        self._left_lately: deque[tuple[float, Request]] = deque()  # because their connections broke, and when

    def progress(self) -> int:
        """Reads so far; rises while any of its responses moves."""
        return self._reads + sum(attempt.reads for attempt in self.attempts)

    def awaited(self) -> int:
        """Attempts that wait for the instance, and not for their clients."""
        return sum(not attempt.held_back for attempt in self.attempts)

    def silent_s(self, now: float) -> float:
        """How long nothing has come of any of its requests, streamed or not. Called at each tick."""
        reads = self.progress()
        if reads != self._seen or all(attempt.held_back for attempt in self.attempts):
            self._seen, self._moved_at = reads, now
            self.silence_told = self.probe_fits = False
        return now - self._moved_at

    def largest_prompt(self) -> int:
        """Tokens of the longest prompt on it."""
        tickets = (request.ticket for request in self.attempts.values())
        return max((ticket.demand.prompt_tokens for ticket in tickets if ticket is not None), default=0)

    def moved_at(self) -> float | None:
        """When the last of its streams moved; None while none flows."""
        flowing = (a.moved_at for a in self.attempts if a.delivering and not a.held_back)
        return max(flowing, default=None)

    def leave(self, attempt: Attempt) -> None:
        if self.attempts.pop(attempt, None) is not None:
            self._reads += attempt.reads

    def note_break(self, request: Request, now: float) -> None:
        """Its connection broke under a request: the instance may have died."""
        self._left_lately.append((now, request))

    def forget(self, now: float) -> None:
        """Breaks that are too old for this instance's death."""
        while self._left_lately and now - self._left_lately[0][0] > DEATH_MEMORY_S:
            self._left_lately.popleft()

    def died_under(self) -> set[Request]:
        """The requests under which it broke lately."""
        return {request for _, request in self._left_lately}

    def told_silent(self, *, probe_fits: bool) -> None:
        """The supervisor knows of this silence."""
        self.silence_told, self.probe_fits = True, probe_fits


def hung(traffic: Iterable[Traffic], now: float, timeout_s: float) -> list[Traffic]:
    """Instances none of whose streams moved for the time set, while some other's did."""
    moved = {each: at for each in traffic if (at := each.moved_at()) is not None}
    if len(moved) < 2 or now - max(moved.values()) >= timeout_s / 2:
        return []
    return [each for each, at in moved.items() if now - at > timeout_s]
