"""Who may get requests at all, and how many: ejection, half-open return, slow start, stragglers."""

from __future__ import annotations

from launcher.proxy.balancing.demand import Ticket
from launcher.proxy.balancing.estimators import Mean

STRAGGLER = 1.5  # so many times slower than its siblings' median is no noise of one machine
RECOVERED = 1.2  # and is one of them again below this
ENOUGH = 20  # first tokens seen before an instance is judged


class OutlierDetection:
    """One instance's standing."""

    __slots__ = ("ejected_until", "failures", "half_open", "ready_since", "slowness", "straggler", "trying")

    def __init__(self) -> None:
        self.ready_since: float | None = None  # None: its share is full from the start
        self.failures = 0  # in a row
        self.ejected_until: float | None = None
        self.half_open = False  # one request tries it
        self.trying: Ticket | None = None  # and is on it
        self.slowness = Mean(1.0, 50)  # time to first token, seen over expected from its siblings' speeds
        self.straggler = False

    def admits(self, now: float) -> bool:
        """Whether it may get a request now."""
        if self.ejected_until is not None:
            if now < self.ejected_until:
                return False
            self.ejected_until = None
            self.half_open = True
            self.trying = None
        return not (self.half_open and self.trying is not None)

    def bound(self, ticket: Ticket) -> None:
        """A request starts on it; if it is half open, to try it."""
        if self.half_open:
            self.trying = ticket

    def left(self, ticket: Ticket) -> None:
        """A request has left it: if it was the one that tries it, another may."""
        if self.trying is ticket:
            self.trying = None

    def eject(self, until: float) -> None:
        """No requests until then; after it one request tries it."""
        self.ejected_until = until
        self.half_open = False

    def spoke(self) -> None:
        """It answers: in full rotation again, but what failed before still counts."""
        self.half_open = False

    def succeeded(self) -> None:
        """It gave a whole answer: all is forgiven."""
        self.failures = 0
        self.half_open = False

    def failed(self, now: float, limit: int, pause_s: float) -> bool:
        """A request failed through its fault. True when this ejects it: `limit` in a row, or the one that tried."""
        self.failures += 1
        if self.failures < limit and not self.half_open:
            return False
        self.eject(now + pause_s)
        return True

    def share(self, now: float, slow_start_s: float) -> float:
        """Part of its full share that a fresh one gets: from a tenth to 1.0 over `slow_start_s`."""
        if self.ready_since is None:
            return 1.0
        age = now - self.ready_since
        if age >= slow_start_s:
            self.ready_since = None
            return 1.0
        return max(0.1, age / slow_start_s)

    def judge(self, median: float) -> bool:
        """Compare with the median slowness of its siblings; True when the verdict has changed."""
        ratio = self.slowness.value / median if median > 0.0 else 1.0
        lags = ratio >= RECOVERED if self.straggler else self.slowness.count >= ENOUGH and ratio > STRAGGLER
        changed = lags is not self.straggler
        self.straggler = lags
        return changed
