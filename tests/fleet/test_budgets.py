"""Budgets over all hosts: the sums, and by how much a key can exceed its budget."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest

from launcher.control.client import UnreachableError
from launcher.fleet.budgets import INTERVAL_S, exchange
from launcher.fleet.members import Member
from launcher.usage.budget_rules import Rules
from launcher.usage.budgets import Budgets, NoSums, Past, Reservation
from launcher.usage.elsewhere import SpentElsewhere, sums
from launcher.usage.entry import Entry
from launcher.usage.spending import Spent

BUDGET = "100k-tokens/month"
BEGINS = "2026-11-01T00:00:00+00:00"


def state(key: str, spent: int | str | None, budget: str = BUDGET, begins: str = BEGINS) -> dict[str, Any]:
    return {"key": key, "budget": budget, "begins": begins, "spent_here": spent}


def test_what_the_other_hosts_spent() -> None:
    known = {"h1": [state("ann", 10), state("bob", 1)], "h2": [state("ann", 200)], "h3": [state("ann", 3000)]}
    found = {host: report.spent for host, report in sums(known).items()}
    assert found["h1"][0] == SpentElsewhere("ann", BUDGET, BEGINS, 3200)
    assert [(each.key, each.amount) for each in found["h1"]] == [("ann", 3200), ("bob", 0)]
    assert [(each.key, each.amount) for each in found["h2"]] == [("ann", 3010), ("bob", 1)]


def test_money_is_summed_exactly() -> None:
    budget = "50-usd/week"
    known = {f"h{number}": [state("ann", "0.000000000001", budget)] for number in range(1, 5)}
    assert sums(known)["h1"].spent[0].amount == "0.000000000003"


@pytest.mark.parametrize(
    "other", [state("ann", 5, begins="2026-10-01T00:00:00+00:00"), state("ann", 5, budget="7-tokens/day")]
)
def test_other_periods_and_budgets_are_sums_of_their_own(other: dict[str, Any]) -> None:
    found = sums({"h1": [], "h2": [state("ann", 1)], "h3": [other]})["h1"].spent
    assert sorted(each.amount for each in found) == [1, 5]


def test_what_a_host_does_not_know_counts_nothing() -> None:
    assert sums({"h1": [], "h2": [state("ann", None)]})["h1"].spent == ()


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
            told = {host: sum(each.amount for each in sums(known)[host].spent) for host in hosts}
            most, since_exchange = max(most, since_exchange), 0
        for host in hosts:
            if own[host] + told[host] < limit:
                amount = pick.randint(0, rate[host])
                own[host] += amount
                since_exchange += amount
    assert sum(own.values()) >= limit or sum(rate.values()) * 2_500 < limit
    assert sum(own.values()) - limit <= max(most, since_exchange)
    assert all(own[host] + told[host] >= limit for host in hosts) or sum(own.values()) < limit


class Host:
    """A daemon's budgets, and requests that end."""

    def __init__(self, clock: Callable[[], float], rate: int) -> None:
        self.budgets = Budgets(Rules(), ZoneInfo("UTC"), clock, NoSums)
        self.budgets.learn(Past())
        self.budgets.follow({"ann": BUDGET})
        self._clock, self.rate = clock, rate
        self.spent = 0

    def turn(self, amount: int) -> None:
        """A request of so many tokens, if it is admitted."""
        admitted = self.budgets.admit("ann", Spent(amount, 0))
        if isinstance(admitted, Reservation):
            admitted.release()
            self.spent += amount
            self.budgets.spend(entry(self._clock(), amount))


def entry(now: float, tokens: int) -> Entry:
    return Entry(
        ended_at=now, request_id="r", key="ann", model="m", path="/", status=200, outcome="completed",
        duration_s=1.0, output_tokens=tokens,
    )  # fmt: skip


class Fleet:
    """Implements what `exchange` needs of Hosts."""

    def __init__(self, hosts: dict[str, Host]) -> None:
        self.hosts = hosts
        self.away: set[str] = set()

    def members(self) -> list[Member]:
        return [Member(host=name, address=f"{name}:8000") for name in self.hosts]

    def ask(self, host: str, method: str, path: str, body: bytes = b"", timeout_s: float = 0.0) -> Any:
        if host in self.away:
            raise UnreachableError("cannot reach it", "wait")
        budgets = self.hosts[host].budgets
        if method == "GET":
            assert path == "/budgets"
            return {"budgets": msgspec.to_builtins(budgets.states())}
        assert path == "/budgets/elsewhere"
        return budgets.told(body)


@pytest.mark.parametrize("seed", range(8))
def test_daemons_hold_a_budget_together_to_within_one_interval(seed: int) -> None:
    """With the daemon's own Budgets and our exchange; one host is lost for a while and counts with what it had spent."""
    pick = random.Random(seed)  # noqa: S311
    now = [1_795_440_000.0]
    hosts = {f"h{number}": Host(lambda: now[0], pick.randint(1, 300)) for number in range(pick.randint(2, 6))}
    fleet, known = Fleet(hosts), dict[str, Any]()
    limit, most, since = 100_000, 0, 0
    for tick in range(2_000):
        now[0] += 0.1
        if tick % round(10 * INTERVAL_S) == 0:
            fleet.away = {"h0"} if 500 <= tick < 700 else set()
            assert set(exchange(fleet, known)) == fleet.away  # type: ignore[arg-type]
            most, since = max(most, since), 0
        for name, host in hosts.items():
            if name not in fleet.away:  # its clients go elsewhere
                before = host.spent
                host.turn(pick.randint(1, host.rate))
                since += host.spent - before
    total = sum(host.spent for host in hosts.values())
    assert total - limit <= max(most, since)
    assert total >= limit or sum(host.rate for host in hosts.values()) * 2_000 < 2.5 * limit


def test_a_lost_host_still_counts() -> None:
    now = 1_795_440_000.0
    hosts = {name: Host(lambda: now, 1) for name in ("h1", "h2")}
    fleet, known = Fleet(hosts), dict[str, Any]()
    hosts["h2"].turn(70_000)
    assert not exchange(fleet, known)  # type: ignore[arg-type]
    fleet.away = {"h2"}
    hosts["h1"].turn(20_000)
    exchange(fleet, known)  # type: ignore[arg-type]
    (state,) = hosts["h1"].budgets.states()
    assert (state.spent, state.spent_here, state.left) == (90_000, 20_000, 10_000)
