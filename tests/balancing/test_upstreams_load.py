"""The unfinished work of one instance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.balancing.upstreams import Load


def bind(load: Load, number: int, uncached: float, now: float = 0.0, *, stream: bool = True) -> None:
    load.bind(number, uncached, now, stream=stream)


def test_prefill_is_done_in_order_and_elapsed_time_counts_for_the_first() -> None:
    load = Load()
    assert load.remaining_s(0.0, 0.01) == 0.0
    bind(load, 1, 100.0)
    bind(load, 2, 50.0, 0.2)
    assert load.remaining_s(0.4, 0.01) == 1.1
    assert load.remaining_s(9.0, 0.01) == 0.5
    assert load.first_token(2, 1.0)
    assert not load.first_token(1, 1.1)
    assert load.remaining_s(1.2, 0.01) == 0.0
    assert load.prefill == 0.0


def test_a_first_token_after_the_end_is_known() -> None:
    load = Load()
    bind(load, 1, 100.0)
    load.leave(1, 0.5)
    assert not load.first_token(1, 0.6)


def test_a_request_that_leaves_early_takes_its_work_away() -> None:
    load = Load()
    for number in (1, 2, 3):
        bind(load, number, 100.0)
    load.leave(2, 0.5)
    assert load.remaining_s(0.5, 0.01) == 1.5
    load.leave(1, 0.6)
    assert load.remaining_s(0.6, 0.01) == 1.0
    load.leave(3, 0.7)
    load.leave(3, 0.7)
    assert load.prefill == 0.0


def test_the_prefill_of_an_answer_that_is_not_streamed_ends_by_time() -> None:
    load = Load()
    bind(load, 1, 100.0, stream=False)
    bind(load, 2, 100.0, stream=False)
    assert load.remaining_s(1.5, 0.01) == 0.5
    assert len(load.pending) == 1
    assert load.remaining_s(2.5, 0.01) == 0.0
    assert not load.pending


def test_a_single_report_of_the_instance_changes_nothing() -> None:
    load = Load()
    load.reported(7, 3, full=True)
    assert (load.surplus, load.full) == (0, True)
    load.reported(5, 3, full=False)
    assert (load.surplus, load.full) == (2, False)
    load.reported(3, 3, full=False)
    assert load.surplus == 0


@given(st.lists(st.tuples(st.integers(1, 500), st.booleans())))
def test_nothing_is_left_when_all_have_left(works: list[tuple[int, bool]]) -> None:
    load = Load()
    for number, (tokens, begins) in enumerate(works):
        bind(load, number, float(tokens))
        if begins:
            load.first_token(number, 1.0)
        assert load.remaining_s(2.0, 0.001) >= -1e-9
    for number in range(len(works)):
        load.leave(number, 3.0)
    assert not load.pending
    assert load.prefill == 0.0
