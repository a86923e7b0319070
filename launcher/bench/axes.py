"""Scales and ticks of charts. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

_MAX_TICKS: Final = 6


class Scale(msgspec.Struct, frozen=True):
    """Maps values to positions; `ticks` are the values to label, from the scale's start to its end."""

    start: float
    end: float
    at_start: float
    at_end: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """The position, at most at the scale's ends."""
        low, high, value = (
            (math.log(each) if each > 0 else -math.inf) if self.logarithmic else each
            for each in (self.start, self.end, value)
        )
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return self.at_start + share * (self.at_end - self.at_start)


def from_zero(values: Sequence[float], at_start: float, at_end: float, steps: int = 5) -> Scale:
    """From 0 to a round number at or above the largest value, with at most `steps` intervals of 1, 2, 2.5 or 5."""
    largest = max(values, default=0) or 1.0
    step = next(step for step in _steps(largest / steps) if step * steps >= largest * (1 - 1e-9))
    count = math.ceil(largest / step - 1e-9)
    ticks = tuple(step * index for index in range(count + 1))
    return Scale(0.0, ticks[-1], at_start, at_end, ticks)


def logarithmic(values: Sequence[float], at_start: float, at_end: float) -> Scale:
    """From 1, 2 or 5 times a power of ten below the positive values to one above; at most six ticks."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    marks = [factor * 10.0**exponent for exponent in exponents for factor in (1, 2, 5)]
    start = max(mark for mark in marks if mark <= low * (1 + 1e-9))
    end = min(mark for mark in marks if mark >= high * (1 - 1e-9) and mark > start)
    candidates = (
        [factor * 10.0**exponent for exponent in exponents for factor in factors]
        for factors in ((1, 2, 5), (1, 3), (1,))
    )
    inside = [[tick for tick in ticks if start <= tick <= end] for ticks in candidates]
    ticks = next((ticks for ticks in inside if len(ticks) <= _MAX_TICKS), inside[-1])
    return Scale(start, end, at_start, at_end, tuple(ticks), logarithmic=True)


def _steps(least: float) -> Sequence[float]:
    exponent = math.floor(math.log10(least))
    return [
        factor * 10.0**power for power in (exponent - 1, exponent, exponent + 1) for factor in (1, 2, 2.5, 5)
    ]


def apart(positions: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Positions of labels, moved as little as keeps them `distance` apart and between `low` and `high`."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    placed = [0.0] * len(positions)
    previous = low - distance
    for index in order:
        previous = placed[index] = max(positions[index], previous + distance)
    following = high + distance
    for index in reversed(order):
        following = placed[index] = min(placed[index], following - distance)
    return placed
