"""The business case's tables, to the cent: Rackspace, The business case for CPU-based AI inference, 2025-12-31."""

from __future__ import annotations

import datetime as dt
from decimal import ROUND_HALF_UP, Decimal

import pytest

from launcher.accounts.estimate import Demand, Estimate, Month, estimate
from launcher.accounts.references import References, references, shipped
from launcher.config.usage_schema import Cost, Reference

CASE = Cost(hourly=0.79)
TODAY = dt.date(2026, 1, 1)

# Model, output tokens a second, cost of a million output tokens.
MODELS = (
    ("Qwen3-0.6B", 124.81, "1.76"),
    ("Llama-3.2-1B", 123.95, "1.77"),
    ("Gemma-3-1b-it", 97.35, "2.25"),
    ("Qwen3-1.7B", 95.55, "2.30"),
    ("Llama-3.2-3B", 71.87, "3.05"),
    ("Phi-4-mini-instruct", 67.32, "3.26"),
    ("Qwen3-4B", 60.00, "3.66"),
    ("Gemma-3-4b-it", 53.83, "4.08"),
    ("Qwen3-8B", 39.75, "5.52"),
    ("Gemma-3-12b-it", 25.36, "8.65"),
    ("Phi-4", 23.83, "9.21"),
)
# Tickets a month -> what the case says of GPT-4o-mini, of Claude Sonnet 4.5, of the machine.
TICKETS = {100_000: ("25.50", "600.00", 575), 500_000: ("127.50", "3000.00", 575)}


def cents(amount: float) -> str:
    return str(Decimal(repr(amount)).quantize(Decimal("0.01"), ROUND_HALF_UP))


def of_case(requests: int | None = None, cost: Cost = CASE) -> Estimate:
    demand = None if requests is None else Demand(requests=requests, input=500, output=300)
    return estimate(cost, 60.0, demand, references(cost, TODAY))


def month(requests: int, cost: Cost = CASE) -> Month:
    found = of_case(requests, cost).month
    assert found is not None
    return found


@pytest.mark.parametrize(("model", "speed", "wanted"), MODELS)
def test_cost_of_the_case_per_million_output_tokens(model: str, speed: float, wanted: str) -> None:
    assert cents(estimate(CASE, speed, None, references(CASE, TODAY)).per_million_output) == wanted


def test_tokens_an_hour_of_the_case() -> None:
    assert of_case().tokens_per_hour == 216_000


@pytest.mark.parametrize("tickets", TICKETS)
def test_bills_of_the_case(tickets: int) -> None:
    mini, sonnet, machine = TICKETS[tickets]
    found = month(tickets)
    by_name = {row.name: cents(row.amount) for row in found.references}
    assert by_name["GPT-4o-mini"] == mini
    assert by_name["Claude Sonnet 4.5"] == sonnet
    # 0.79 an hour x 730 hours; the case rounds it to 575.
    assert cents(found.bill) == "576.70"
    assert round(found.bill / 25) * 25 == machine


def test_output_prices_of_the_case() -> None:
    assert {row.name: row.output for row in shipped().reference} == {
        "GPT-4o-mini": 0.60, "Claude Haiku 3.5": 4.0, "GPT-4o": 10.0, "Claude Sonnet 4.5": 15.0,
    }  # fmt: skip


def test_what_the_case_is_silent_on() -> None:
    """500,000 tickets are 150 million output tokens: at 60 a second 694 of the month's 730 hours."""
    found = month(500_000)
    assert found.output_tokens == 150_000_000
    assert round(found.busy_hours) == 694
    assert round(found.utilisation * 100) == 95
    assert found.fits
    assert found.machines == 1
    assert cents(found.per_million_output) == "3.84"
    assert round(month(100_000).utilisation * 100) == 19


def test_a_demand_above_one_machine() -> None:
    found = month(1_000_000)
    assert not found.fits
    assert found.machines == 2
    assert cents(found.bill) == "1153.40"
    # Exactly one full machine still fits; one request more does not.
    assert month(730 * 3600 * 60 // 300).machines == 1
    assert month(730 * 3600 * 60 // 300 + 1).machines == 2


def test_break_even_of_the_case() -> None:
    """The case: "at 80 million tokens monthly", self-hosted matches Claude Sonnet."""
    by_name = {row.name: row.break_even_tokens for row in month(100_000).references}
    assert by_name["Claude Sonnet 4.5"] == 76_893_334
    at = Demand(requests=96_117, input=500, output=300)  # the first whole number of tickets above it
    assert at.tokens.total > 76_893_334 > at.tokens.total - 800
    (sonnet,) = (row for row in month(at.requests).references if row.name == "Claude Sonnet 4.5")
    assert 576.70 < sonnet.amount < 576.71


def test_no_break_even_where_an_api_is_cheaper_than_a_full_machine() -> None:
    by_name = {row.name: row.break_even_tokens for row in month(100_000).references}
    assert by_name["GPT-4o-mini"] is None  # 1,809 million; a full machine serves 420 million


def test_a_free_machine_is_always_cheaper_and_a_free_api_never_dearer() -> None:
    free = month(100_000, Cost(hourly=0))
    assert free.bill == 0
    assert {row.break_even_tokens for row in free.references} == {0}
    gift = References((Reference(name="gift", input=0, output=0),), "")
    found = estimate(CASE, 60.0, Demand(requests=1, input=1, output=1), gift).month
    assert found is not None
    assert found.references[0].break_even_tokens is None


def test_a_purchase_and_its_energy() -> None:
    """20,000 over 5 years of 8,760 h, and 0.8 kW at 0.25 a kWh."""
    bought = Cost(purchase=20_000, years=5, watts=800, price_per_kwh=0.25)
    found = of_case(cost=bought)
    assert cents(found.month_bill) == cents(20_000 / 60 + 0.8 * 730 * 0.25)
    assert cents(found.hourly) == "0.66"


def test_prompts_alone_take_no_output_time() -> None:
    found = estimate(CASE, 60.0, Demand(requests=10, input=0, output=1), references(CASE, TODAY)).month
    assert found is not None
    assert found.prompt_tokens == 0
    assert found.per_million_output == found.per_million_total
