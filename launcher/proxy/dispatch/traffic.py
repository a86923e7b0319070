"""What one instance has been asked and has not answered yet: its progress, its silence."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from launcher.balancing.upstreams import InstanceId, Upstream
from launcher.proxy.observability.stats import SlotCounters
from launcher.proxy.request.record import Request
from launcher.proxy.upstream.attempt import Attempt
from launcher.proxy.upstream.pool import ConnectionPool
from launcher.proxy.upstream.pulse import Pulse

DEATH_MEMORY_S = 2.0  # from a connection's break to the supervisor's word that the process is gone


class Traffic:
    """An upstream, its connections, and the attempts on it. An instance that is removed and comes again is another one."""

    __slots__ = (
        "_left_lately", "_moved_at", "_reads", "_seen", "attempts", "pool", "probe_fits", "pulse", "silence_told", "sums",
        "upstream",
    )  # fmt: skip

    def __init__(self, upstream: Upstream, pool: ConnectionPool, sums: SlotCounters, now: float) -> None:
        self.upstream = upstream
        self.pool = pool
        self.sums = sums  # of its slot
        self.pulse = Pulse()
        self.attempts: dict[Attempt, Request] = {}
        self._reads = 0  # by attempts that have left
        self._seen = 0  # reads at the last tick
        self._moved_at = now  # when there were more, or nothing was owed
        self.silence_told = False
        self.probe_fits = False  # in this silence, for the supervisor's probe
        self._left_lately: deque[tuple[float, Request]] = deque()  # because their connections broke, and when

    def computing(self) -> Iterator[Attempt]:
        """The attempts for which its model runs. What its API server answers by itself says nothing of its engine."""
        return (attempt for attempt, request in self.attempts.items() if _computes(request))

    def progress(self) -> int:
        """Reads so far; rises while any of its responses moves."""
        return self._reads + sum(attempt.reads for attempt in self.computing())

    def awaited(self) -> int:
        """Attempts that wait for the instance, and not for their clients."""
        return sum(not attempt.held_back for attempt in self.computing())

    def silent_s(self, now: float) -> float:
        """How long nothing has come of any of its requests, streamed or not. Called at each tick."""
        reads = self.progress()
        if reads != self._seen or all(attempt.held_back for attempt in self.computing()):
            self._seen, self._moved_at = reads, now
            self.silence_told = self.probe_fits = False
        return now - self._moved_at

    def excuse(self, seconds: float, now: float) -> None:
        """It could not be read for so long: that was not its silence."""
        self._moved_at = min(now, self._moved_at + seconds)
        self.pulse.excuse(seconds)

    def longest_wait_s(self, now: float) -> float:
        """How long the most silent of its requests has been so."""
        waits = (now - attempt.moved_at for attempt in self.computing() if not attempt.held_back)
        return max(waits, default=0.0)

    def has_room(self) -> bool:
        """Whether its engine would start one more request at once."""
        return self.upstream.in_flight < self.upstream.max_num_seqs

    def largest_prompt(self) -> int:
        """Tokens of the longest prompt on it."""
        tickets = (request.ticket for request in self.attempts.values())
        return max((ticket.demand.prompt_tokens for ticket in tickets if ticket is not None), default=0)

    def moved_at(self) -> float | None:
        """When the last of its streams moved; None while none flows."""
        flowing = (a.moved_at for a in self.computing() if a.delivering and not a.held_back)
        return max(flowing, default=None)

    def leave(self, attempt: Attempt) -> None:
        request = self.attempts.pop(attempt, None)
        if request is not None and _computes(request):
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


def _computes(request: Request) -> bool:
    return request.ticket is None or request.ticket.demand.takes_place


def hung(traffic: Iterable[Traffic], now: float, timeout_s: float) -> list[Traffic]:
    """Instances none of whose streams moved for the time set, while some other's did. Their engines may work."""
    moved = {each: at for each in traffic if (at := each.moved_at()) is not None}
    if len(moved) < 2 or now - max(moved.values()) >= timeout_s / 2:
        return []
    return [each for each, at in moved.items() if now - at > timeout_s]


# --- How long each slot had a ready instance, and how long that one had work: sums over all its generations.


class Occupied(NamedTuple):
    """Seconds of one slot since the proxy's start."""

    ready_s: float  # its instance could be asked, or was being drained
    busy_s: float  # of these, at least one request was on it


class _Stopwatch:
    """Seconds per slot. It runs for an instance from `start` to `stop`; a repeated call of either changes nothing."""

    def __init__(self) -> None:
        self._sums: dict[int, float] = {}
        self._since: dict[InstanceId, float] = {}

    def start(self, key: InstanceId, now: float) -> None:
        self._since.setdefault(key, now)

    def stop(self, key: InstanceId, now: float) -> None:
        since = self._since.pop(key, None)
        if since is not None:
            self._sums[key[0]] = self._sums.get(key[0], 0.0) + now - since

    def read(self, now: float) -> dict[int, float]:
        sums = dict(self._sums)
        for (slot, _), since in self._since.items():
            sums[slot] = sums.get(slot, 0.0) + now - since
        return sums


class Occupancy:
    """Told of an instance's first and last request at a time, never of a token. `now`: the event loop's time."""

    def __init__(self) -> None:
        self._ready = _Stopwatch()
        self._busy = _Stopwatch()

    def added(self, key: InstanceId, now: float) -> None:
        self._ready.start(key, now)

    def removed(self, key: InstanceId, now: float) -> None:
        """The instance is gone, with whatever was on it."""
        self._ready.stop(key, now)
        self._busy.stop(key, now)

    def busy(self, key: InstanceId, now: float) -> None:
        """Its first request came."""
        self._busy.start(key, now)

    def idle(self, key: InstanceId, now: float) -> None:
        """Its last request left."""
        self._busy.stop(key, now)

    def read(self, now: float) -> dict[int, Occupied]:
        """By slot; neither sum ever falls."""
        busy = self._busy.read(now)
        return {
            slot: Occupied(ready_s, busy.get(slot, 0.0)) for slot, ready_s in self._ready.read(now).items()
        }
