"""When a request whose attempt failed is tried again: at once, after a pause, or no more.

Each ready instance has one try a round. A round on which an instance was reached, and gave no response, is repeated
MAX_ROUNDS times; while none can be reached at all the request waits `park_timeout_s` for one to come back.

A request that MAX_FAILED attempts could not answer, on instances that live on, may be at fault itself: it gets no more.
All attempts together have MAX_TIMES the time of one to begin with a response.
"""

from __future__ import annotations

from launcher.balancing.upstreams import Upstream
from launcher.proxy.request.ports import Answer

MAX_ATTEMPTS = 16  # of one request; each instance has one try per round
MAX_FAILED = 5  # of them, without a response below 500 and on instances that are not gone
MAX_TIMES = 3  # the time-out of one attempt
MAX_ROUNDS = 3  # over instances that gave no response at all
ROUND_PAUSE_S = 0.25  # for the supervisor to see which of them are gone
PARKED_PAUSE_S = 1.0  # the same once they cannot be reached for longer


class FailedAttempts:
    """The failed attempts of one request before its first byte, or before that of a continuation."""

    __slots__ = (
        "answer", "blamed", "parked_until", "pause_s", "queued_s", "queued_since", "reached", "rounds", "unreached",
        "waited_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.rounds = 0  # every ready instance was tried so often, and one at least was reached
        self.reached = False  # one was, in this round
        self.unreached = 0  # connects that failed
        self.parked_until: float | None = None  # since no instance could be reached
        self.pause_s = 0.0  # of the present back-off
        # They answered 5xx, or gave no response: at fault if another one succeeds.
        self.blamed: list[Upstream] = []
        self.answer: Answer | None = None  # the last one that could be delivered
        self.waited_s = 0.0  # on instances, for the first byte
        self.queued_s = 0.0  # in the queue, since the first attempt
        self.queued_since: float | None = None

    @property
    def living(self) -> list[Upstream]:
        """Those of `blamed` that are not gone: an instance that was stopped broke the connection for that."""
        return [upstream for upstream in self.blamed if upstream.gone is None]

    def left_s(self, timeout_s: float) -> float:
        """What the next attempt has of the time-out of one."""
        return min(timeout_s, MAX_TIMES * timeout_s - self.waited_s)

    def note_bound(self, now: float) -> None:
        """It waits in the queue no more."""
        if self.queued_since is not None:
            self.queued_s += now - self.queued_since
            self.queued_since = None

    def excuse(self, seconds: float) -> None:
        """The event loop did not run for so long: no wait counts that time."""
        if self.parked_until is not None:
            self.parked_until += seconds
        if self.queued_since is not None:
            self.queued_since += seconds

    def why_given_up(self, timeout_s: float, reason: str) -> str:
        """The last failure's reason, and what else is known."""
        living = self.living
        if len(living) >= MAX_FAILED:
            count = len({upstream.key for upstream in living})
            where = "1 instance" if count == 1 else f"{count} instances"
            return f"{reason}; the request itself may be the cause: {len(living)} attempts on {where} failed"
        if timeout_s > 0 and self.left_s(timeout_s) <= 0:
            return f"{reason}; all attempts together took {self.waited_s:.0f} s"
        return reason


class RetryPolicy:
    def __init__(self, park_timeout_s: float) -> None:
        self._park_timeout_s = park_timeout_s

    def next(
        self,
        failures: FailedAttempts,
        attempts: int,
        tried: int,
        now: float,
        *,
        timeout_s: float,
        possible: bool,
    ) -> float | None:
        """Seconds until the next attempt (0: at once); None: give up. A round that is over is noted in `failures`.

        `attempts` is how many there were, `tried` the instances of this round, `possible` whether one is left.
        `timeout_s`: of one attempt, to its first byte; 0: none.
        """
        if attempts - failures.unreached >= MAX_ATTEMPTS or len(failures.living) >= MAX_FAILED:
            return None
        if timeout_s > 0 and failures.left_s(timeout_s) <= 0:
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
