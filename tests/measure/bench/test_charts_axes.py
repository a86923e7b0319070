from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.measure.bench.charts import apart, from_zero, logarithmic


@pytest.mark.parametrize(
    ("largest", "ticks"),
    [
        (714, (0, 200, 400, 600, 800)),
        (1.92, (0, 0.5, 1, 1.5, 2)),
        (0.13, (0, 0.05, 0.1, 0.15)),
        (5, (0, 1, 2, 3, 4, 5)),
        (0, (0, 0.2, 0.4, 0.6, 0.8, 1)),
    ],
)
def test_ticks_from_zero(largest: float, ticks: tuple[float, ...]) -> None:
    assert from_zero([largest], 0, 100).ticks == pytest.approx(ticks)


@given(st.floats(1e-6, 1e9))
def test_an_axis_from_zero_holds_its_largest_value(largest: float) -> None:
    scale = from_zero([largest], 10, 110)
    assert scale.start == 0
    assert largest <= scale.end * (1 + 1e-9)
    assert scale.end <= 2.6 * largest
    assert 2 <= len(scale.ticks) <= 6
    assert scale(0) == 10
    assert scale(scale.end) == 110
    assert 10 < scale(largest) <= 110


@given(st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=5))
def test_a_logarithmic_axis_holds_its_values(values: list[float]) -> None:
    scale = logarithmic(values, 0, 100)
    assert scale.start <= min(values) * (1 + 1e-9)
    assert scale.end >= max(values) * (1 - 1e-9)
    assert 1 <= len(scale.ticks) <= 12
    assert all(0 <= scale(tick) <= 100 for tick in scale.ticks)


def test_a_logarithmic_axis_spaces_factors_equally() -> None:
    scale = logarithmic([0.02, 2], 0, 100)
    assert scale.ticks == pytest.approx((0.03, 0.1, 0.3, 1))
    assert scale(0.2) == pytest.approx(50)
    assert scale(0) == 0


def test_values_beyond_the_ends_stay_on_the_axis() -> None:
    scale = from_zero([10], 100, 0)
    assert scale(-5) == 100
    assert scale(99) == 0


def test_a_logarithmic_axis_without_values_is_drawn() -> None:
    assert logarithmic([], 0, 1).ticks


@given(st.lists(st.floats(0, 100), max_size=6))
def test_labels_keep_their_distance_and_order(positions: list[float]) -> None:
    placed = apart(positions, 15, 0, 100)
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    for one, other in pairwise(order):
        assert placed[other] - placed[one] > 15 - 1e-6


def test_labels_that_are_apart_stay_where_they_are() -> None:
    assert apart([10, 50], 15, 0, 100) == [10, 50]
    assert apart([98, 99], 15, 0, 100) == [85, 100]
