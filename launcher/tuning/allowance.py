"""The visits that a search may still make, within its own bound and the budget of time. Pure."""

from __future__ import annotations

import math
from typing import Final

from launcher.tuning.model import Settings
from launcher.tuning.record import LEAST_REPEATS, MOST_REPEATS, Record

# Half of five visits for every layout.
VISITS_PER_LAYOUT: Final = 2.5
# With fewer pairs Student's t, and so the interval, is twice as wide.
LEAST_PAIRS: Final = 4
# For visits that fail or that another job disturbs, in the confirmation.
SPARE: Final = 2
RESERVED: Final = 2 * LEAST_PAIRS + SPARE


class Allowance:
    """The visits of a search. What the confirmation needs is reserved for it."""

    def __init__(self, settings: Settings, record: Record) -> None:
        self._settings = settings
        self._record = record
        self._visits = 0
        self._refining = 0
        self._reserved: int | None = None
        self._most_repeats = MOST_REPEATS

    def for_race(self, layouts: int) -> None:
        """Race and confirmation. With fewer than 8 layouts the confirmation alone needs more than half of five each."""
        self._visits = max(math.floor(VISITS_PER_LAYOUT * layouts), layouts + SPARE + RESERVED)

    def for_refining(self, most: int) -> None:
        """Later, at most."""
        self._refining = math.floor(VISITS_PER_LAYOUT * most)

    def refining(self, layouts: int) -> None:
        """Now."""
        self._visits += math.floor(VISITS_PER_LAYOUT * layouts)
        self._refining = 0

    def extend(self, visits: int) -> None:
        """At least as many as that from now on. Failed starts may have taken those of a small field."""
        self._visits = max(self._visits, len(self._record) + visits)

    def reserve(self, visits: int) -> None:
        """For pairs after this one."""
        self._reserved = visits

    @property
    def to_come(self) -> int:
        """The most visits of all stages."""
        return self._within_budget(self._visits + self._refining)

    @property
    def left(self) -> int:
        """The most visits of this stage and the confirmation."""
        return self._within_budget(self._visits)

    @property
    def to_spend(self) -> int:
        """The most visits of this stage. Of a short budget the confirmation gets half."""
        if self._reserved is not None:
            return self.left - self._reserved
        budget_s = self._settings.budget_s
        whole = self._visits if budget_s is None else math.floor(budget_s / self.visit_s)
        return self.left - min(RESERVED, whole // 2)

    def _within_budget(self, visits: int) -> int:
        left = visits - len(self._record)
        if self._settings.budget_s is not None:
            left_s = self._settings.budget_s - self._record.used_s()
            left = min(left, math.floor(left_s / self.visit_s))
        return max(0, left)

    @property
    def repeats(self) -> int:
        """Measurements of the next visit."""
        best = self._record.repeats()
        return best if self._settings.repeats is not None else min(best, self._most_repeats)

    @property
    def visit_s(self) -> float:
        """Seconds of the next visit."""
        return self._record.visit_s(self.repeats)

    def spread(self, visits: int) -> None:
        """Fewer repeats, if with more the budget covers neither these visits nor the confirmation."""
        self._most_repeats = MOST_REPEATS
        if self._settings.budget_s is not None:
            while self._most_repeats > LEAST_REPEATS and self.to_spend < visits:
                self._most_repeats -= 1
