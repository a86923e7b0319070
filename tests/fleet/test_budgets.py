"""Budgets over all hosts: the sums, and by how much a key can exceed its budget."""

from __future__ import annotations

import random
from typing import Any

import pytest

from launcher.fleet.budgets import INTERVAL_S, elsewhere

BUDGET = "100k-tokens/month"
BEGINS = "2026-11-01T00:00:00+00:00"


def state(key: str, spent: int | str | None, budget: str = BUDGET, begins: str = BEGINS) -> dict[str, Any]:
    return {"key": key, "budget": budget, "begins": begins, "spent_here": spent}


def test_what_the_other_hosts_spent() -> None:
    known = {"h1": [state("ann", 10), state("bob", 1)], "h2": [state("ann", 200)], "h3": [state("ann", 3000)]}
    assert elsewhere(known, "h1") == [{"key": "ann", "budget": BUDGET, "begins": BEGINS, "amount": 3200}]
    assert [(each["key"], each["amount"]) for each in elsewhere(known, "h2")] == [("ann", 3010), ("bob", 1)]


def test_money_is_summed_exactly() -> None:
    budget = "50-usd/week"
    known = {f"h{number}": [state("ann", "0.000000000001", budget)] for number in range(1, 5)}
    assert elsewhere(known, "h1")[0]["amount"] == "0.000000000003"


@pytest.mark.parametrize(
    "other", [state("ann", 5, begins="2026-10-01T00:00:00+00:00"), state("ann", 5, budget="7-tokens/day")]
)
def test_other_periods_and_budgets_are_sums_of_their_own(other: dict[str, Any]) -> None:
    found = elsewhere({"h1": [], "h2": [state("ann", 1)], "h3": [other]}, "h1")
    assert sorted(each["amount"] for each in found) == [1, 5]


def test_what_a_host_does_not_know_counts_nothing() -> None:
    assert elsewhere({"h1": [], "h2": [state("ann", None)]}, "h1") == []


@pytest.mark.parametrize("seed", range(20))
def test_a_key_exceeds_its_budget_by_at_most_one_interval(seed: int) -> None:
    """Hosts that admit while own + told < limit, requests of up to a second's worth, an exchange each INTERVAL_S."""
    pick = random.Random(seed)  # noqa: S311
    hosts = [f"h{number}" for number in range(pick.randint(2, 12))]
    rate = {host: pick.randint(0, 400) for host in hosts}  # tokens each tenth of a second
    own, told = dict.fromkeys(hosts, 0), dict.fromkeys(hosts, 0)
    limit, phase, since_exchange, most = 100_000, pick.randint(0, 49), 0, 0
    for tick in range(5_000):
        if tick % round(10 * INTERVAL_S) == phase:
            known = {host: [state("ann", own[host])] for host in hosts}
            told = {host: sum(each["amount"] for each in elsewhere(known, host)) for host in hosts}
            most, since_exchange = max(most, since_exchange), 0
        for host in hosts:
            if own[host] + told[host] < limit:
                amount = pick.randint(0, rate[host])
                own[host] += amount
                since_exchange += amount
    assert sum(own.values()) >= limit or sum(rate.values()) * 2_500 < limit
    assert sum(own.values()) - limit <= max(most, since_exchange)
    assert all(own[host] + told[host] >= limit for host in hosts) or sum(own.values()) < limit
