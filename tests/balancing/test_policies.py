"""Which instance a policy takes."""

# ruff: noqa: S311
from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from support.balancing import ticket, up

from launcher.balancing.cost_model import CostModel
from launcher.balancing.policies import LeastRequests, Policy, RoundRobin, make_policy
from launcher.balancing.upstreams import Upstream
from launcher.config.schema import Policy as Name


def rows(*in_flight: int) -> list[Upstream]:
    made = [up(slot, seqs=32) for slot in range(len(in_flight))]
    for row, load in zip(made, in_flight, strict=True):
        row.in_flight = load
    return made


def policy(name: Name, seed: int = 1, sharing: dict[int | None, int] | None = None) -> Policy:
    return make_policy(name, Random(seed).randrange, CostModel(), sharing or {})


@given(st.sampled_from(list(Name)), st.lists(st.integers(0, 31), min_size=1, max_size=6), st.data())
def test_a_policy_chooses_a_candidate_and_the_same_one_for_the_same_seed(
    name: Name, loads: list[int], data: st.DataObject
) -> None:
    table = rows(*loads)
    opened = [row for row in table if data.draw(st.booleans())] or table
    one = ticket()
    first = policy(name).choose(one, table, opened, 0.0)
    assert first in table
    assert policy(name).choose(one, table, opened, 0.0) is first


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers())
def test_least_requests_chooses_the_fewest(loads: list[int], seed: int) -> None:
    table = rows(*loads)
    assert LeastRequests(Random(seed).randrange).choose(ticket(), table, table, 0.0).in_flight == min(loads)


def test_ties_are_broken_evenly_and_a_straggler_counts_as_busier() -> None:
    least = LeastRequests(Random(1).randrange)
    table = rows(2, 1, 1, 1)
    counts = Counter(least.choose(ticket(), table, table, 0.0).slot for _ in range(3000))
    assert set(counts) == {1, 2, 3}
    assert min(counts.values()) > 900
    table[1].lag = table[2].lag = 2.0
    assert least.choose(ticket(), table, table, 0.0).slot == 3


def test_round_robin_skips_instances_that_are_not_open() -> None:
    turns = RoundRobin()
    table = rows(0, 0, 0)
    assert [turns.choose(ticket(), table, table, 0.0).slot for _ in range(4)] == [0, 1, 2, 0]
    assert turns.choose(ticket(), table, [table[0], table[2]], 0.0).slot == 2


PROMPT = tuple(range(100, 120))


def test_a_cached_prompt_goes_to_the_instance_that_has_it() -> None:
    table = rows(0, 0)
    table[1].prefixes.use(PROMPT)
    one = ticket(tokens=2560, prefix=PROMPT)
    assert policy(Name.PREFIX_AWARE).choose(one, table, table, 0.0).slot == 1


def test_a_request_waits_for_its_cache_while_that_is_cheaper_than_a_copy() -> None:
    table = rows(0, 1)
    table[1].prefixes.use(PROMPT)
    one = ticket(tokens=2560, prefix=PROMPT)
    table[1].load.bind(2, 1000.0, 0.0, stream=True)  # a second of prefill, against 2.6 s
    assert policy(Name.PREFIX_AWARE).choose(one, table, table[:1], 0.0).slot == 1
    table[1].load.bind(3, 2000.0, 0.0, stream=True)
    assert policy(Name.PREFIX_AWARE).choose(one, table, table[:1], 0.0).slot == 0


def test_waiting_requests_with_the_same_prompt_share_the_cost_of_a_copy() -> None:
    table = rows(0, 1)
    table[1].prefixes.use(PROMPT)
    one = ticket(tokens=2560, prefix=PROMPT)
    table[1].load.bind(4, 1000.0, 0.0, stream=True)
    sharing: dict[int | None, int] = {PROMPT[-1]: 9}
    assert policy(Name.PREFIX_AWARE, sharing=sharing).choose(one, table, table[:1], 0.0).slot == 0


def test_a_copy_costs_more_where_other_requests_wait() -> None:
    table = rows(1, 0, 0)
    table[0].prefixes.use(PROMPT)
    table[0].load.bind(5, 3000.0, 0.0, stream=True)  # three seconds of prefill, against 2.6 s
    one = ticket(tokens=2560, prefix=PROMPT)
    for held_up, chosen in ((1, 2), (2, 0)):
        table[held_up].load.expect(0.1)
        assert policy(Name.PREFIX_AWARE).choose(one, table, table[1:], 0.0).slot == chosen
    one.awaited = table[1]  # it is the one that waits there
    assert policy(Name.PREFIX_AWARE).choose(one, table, table[1:], 0.0).slot == 1


def test_a_full_instance_costs_the_wait_until_enough_requests_end() -> None:
    table = rows(32, 31)
    assert policy(Name.PREFIX_AWARE).choose(ticket(), table, table[1:], 0.0).slot == 1
    table[0].prefixes.use(PROMPT)  # a copy takes 2.6 s, a request ends every 0.3 s
    one = ticket(tokens=2560, prefix=PROMPT)
    assert policy(Name.PREFIX_AWARE).choose(one, table, table[1:], 0.0).slot == 0
    table[0].load.ahead = 9
    assert policy(Name.PREFIX_AWARE).choose(one, table, table[1:], 0.0).slot == 1


def test_no_request_waits_for_an_instance_with_no_more_of_its_prompt_than_an_open_one() -> None:
    table = rows(0, 5, 30)
    assert policy(Name.PREFIX_AWARE).choose(ticket(), table, table[2:], 0.0).slot == 2
    table[0].prefixes.use(PROMPT)
    table[1].prefixes.use(PROMPT)
    one = ticket(tokens=2560, prefix=PROMPT)
    assert policy(Name.PREFIX_AWARE).choose(one, table, table[1:], 0.0).slot == 1
    full = rows(32, 32)
    full[0].prefixes.use(PROMPT)
    assert policy(Name.PREFIX_AWARE).choose(one, full, full[1:], 0.0).slot in (0, 1)
