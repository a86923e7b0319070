"""Quantiles from buckets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.telemetry.quantiles import BUCKETS, bucket_of, counted, joined, quantile

SECONDS = st.floats(0.0011, 1000)


def test_without_values_there_is_no_quantile() -> None:
    assert quantile({}, 50) is None
    assert quantile(counted([]), 99) is None


def test_extreme_values_have_a_bucket() -> None:
    assert [bucket_of(seconds) for seconds in (-1.0, 0.0, 1e-9, 1e9)] == [0, 0, 0, BUCKETS - 1]


@given(st.lists(SECONDS, min_size=1, max_size=300), st.sampled_from([50, 99]))
def test_a_quantile_is_exact_to_five_percent(values: list[float], percent: int) -> None:
    exact = sorted(values)[-(-len(values) * percent // 100) - 1]
    found = quantile(counted(values), percent)
    assert found is not None
    assert abs(found / exact - 1) < 0.05


@given(st.lists(st.lists(SECONDS, max_size=20), max_size=10))
def test_parts_joined_are_the_whole(parts: list[list[float]]) -> None:
    assert joined(map(counted, parts)) == counted(value for part in parts for value in part)
