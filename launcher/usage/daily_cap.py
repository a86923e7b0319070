"""The most that something may cost a day, held by reserving each request's upper bound before it is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol


class Day(NamedTuple):
    """From midnight to midnight, in Unix seconds."""

    begins: float
    ends: float


class SpentRecord(Protocol):
    """Keeps an amount across a crash."""

    def store(self, begin: int, amount: int) -> None:
        """`begin`: of the period that it was spent in, Unix seconds. Never raises."""


class DailyCap:
    """What one endpoint has cost today, and what requests under way may still cost; amounts in picos.

    A request counts on the day on which it ends. So settled + reserved never exceeds the cap, unless a request cost more
    than was reserved for it: then by no more than the excess of the requests that were under way.
    """

    def __init__(
        self,
        cap: int,
        day_of: Callable[[float], Day],
        now: float,
        *,
        spent: int | None = 0,
        record: SpentRecord | None = None,
        currency: str = "USD",
    ) -> None:
        """`day_of` gives the day around a Unix time. `spent`: before a restart, on this day; None: it is not known, so
        nothing is admitted before the next day."""
        self.cap = cap
        self.currency = currency
        self.settled = spent or 0
        self.reserved = 0
        self.known = spent is not None
        self.reached = False
        """A request of today was refused."""
        self._day_of = day_of
        self._day = day_of(now)
        self._record = record
        if self.known:
            self._store()

    @property
    def ends(self) -> float:
        """When the day ends."""
        return self._day.ends

    def next_day(self, now: float) -> bool:
        """Begin another day where it is time to; True: one began. A clock that is set back begins none."""
        if now < self._day.ends:
            return False
        self._day = self._day_of(now)
        self.settled = 0
        self.known = True
        self.reached = False
        self._store()
        return True

    def learn(self, spent: int) -> None:
        """What it has cost today before the daemon's start, where that was not known."""
        if not self.known:
            self.known = True
            self.settled += spent
            self._store()

    def admits(self, amount: int) -> bool:
        """Whether a request that costs so much at most may be sent now."""
        return self.known and self.settled + self.reserved + amount <= self.cap

    def refuse(self) -> bool:
        """A request was refused; True: the first one of the day."""
        first, self.reached = not self.reached, True
        return first

    def reserve(self, amount: int) -> None:
        self.reserved += amount
        self._store()

    def settle(self, reserved: int, amount: int) -> None:
        """A request for which `reserved` was reserved has ended, and cost `amount`."""
        self.reserved -= reserved
        self.settled += amount
        self._store()

    def _store(self) -> None:
        """With what is reserved: what becomes of requests that a crash ends is not known."""
        if self._record is not None:
            self._record.store(int(self._day.begins), self.settled + self.reserved)
