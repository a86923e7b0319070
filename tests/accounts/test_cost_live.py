"""The live figures: the bill counted up, the last hour."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.accounts.cost import Meter, Observed, Sums
from launcher.accounts.references import Tokens
from launcher.base.money import PICOS
from launcher.config.usage_schema import Cost

RENT = Cost(hourly=3.6)  # 0.001 a second
NONE = Sums(0, Tokens(0, 0, 0), 0.0, 0.0)


def test_the_bill_counts_up() -> None:
    meter = Meter(100.7)
    meter.count(RENT, 101.2)
    assert meter.spent == PICOS // 1000
    meter.count(RENT, 1100.0)
    assert meter.spent == PICOS


@given(st.lists(st.floats(0, 1000), max_size=30))
def test_how_often_it_is_counted_changes_nothing(steps: list[float]) -> None:
    meter, now = Meter(0.0), 0.0
    for step in steps:
        now += step
        meter.count(RENT, now)
    assert meter.spent == int(now) * PICOS // 1000


def test_a_clock_that_is_set_back_costs_nothing() -> None:
    meter = Meter(1000.0)
    meter.count(RENT, 500.0)
    assert meter.spent == 0
    meter.count(RENT, 1001.0)
    assert meter.spent == PICOS // 1000


def test_a_new_price_applies_from_now_on() -> None:
    meter = Meter(0.0)
    meter.count(RENT, 1000.0)
    meter.count(Cost(hourly=7.2), 2000.0)
    assert meter.spent == 3 * PICOS


def test_measured_energy_counts_once() -> None:
    meter = Meter(0.0)
    measured = Cost(watts="measured", price_per_kwh=1.0)
    for step in range(1, 11):
        meter.count(measured, float(step), joules=3.6e5)
    assert meter.spent == PICOS


def run(meter: Meter, minutes: int, tokens_a_minute: int) -> None:
    for minute in range(minutes + 1):
        meter.count(RENT, minute * 60.0)
        meter.sample(minute * 60.0, minute * tokens_a_minute)


def test_the_last_hour() -> None:
    meter = Meter(0.0)
    run(meter, 180, 1000)
    found = meter.now(RENT, None)
    assert found.seconds == 3600
    assert found.per_million_output == pytest.approx(3.6 / 0.06)


def test_less_than_an_hour_after_a_start() -> None:
    meter = Meter(0.0)
    assert meter.now(RENT, None).per_million_output is None
    run(meter, 5, 1000)
    found = meter.now(RENT, None)
    assert (found.seconds, found.per_million_output) == (300, pytest.approx(60.0))


def test_an_idle_hour_has_no_cost_of_a_token() -> None:
    meter = Meter(0.0)
    run(meter, 70, 0)
    assert meter.now(RENT, None).per_million_output is None


def test_a_ledger_that_began_again() -> None:
    meter = Meter(0.0)
    run(meter, 60, 1000)
    meter.sample(3660.0, 10)
    assert meter.now(RENT, None).per_million_output is None
    meter.count(RENT, 3720.0)
    meter.sample(3720.0, 1010)
    assert meter.now(RENT, None).seconds == 60


def test_today() -> None:
    today = Observed(begin=0, end=1000, local=NONE, overflow=NONE, slots=2, busy_s=250.0, joules=None)
    found = Meter(0.0).now(RENT, today)
    assert (found.today, found.today_utilisation) == (1.0, 0.25)
    assert Meter(0.0).now(RENT, today._replace(busy_s=None)).today_utilisation is None
    assert Meter(0.0).now(RENT, None).today is None
