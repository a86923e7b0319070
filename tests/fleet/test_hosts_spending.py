"""Budgets over all hosts: the sums, and by how much a key can exceed its budget."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from support.stored_sums import StoredSums

from launcher.accounts.budgets import Budgets, BudgetState, Past, Reservation, Rules
from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.spending import Heard, Known, Spent, SpentElsewhere, merged, sums
from launcher.base.clock import Clock
from launcher.control.client import UnreachableError
from launcher.fleet.hosts import INTERVAL_S, SPENT, Exchange, kept_spent
from launcher.fleet.members import Member

BUDGET = "100k-tokens/month"
DAILY = "100k-tokens/day"
DAY_S = 86_400
BEGINS = "2026-11-01T00:00:00+00:00"


def state(key: str, spent: int | str | None, budget: str = BUDGET, begins: str = BEGINS) -> Heard:
    return Heard(key, budget, begins, spent)


def told(known: Mapping[str, Sequence[Heard]]) -> dict[str, tuple[SpentElsewhere, ...]]:
    """Where all hosts answer."""
    return {host: report.spent for host, report in sums(merged(known), known).items()}


def test_what_the_other_hosts_spent() -> None:
    known = {"h1": [state("ann", 10), state("bob", 1)], "h2": [state("ann", 200)], "h3": [state("ann", 3000)]}
    found = told(known)
    assert found["h1"][0] == SpentElsewhere("ann", BUDGET, BEGINS, 3200)
    assert [(each.key, each.amount) for each in found["h1"]] == [("ann", 3200), ("bob", 0)]
    assert [(each.key, each.amount) for each in found["h2"]] == [("ann", 3010), ("bob", 1)]


def test_money_is_summed_exactly() -> None:
    budget = "50-usd/week"
    known = {f"h{number}": [state("ann", "0.000000000001", budget)] for number in range(1, 5)}
    assert told(known)["h1"][0].amount == "0.000000000003"


@pytest.mark.parametrize(
    "other", [state("ann", 5, begins="2026-10-01T00:00:00+00:00"), state("ann", 5, budget="7-tokens/day")]
)
def test_other_periods_and_budgets_are_sums_of_their_own(other: Heard) -> None:
    found = told({"h1": [], "h2": [state("ann", 1)], "h3": [other]})["h1"]
    assert sorted(each.amount for each in found) == [1, 5]


def test_what_a_host_does_not_know_counts_nothing() -> None:
    assert told({"h1": [], "h2": [state("ann", None)]})["h1"] == ()


@pytest.mark.parametrize("seed", range(20))
def test_a_key_exceeds_its_budget_by_at_most_one_interval(seed: int) -> None:
    """Hosts that admit while own + told < limit, requests of up to a second's worth, an exchange each INTERVAL_S."""
    pick = random.Random(seed)  # noqa: S311
    hosts = [f"h{number}" for number in range(pick.randint(2, 12))]
    rate = {host: pick.randint(0, 400) for host in hosts}  # tokens each tenth of a second
    own, others = dict.fromkeys(hosts, 0), dict.fromkeys(hosts, 0)
    limit, phase, since_exchange, most = 100_000, pick.randint(0, 49), 0, 0
    for tick in range(5_000):
        if tick % round(10 * INTERVAL_S) == phase:
            known = {host: [state("ann", own[host])] for host in hosts}
            others = {host: sum(int(each.amount) for each in its) for host, its in told(known).items()}
            most, since_exchange = max(most, since_exchange), 0
        for host in hosts:
            if own[host] + others[host] < limit:
                amount = pick.randint(0, rate[host])
                own[host] += amount
                since_exchange += amount
    assert sum(own.values()) >= limit or sum(rate.values()) * 2_500 < limit
    assert sum(own.values()) - limit <= max(most, since_exchange)
    assert all(own[host] + others[host] >= limit for host in hosts) or sum(own.values()) < limit


class Host:
    """A daemon's budgets, and requests that end."""

    def __init__(self, clock: Callable[[], float], rate: int, budget: str = BUDGET) -> None:
        self._clock, self.rate, self._budget = clock, rate, budget
        self._sums = StoredSums()
        self.spent = 0
        self.restart()

    def restart(self) -> None:
        """A daemon whose ledger has all that it served."""
        self._sums = self._sums.next()
        self.budgets = Budgets(Rules(), ZoneInfo("UTC"), Clock(self._clock, self._clock), self._sums.slot)
        self.budgets.learn(Past([("ann", self._clock(), self.spent, 0)] if self.spent else []))
        self.budgets.follow({"ann": self._budget})

    @property
    def state(self) -> BudgetState:
        (found,) = self.budgets.states()
        return found

    def turn(self, amount: int) -> None:
        """A request of so many tokens, if it is admitted."""
        admitted = self.budgets.admit("ann", Spent(amount, 0))
        if isinstance(admitted, Reservation):
            admitted.release()
            self.spent += amount
            self.budgets.spend(entry(self._clock(), amount))


def entry(now: float, tokens: int) -> EndedRequest:
    return EndedRequest(
        ended_at=now, request_id="r", key="ann", model="m", path="/", status=200, outcome="completed",
        duration_s=1.0, output_tokens=tokens,
    )  # fmt: skip


class Fleet:
    """Implements what `Exchange` needs of Hosts."""

    def __init__(self, hosts: dict[str, Host], folder: Path) -> None:
        self.hosts = hosts
        self.away: set[str] = set()
        self.file = folder / "ingress" / SPENT

    def ingress_hosts(self) -> list[str]:
        return ["ingress"]

    def keep_spent(self, host: str, known: Known) -> Known:
        return kept_spent(self.file, known)

    def director(self) -> Exchange:
        """A new one."""
        return Exchange(self)  # type: ignore[arg-type]

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


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))]
)
def test_daemons_hold_a_budget_together_to_within_one_interval(seed: int, tmp_path: Path) -> None:
    """With the daemon's own Budgets and our exchange; one host is lost for a while and counts with what it had spent."""
    pick = random.Random(seed)  # noqa: S311
    now = [1_795_440_000.0]
    hosts = {f"h{number}": Host(lambda: now[0], pick.randint(1, 300)) for number in range(pick.randint(2, 6))}
    fleet = Fleet(hosts, tmp_path)
    director = fleet.director()
    limit, most, since = 100_000, 0, 0
    for tick in range(2_000):
        now[0] += 0.1
        if tick % round(10 * INTERVAL_S) == 0:
            fleet.away = {"h0"} if 500 <= tick < 700 else set()
            assert set(director.turn()) == fleet.away
            most, since = max(most, since), 0
        for name, host in hosts.items():
            if name not in fleet.away:  # its clients go elsewhere
                before = host.spent
                host.turn(pick.randint(1, host.rate))
                since += host.spent - before
    total = sum(host.spent for host in hosts.values())
    assert total - limit <= max(most, since)
    assert total >= limit or sum(host.rate for host in hosts.values()) * 2_000 < 2.5 * limit


def test_a_lost_host_still_counts(tmp_path: Path) -> None:
    now = 1_795_440_000.0
    hosts = {name: Host(lambda: now, 1) for name in ("h1", "h2")}
    fleet = Fleet(hosts, tmp_path)
    director = fleet.director()
    hosts["h2"].turn(70_000)
    assert not director.turn()
    fleet.away = {"h2"}
    hosts["h1"].turn(20_000)
    director.turn()
    (state,) = hosts["h1"].budgets.states()
    assert (state.spent, state.spent_here, state.left) == (90_000, 20_000, 10_000)


def test_what_a_lost_host_spent_counts_for_a_new_director_a_restarted_daemon_and_a_new_host(
    tmp_path: Path,
) -> None:
    """Only the old director had heard the lost host itself."""
    now = 1_795_440_000.0
    hosts = {name: Host(lambda: now, 1) for name in ("h1", "h2")}
    fleet = Fleet(hosts, tmp_path)
    director = fleet.director()
    hosts["h2"].turn(70_000)
    hosts["h1"].turn(20_000)
    assert not director.turn()
    del hosts["h2"]
    for _ in range(3):
        hosts["h1"].restart()
        assert (hosts["h1"].state.spent, hosts["h1"].state.left) == (90_000, 10_000)
        assert not fleet.director().turn()
        assert (hosts["h1"].state.spent, hosts["h1"].state.left) == (90_000, 10_000)
    hosts["h3"] = Host(lambda: now, 1)
    fleet.director().turn()
    assert (hosts["h3"].state.spent, hosts["h3"].state.spent_here) == (90_000, 0)
    hosts["h3"].turn(10_000)
    for _ in range(3):  # what is told never counts twice
        fleet.director().turn()
        assert [host.state.spent for host in hosts.values()] == [100_000, 100_000]


def test_what_a_lost_host_spent_counts_after_the_budget_was_raised(tmp_path: Path) -> None:
    now = 1_795_440_000.0
    hosts = {name: Host(lambda: now, 1) for name in ("h1", "h2")}
    fleet = Fleet(hosts, tmp_path)
    director = fleet.director()
    hosts["h2"].turn(70_000)
    director.turn()
    fleet.away = {"h2"}
    hosts["h1"].budgets.follow({"ann": "120k-tokens/month"})
    director.turn()
    assert hosts["h1"].state.left == 50_000


def test_what_a_host_spent_counts_when_it_comes_back_with_an_empty_ledger(tmp_path: Path) -> None:
    now = 1_795_440_000.0
    hosts = {name: Host(lambda: now, 1) for name in ("h1", "h2")}
    fleet = Fleet(hosts, tmp_path)
    hosts["h2"].turn(70_000)
    hosts["h1"].turn(20_000)
    fleet.director().turn()
    hosts["h2"] = Host(lambda: now, 1)
    for _ in range(3):
        fleet.director().turn()
        assert [host.state.spent for host in hosts.values()] == [90_000, 90_000]


def test_a_host_that_does_not_know_what_it_spent_is_not_told_its_own() -> None:
    """Else it would count twice when the ledger can be read again."""
    heard = merged({"h1": [state("ann", 20)], "h2": [state("ann", 70)]})
    now = {"h1": [state("ann", 20)], "h2": [state("ann", None)]}
    assert [sums(heard, now)[host].spent[0].amount for host in now] == [70, 20]


def test_of_what_is_kept_the_highest_figure_of_each_host_counts(tmp_path: Path) -> None:
    """Two directors write the file after a partition. Earlier periods leave it."""
    path = tmp_path / "fleet" / SPENT
    months = [f"2026-{month:02}-01T00:00:00+00:00" for month in range(6, 12)]
    kept_spent(path, {"h1": [state("ann", 20)], "h2": [state("ann", 70)]})
    kept_spent(path, {"h1": [state("ann", 30)], "h2": [state("ann", 0)]})
    assert kept_spent(path, {}) == {"h1": (state("ann", 30),), "h2": (state("ann", 70),)}
    for begins in months:
        kept_spent(path, {"h1": [state("ann", 1, begins=begins)]})
    assert sorted(its.begins for its in kept_spent(path, {})["h1"]) == months[2:]
    path.write_bytes(b"{")
    assert kept_spent(path, {}) == {}


@pytest.mark.parametrize("new_director", [False, True])
@pytest.mark.parametrize("days", [-45, 2, 45, 3 * 365])
def test_a_host_with_a_wrong_clock_makes_nobody_forget(days: int, new_director: bool, tmp_path: Path) -> None:
    """Over several of its own midnights: what a lost host spent in the others' present period counts on."""
    now, wrong = [1_795_440_000.0], [1_795_440_000.0 + days * DAY_S]
    hosts = {name: Host(lambda: now[0], 1, budget=DAILY) for name in ("h1", "h2")}
    hosts["h3"] = Host(lambda: wrong[0], 1, budget=DAILY)
    fleet = Fleet(hosts, tmp_path)
    director = fleet.director()
    hosts["h2"].turn(70_000)
    assert not director.turn()
    del hosts["h2"]
    for _ in range(5):
        hosts["h3"].turn(10)
        director = fleet.director() if new_director else director
        assert not director.turn()
        assert (hosts["h1"].state.spent, hosts["h1"].state.spent_here) == (70_000, 0)
        wrong[0] += DAY_S
    hosts["h4"] = Host(lambda: now[0], 1, budget=DAILY)
    assert not director.turn()
    assert hosts["h4"].state.spent == 70_000


def test_what_other_hosts_spent_ends_with_its_period() -> None:
    clock = [1_795_440_000.0]
    host = Host(lambda: clock[0], 1)
    host.budgets.told(msgspec.json.encode({"spent": [SpentElsewhere("ann", BUDGET, BEGINS, 70_000)]}))
    assert host.state.spent == 70_000
    clock[0] += 31 * 86_400
    assert host.state.spent == 0
    host.restart()
    assert host.state.spent == 0


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.release) for seed in range(2, 8))]
)
def test_a_budget_holds_over_new_directors_restarts_and_lost_hosts(seed: int, tmp_path: Path) -> None:
    """One host at a time is lost: at most one interval's spending more, and none is counted twice."""
    pick = random.Random(seed)  # noqa: S311
    now = 1_795_440_000.0
    hosts = {f"h{number}": Host(lambda: now, 1) for number in range(4)}
    fleet, total, most = Fleet(hosts, tmp_path), 0, 0
    director = fleet.director()
    for _ in range(60):
        if pick.random() < 0.2:
            director = fleet.director()
        if pick.random() < 0.2:
            fleet.away = set(pick.sample(sorted(hosts), pick.randint(0, 1)))
        if pick.random() < 0.2:
            pick.choice(sorted(hosts.items()))[1].restart()
        director.turn()
        since = 0
        for name, host in hosts.items():
            if name not in fleet.away:
                before = host.spent
                host.turn(pick.randint(1, 3_000))
                since += host.spent - before
        director.turn()
        total, most = sum(host.spent for host in hosts.values()), max(most, since)
        assert all(host.state.spent <= total for host in hosts.values())  # type: ignore[operator]
    assert 100_000 <= total <= 100_000 + most
