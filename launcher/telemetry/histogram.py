"""A histogram that a request pays a bisection for; prometheus_client only renders it."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """Counts of observations by upper bound, and their sum."""

    __slots__ = ("bounds", "counts", "created", "help", "name", "sum")

    def __init__(self, name: str, help_: str, bounds: tuple[float, ...], created: float) -> None:
        """`bounds`: ascending, without +Inf. `created`: seconds since the epoch."""
        self.name = name
        self.help = help_
        self.bounds: list[float] = list(bounds)
        # Of each bound, and of what is above all of them.
        self.counts: list[int] = [0] * (len(bounds) + 1)
        self.sum: float = 0.0
        self.created = created

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
