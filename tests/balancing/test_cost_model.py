"""How fast instances are, learned from what requests do."""

from __future__ import annotations

import pytest
from support.balancing import ticket, up

from launcher.balancing.cost_model import LEARNED, CostModel
from launcher.balancing.upstreams import Ticket, Upstream


def model_and_upstream() -> tuple[CostModel, Upstream]:
    costs = CostModel()
    upstream = up(0)
    upstream.fit = costs.fit("m")
    assert costs.fit("m") is upstream.fit
    return costs, upstream


def began(tokens: int, uncached: float | None = None) -> Ticket:
    one = ticket(tokens=tokens)
    one.uncached = one.work = float(tokens) if uncached is None else uncached
    return one


def test_prefill_speed_comes_from_first_tokens() -> None:
    costs, upstream = model_and_upstream()
    for n in range(200):
        tokens = 100 + n % 10 * 100
        costs.seen_first_token(began(tokens), upstream, 0.08 + tokens / 1500)
    assert costs.token_s(upstream) == pytest.approx(1 / 1500, rel=0.02)
    assert costs.horizon_s(upstream) == pytest.approx(0.09, abs=0.01)


def test_tokens_per_byte_come_from_usage() -> None:
    costs, _ = model_and_upstream()
    assert costs.prompt_tokens(400) == 101
    costs.seen_prompt(0, 10)
    costs.seen_prompt(1000, 500)
    assert costs.prompt_tokens(400) == 201
    assert costs.block_tokens == 256


def test_output_tokens_are_estimated_from_answers() -> None:
    costs, upstream = model_and_upstream()
    assert costs.output_tokens(100) == 100
    assert costs.output_tokens(None) == 200
    assert costs.output_tokens(None, 3) == 600
    one = ticket(max_tokens=102)
    costs.seen_end(one, upstream, 1.0)
    assert costs.output_tokens(100) == 100
    one.tokens, one.first_token_at = 51, 0.0
    costs.seen_end(one, upstream, 5.0)
    assert costs.output_tokens(None) == 51
    assert costs.output_tokens(100) == 50
    one.demand.max_tokens = None
    costs.seen_end(one, upstream, 5.0)
    assert costs.output_tokens(100) == 50
    assert costs.next_end_s(up(0, seqs=4)) == pytest.approx(51 * 0.1 / 4)


def test_a_misjudged_cached_prompt_corrects_the_cache_size_not_the_speed() -> None:
    costs, upstream = model_and_upstream()
    for n in range(LEARNED + 10):
        costs.seen_first_token(began(100 + n % 5 * 100), upstream, (100 + n % 5 * 100) * 0.001)
    before, capacity = upstream.fit.count, upstream.prefixes.capacity
    costs.seen_first_token(began(4000, uncached=100.0), upstream, 4.0)
    assert upstream.fit.count == before
    assert upstream.prefixes.capacity < capacity
    smaller = upstream.prefixes.capacity
    costs.seen_first_token(began(4000), upstream, 0.1)
    assert upstream.prefixes.capacity > smaller
    known = up(1, kv_tokens=1000)
    costs.seen_cached(began(4000, uncached=100.0), known, 0)
    assert known.prefixes.capacity == up(2).prefixes.capacity
    same = upstream.prefixes.capacity
    costs.seen_cached(began(4000), upstream, 0)
    assert upstream.prefixes.capacity == same


def test_engines_that_take_no_time() -> None:
    costs, upstream = model_and_upstream()
    for _ in range(LEARNED + 1):
        upstream.fit.add(0.0, 0.0)
    upstream.fit.base = upstream.fit.slope = 0.0
    costs.seen_first_token(began(100), upstream, 0.0)
    assert upstream.outliers.slowness.count == 0


def test_delayed_requests_by_arrival_rate_and_load() -> None:
    costs, busy = model_and_upstream()
    idle = up(1)
    for n in range(100):
        costs.seen_bound(busy, 50.0, n * 0.1)
    costs.seen_bound(idle, 50.0, 0.0)
    rate, load = 10.0, 0.5
    assert costs.delayed(busy, 2.0, 1.0, 10.0) == pytest.approx(rate * 2.5 / (1.0 - load), rel=0.2)
    assert costs.delayed(busy, 0.0, 1.0, 10.0) > 20 * costs.delayed(idle, 0.0, 1.0, 10.0)
    for n in range(1000):
        costs.seen_bound(busy, 3000.0, 10.0 + n)
    assert costs.delayed(busy, 1.0, 0.0, 1010.0) == pytest.approx(10.0, rel=0.2)  # as at 90 % load


def test_the_head_start_of_small_prompts_is_bounded() -> None:
    costs, upstream = model_and_upstream()
    sizes = (0.0, 1e-9, 10.0, 100.0, 500.0, 1000.0, 5000.0, 1e12)
    starts = [costs.head_start_s(size, 0.001) for size in sizes]
    assert starts == sorted(starts, reverse=True)
    assert starts[0] < 5.0
    assert starts[-1] >= 0.0
    assert [costs.head_start_s(size, 0.01) for size in sizes] == pytest.approx([10.0 * s for s in starts])
    costs.seen_bound(upstream, 0.0, 0.0)
    assert costs.head_start_s(1.0, 0.001) == pytest.approx(0.0)


def test_arrivals_count_tokens_not_estimated_seconds() -> None:
    costs, upstream = model_and_upstream()
    for n in range(100):
        costs.seen_bound(upstream, 300.0, n * 0.1)
    before = costs.head_start_s(300.0, costs.token_s(upstream)), costs.delayed(upstream, 1.0, 0.0, 10.0)
    upstream.fit.slope /= 10.0
    after = costs.head_start_s(300.0, costs.token_s(upstream)), costs.delayed(upstream, 1.0, 0.0, 10.0)
    assert after[0] == pytest.approx(before[0] / 10.0)
    assert after[1] < before[1] / 4.0  # a load of 0.3 now, not of the 0.9 that is the most


def test_a_refused_request_leaves_no_trace() -> None:
    costs, upstream = model_and_upstream()
    number = costs.seen_bound(upstream, 1e6, 0.0)
    costs.seen_refused(upstream, 1e6, 0.0, number)
    assert costs.typical_uncached == model_and_upstream()[0].typical_uncached
    for n in range(300):
        costs.seen_bound(upstream, 100.0, n * 0.1)
    before = costs.typical_uncached, costs.delayed(upstream, 1.0, 0.5, 31.0)
    number = costs.seen_bound(upstream, 1e6, 30.5)
    costs.seen_refused(upstream, 1e6, 30.5, number)
    after = costs.typical_uncached, costs.delayed(upstream, 1.0, 0.5, 31.0)
    assert after == pytest.approx(before)


@pytest.mark.parametrize("earlier", [0, 3, 150, 300])
@pytest.mark.parametrize("later", [0, 3, 150, 1000])
def test_a_refusal_that_took_long_leaves_no_trace_either(earlier: int, later: int) -> None:
    """The mean of prompts is what it would be without it, however many came before and since."""
    costs, upstream = model_and_upstream()
    without, other = model_and_upstream()
    sizes = [100.0 + 7 * (n % 13) for n in range(earlier + later)]
    number = 0
    for n, size in enumerate(sizes):
        if n == earlier:
            number = costs.seen_bound(upstream, 1e6, 0.0)
        costs.seen_bound(upstream, size, 0.0)
        without.seen_bound(other, size, 0.0)
    if earlier == len(sizes):
        number = costs.seen_bound(upstream, 1e6, 0.0)
    costs.seen_refused(upstream, 1e6, 0.0, number)
    assert costs.typical_uncached == pytest.approx(without.typical_uncached, rel=0.05)
