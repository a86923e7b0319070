"""A histogram that a request pays a bisection for; prometheus_client only renders it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable


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


class Histograms:
    """One histogram for each value of a label."""

    __slots__ = ("_bounds", "_created", "_found", "help", "label", "name")

    def __init__(
        self, name: str, help_: str, bounds: tuple[float, ...], created: float, *, label: str
    ) -> None:
        self.name = name
        self.help = help_
        self.label = label
        self._bounds = bounds
        self._created = created
        self._found: dict[str, Histogram] = {}

    def of(self, value: str) -> Histogram:
        found = self._found.get(value)
        if found is None:
            found = self._found[value] = Histogram(self.name, self.help, self._bounds, self._created)
        return found

    def items(self) -> Iterable[tuple[str, Histogram]]:
        return self._found.items()
