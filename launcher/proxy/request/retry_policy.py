"""When a request whose attempt failed is tried again: at once, after a pause, or no more.

Each ready instance has one try a round. A round on which an instance was reached, and gave no response, is repeated
MAX_ROUNDS times; while none can be reached at all the request waits `park_timeout_s` for one to come back.
"""

from __future__ import annotations

from launcher.proxy.balancing.upstreams import Upstream
from launcher.proxy.request.answer import Answer

MAX_ATTEMPTS = 16  # of one request; each instance has one try per round
MAX_ROUNDS = 3  # over instances that gave no response at all
ROUND_PAUSE_S = 0.25  # for the supervisor to see which of them are gone
PARKED_PAUSE_S = 1.0  # the same once they cannot be reached for longer


class FailedAttempts:
    """The failed attempts of one request before its first byte."""

    __slots__ = ("answer", "blamed", "parked_until", "pause_s", "reached", "rounds", "unreached")

    def __init__(self) -> None:
        self.rounds = 0  # every ready instance was tried so often, and one at least was reached
        self.reached = False  # one was, in this round
        self.unreached = 0  # connects that failed
        self.parked_until: float | None = None  # since no instance could be reached
        self.pause_s = 0.0  # of the present back-off
        self.blamed: list[Upstream] = []  # they answered 5xx: at fault if another one succeeds
        self.answer: Answer | None = None  # the last one that could be delivered


class RetryPolicy:
    def __init__(self, park_timeout_s: float) -> None:
        self._park_timeout_s = park_timeout_s

    def next(
        self, failures: FailedAttempts, attempts: int, tried: int, now: float, *, possible: bool
    ) -> float | None:
        """Seconds until the next attempt (0: at once); None: give up. A round that is over is noted in `failures`.

        `attempts` is how many there were, `tried` the instances of this round, `possible` whether one is left.
        """
        if attempts - failures.unreached >= MAX_ATTEMPTS:
            return None
        if possible:
            return 0.0
        if failures.reached:
            if failures.rounds >= MAX_ROUNDS:
                return None
            failures.rounds += 1
            pause_s = ROUND_PAUSE_S
        else:
            if failures.parked_until is None:
                failures.parked_until = now + self._park_timeout_s
            if now >= failures.parked_until:
                return None
            pause_s = PARKED_PAUSE_S if failures.unreached >= MAX_ROUNDS * tried else ROUND_PAUSE_S
        failures.reached = False
        return pause_s
