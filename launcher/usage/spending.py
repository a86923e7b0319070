"""What each key spent on each day, so that the sum of any current period is known without reading the ledger again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from launcher.usage.spans import day_begin

DAY_S: Final = 86400
KEPT_S: Final = 40 * DAY_S
"""Longer than a month and the week that began before it."""


class Spent(NamedTuple):
    tokens: int  # prompt and output
    picos: int

    def plus(self, other: Spent) -> Spent:
        return Spent(self.tokens + other.tokens, self.picos + other.picos)

    def minus(self, other: Spent) -> Spent:
        return Spent(self.tokens - other.tokens, self.picos - other.picos)


NOTHING: Final = Spent(0, 0)


class Spending:
    """Sums by the name of a key and the midnight of a day, Unix seconds."""

    def __init__(self, zone: ZoneInfo) -> None:
        self._zone = zone
        self._days: dict[str, dict[int, Spent]] = {}
        # The day of the last amount: nearly every one is of the same.
        self._day = 0
        self._next_day = 0

    def add(self, name: str, at: float, tokens: int, picos: int) -> None:
        if not self._day <= at < self._next_day:
            self._day = day_begin(at, self._zone)
            # From noon of the next day: a day may have 25 hours.
            self._next_day = day_begin(self._day + DAY_S * 3 // 2, self._zone)
            self._forget(self._day - KEPT_S)
        days = self._days.get(name)
        if days is None:
            days = self._days[name] = {}
        before = days.get(self._day, NOTHING)
        days[self._day] = Spent(before[0] + tokens, before[1] + picos)

    def add_all(self, rows: Iterable[tuple[str, float, int, int]]) -> None:
        """Rows of name, Unix time, tokens, picos."""
        for row in rows:
            self.add(*row)

    def rows(self) -> Iterator[tuple[str, float, int, int]]:
        """As `add_all` takes them."""
        for name, days in self._days.items():
            for day, spent in days.items():
                yield name, day, *spent

    def of(self, name: str, begin: int, end: int) -> Spent:
        """The sum of a key's days that began in [begin, end)."""
        total = NOTHING
        for day, spent in self._days.get(name, {}).items():
            if begin <= day < end:
                total = total.plus(spent)
        return total

    def _forget(self, before: int) -> None:
        for name, days in list(self._days.items()):
            kept = {day: spent for day, spent in days.items() if day >= before}
            if kept:
                self._days[name] = kept
            else:
                del self._days[name]
