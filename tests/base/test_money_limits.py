"""A daily cap holds over any sequence of requests, usages, crashes and midnights."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hand_clock import at

from launcher.base.money_limits import DailyCap, Day

DAY_S = 86_400
CAP = 20 * 10**12


def day_of(now: float) -> Day:
    begins = now // DAY_S * DAY_S
    return Day(begins, begins + DAY_S)


@dataclass
class Record:
    """What survives a crash."""

    kept: dict[int, int] = field(default_factory=dict)

    def store(self, begin: int, amount: int) -> None:
        self.kept = {begin: amount}


@dataclass
class Model:
    """Requests at an endpoint, their cap, and what the endpoint would bill."""

    record: Record = field(default_factory=Record)
    now: float = 0.0
    running: list[int] = field(default_factory=list)
    billed: int = 0
    """Of today, at most: what ended, and what a crash left behind at its upper bound."""
    excess: int = 0
    """What requests of today cost above their reservations."""

    def __post_init__(self) -> None:
        self.cap = DailyCap(CAP, day_of, at(self.now), record=self.record)

    def send(self, bound: int) -> None:
        before = self.cap.settled + self.cap.reserved
        if self.cap.admits(bound):
            assert before + bound <= CAP
            self.cap.reserve(bound)
            self.running.append(bound)
        else:
            assert before + bound > CAP  # nothing that fits is refused

    def end(self, share: float) -> None:
        if self.running:
            bound = self.running.pop(int(share * len(self.running)) % len(self.running))
            cost = int(bound * share)
            self.cap.settle(bound, cost)
            self.billed += cost

    def end_dearer(self, more: int) -> None:
        """The endpoint says more than was reserved."""
        if self.running:
            bound = self.running.pop()
            self.cap.settle(bound, bound + more)
            self.billed += bound + more
            self.excess += more

    def crash(self) -> None:
        """SIGKILL: the endpoint may bill all that ran; the ledger may lack the last requests."""
        self.billed += sum(self.running)
        self.running = []
        begins = int(day_of(self.now).begins)
        self.cap = DailyCap(
            CAP, day_of, at(self.now), spent=self.record.kept.get(begins, 0), record=self.record
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.cap.next_day(at(self.now)):
            self.billed = self.excess = 0

    def check(self) -> None:
        cap = self.cap
        assert cap.reserved == sum(self.running)
        assert cap.settled == self.billed  # to the pico
        assert cap.settled + cap.reserved <= CAP + self.excess


AMOUNTS = st.integers(0, CAP + 1) | st.integers(0, CAP // 20)
EVENTS = st.one_of(
    st.tuples(st.just("send"), AMOUNTS),
    st.tuples(st.just("send"), st.integers(0, CAP // 4)),
    st.tuples(st.just("end"), st.floats(0, 1)),
    st.tuples(st.just("end"), st.just(1.0)),
    st.tuples(st.just("crash")),
    st.tuples(st.just("sleep"), st.floats(0, DAY_S * 1.5)),
)
DEARER = st.tuples(st.just("end_dearer"), st.integers(1, CAP))


def run(events: list[tuple[object, ...]]) -> Model:
    model = Model()
    for name, *arguments in events:
        getattr(model, str(name))(*arguments)
        model.check()
    return model


@given(st.lists(EVENTS, max_size=60))
def test_what_is_billed_never_exceeds_the_cap(events: list[tuple[object, ...]]) -> None:
    model = run(events)
    assert model.billed + sum(model.running) <= CAP


@given(st.lists(EVENTS | DEARER, max_size=60))
def test_usage_above_the_reservation_exceeds_it_by_the_requests_under_way(
    events: list[tuple[object, ...]],
) -> None:
    """A request that is sent after the excess was said fits what is left."""
    model = run(events)
    assert model.billed + sum(model.running) <= CAP + model.excess


def test_a_request_counts_on_the_day_on_which_it_ends() -> None:
    model = Model()
    model.send(CAP)
    model.sleep(DAY_S)
    assert (model.cap.settled, model.cap.reserved, model.cap.ends) == (0, CAP, 2 * DAY_S)
    assert not model.cap.admits(1)
    model.end(0.25)
    assert (model.cap.settled, model.cap.admits(CAP - CAP // 4)) == (CAP // 4, True)


def test_a_clock_that_is_set_back_begins_no_day() -> None:
    cap = DailyCap(CAP, day_of, at(DAY_S + 10.0), spent=5)
    assert not cap.next_day(at(DAY_S - 10.0))
    assert cap.settled == 5
    assert cap.next_day(at(2 * DAY_S))
    assert cap.settled == 0


@pytest.mark.parametrize("spent", [None, CAP])
def test_nothing_is_admitted_before_the_next_day(spent: int | None) -> None:
    """The amount of today is not known, or is the cap."""
    cap = DailyCap(CAP, day_of, at(0.0), spent=spent)
    assert not cap.admits(1)
    assert [cap.refuse(), cap.refuse()] == [True, False]
    assert cap.next_day(at(DAY_S))
    assert cap.admits(CAP)
    assert cap.refuse()
