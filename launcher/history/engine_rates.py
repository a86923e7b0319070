"""Rates of engines' counters, which are read with each health probe and not with each row. Pure.

A rate between two probes holds until the next probe: each token is in as many rows as the probes are apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# A probe that takes longer than twice the last interval and this is late: its rate is unknown then.
_LATE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """An engine's counters at a probe."""

    generation: int
    at: float
    """Of the probe, monotonic."""
    output_tokens: int
    prefix_queries: int
    prefix_hits: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, between two probes."""

    output_tokens: float
    prefix_queries: float
    prefix_hits: float


@dataclass(frozen=True, slots=True)
class _Seen:
    counts: EngineCounts
    rates: Rates | None = None
    until: float = 0.0
    """The rates are unknown after this time."""


class EngineRates:
    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def rates(self, slot: int, counts: EngineCounts | None, now: float) -> Rates | None:
        """None before the second probe of an instance, and where the last probe got no counters (`counts` is None)."""
        if counts is None:
            self._seen.pop(slot, None)
            return None
        before = self._seen.get(slot)
        if before is None or before.counts != counts:
            before = self._seen[slot] = _between(None if before is None else before.counts, counts)
        return before.rates if now <= before.until else None

    def keep(self, slots: frozenset[int]) -> None:
        """Forget all other slots."""
        for slot in self._seen.keys() - slots:
            del self._seen[slot]


def _between(old: EngineCounts | None, new: EngineCounts) -> _Seen:
    if old is None or old.generation != new.generation or new.at <= old.at:
        return _Seen(new)
    elapsed = new.at - old.at
    rises = (
        new.output_tokens - old.output_tokens,
        new.prefix_queries - old.prefix_queries,
        new.prefix_hits - old.prefix_hits,
    )
    if min(rises) < 0:
        return _Seen(new)  # another process answers
    return _Seen(new, Rates(*(rise / elapsed for rise in rises)), new.at + 2 * elapsed + _LATE_S)
