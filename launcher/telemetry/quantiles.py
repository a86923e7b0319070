"""What was measured lately, by slot: the time to the first token of the streams that an instance answered. Pure.

A histogram of everything since the start says nothing of the last minutes; this keeps the last values themselves.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping
from typing import Final

from msgspec import Struct

WINDOW_S: Final = 300.0  # how old a value may be that still counts

# Of one key: at 99 % of these the value is one of the ten largest. 16 KiB of floats.
KEPT: Final = 1000


class Quantiles(Struct, frozen=True, kw_only=True):
    """Of the last values; in seconds."""

    p50_s: float
    p99_s: float
    count: int  # how many values these are made of
    window_s: float = WINDOW_S  # none of them is older


class RollingQuantiles:
    def __init__(self) -> None:
        self._values: dict[Hashable, deque[tuple[float, float]]] = {}

    def take(self, key: Hashable, seconds: float, now: float) -> None:
        values = self._values.get(key)
        if values is None:
            values = self._values[key] = deque(maxlen=KEPT)
        values.append((now, seconds))

    def since(self, then: float) -> tuple[float, ...]:
        """The values that were taken after a time, of all keys."""
        found: list[float] = []
        for values in self._values.values():
            for at, seconds in reversed(values):
                if at <= then:
                    break
                found.append(seconds)
        return tuple(found)

    def quantiles(self, key: Hashable, now: float) -> Quantiles | None:
        """None where there is no value that is recent enough."""
        return _quantiles(self._recent(key, now))

    def overall(self, now: float) -> Quantiles | None:
        """Of all keys together: a key that has many values counts with its last ones."""
        return _quantiles([seconds for key in self._values for seconds in self._recent(key, now)])

    def _recent(self, key: Hashable, now: float) -> list[float]:
        values = self._values.get(key)
        while values and values[0][0] < now - WINDOW_S:
            values.popleft()
        return [seconds for _, seconds in values or ()]


def _quantiles(values: list[float]) -> Quantiles | None:
    if not values:
        return None
    ordered = sorted(values)
    return Quantiles(p50_s=_rank(ordered, 50), p99_s=_rank(ordered, 99), count=len(ordered))


def _rank(ordered: list[float], percent: int) -> float:
    """The nearest rank: a value that was really measured."""
    return ordered[-(-len(ordered) * percent // 100) - 1]


BUCKETS: Final = 160
_PER_DOUBLING: Final = 8
# The lower bound of the first bucket; the last one ends after 1049 s.
_LEAST_S: Final = 0.001


def bucket_of(seconds: float) -> int:
    if seconds <= _LEAST_S:
        return 0
    return min(BUCKETS - 1, int(math.log2(seconds / _LEAST_S) * _PER_DOUBLING))


def counted(values: Iterable[float]) -> dict[int, int]:
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
