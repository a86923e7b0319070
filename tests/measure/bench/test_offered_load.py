"""Loads: what is read, how many requests, and the steps of a search."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.measure.bench.offered_load import (
    SWEEP_POINTS,
    SWEEP_PRECISION,
    Load,
    best_rate,
    in_order,
    is_burst,
    keeps_up,
    next_rate,
    parse_concurrency,
    parse_rates,
    requests_for,
)


def test_lists_are_read() -> None:
    assert parse_concurrency("1,4,16") == (Load(concurrency=1), Load(concurrency=4), Load(concurrency=16))
    assert parse_rates("0.5,2") == (Load(rate=0.5), Load(rate=2.0))


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1.5", "-1", "x", "99999999"])
def test_wrong_concurrency_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_concurrency(text)


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "x"])
def test_wrong_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_rates(text)


def test_a_published_workload_keeps_its_number_of_requests() -> None:
    assert requests_for(Load(concurrency=4), 20) == 20
    assert requests_for(Load(concurrency=128), 1024) == 1024


def test_every_slot_of_a_closed_loop_is_used_several_times() -> None:
    assert requests_for(Load(concurrency=64), 20) == 256


def test_an_open_loop_covers_half_a_minute() -> None:
    assert requests_for(Load(rate=10.0), 20) == 300
    assert requests_for(Load(rate=0.1), 20) == 20


def test_repeats_come_in_turn() -> None:
    one, two = Load(concurrency=1), Load(concurrency=2)
    assert in_order((one, two), 2) == (one, two, one, two)


def searched(capacity: float, first: float) -> list[tuple[float, bool]]:
    """All steps against an endpoint that meets its SLO up to `capacity`."""
    tried: list[tuple[float, bool]] = []
    while (rate := next_rate(tried, first)) is not None:
        tried.append((rate, rate <= capacity))
        assert len(tried) <= SWEEP_POINTS
    return tried


def test_a_search_rises_and_then_narrows() -> None:
    tried = searched(capacity=5.0, first=1.0)
    assert [rate for rate, _ in tried[:4]] == [1.0, 2.0, 4.0, 8.0]
    assert tried[4][0] == pytest.approx(math.sqrt(32))


def test_an_endpoint_keeps_up_whose_last_request_ends_a_latency_after_the_last_arrival() -> None:
    # 300 requests at 10/s arrive within 30 s, give or take 1.7 s.
    assert keeps_up(10.0, 300, duration_s=30.0 + 13.0, latency_s=13.0)
    assert keeps_up(10.0, 300, duration_s=33.0, latency_s=0.1)
    assert not keeps_up(10.0, 300, duration_s=60.0, latency_s=13.0)


def test_few_requests_may_arrive_slowly_by_chance() -> None:
    assert keeps_up(1.0, 8, duration_s=13.0, latency_s=0.0)
    assert not keeps_up(1.0, 800, duration_s=1300.0, latency_s=0.0)


def test_requests_that_arrive_all_at_once_are_a_burst() -> None:
    assert is_burst(100.0, 8, latency_s=2.0)
    assert not is_burst(10.0, 300, latency_s=13.0)


def test_a_search_that_starts_too_high_falls_first() -> None:
    assert [rate for rate, _ in searched(capacity=1.5, first=8.0)[:4]] == [8.0, 4.0, 2.0, 1.0]


@given(st.floats(0.05, 1000), st.floats(0.05, 1000))
def test_a_search_ends_close_below_the_capacity(capacity: float, first: float) -> None:
    tried = searched(capacity, first)
    found = best_rate(tried)
    if len(tried) == SWEEP_POINTS:
        return  # the first rate was thousands of times too high or too low
    assert found is not None
    assert found <= capacity <= found * SWEEP_PRECISION


def test_without_a_rate_that_meets_the_slo_there_is_no_answer() -> None:
    assert best_rate([(1.0, False), (0.5, False)]) is None


def test_a_rate_above_a_broken_one_is_no_answer() -> None:
    """Noise: 4 met the SLO after 2 had broken it."""
    assert best_rate([(1.0, True), (2.0, False), (4.0, True)]) == 1.0


@given(st.lists(st.tuples(st.floats(0.1, 100), st.booleans()), max_size=40))
def test_every_history_has_an_end(tried: list[tuple[float, bool]]) -> None:
    rate = next_rate(tried, 1.0)
    assert (rate is None) or (len(tried) < SWEEP_POINTS and rate > 0)
