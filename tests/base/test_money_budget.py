"""Budgets in writing, and their periods."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.money import Budget, Period, parse_budget, picos

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("20M-tokens/month", Budget(20_000_000, "tokens", Period.MONTH)),
        ("1.5k-tokens/day", Budget(1_500, "tokens", Period.DAY)),
        ("50-usd/week", Budget(picos(50), "usd", Period.WEEK)),
        ("0.01-eur/day", Budget(picos("0.01"), "eur", Period.DAY)),
    ],
)
def test_forms(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget
    assert budget.is_money == (budget.unit != "tokens")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "20M",
        "20M-tokens",
        "20-tokens/year",
        "0-tokens/day",
        "1.5-tokens/day",
        "-5-usd/day",
        "5-USD/day",
        "9999999G-usd/day",
    ],
)
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(ValueError, match=r"budget|token|decimals"):
        parse_budget(text)


@pytest.mark.parametrize(
    ("period", "first", "end"),
    [
        (Period.DAY, "2026-03-29T00:00+01:00", "2026-03-30T00:00+02:00"),  # 23 hours
        (Period.WEEK, "2026-03-23T00:00+01:00", "2026-03-30T00:00+02:00"),
        (Period.MONTH, "2026-03-01T00:00+01:00", "2026-04-01T00:00+02:00"),
    ],
)
def test_bounds_are_midnights_of_the_zone(period: Period, first: str, end: str) -> None:
    now = dt.datetime(2026, 3, 29, 12, 0, tzinfo=BERLIN)
    assert period.bounds(now) == (dt.datetime.fromisoformat(first), dt.datetime.fromisoformat(end))


MOMENTS = st.integers(1_577_836_800, 2_208_988_800).map(lambda time: dt.datetime.fromtimestamp(time, BERLIN))


@given(st.sampled_from(Period), MOMENTS)
def test_a_moment_is_within_its_period_and_the_next_begins_at_its_end(
    period: Period, now: dt.datetime
) -> None:
    first, end = period.bounds(now)
    assert first.timestamp() <= now.timestamp() < end.timestamp()
    assert period.bounds(end)[0] == end
