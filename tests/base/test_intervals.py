"""Coverage of the intervals: how often they contain the truth, by simulation with known truths."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from launcher.base.intervals import (
    Interval,
    effective_count,
    mean,
    mean_ratio,
    paired_ratio,
    quantile,
    quantile_needs,
    quantile_ratio,
    student_t,
)

# The share that they find is exact to 0.007: intervals of another level, or too narrow ones, are beyond the bounds.
TRIALS = 1000
GAIN = 1.3
GENERATOR = np.random.default_rng()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test draws the same numbers, whatever ran before it."""
    GENERATOR.bit_generator.state = np.random.default_rng(20261122).bit_generator.state


def normal(count: int, spread: float = 0.05) -> NDArray[np.float64]:
    return 1 + GENERATOR.normal(0, spread, count)


def skewed(count: int) -> NDArray[np.float64]:
    """Log-normal with mean 1; a tail as latencies have it."""
    return np.exp(GENERATOR.normal(-0.125, 0.5, count))


def autocorrelated(count: int, correlation: float) -> NDArray[np.float64]:
    """Log-normal latencies of requests that share a queue with their neighbours; median 1."""
    steps = GENERATOR.normal(size=count) * math.sqrt(1 - correlation**2)
    values = np.empty(count)
    values[0] = GENERATOR.normal()
    for index in range(1, count):
        values[index] = correlation * values[index - 1] + steps[index]
    return np.exp(0.7 * values)


def coverage(truth: float, interval: Callable[[], Interval | None], trials: int = TRIALS) -> float:
    found = [interval() for _ in range(trials)]
    assert None not in found
    return sum(each is not None and each.contains(truth) for each in found) / trials


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (100, 1.9840), (1e6, 1.9600)],
)
def test_student_t_is_the_tables(freedom: float, expected: float) -> None:
    assert student_t(0.95, freedom) == pytest.approx(expected, abs=1e-4)


def test_student_t_at_another_level() -> None:
    assert student_t(0.99, 3) == pytest.approx(5.8409, abs=1e-4)


@pytest.mark.parametrize("count", [2, 3, 5, 10, 20])
def test_coverage_of_a_mean(count: int) -> None:
    assert 0.93 < coverage(1.0, lambda: mean(list(normal(count)))) < 0.97


@pytest.mark.parametrize(("count", "spread"), [(3, 0.08), (5, 0.01), (10, 0.08)])
def test_coverage_of_a_ratio_of_means(count: int, spread: float) -> None:
    """Three runs cover more: Welch's degrees of freedom are estimated."""
    found = coverage(
        GAIN, lambda: mean_ratio(list(GAIN * normal(count, spread)), list(normal(count, spread)))
    )
    assert 0.93 < found < (0.985 if count == 3 else 0.97)


def test_coverage_of_a_ratio_with_unequal_counts_and_noise() -> None:
    assert (
        0.93 < coverage(GAIN, lambda: mean_ratio(list(GAIN * normal(4, 0.08)), list(normal(8, 0.01)))) < 0.97
    )


def test_coverage_of_a_ratio_of_skewed_means() -> None:
    assert 0.92 < coverage(GAIN, lambda: mean_ratio(list(GAIN * skewed(5)), list(skewed(5)))) < 0.97


@pytest.mark.parametrize("count", [3, 6])
def test_pairs_cancel_drift(count: int) -> None:
    """A drift of 20 % that falls on both of a pair leaves coverage and width as without it."""

    def pairs() -> Interval | None:
        drift = np.linspace(1, 0.8, count)
        return paired_ratio(list(GAIN * normal(count, 0.02) * drift), list(normal(count, 0.02) * drift))

    assert 0.93 < coverage(GAIN, pairs) < 0.97
    drift = np.linspace(1, 0.8, 6)
    paired = paired_ratio(list(GAIN * drift), list(drift * normal(6, 0.001)))
    welch = mean_ratio(list(GAIN * drift), list(drift * normal(6, 0.001)))
    assert paired is not None
    assert welch is not None
    assert paired.high - paired.low < 0.1 * (welch.high - welch.low)


@pytest.mark.parametrize(("count", "share"), [(10, 0.5), (100, 0.5), (400, 0.95), (2000, 0.99)])
def test_coverage_of_a_quantile(count: int, share: float) -> None:
    truth = math.exp(0.7 * NormalDist().inv_cdf(share))
    assert (
        0.93
        < coverage(truth, lambda: quantile(list(np.exp(0.7 * GENERATOR.normal(size=count))), share))
        < 0.98
    )


@pytest.mark.parametrize(
    ("count", "share"), [(20, 0.5), (400, 0.5), pytest.param(2000, 0.99, marks=pytest.mark.release)]
)
def test_coverage_of_a_ratio_of_quantiles(count: int, share: float) -> None:
    """Wider than it must be, never narrower: it errs towards "no difference seen"."""

    def draw() -> list[float]:
        return list(np.exp(0.7 * GENERATOR.normal(size=count)))

    found = coverage(GAIN, lambda: quantile_ratio([GAIN * each for each in draw()], draw(), share))
    assert 0.94 < found < 0.99


def test_coverage_where_requests_depend_on_each_other() -> None:
    """As independent samples, 1,000 requests with a correlation of 0.8 would cover the truth in 54 %."""
    assert coverage(1.0, lambda: quantile(list(autocorrelated(1000, 0.8)), 0.5), trials=500) > 0.89


def test_dependent_samples_count_as_fewer() -> None:
    """An AR(1) process with correlation r has (1 + r) / (1 - r) times the variance of independent samples."""
    assert effective_count(GENERATOR.random(4000) < 0.5) > 2000
    counts = [effective_count(autocorrelated(4000, 0.8) <= 1.0) for _ in range(20)]
    assert 400 < sum(counts) / len(counts) < 1200


def test_too_few_samples_have_no_interval() -> None:
    assert mean([1.0]) is None
    assert mean_ratio([1.0], [1.0, 2.0]) is None
    assert paired_ratio([1.0], [1.0]) is None
    assert quantile([], 0.5) is None
    assert quantile_ratio([1.0] * 10, [1.0] * 5, 0.5) is None
    assert quantile_needs(0.5) == 6
    assert quantile_needs(0.99) == 368
    assert quantile(list(GENERATOR.random(367)), 0.99) is None


def test_equal_samples_have_an_interval_without_width() -> None:
    for found in (
        mean_ratio([2.0, 2.0], [1.0, 1.0]),
        quantile_ratio([2.0] * 10, [1.0] * 10, 0.5),
    ):
        assert found is not None
        assert (found.estimate, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_the_inverse_ratio_has_the_inverse_interval() -> None:
    over, under = list(normal(5)), list(normal(4))
    one, other = mean_ratio(over, under), mean_ratio(under, over)
    assert one is not None
    assert other is not None
    assert (one.low, one.high) == pytest.approx((1 / other.high, 1 / other.low))


def test_what_is_no_ratio() -> None:
    with pytest.raises(ValueError, match="a ratio needs a positive mean, got 0"):
        mean_ratio([1.0, 1.0], [0.0, 0.0])
    with pytest.raises(ValueError, match="a ratio needs positive samples, got 0"):
        paired_ratio([1.0, 0.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="2 samples cannot be paired with 3"):
        paired_ratio([1.0, 1.0], [1.0, 1.0, 1.0])
    assert quantile_ratio([0.0] * 10, [1.0] * 10, 0.5) is None


def test_ties_at_the_quantile_hide_no_dependence() -> None:
    """Ten late requests in a row are one event, not ten: too few to bound a p99."""
    assert quantile([0.2] * 390 + [5.0] * 10, 0.99) is None


def test_zeros_are_samples_like_others() -> None:
    """Goodput is 0 where no request met the SLO."""
    assert mean_ratio([0.0, 0.0], [1.0, 2.0]) == Interval(0.0, 0.0, 0.0)
    found = mean_ratio([0.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    assert found is not None
    assert found.estimate == pytest.approx(2 / 3)
    assert found.contains(1.0)
