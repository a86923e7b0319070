"""The most that something may cost a day, held by reserving each request's upper bound before it is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from launcher.base.clock import Moment, Period


class Day(NamedTuple):
    """From midnight to midnight, in Unix seconds."""

    begins: int
    ends: int


class SpentRecord(Protocol):
    """Keeps an amount across a crash."""

    def store(self, begin: int, amount: int) -> None:
        """`begin`: of the period that it was spent in, Unix seconds. Never raises."""


class DailyCap:
    """What one endpoint has cost today, and what requests under way may still cost; amounts in picos.

    A request counts on the day on which it ends (base.clock: also when the clock was set). So settled + reserved never
    exceeds the cap, unless a request cost more than was reserved for it: then by no more than the excess of the requests
    that were under way.
    """

    def __init__(
        self,
        cap: int,
        day_of: Callable[[float], Day],
        now: Moment,
        *,
        spent: int | None = 0,
        record: SpentRecord | None = None,
        currency: str = "USD",
    ) -> None:
        """`day_of` gives the day around a Unix time. `spent`: before a restart, on this day; None: it is not known, so
        nothing is admitted before the next day."""
        self.cap = cap
        self.currency = currency
        self.reserved = 0
        self.known = spent is not None
        self._guessed = False
        self.reached = False
        """A request of today was refused."""
        self._dated = spent or 0  # by requests that ended on this day
        self._carried = 0  # since the begin of the day before the clock was set, while that counts
        self._since = 0  # since `reading`
        self._day = Period(day_of, now)
        self._record = record
        if self.known:
            self._store()

    @property
    def settled(self) -> int:
        return max(self._dated, self._carried)

    @property
    def begins(self) -> int:
        return self._day.begin

    @property
    def ends(self) -> int:
        """When the day ends."""
        return self._day.end

    def start(self, spent: int, *, guessed: bool = False) -> None:
        """Begin with the cost of requests before a restart, on this day; `guessed`: until `learn` says it."""
        self._dated += spent
        self.known, self._guessed = True, guessed
        self._store()

    def next_day(self, now: Moment) -> bool:
        """Begin another day where it is time to; True: what was spent before does not count any longer. After the clock was
        set, none begins before `learn`."""
        return self._day.is_due(now) and self._move(now, 0)

    def reading(self) -> None:
        """The ledger is about to be read, with all that was settled before this call."""
        self._since = 0

    def learn(self, spent: int, now: Moment) -> None:
        """What the ledger says of the day around `now`: where that was not known, and after the clock was set."""
        if self.known and not self._guessed and now.steps == self._day.steps:
            return
        self.known, self._guessed = True, False
        self._move(now, spent + self._since)

    def _move(self, now: Moment, spent: int) -> bool:
        begin, carries, settled = self._day.begin, self._day.carries, self.settled
        fresh = self._day.move(now)
        if fresh:
            self._carried = 0
            self.known = True
            self.reached = False
        elif self._day.carries and not carries:
            self._carried = settled
        self._dated = max(spent, self._dated) if begin == self._day.begin and not fresh else spent
        self._store()
        return fresh

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
        self._dated += amount
        self._since += amount
        if self._day.carries:
            self._carried += amount
        self._store()

    def _store(self) -> None:
        """With what is reserved: what becomes of requests that a crash ends is not known."""
        if self._record is not None:
            self._record.store(self._day.begin, self.settled + self.reserved)
