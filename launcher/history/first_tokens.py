"""Times to the first token in buckets of equal ratio: quantiles of any span of rows, exact to 5 %. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

BUCKETS: Final = 160
_PER_DOUBLING: Final = 8
# The lower bound of the first bucket; the last one ends after 1049 s.
_LEAST_S: Final = 0.001


def bucket_of(seconds: float) -> int:
    if seconds <= _LEAST_S:
        return 0
    return min(BUCKETS - 1, int(math.log2(seconds / _LEAST_S) * _PER_DOUBLING))


def counted(values: Iterable[float]) -> Mapping[int, int]:
    """How many of the values are in each bucket that has any."""
    return Counter(map(bucket_of, values))


def joined(parts: Iterable[Mapping[int, int]]) -> Mapping[int, int]:
    total: Counter[int] = Counter()
    for part in parts:
        if part:
            total.update(part)
    return total


def quantile(counts: Mapping[int, int], percent: int) -> float | None:
    """Nearest rank, as the middle of its bucket; None without values."""
    rank = -(-sum(counts.values()) * percent // 100)
    for bucket in sorted(counts):
        rank -= counts[bucket]
        if rank <= 0:
            return _LEAST_S * 2 ** ((bucket + 0.5) / _PER_DOUBLING)
    return None
