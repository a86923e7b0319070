"""How fast instances are, learned from what requests do."""

from __future__ import annotations

import pytest
from proxy.balancing.builders import ticket, up

from launcher.proxy.balancing.cost_model import LEARNED, CostModel
from launcher.proxy.balancing.demand import Ticket
from launcher.proxy.balancing.upstreams import Upstream


def model_and_upstream() -> tuple[CostModel, Upstream]:
    speeds = CostModel()
    upstream = up(0)
    upstream.line = speeds.line("m")
    assert speeds.line("m") is upstream.line
    return speeds, upstream


def began(tokens: int, uncached: float | None = None) -> Ticket:
    one = ticket(tokens=tokens)
    one.uncached = one.work = float(tokens) if uncached is None else uncached
    return one


def test_prefill_speed_comes_from_first_tokens() -> None:
    speeds, upstream = model_and_upstream()
    for n in range(200):
        tokens = 100 + n % 10 * 100
        speeds.seen_first(began(tokens), upstream, 0.08 + tokens / 1500)
    assert speeds.token_s(upstream) == pytest.approx(1 / 1500, rel=0.02)
    assert speeds.horizon_s(upstream) == pytest.approx(0.09, abs=0.01)


def test_tokens_per_byte_come_from_usage() -> None:
    speeds, _ = model_and_upstream()
    assert speeds.prompt_tokens(400) == 101
    speeds.seen_prompt(0, 10)
    speeds.seen_prompt(1000, 500)
    assert speeds.prompt_tokens(400) == 201
    assert speeds.block_tokens == 256


def test_answers_are_guessed_from_answers() -> None:
    speeds, upstream = model_and_upstream()
    assert speeds.output_tokens(100) == 100
    assert speeds.output_tokens(None) == 200
    assert speeds.output_tokens(None, 3) == 600
    one = ticket()
    speeds.seen_end(one, upstream, 1.0)
    one.tokens, one.first = 51, 0.0
    speeds.seen_end(one, upstream, 5.0)
    assert speeds.output_tokens(None) == 51
    speeds.seen_used(51, 102)
    assert speeds.output_tokens(100) == 50
    speeds.seen_used(51, None)
    speeds.seen_used(0, 10)
    assert speeds.output_tokens(100) == 50
    assert speeds.decode_s(up(0)) == 0.0
    assert speeds.seat_s(up(0, seqs=4)) == pytest.approx(51 * 0.1 / 4)


def test_a_prompt_that_was_not_cached_against_belief_makes_the_cache_smaller_and_says_nothing_of_speed() -> (
    None
):
    speeds, upstream = model_and_upstream()
    for n in range(LEARNED + 10):
        speeds.seen_first(began(100 + n % 5 * 100), upstream, (100 + n % 5 * 100) * 0.001)
    before, capacity = upstream.line.count, upstream.store.capacity
    speeds.seen_first(began(4000, uncached=100.0), upstream, 4.0)
    assert upstream.line.count == before
    assert upstream.store.capacity < capacity
    smaller = upstream.store.capacity
    speeds.seen_first(began(4000), upstream, 0.1)
    assert upstream.store.capacity > smaller
    known = up(1, kv_tokens=1000)
    speeds.seen_cached(began(4000, uncached=100.0), known, 0)
    assert known.store.capacity == up(2).store.capacity
    same = upstream.store.capacity
    speeds.seen_cached(began(4000), upstream, 0)
    assert upstream.store.capacity == same


def test_engines_that_take_no_time_are_no_division_by_zero() -> None:
    speeds, upstream = model_and_upstream()
    for _ in range(LEARNED + 1):
        upstream.line.add(0.0, 0.0)
    upstream.line.base = upstream.line.slope = 0.0
    speeds.seen_first(began(100), upstream, 0.0)
    assert upstream.health.slowness.count == 0


def test_work_is_weighed_by_whom_it_delays_where_it_is_done() -> None:
    speeds, busy = model_and_upstream()
    idle = up(1)
    for n in range(100):
        speeds.seen_bound(busy, 50.0, n * 0.1)
    speeds.seen_bound(idle, 50.0, 0.0)
    rate, load = 10.0, 0.5
    assert speeds.delayed(busy, 2.0, 1.0, 10.0) == pytest.approx(rate * 2.5 / (1.0 - load), rel=0.2)
    assert speeds.delayed(busy, 0.0, 1.0, 10.0) > 20 * speeds.delayed(idle, 0.0, 1.0, 10.0)
    for n in range(1000):
        speeds.seen_bound(busy, 3000.0, 10.0 + n)
    assert speeds.delayed(busy, 1.0, 0.0, 1010.0) == pytest.approx(10.0, rel=0.2)  # as at 90 % load


def test_small_prompts_pass_large_ones_but_not_without_bound() -> None:
    speeds, upstream = model_and_upstream()
    sizes = (0.0, 1e-9, 10.0, 100.0, 500.0, 1000.0, 5000.0, 1e12)
    starts = [speeds.head_start_s(size, 0.001) for size in sizes]
    assert starts == sorted(starts, reverse=True)
    assert starts[0] < 5.0
    assert starts[-1] >= 0.0
    assert [speeds.head_start_s(size, 0.01) for size in sizes] == pytest.approx([10.0 * s for s in starts])
    speeds.seen_bound(upstream, 0.0, 0.0)
    assert speeds.head_start_s(1.0, 0.001) == pytest.approx(0.0)


def test_work_bound_while_the_speed_was_a_guess_is_not_told_by_that_guess() -> None:
    speeds, upstream = model_and_upstream()
    for n in range(100):
        speeds.seen_bound(upstream, 300.0, n * 0.1)
    before = speeds.head_start_s(300.0, speeds.token_s(upstream)), speeds.delayed(upstream, 1.0, 0.0, 10.0)
    upstream.line.slope /= 10.0
    after = speeds.head_start_s(300.0, speeds.token_s(upstream)), speeds.delayed(upstream, 1.0, 0.0, 10.0)
    assert after[0] == pytest.approx(before[0] / 10.0)
    assert after[1] < before[1] / 4.0  # a load of 0.3 now, not of the 0.9 that is the most
