"""Histograms of durations: their error, and that stored ones merge."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ledger_file import counts_of, histogram

from launcher.accounts.latency import (
    BUCKETS,
    ERROR,
    LOW,
    merged,
    merged_by,
    quantiles,
)

DURATIONS = st.lists(st.floats(LOW, 9e4), min_size=1, max_size=60)


@given(durations=DURATIONS, share=st.floats(0, 1))
def test_a_quantile_is_within_its_error(durations: list[float], share: float) -> None:
    truth = float(np.quantile(durations, share, method="inverted_cdf"))
    (found,) = quantiles(counts_of(durations)[np.newaxis], share)
    assert found == pytest.approx(truth, rel=ERROR * 1.0001)


@given(first=DURATIONS, second=DURATIONS)
def test_stored_histograms_one_after_the_other_are_their_sum(first: list[float], second: list[float]) -> None:
    parts = [histogram(first), histogram(second)]
    assert merged(parts).tolist() == counts_of(first + second).tolist()
    assert merged([b"".join(parts)]).tolist() == counts_of(first + second).tolist()


def test_what_is_outside_of_the_buckets_counts_in_the_outer_ones() -> None:
    counts = counts_of([0.0, -1.0, 1e9])
    assert (counts[0], counts[-1], len(counts)) == (2, 1, BUCKETS)


def test_none_counted() -> None:
    assert quantiles(merged([])[np.newaxis], 0.5) == [None]
    assert histogram([]) == b""


def test_bytes_that_are_no_histogram() -> None:
    with pytest.raises(ValueError, match="bucket 65535 of a histogram"):
        merged([b"\xff" * 6])
    with pytest.raises(ValueError, match="bucket 65535 of a histogram"):
        merged_by([b"\xff" * 6], [0], 1)


@given(st.lists(st.tuples(DURATIONS, st.integers(0, 3)), max_size=9))
def test_groups_are_merged_apart(parts: list[tuple[list[float], int]]) -> None:
    stored, groups = [histogram(durations) for durations, _ in parts], [group for _, group in parts]
    found = merged_by(stored, groups, 4)
    for group in range(4):
        mine = [each for each, its in zip(stored, groups, strict=True) if its == group]
        assert found[group].tolist() == merged(mine).tolist()
    assert quantiles(found, 0.9) == [*chain(*(quantiles(row[np.newaxis], 0.9) for row in found))]
