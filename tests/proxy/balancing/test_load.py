"""The work that is on one instance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from proxy.balancing.builders import ticket

from launcher.proxy.balancing.load import Load


def test_prefill_is_done_in_order_and_time_counts_for_the_first() -> None:
    ledger = Load()
    one, two = ticket(), ticket()
    assert ledger.remaining_s(0.0, 0.01) == 0.0
    ledger.bind(one, 100.0, 0.0)
    ledger.bind(two, 50.0, 0.2)
    assert ledger.remaining_s(0.4, 0.01) == 1.1
    assert ledger.remaining_s(9.0, 0.01) == 0.5
    assert ledger.first(two, 1.0)
    assert not ledger.first(one, 1.1)
    assert ledger.remaining_s(1.2, 0.01) == 0.0
    assert ledger.prefill == 0.0


def test_one_that_leaves_early_takes_its_work_away() -> None:
    ledger = Load()
    one, two, three = ticket(), ticket(), ticket()
    for each in (one, two, three):
        ledger.bind(each, 100.0, 0.0)
    ledger.leave(two, 0.5)
    assert ledger.remaining_s(0.5, 0.01) == 1.5
    ledger.leave(one, 0.6)
    assert ledger.remaining_s(0.6, 0.01) == 1.0
    ledger.leave(three, 0.7)
    ledger.leave(three, 0.7)
    assert (ledger.prefill, ledger.decode) == (0.0, 0.0)


def test_the_prefill_of_an_answer_that_comes_whole_ends_by_time() -> None:
    ledger = Load()
    ledger.bind(ticket(stream=False), 100.0, 0.0)
    ledger.bind(ticket(stream=False), 100.0, 0.0)
    assert ledger.remaining_s(1.5, 0.01) == 0.5
    assert len(ledger.pending) == 1
    assert ledger.remaining_s(2.5, 0.01) == 0.0
    assert not ledger.pending


def test_one_word_of_the_instance_alone_changes_nothing() -> None:
    ledger = Load()
    ledger.told(7, 3, full=True)
    assert (ledger.surplus, ledger.full) == (0, True)
    ledger.told(5, 3, full=False)
    assert (ledger.surplus, ledger.full) == (2, False)
    ledger.told(3, 3, full=False)
    assert ledger.surplus == 0


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 50), st.integers(0, 80), st.booleans())))
def test_nothing_is_left_when_all_have_left(works: list[tuple[int, int, int, bool]]) -> None:
    ledger = Load()
    tickets = []
    for tokens, output, produced, begins in works:
        one = ticket(tokens=tokens, output=output)
        tickets.append(one)
        ledger.bind(one, float(tokens), 0.0)
        if begins:
            ledger.first(one, 1.0)
            ledger.produced(one, produced)
            one.tokens += produced
        assert ledger.decode >= 0.0
        assert ledger.remaining_s(2.0, 0.001) >= -1e-9
    for one in tickets:
        ledger.leave(one, 3.0)
    assert not ledger.pending
    assert ledger.prefill == ledger.decode == 0.0
