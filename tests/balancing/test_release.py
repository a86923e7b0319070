"""How requests leave their instances: what the estimates, the caches and outlier detection learn."""

from __future__ import annotations

import pytest
from support.balancing import balancer, run, slot, ticket

from launcher.balancing.balancer import Balancer
from launcher.balancing.outlier_detection import OutlierDetection
from launcher.balancing.prefix_cache import PrefixCache
from launcher.balancing.upstreams import Ending

BASE_S, PER_TOKEN_S = 0.05, 0.002


def seasoned(requests: int = 300) -> tuple[Balancer, float]:
    """A balancer that has seen streams of 100 to 2,000 tokens; and the time."""
    made, now = balancer(1), 0.0
    for n in range(requests):
        one = ticket(now, tokens=100 + n * 37 % 1900)
        assert made.offer(one, now) is not None
        now += BASE_S + PER_TOKEN_S * one.demand.prompt_tokens
        made.first_token(one, now)
        made.progress(one, 50)
        made.release(one, now + 1.0, Ending.WHOLE)
        now += 1.0
    assert made.costs.fit("m").slope == pytest.approx(PER_TOKEN_S, rel=0.01)
    return made, now


def learned(made: Balancer) -> tuple[float, float, int, int]:
    line = made.costs.fit("m")
    return line.base, line.slope, made.output_tokens(None), made.output_tokens(1000)


@pytest.mark.parametrize("ending", [Ending.REFUSED, Ending.LEFT, Ending.BROKEN])
@pytest.mark.parametrize("stream", [False, True])
def test_only_whole_answers_change_the_estimates(ending: Ending, stream: bool) -> None:
    made, now = seasoned()
    before = learned(made)
    made.offer(one := ticket(now, tokens=200_000, max_tokens=1000, stream=stream), now)
    made.progress(one, 3)
    made.release(one, now + 0.02, ending)
    assert learned(made) == before


@pytest.mark.parametrize(("tokens", "times"), [(100_000, 1), (20_000, 3)])
def test_answers_too_early_for_their_prompts_enlarge_the_cache(tokens: int, times: int) -> None:
    made, now = seasoned()
    before, capacity = learned(made), (upstream := next(iter(made.table))).prefixes.capacity
    for _ in range(times):
        made.offer(one := ticket(now, tokens=tokens, stream=False), now)
        made.release(one, now + 0.02, Ending.WHOLE)
        now += 60.0
    assert learned(made) == before
    assert upstream.prefixes.capacity > capacity


def test_usage_corrects_the_tokens_of_a_whole_answer() -> None:
    made, now = seasoned()
    made.offer(one := ticket(now, tokens=1000, stream=False), now)
    made.usage(one, 0, 800, 10)
    made.release(one, now + 1.3, Ending.WHOLE)  # 1.65 s are due for 800, for 1,000 2.05
    told_s = made.costs.fit("m").at(900.0)
    made, now = seasoned()
    made.offer(one := ticket(now, tokens=1000, stream=False), now)
    made.release(one, now + 1.3, Ending.WHOLE)
    assert made.costs.fit("m").at(900.0) < told_s < BASE_S + 900.0 * PER_TOKEN_S
    made, now = seasoned()
    before = learned(made)
    made.offer(one := ticket(now, tokens=1000, stream=False), now)
    made.usage(one, 0, 1000, 10, cached_tokens=700)
    made.release(one, now + 1.3, Ending.WHOLE)
    assert learned(made)[:2] == before[:2]  # 0.65 s were due


def test_requests_without_a_prompt_change_no_estimate() -> None:
    made, now = seasoned()
    before, own = learned(made), made.costs.typical_uncached
    for _ in range(500):
        made.offer(one := ticket(now, tokens=0, output=0, stream=False), now)
        made.release(one, now + 0.001, Ending.WHOLE)
        now += 0.01
    assert learned(made) == before
    assert made.costs.typical_uncached == own


def test_usage_without_prompt_bytes_leaves_tokens_per_byte() -> None:
    made = balancer(1)
    capacity = next(iter(made.table)).prefixes.capacity
    made.offer(one := ticket(tokens=1000), 0.0)
    made.usage(one, 0, 5000, 10, cached_tokens=5000)
    assert made.prompt_tokens(400) == 101
    assert made.costs.block_tokens == 128
    assert next(iter(made.table)).prefixes.capacity == capacity
    for _ in range(300):
        made.usage(one, 10**6, 1200, 10)
    assert made.prompt_tokens(10_000) == pytest.approx(501, abs=1)
    for _ in range(3000):
        made.usage(one, 2, 20, 10)
    assert made.prompt_tokens(10_000) == pytest.approx(10_001, abs=2)


# --- caches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "stream", "after_s", "stays"),
    [
        (Ending.REFUSED, True, 0.1, False),
        (Ending.REFUSED, False, 99.0, False),
        (Ending.LEFT, True, 0.1, False),
        (Ending.LEFT, False, 0.1, False),
        (Ending.LEFT, False, 99.0, True),  # time enough for its prefill
        (Ending.WHOLE, False, 0.1, True),
        (Ending.BROKEN, True, 0.1, False),
    ],
)
def test_prompts_that_were_not_computed_are_not_cached(
    ending: Ending, stream: bool, after_s: float, stays: bool
) -> None:
    made = balancer(1)
    cache = next(iter(made.table)).prefixes
    shared, prompt = tuple(range(5)), tuple(range(20))
    made.offer(first := ticket(tokens=640, prefix=shared), 0.0)
    run(made, first, 0.0)
    made.offer(one := ticket(5.0, tokens=2560, prefix=prompt, stream=stream), 5.0)
    assert cache.match(prompt) == 20
    made.release(one, 5.0 + after_s, ending)
    assert cache.match(prompt) == (20 if stays else 5)


def test_a_first_token_proves_that_the_prompt_is_cached() -> None:
    made = balancer(1)
    prompt = tuple(range(20))
    made.offer(one := ticket(tokens=2560, prefix=prompt), 0.0)
    made.first_token(one, 2.0)
    made.release(one, 2.1, Ending.LEFT)
    assert next(iter(made.table)).prefixes.match(prompt) == 20


def test_blocks_that_others_used_since_are_kept() -> None:
    cache = PrefixCache(15)
    cache.use(tuple(range(10)), 1)
    cache.use((*range(4), 20, 21), 2)
    cache.forget(tuple(range(10)), 1)
    assert cache.match(tuple(range(10))) == 4
    assert cache.match((*range(4), 20, 21)) == 6
    cache.use(tuple(range(100, 120)), 3)  # longer than it all: its end is not held anyway
    cache.forget(tuple(range(100, 120)), 3)
    assert len(cache) == 0


# --- outliers ----------------------------------------------------------------------------------------


def half_open(made: Balancer) -> tuple[OutlierDetection, float]:
    """The only instance was ejected, and is to be tried."""
    upstream = next(iter(made.table))
    for _ in range(3):
        made.failed(upstream, 0.0)
    upstream.outliers.end_pause(9.9)
    assert not upstream.outliers.admits
    return upstream.outliers, 10.0


@pytest.mark.parametrize(
    ("ending", "heals"), [(Ending.WHOLE, True), (Ending.REFUSED, True), (Ending.LEFT, False)]
)
def test_an_abort_does_not_end_a_trial(ending: Ending, heals: bool) -> None:
    made = balancer(1)
    outliers, now = half_open(made)
    made.offer(trial := ticket(now), now)
    assert slot(trial) == 0
    assert made.offer(ticket(now), now) is None
    made.release(trial, now + 1.0, ending)
    assert outliers.half_open is not heals
    assert outliers.failures == (0 if ending is Ending.WHOLE else 3)
    assert len(made.pump(now + 1.0)) == 1  # into rotation, or to try it anew


def test_the_first_token_of_a_trial_ends_it_but_failures_still_count() -> None:
    made = balancer(1)
    outliers, now = half_open(made)
    made.offer(trial := ticket(now), now)
    made.offer(second := ticket(now), now)
    assert second.queued
    made.first_token(trial, now + 0.1)
    assert made.pump(now + 0.1) == [second]
    assert not outliers.half_open
    made.release(trial, now + 0.2, Ending.BROKEN)
    assert made.failed(next(iter(made.table)), now + 0.2)  # what it broke before is not forgiven yet


def test_only_the_end_of_the_trial_allows_another() -> None:
    made = balancer(1)
    made.offer(old := ticket(), 0.0)
    made.first_token(old, 0.1)
    _, now = half_open(made)
    made.offer(trial := ticket(now), now)
    assert slot(trial) == 0
    made.release(old, now + 0.1, Ending.LEFT)
    assert made.offer(ticket(now), now + 0.1) is None
    made.release(trial, now + 0.2, Ending.LEFT)
    assert [slot(one) for one in made.pump(now + 0.2)] == [0]


def test_aborts_between_failures_do_not_clear_them() -> None:
    made = balancer(1)
    upstream = next(iter(made.table))
    for n in range(3):
        made.offer(one := ticket(float(n)), float(n))
        made.release(one, n + 0.5, Ending.LEFT)
        assert made.failed(upstream, n + 0.6) is (n == 2)
