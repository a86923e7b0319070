"""Estimators: means, the linear fit, rates."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.balancing.estimators import Arrivals, LinearFit, Mean, Quantile, RelativeFit

seconds = st.floats(0.0, 100.0)


def test_a_mean_starts_at_its_prior_and_forgets() -> None:
    mean = Mean(7.0, 4)
    assert mean.value == 7.0
    mean.add(1.0)
    assert mean.value == 1.0
    for _ in range(50):
        mean.add(3.0)
    assert mean.value == pytest.approx(3.0, abs=0.01)


def test_the_fit_follows_a_changed_line() -> None:
    line = LinearFit(0.0, 1.0, 10.0, 50)
    for base, slope in ((0.5, 0.1), (0.2, 0.4)):
        for n in range(600):
            line.add(n % 7, base + slope * (n % 7))
        assert line.base == pytest.approx(base, abs=0.01)
        assert line.slope == pytest.approx(slope, abs=0.01)
    assert line.at(10.0) == pytest.approx(4.2, abs=0.1)


@pytest.mark.parametrize("took", [0.025, 0.0025])
def test_a_prior_many_times_too_high_fades_after_a_handful_of_samples(took: float) -> None:
    line = LinearFit(0.05, 0.001, 500.0, 200)
    for n in range(4):
        line.add(20.0 * (n + 1), took * (1.0 + 0.01 * (n % 2)))
    assert line.at(1000.0) < 0.25 * (0.05 + 1000.0 * 0.001)
    assert line.at(60.0) == pytest.approx(took, rel=0.4)


def test_a_prior_that_is_too_low_fades() -> None:
    line = LinearFit(0.05, 0.001, 500.0, 200)
    for n in range(8):
        line.add(300.0 * (n + 1), 0.2 + 0.01 * 300.0 * (n + 1))
    assert line.slope == pytest.approx(0.01, rel=0.1)


def test_without_a_trend_the_fit_is_flat_at_the_mean() -> None:
    line = LinearFit(0.05, 0.001, 500.0, 200)
    for n in range(40):
        line.add(100.0 * (n % 5), 0.025 - 0.001 * (n % 5))
    assert line.base == pytest.approx(0.023, abs=0.001)
    assert line.at(1000.0) == pytest.approx(line.base, abs=0.001)


@given(st.lists(st.tuples(seconds, seconds), max_size=80))
def test_the_fit_is_never_zero_or_negative(points: list[tuple[float, float]]) -> None:
    line = LinearFit(0.05, 0.001, 500.0, 20)
    for x, y in points:
        line.add(x, y)
    assert line.base >= 0.0
    assert line.slope > 0.0


def test_samples_without_a_slope_change_none() -> None:
    line = LinearFit(1.0, 2.0, 0.0, 2)
    for _ in range(100):
        line.add(0.0, 5.0)
    assert (line.base, line.slope) == (1.0, 2.0)
    falling = LinearFit(1.0, 2.0, 1.0, 2)
    for n in range(100):
        falling.add(n % 2, 9.0 - n % 2)
    assert falling.slope > 0.0


def test_rates_are_right_when_young_and_fade() -> None:
    rate = Arrivals(30.0)
    assert rate.per_s(5.0) == 0.0
    for n in range(50):
        rate.add(n * 0.1)
    assert rate.per_s(4.9) == pytest.approx(10.0, rel=0.1)
    assert rate.per_s(200.0) < 0.1


@pytest.mark.parametrize("before", [0, 300])
def test_one_sample_far_beyond_the_others_does_not_set_the_slope(before: int) -> None:
    line = LinearFit(0.05, 0.001, 500.0, 200)
    for n in range(before):
        line.add(100.0 + n * 37 % 1900, 0.05 + 0.001 * (100.0 + n * 37 % 1900))
    line.add(200_000.0, 0.1)
    for n in range(100):
        line.add(100.0 + n * 37 % 1900, 0.05 + 0.001 * (100.0 + n * 37 % 1900))
    assert 0.0006 < line.slope < 0.0012


def test_the_fit_follows_longer_prompts() -> None:
    line = LinearFit(0.05, 0.001, 500.0, 200)
    for n in range(200):
        line.add(100.0 + n, 0.05 + 0.001 * (100.0 + n))
    for n in range(60):
        line.add(20_000.0 + n, 0.05 + 0.002 * (20_000.0 + n))
    assert line.at(20_000.0) == pytest.approx(40.05, rel=0.02)


def test_relative_errors_are_least() -> None:
    line = RelativeFit()
    for n in range(200):
        # Large ones are noisy by a fifth: least squares would give small ones a base that is far off.
        line.add(10, 0.11)
        line.add(5000, 50.1 * (1.2 if n % 2 else 0.8))
    assert line.at(10) == pytest.approx(0.11, rel=0.05)
    assert line.at(5000) == pytest.approx(50.1, rel=0.1)


@given(st.lists(st.tuples(st.floats(0.0, 1e5), seconds), min_size=1, max_size=40))
def test_a_relative_fit_is_never_negative(samples: list[tuple[float, float]]) -> None:
    line = RelativeFit()
    for x, y in samples:
        line.add(x, y)
    assert line.base >= 0.0
    assert line.slope >= 0.0


@pytest.mark.parametrize("part", [0.5, 0.98])
def test_a_quantile_is_followed(part: float) -> None:
    random = Random(1)  # noqa: S311
    quantile = Quantile(part, 1.0, 0.05, 0.1, 10.0)
    below = 0
    for n in range(20_000):
        sample = 1.0 + random.random()
        below += n >= 10_000 and sample <= quantile.value
        quantile.add(sample)
    assert below / 10_000 == pytest.approx(part, abs=0.02)
    for _ in range(5000):
        quantile.add(100.0)
    assert quantile.value == 10.0
