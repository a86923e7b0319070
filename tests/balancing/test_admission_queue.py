"""The queue: bounds, classes, fairness, order, deadlines."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.balancing import ticket
from support.budgets import bound

from launcher.balancing.admission_queue import MOST_DISPLACED, AdmissionQueue
from launcher.balancing.upstreams import Ticket


def numbered(number: int, one: Ticket, cost: float = 1.0) -> Ticket:
    one.number, one.rank, one.cost = number, float(number), cost
    return one


def take_all(queue: AdmissionQueue) -> list[Ticket]:
    taken = []
    while (first := next(queue.ordered("m"), None)) is not None:
        queue.take(first)
        taken.append(first)
    return taken


def test_bounds_by_count_and_bytes() -> None:
    queue = AdmissionQueue(2, 100)
    assert queue.refusal(100) is None
    assert queue.refusal(101) == ("bytes", "0 bytes of request bodies wait already")
    queue.add(numbered(1, ticket(tokens=15)))
    assert queue.count == 1
    assert queue.bytes == 60
    assert queue.refusal(41) is not None
    queue.add(numbered(2, ticket(tokens=1)))
    assert queue.refusal(0) == ("requests", "2 requests wait already")


def test_smaller_priority_first_then_rank() -> None:
    queue = AdmissionQueue(10, 10**6)
    late, urgent, early = (numbered(n, ticket(priority=p)) for n, p in ((3, 0), (2, -1), (1, 0)))
    for one in (late, urgent, early):
        queue.add(one)
    assert take_all(queue) == [urgent, early, late]
    assert queue.next_deadline() is not None


def test_what_would_start_before_a_ticket_that_was_queued_before() -> None:
    queue = AdmissionQueue(10, 10**6)
    first, last = numbered(1, ticket(key="a")), numbered(3, ticket(key="a"))
    other, urgent = numbered(4, ticket(key="b")), numbered(5, ticket(priority=-1))
    for one in (first, last, other, urgent):
        queue.add(one)
    assert queue.waiting("m") == 4
    ahead, nearest = queue.ahead(numbered(2, ticket(key="a")), 5)
    assert nearest == [first]
    assert ahead.count == 2  # the other key's and the urgent one


@given(st.lists(st.integers(1, 20), min_size=2, max_size=5), st.data())
def test_waiting_keys_share_by_cost(loads: list[int], data: st.DataObject) -> None:
    queue = AdmissionQueue(1000, 10**9)
    number = 0
    dearest = 0.0
    for key, load in enumerate(loads):
        for _ in range(load):
            number += 1
            cost = data.draw(st.floats(0.1, 10.0))
            dearest = max(dearest, cost)
            queue.add(numbered(number, ticket(key=str(key)), cost))
    served: Counter[str | None] = Counter()
    waiting = Counter({str(key): load for key, load in enumerate(loads)})
    while (first := next(queue.ordered("m"), None)) is not None:
        # What it has been given differs by at most one dearest request from any other that still waits.
        backlogged = [served[key] for key, left in waiting.items() if left]
        assert max(backlogged) - min(backlogged) <= dearest + 1e-6
        queue.take(first)
        served[first.demand.key] += first.cost  # type: ignore[assignment]
        waiting[str(first.demand.key)] -= 1
    assert queue.count == queue.bytes == 0
    assert not queue.sharing


@given(st.lists(st.sampled_from("atwx"), max_size=200))
def test_nothing_is_lost_or_doubled(acts: list[str]) -> None:
    queue = AdmissionQueue(1000, 10**9)
    inside: set[Ticket] = set()
    number = 0
    for now, act in enumerate(acts):
        if act == "a":
            number += 1
            one = numbered(number, ticket(key=str(number % 3), priority=number % 2, deadline=now + 20.0))
            queue.add(one)
            inside.add(one)
        elif act == "x":
            gone = queue.expired(float(now))
            assert {o.deadline <= now for o in gone} <= {True}
            assert all(one in inside for one in gone)
            inside -= set(gone)
        elif inside:
            one = next(queue.ordered("m"))
            (queue.take if act == "t" else queue.remove)(one)
            inside.remove(one)
        assert set(queue.ordered("m")) == inside
        assert len(list(queue.ordered("m"))) == queue.count == len(inside)


def test_one_key_is_first_come_first_served() -> None:
    queue = AdmissionQueue(1000, 10**9)
    tickets = [numbered(n, ticket(deadline=5.0)) for n in range(1, 200)]
    for one in tickets:
        queue.add(one)
    assert take_all(queue) == tickets
    assert queue.expired(10.0) == []
    assert queue.next_deadline() is None


def test_a_ticket_that_is_queued_again_has_its_new_deadline_only() -> None:
    queue = AdmissionQueue(10, 10**6)
    one = numbered(1, ticket(deadline=10.0))
    queue.add(one)
    queue.take(one)
    one.deadline = 20.0
    queue.add(one)
    queue.take(one)
    queue.add(one)  # the same deadline twice
    assert queue.expired(10.0) == []
    assert queue.expired(20.0) == [one]
    assert queue.expired(30.0) == []


def test_deadlines_of_removed_tickets_are_dropped() -> None:
    queue = AdmissionQueue(1000, 10**9)
    for n in range(1, 200):
        one = numbered(n, ticket(deadline=1000.0 - n))
        queue.add(one)
        if n % 10:
            queue.remove(one)
    assert (queue.next_deadline() or 0.0) <= 810.0
    queue.expired(800.0)
    assert queue.count == 19


def test_two_keys_take_turns() -> None:
    queue = AdmissionQueue(10, 10**6)
    tickets = [numbered(n, ticket(key="a" if n < 4 else "b")) for n in range(1, 7)]
    for one in tickets:
        queue.add(one)
    assert [one.number for one in queue.ordered("m")] == [1, 4, 2, 5, 3, 6]


@pytest.mark.bounded
def test_a_large_body_displaces_large_ones_and_not_thousands() -> None:
    """One model is down: its queue ends in many small bodies. Looked for one by one they would take minutes of CPU."""
    queue = AdmissionQueue(4096, 512 << 20)
    small = 300
    for number in range(4000):
        body_bytes = 64 << 20 if number < 7 else small
        queue.add(numbered(number, ticket(tokens=body_bytes // 4, model="down", key=str(number % 2))))
    before = time.thread_time()
    found = queue.displaced(ticket(tokens=(64 << 20) // 4, model="up").demand)
    assert time.thread_time() - before < bound(0.05)
    assert [one.demand.body_bytes for one in found] == [64 << 20]
    assert (
        queue.displaced(ticket(tokens=small * MOST_DISPLACED // 8, model="up").demand) == []
    )  # there is room
    for number in range(4000, 4096):
        queue.add(numbered(number, ticket(tokens=10, model="down", key="more")))
    assert len(queue.displaced(ticket(tokens=10, model="up").demand)) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), min_size=40, max_size=120))
def test_a_full_queue_is_shared_by_model_then_by_key(arrivals: list[tuple[str, str]]) -> None:
    queue = AdmissionQueue(12, 10**9)
    wanted: dict[str, Counter[str]] = {}
    for number, (model, key) in enumerate(arrivals):
        one = numbered(number, ticket(model=model, key=key))
        wanted.setdefault(model, Counter())[key] += 1
        if queue.refusal(one.demand.body_bytes) is not None:
            leaving = queue.displaced(one.demand)
            if not leaving:
                continue
            for other in leaving:
                queue.remove(other)
        queue.add(one)
    assert queue.count <= 12
    have = {model: Counter(str(one.demand.key) for one in queue.ordered(model)) for model in wanted}
    fair = 12 // len(wanted)
    for model, keys in wanted.items():
        assert have[model].total() >= min(fair, keys.total())
        own = have[model].total() // len(keys)
        assert all(have[model][key] >= min(own, count) for key, count in keys.items())
