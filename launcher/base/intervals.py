"""Confidence intervals of measured figures: means, ratios of means, quantiles and ratios of quantiles. Pure.

A sample is one independent repeat: a run with its own seed, a start of an engine. Requests of one run depend on
each other (they share batches and a queue): `quantile` measures that, the intervals of means do not, so give them
one figure per run. Which rule fits:

    mean, mean_ratio     two runs and more; Student's t, exact for normal noise; holds for skewed noise and outliers
    paired_ratio         runs in alternating order: drift that falls on both of a pair cancels
    quantile             latencies of one run; exact for independent requests whatever their distribution
    quantile_ratio       two of them

tests/base/test_intervals.py measures by simulation how often each covers the truth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

LEVEL: Final = 0.95
# Beyond this many degrees of freedom Student's t differs from the one of this many by less than 0.01 %.
_MAX_FREEDOM: Final = 10_000
# Batches whose means tell how far a sample depends on its neighbours.
_BATCHES: Final = 20
# Points of the grid that integrates Student's density: the half width is exact to 0.01 %.
_GRID: Final = 4_001

Samples = Sequence[float]
_Array = NDArray[np.float64]


class Interval(msgspec.Struct, frozen=True):
    """An estimate and the range that covers the true value with probability LEVEL."""

    estimate: float
    low: float
    high: float

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


def mean(samples: Samples) -> Interval | None:
    """Student's t interval of a mean; None for fewer than two samples."""
    if len(samples) < 2:
        return None
    values = np.asarray(samples, dtype=float)
    estimate = float(values.mean())
    margin = student_t(LEVEL, len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Interval(estimate, estimate - margin, estimate + margin)


def mean_ratio(numerator: Samples, denominator: Samples) -> Interval | None:
    """Interval of the ratio of two positive means; None for fewer than two samples on a side.

    A numerator of zeros is 0 times the denominator. Else Welch's t interval of the difference of the logarithms of the
    means; their variances by the delta method, degrees of freedom by Welch and Satterthwaite (1947). On the logarithmic
    scale the interval of B/A is that of A/B inverted."""
    over, under = np.asarray(numerator, dtype=float), _with_positive_mean(denominator)
    if min(len(over), len(under)) < 2:
        return None
    if not over.any():
        return Interval(0.0, 0.0, 0.0)
    over = _with_positive_mean(numerator)
    first, second = _squared_error(over), _squared_error(under)
    estimate = float(over.mean() / under.mean())
    error = first + second
    if error == 0:
        return Interval(estimate, estimate, estimate)
    freedom = error**2 / (first**2 / (len(over) - 1) + second**2 / (len(under) - 1))
    factor = math.exp(student_t(LEVEL, freedom) * math.sqrt(error))
    return Interval(estimate, estimate / factor, estimate * factor)


def paired_ratio(numerator: Samples, denominator: Samples) -> Interval | None:
    """Interval of the ratio of two figures measured in pairs, positive samples in the same order on both sides.

    Student's t interval of the mean of log(numerator / denominator): the geometric mean of the pairs' ratios.
    None for fewer than two pairs."""
    if len(numerator) != len(denominator):
        raise ValueError(f"{len(numerator)} samples cannot be paired with {len(denominator)}")
    found = mean(list(np.log(_positive(numerator)) - np.log(_positive(denominator))))
    if found is None:
        return None
    return Interval(math.exp(found.estimate), math.exp(found.low), math.exp(found.high))


def quantile(samples: Samples, share: float) -> Interval | None:
    """Distribution-free interval of a quantile from samples in the order they were measured.

    Its bounds are order statistics, whose ranks come from the binomial distribution (David and Nagaraja, Order
    Statistics, 2003, section 7.1), with ranks between two samples interpolated (Hettmansperger and Sheather, 1986).
    Samples that depend on their neighbours count as fewer (`effective_count`).
    None where the samples are too few for a bound on either side: `quantile_needs` says how many are enough."""
    values = np.asarray(samples, dtype=float)
    if len(values) < quantile_needs(share):
        return None
    estimate = float(np.quantile(values, share))
    below_it = values < estimate if (values <= estimate).all() else values <= estimate
    count = effective_count(below_it)
    if count < quantile_needs(share):
        return None
    # below[k]: the probability that at most k of `count` independent samples lie below the quantile.
    steps = np.arange(count)
    logs = np.log((count - steps) / (steps + 1)) + math.log(share / (1 - share))
    below = np.exp(count * math.log(1 - share) + np.concatenate([[0.0], logs.cumsum()])).cumsum()
    ranks = np.interp([(1 - LEVEL) / 2, (1 + LEVEL) / 2], below, np.arange(1, count + 2))
    positions = np.arange(1, len(values) + 1) / (len(values) + 1)
    low, high = np.interp(ranks / (count + 1), positions, np.sort(values))
    return Interval(estimate, float(low), float(high))


def quantile_ratio(numerator: Samples, denominator: Samples, share: float) -> Interval | None:
    """Interval of the ratio of two runs' quantiles of positive samples; None where either has no interval.

    The two intervals are combined on the logarithmic scale by the method of variance estimates recovery (Zou and
    Donner, Statistics in Medicine 27, 2008). It covers what varies within a run, not what varies between runs."""
    over, under = quantile(numerator, share), quantile(denominator, share)
    if over is None or under is None or min(over.low, under.low) <= 0:
        return None
    estimate = over.estimate / under.estimate
    down = math.hypot(math.log(over.estimate / over.low), math.log(under.high / under.estimate))
    up = math.hypot(math.log(over.high / over.estimate), math.log(under.estimate / under.low))
    return Interval(estimate, estimate * math.exp(-down), estimate * math.exp(up))


def quantile_needs(share: float) -> int:
    """Fewest independent samples that bound a quantile on both sides: 368 for a p99, 6 for a median."""
    return math.ceil(math.log((1 - LEVEL) / 2) / math.log(max(share, 1 - share)))


def effective_count(events: Sequence[bool] | NDArray[np.bool_]) -> int:
    """How many independent samples tell as much of an event's frequency as these, in the order they were measured.

    The variance of the means of 20 batches, over the variance that independent samples have (Schmeiser, Operations
    Research 30, 1982, on 10 to 30 batches). Never more than there are; fewer than 40 are taken as independent."""
    values = np.asarray(events, dtype=float)
    share = float(values.mean())
    size = len(values) // _BATCHES
    if size < 2 or share in {0.0, 1.0}:
        return len(values)
    batches = values[: size * _BATCHES].reshape(_BATCHES, size).mean(axis=1)
    inflation = size * float(batches.var(ddof=1)) / (share * (1 - share))
    return math.floor(len(values) / max(inflation, 1.0))


@cache
def student_t(level: float, freedom: float) -> float:
    """Half width, in standard errors, of the central interval of Student's t distribution.

    With t = sqrt(freedom) * tan(angle) the density is proportional to cos(angle) ** (freedom - 1)."""
    if freedom > _MAX_FREEDOM:
        return NormalDist().inv_cdf((1 + level) / 2)
    # Beyond 100 standard errors nothing is left that a level of 0.999999 would see.
    end = math.atan(100 / math.sqrt(freedom)) if freedom > 30 else math.pi / 2
    angles = np.linspace(0, end, _GRID)
    density = np.cos(angles) ** (freedom - 1)
    probability = np.concatenate([[0.0], ((density[1:] + density[:-1]) / 2).cumsum()])
    angle = float(np.interp(level, probability / probability[-1], angles))
    return math.sqrt(freedom) * math.tan(angle)


def _with_positive_mean(samples: Samples) -> _Array:
    values = np.asarray(samples, dtype=float)
    if len(values) and values.mean() <= 0:
        raise ValueError(f"a ratio needs a positive mean, got {float(values.mean()):g}")
    return values


def _positive(samples: Samples) -> _Array:
    values = np.asarray(samples, dtype=float)
    if (values <= 0).any():
        raise ValueError(f"a ratio needs positive samples, got {float(values.min()):g}")
    return values


def _squared_error(samples: _Array) -> float:
    """Squared relative standard error of the mean."""
    return float(samples.var(ddof=1) / len(samples) / samples.mean() ** 2)
