"""Histograms of durations that merge: buckets of geometric width, a quantile within 5 % of the true one. Pure.

DDSketch (Masson, Rim, Lee, VLDB 2019): bucket i holds the durations from LOW x RATIO^i to LOW x RATIO^(i+1), and their
harmonic middle stands for all of them. Stored, a histogram is its buckets that are not empty; two stored histograms
one after the other are their sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

ERROR: Final = 0.05
RATIO: Final = (1 + ERROR) / (1 - ERROR)
# 0.1 ms; what is shorter counts as this.
LOW: Final = 1e-4
# Up to 28 hours; what is longer counts as this.
BUCKETS: Final = math.ceil(math.log(1e9) / math.log(RATIO))
_STORED: Final = np.dtype([("bucket", "<u2"), ("count", "<u4")])
_MOST: Final = 2**32 - 1

Counts = NDArray[np.int64]


def buckets_of(durations_s: Sequence[float] | NDArray[np.float64]) -> Counts:
    """The bucket of each duration in seconds."""
    values = np.maximum(np.asarray(durations_s, dtype=float), LOW)
    found: Counts = (np.log(values / LOW) / math.log(RATIO)).astype(np.int64)
    return np.minimum(found, BUCKETS - 1)


def each_to_bytes(histograms: Counts) -> list[bytes]:
    """The stored form of each row, which has a count for each bucket."""
    rows, used = np.nonzero(histograms)
    stored = np.empty(len(used), dtype=_STORED)
    stored["bucket"], stored["count"] = used, np.minimum(histograms[rows, used], _MOST)
    data = stored.tobytes()
    ends = (np.searchsorted(rows, np.arange(len(histograms)), side="right") * _STORED.itemsize).tolist()
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def merged(stored: Iterable[bytes]) -> Counts:
    """The sum of stored histograms, as a count for each bucket. Raises ValueError for bytes that are none."""
    parts = np.frombuffer(b"".join(stored), dtype=_STORED)
    if len(parts) and parts["bucket"].max() >= BUCKETS:
        raise ValueError(f"bucket {parts['bucket'].max()} of a histogram is above {BUCKETS - 1}")
    counts = np.zeros(BUCKETS, dtype=np.int64)
    np.add.at(counts, parts["bucket"], parts["count"].astype(np.int64))
    return counts


def merged_by(stored: Sequence[bytes], groups: Sequence[int], count: int) -> Counts:
    """The sums of stored histograms by group, as a count for each of `count` groups and each bucket. `groups`: of each
    histogram, 0 to `count` - 1. Raises ValueError as `merged`."""
    parts = np.frombuffer(b"".join(stored), dtype=_STORED)
    if len(parts) and parts["bucket"].max() >= BUCKETS:
        raise ValueError(f"bucket {parts['bucket'].max()} of a histogram is above {BUCKETS - 1}")
    lengths = np.fromiter(map(len, stored), np.int64, len(stored)) // _STORED.itemsize
    cells = np.repeat(np.asarray(groups, dtype=np.int64), lengths) * BUCKETS + parts["bucket"]
    # bincount's sums are floats: exact below 2**53.
    sums = np.bincount(cells, weights=parts["count"], minlength=count * BUCKETS)
    return sums.astype(np.int64).reshape(count, BUCKETS)


def quantiles(histograms: Counts, share: float) -> list[float | None]:
    """For each row the duration in seconds below which `share` (0 to 1) of its counted ones are; None for a row of none."""
    sums = np.cumsum(histograms, axis=1)
    totals = sums[:, -1]
    ranks = np.maximum(0, np.ceil(share * totals) - 1)
    buckets = (sums <= ranks[:, np.newaxis]).sum(axis=1)
    middles = LOW * RATIO**buckets * 2 * RATIO / (1 + RATIO)
    return [
        middle if total else None for middle, total in zip(middles.tolist(), totals.tolist(), strict=True)
    ]
