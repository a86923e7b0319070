"""Costs of a window: the bill, its split over tokens, references and overflow; from planted ledgers."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ledger_file import LedgerFile

from launcher.accounts.cost import MONTH_S, CostReport, Observed, Sums, bill, cost_report, spent
from launcher.accounts.references import References, Tokens
from launcher.base.errors import LauncherError
from launcher.base.money import PICOS
from launcher.config.usage_schema import Cost, Reference

HOUR = 3600
BEGAN = 1_700_000_000 - 1_700_000_000 % HOUR
RENT = Cost(
    hourly=0.79, reference=(Reference(name="api", input=3, cached=0.3, output=15, date="2026-01-01"),)
)
NONE = Sums(0, Tokens(0, 0, 0), 0.0, 0.0)


def report(cost: Cost = RENT, **parts: object) -> CostReport:
    values = {
        "begin": 0, "end": MONTH_S, "local": Sums(100_000, Tokens(50_000_000, 0, 30_000_000), 100.0, 300.0),
        "overflow": NONE, "slots": 4, "busy_s": MONTH_S / 4, "joules": None,
    } | parts  # fmt: skip
    return cost_report(cost, Observed(**values), References(cost.reference, "note"), "UTC")  # type: ignore[arg-type]


# --- the bill ----------------------------------------------------------------------------------------


def test_rent_is_by_wall_clock_hours() -> None:
    assert bill(Cost(hourly=0.79), MONTH_S).total == 576_700_000_000_000
    assert bill(Cost(hourly=0.79), 1).rent == round(79 * PICOS / 100 / 3600)


def test_a_purchase_is_spread_over_its_years() -> None:
    bought = Cost(purchase=21_900, years=5)
    assert bill(bought, 3600).purchase == PICOS // 2  # 43,800 hours
    assert bill(bought, 12 * 5 * MONTH_S).total == 21_900 * PICOS


def test_energy_by_power_or_measured() -> None:
    by_power = Cost(watts=1000, price_per_kwh=0.25)
    assert bill(by_power, 7200).energy == PICOS // 2
    assert bill(by_power, 7200, joules=1.0).energy == PICOS // 2  # what is measured does not count
    measured = Cost(watts="measured", price_per_kwh=0.25)
    assert bill(measured, 7200, joules=3.6e6).energy == PICOS // 4
    assert bill(measured, 7200).energy == 0
    assert bill(Cost(price_per_kwh=0.25), 7200, joules=3.6e6).energy == 0


@given(
    st.integers(0, 10**9).map(lambda n: n / 10**6), st.lists(st.integers(1, 10**7), min_size=1, max_size=20)
)
def test_bills_of_parts_sum_up(hourly: float, parts: list[int]) -> None:
    """To a pico for each part: nothing is summed as a float."""
    whole = bill(Cost(hourly=hourly), sum(parts)).total
    assert abs(whole - sum(bill(Cost(hourly=hourly), part).total for part in parts)) <= len(parts)


# --- the two costs -----------------------------------------------------------------------------------


def test_allocated_is_the_whole_bill_and_used_the_busy_share() -> None:
    found = report()
    assert found.bill == 576.70
    assert found.utilisation == 0.25
    assert found.allocated.output == pytest.approx(576.70 / 30, abs=1e-12)
    assert found.allocated.total == pytest.approx(576.70 / 80, abs=1e-12)
    assert found.used is not None
    assert found.used.output == pytest.approx(576.70 / 30 / 4, abs=1e-12)


def test_input_and_output_are_split_by_measured_time() -> None:
    found = report(local=Sums(1, Tokens(50_000_000, 10_000_000, 30_000_000), 100.0, 300.0))
    assert found.input_share == 0.25
    assert found.allocated.input_part == pytest.approx(576.70 / 4 / 40, abs=1e-12)  # cached ones take no time
    assert found.allocated.output_part == pytest.approx(576.70 * 3 / 4 / 30, abs=1e-12)
    assert found.cached_tokens == 10_000_000


def test_without_tokens_there_is_no_cost_of_a_token() -> None:
    found = report(local=NONE, busy_s=0.0)
    assert found.bill == 576.70
    assert (found.allocated.output, found.allocated.total, found.input_share) == (None, None, None)
    assert found.used is not None
    assert found.used.output is None
    assert found.references[0].per_million is None
    assert found.references[0].break_even_tokens is None
    assert found.month_tokens == 0


def test_prompts_alone() -> None:
    """Embeddings have no output tokens."""
    found = report(local=Sums(5, Tokens(1000, 1000, 0), 2.0, 0.0))
    assert found.allocated.output is None
    assert found.allocated.input_part is None  # all cached
    assert found.allocated.total == pytest.approx(576_700.0)


def test_output_without_a_stream_cannot_be_split() -> None:
    for before in (0.0, 5.0):  # of embeddings, whose time is that of their prompts
        found = report(local=Sums(5, Tokens(1000, 0, 500), before, 0.0))
        assert found.input_share is None
        assert found.allocated.input_part is None
        assert found.allocated.output_part is None
        assert found.allocated.output is not None


def test_a_free_machine() -> None:
    found = report(Cost(hourly=0))
    assert found.bill == 0
    assert found.allocated.output == 0
    assert found.month_bill == 0


def test_utilisation_that_was_not_metered_is_not_made_up() -> None:
    found = report(busy_s=None, slots=0)
    assert found.utilisation is None
    assert found.used is None
    assert found.allocated.output is not None


def test_utilisation_is_at_most_one() -> None:
    assert report(busy_s=MONTH_S * 1.001).utilisation == 1.0


# --- references, overflow ----------------------------------------------------------------------------


def test_references_are_compared_at_the_observed_proportions() -> None:
    (row,) = report().references
    assert row.amount == 600.0
    assert row.per_million == 7.5
    assert row.break_even_tokens == 76_893_334
    # Half of the month: the same rate, the same break-even.
    half = report(end=MONTH_S // 2, local=Sums(1, Tokens(25_000_000, 0, 15_000_000), 1.0, 1.0), busy_s=None)
    assert half.references[0].break_even_tokens == 76_893_334
    assert half.month_tokens == 80_000_000
    assert half.month_bill == 576.70


def test_cached_prompt_tokens_cost_less_at_an_api() -> None:
    (row,) = report(local=Sums(1, Tokens(50_000_000, 50_000_000, 30_000_000), 1.0, 1.0)).references
    assert row.amount == 50 * 0.3 + 30 * 15


def test_what_overflow_cost_and_saved() -> None:
    sent = Sums(10, Tokens(1000, 0, 500), 1.0, 1.0, picos=6 * PICOS)
    found = report(overflow=sent).overflow
    assert found is not None
    assert (found.requests, found.prompt_tokens, found.output_tokens) == (10, 1000, 500)
    assert (found.amount, found.second_machine, found.saved) == (6.0, 576.7, 570.7)
    assert found.priced
    dear = report(overflow=sent._replace(picos=600 * PICOS)).overflow
    assert dear is not None
    assert dear.saved == -23.3
    assert report().overflow is None


def test_overflow_without_prices_is_not_free() -> None:
    found = report(overflow=Sums(1, Tokens(10, 0, 10), 1.0, 1.0)).overflow
    assert found is not None
    assert not found.priced


# --- from a ledger -----------------------------------------------------------------------------------


def of(ledger: LedgerFile, now: float, since: str = "30d", cost: Cost = RENT) -> CostReport:
    return spent(ledger.path, cost, since, now)


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFile:
    return LedgerFile(tmp_path / "usage.db", began=BEGAN)


def test_a_ledger_that_is_an_hour_old(ledger: LedgerFile) -> None:
    sums = {
        "requests": 12, "completed": 10, "failed": 2, "prompt_tokens": 500, "cached_tokens": 100,
        "output_tokens": 300, "prefill_s": 1.0, "decode_s": 3.0,
    }  # fmt: skip
    ledger.sums(BEGAN, sums)
    for slot, busy in (("0", 1800.0), ("1", 900.0)):
        ledger.meter(BEGAN, "busy_s", slot, busy)
        ledger.meter(BEGAN, "ready_s", slot, 3600.0)
    found = of(ledger, BEGAN + HOUR)
    assert (found.begin, found.end) == (BEGAN, BEGAN + HOUR)  # not 30 days: the ledger's begin
    assert found.bill == 0.79
    assert (found.requests, found.prompt_tokens, found.cached_tokens, found.output_tokens) == (
        10,
        500,
        100,
        300,
    )
    assert found.slots == 2
    assert found.utilisation == 0.375
    assert found.input_share == 0.25
    assert found.zone == "UTC"


def test_hours_without_the_daemon_cost(ledger: LedgerFile) -> None:
    ledger.sums(BEGAN, {"output_tokens": 1000})
    ledger.meter(BEGAN, "busy_s", "0", 3600.0)
    ledger.meter(BEGAN, "ready_s", "0", 3600.0)
    found = of(ledger, BEGAN + 10 * HOUR)
    assert found.bill == 7.9
    assert found.utilisation == 0.1


def test_the_number_of_slots_may_change(ledger: LedgerFile) -> None:
    for slot in "0123":
        ledger.meter(BEGAN, "busy_s", slot, 1800.0)
    for slot in "01":
        ledger.meter(BEGAN + HOUR, "busy_s", slot, 3600.0)
    found = of(ledger, BEGAN + 2 * HOUR)
    assert found.slots == 4
    assert found.utilisation == 0.75


def test_since_a_time_begins_with_its_hour(ledger: LedgerFile) -> None:
    ledger.sums(BEGAN, {"output_tokens": 1})
    ledger.sums(BEGAN + HOUR, {"output_tokens": 10})
    ledger.sums(BEGAN + 2 * HOUR, {"output_tokens": 100})
    now = BEGAN + 2 * HOUR + 600
    found = of(ledger, now, "1h")
    assert (found.begin, found.output_tokens) == (BEGAN + HOUR, 110)
    assert found.end == now
    assert of(ledger, now, "5m").output_tokens == 100


def test_overflow_is_not_served_here(ledger: LedgerFile) -> None:
    ledger.sums(
        BEGAN, {"completed": 3, "prompt_tokens": 30, "output_tokens": 3, "prefill_s": 1, "decode_s": 1}
    )
    away = {
        "requests": 2,
        "completed": 2,
        "prompt_tokens": 7,
        "output_tokens": 5,
        "prefill_s": 9,
        "decode_s": 9,
    }
    ledger.sums(BEGAN, {**away, "overflow_picos": 2 * PICOS}, overflow="api")
    ledger.sums(BEGAN + HOUR, {**away, "overflow_picos": PICOS}, overflow="other")
    found = of(ledger, BEGAN + 2 * HOUR)
    assert (found.requests, found.prompt_tokens, found.output_tokens) == (3, 30, 3)
    assert found.input_share == 0.5
    assert found.overflow is not None
    assert (found.overflow.requests, found.overflow.prompt_tokens, found.overflow.amount) == (4, 14, 3.0)


def test_sums_beyond_what_sqlite_can_sum(ledger: LedgerFile) -> None:
    most = 2**62
    for hour in range(4):
        ledger.sums(BEGAN + hour * HOUR, {"requests": 1, "overflow_picos": most}, overflow="api")
    found = of(ledger, BEGAN + 4 * HOUR).overflow
    assert found is not None
    assert found.amount == 4 * most / PICOS


def test_measured_energy(ledger: LedgerFile) -> None:
    for package in "01":
        ledger.meter(BEGAN, "joules", package, 1.8e6)
    ledger.meter(BEGAN, "joules_s", "", 1800.0)
    measured = Cost(watts="measured", price_per_kwh=0.5)
    found = of(ledger, BEGAN + HOUR, cost=measured)
    assert (found.energy, found.kwh, found.kwh_measured_share) == (0.5, 1.0, 0.5)
    assert of(ledger, BEGAN + HOUR, cost=RENT).kwh_measured_share is None


def test_a_ledger_from_before_cost_was_configured(ledger: LedgerFile) -> None:
    """Its tokens are priced by today's [cost]; without one the error says what to set."""
    ledger.sums(BEGAN, {"output_tokens": 1000})
    with pytest.raises(LauncherError) as error:
        of(ledger, BEGAN + HOUR, cost=Cost())
    assert "does not say what the machine costs" in error.value.message
    assert "set hourly = 0.79" in error.value.remedy
    assert of(ledger, BEGAN + HOUR).allocated.output == 790.0


@pytest.mark.parametrize("now", [BEGAN, BEGAN + 0.5, BEGAN - 100])
def test_a_window_has_a_second_at_least(ledger: LedgerFile, now: float) -> None:
    """The ledger has just begun, or the clock was set back."""
    report = of(ledger, now)
    assert (report.begin, report.end, report.requests) == (BEGAN, BEGAN + 1, 0)


def test_a_time_that_has_not_come(ledger: LedgerFile) -> None:
    with pytest.raises(LauncherError, match="has not come"):
        of(ledger, BEGAN + 10, since="2099-01-01")


def test_hours_are_those_of_the_ledger_s_zone(tmp_path: Path) -> None:
    """Half an hour off UTC."""
    began = BEGAN + 1800
    ledger = LedgerFile(tmp_path / "usage.db", "Asia/Kolkata", began - 60)
    ledger.sums(began - HOUR, {"output_tokens": 1})
    ledger.sums(began, {"output_tokens": 10})
    found = of(ledger, began + 60, "1m")
    assert found.output_tokens == 10
    assert dt.datetime.fromtimestamp(found.begin, dt.UTC).minute == 30
