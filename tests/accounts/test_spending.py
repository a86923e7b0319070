"""Sums of days, where clocks change, too."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

from launcher.accounts.spending import Spending, Spent

BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str) -> float:
    return dt.datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp()


def test_days_of_23_and_25_hours() -> None:
    spending = Spending(BERLIN)
    for month, day in (("03", 29), ("10", 25)):
        begin, end = (int(at(f"2026-{month}-{n}T00:00")) for n in (day, day + 1))
        assert end - begin in {23 * 3600, 25 * 3600}
        for instant in range(begin, end, 1800):
            spending.add("a", instant, 1, 2)
        halves = (end - begin) // 1800
        assert spending.of("a", begin, end) == Spent(halves, 2 * halves)
        spending.add("a", begin - 1, 100, 0)
        spending.add("a", end, 100, 0)
        assert spending.of("a", begin, end).tokens == halves


def test_days_are_bounded_by_their_number() -> None:
    """Not by the clock: a wrong one would forget a month."""
    spending = Spending(BERLIN)
    spending.add("a", at("2026-01-01T12:00"), 1, 0)
    spending.add("a", at("2029-01-01T12:00"), 1, 0)
    assert spending.of("a", 0, 1 << 40).tokens == 2
    for day in range(1000):
        spending.add("a", at("2026-02-01T12:00") + day * 86_400, 1, 0)
    assert spending.of("a", 0, 1 << 40).tokens == 128
    assert len(list(spending.rows())) == 128


def test_clocks_that_are_set_back() -> None:
    spending = Spending(BERLIN)
    spending.add("a", at("2026-05-02T01:00"), 1, 0)
    spending.add("a", at("2026-05-01T23:00"), 10, 0)
    spending.add("a", at("2026-05-02T02:00"), 100, 0)
    midnights = [int(at(f"2026-05-0{n}T00:00")) for n in (1, 2, 3)]
    assert spending.of("a", *midnights[:2]).tokens == 10
    assert spending.of("a", *midnights[1:]).tokens == 101
