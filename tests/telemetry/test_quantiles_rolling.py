"""The last values of a slot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.telemetry.quantiles import KEPT, WINDOW_S, RollingQuantiles


def test_nothing_yet() -> None:
    assert RollingQuantiles().quantiles(0, 100.0) is None


@pytest.mark.parametrize(
    ("count", "p50", "p99"),
    [(1, 1, 1), (2, 1, 2), (3, 2, 3), (100, 50, 99), (101, 51, 100), (1000, 500, 990)],
)
def test_nearest_rank(count: int, p50: float, p99: float) -> None:
    recent = RollingQuantiles()
    for value in range(count, 0, -1):
        recent.take("slot", float(value), 1.0)
    found = recent.quantiles("slot", 1.0)
    assert found is not None
    assert (found.p50_s, found.p99_s, found.count) == (p50, p99, count)


def test_old_values_and_too_many_are_forgotten() -> None:
    recent = RollingQuantiles()
    recent.take(0, 9.0, 0.0)
    recent.take(0, 1.0, WINDOW_S)
    assert recent.quantiles(0, WINDOW_S) is not None
    found = recent.quantiles(0, WINDOW_S + 1)
    assert found is not None
    assert (found.count, found.p99_s) == (1, 1.0)
    assert recent.quantiles(0, WINDOW_S * 3) is None
    for _ in range(KEPT + 9):
        recent.take(0, 1.0, 0.0)
    found = recent.quantiles(0, 0.0)
    assert found is not None
    assert found.count == KEPT


def test_slots_are_apart() -> None:
    recent = RollingQuantiles()
    recent.take(0, 1.0, 0.0)
    recent.take(1, 2.0, 0.0)
    found = recent.quantiles(1, 0.0)
    assert found is not None
    assert found.p50_s == 2.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_quantiles_are_values_in_order(values: list[float]) -> None:
    recent = RollingQuantiles()
    for value in values:
        recent.take(0, value, 0.0)
    found = recent.quantiles(0, 0.0)
    assert found is not None
    assert {found.p50_s, found.p99_s} <= set(values)
    assert sum(value <= found.p50_s for value in values) * 2 >= len(values)
    assert sum(value > found.p99_s for value in values) <= len(values) / 100


def test_all_keys_together() -> None:
    lately = RollingQuantiles()
    assert lately.overall(0.0) is None
    for key, values in ((0, (0.1, 0.2)), (1, (0.4,)), (2, (9.0,))):
        for value in values:
            lately.take(key, value, 0.0 if key == 2 else WINDOW_S)
    found = lately.overall(WINDOW_S + 1)
    assert found is not None
    assert (found.p50_s, found.p99_s, found.count) == (0.2, 0.4, 3)


def test_values_since_a_time() -> None:
    lately = RollingQuantiles()
    assert lately.since(0.0) == ()
    for key, at, seconds in ((0, 1.0, 0.1), (1, 2.0, 0.2), (0, 3.0, 0.3), (0, 4.0, 0.4)):
        lately.take(key, seconds, at)
    assert sorted(lately.since(2.0)) == [0.3, 0.4]
    assert sorted(lately.since(0.0)) == [0.1, 0.2, 0.3, 0.4]
    assert lately.since(4.0) == ()
