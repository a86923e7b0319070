"""Medians and spreads over rounds; ratios and differences within a round, so that a slow minute hits both sides."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """A median with the least and the most."""

    median: float
    least: float
    most: float

    def text(self, digits: int = 1) -> str:
        """12.3 (11.9-12.8)."""
        if self.least == self.most:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.least:.{digits}f}–{self.most:.{digits}f})"


def figure(values: Sequence[float]) -> Figure | None:
    """None of none."""
    return Figure(statistics.median(values), min(values), max(values)) if values else None


class Rounds:
    """The rows of a run, by round, proxy and point."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {(row["round"], row["proxy"], row["point"]): row for row in rows if "units" in row}
        self.rounds = sorted({row["round"] for row in rows})
        self.proxies = list(dict.fromkeys(row["proxy"] for row in rows))
        self.points = list(dict.fromkeys(row["point"] for row in rows if row["point"]))

    def values(self, proxy: str, point: str, of: str) -> Figure | None:
        """A column over all rounds."""
        return figure([row[of] for row in self._of(proxy, point) if row.get(of) is not None])

    def against(
        self, proxy: str, other: str, point: str, of: str, how: Callable[[float, float], float]
    ) -> Figure | None:
        """`how`(ours, theirs) in each round that has both."""
        pairs = (
            (self._rows.get((number, proxy, point)), self._rows.get((number, other, point)))
            for number in self.rounds
        )
        return figure([how(a[of], b[of]) for a, b in pairs if a and b and a.get(of) and b.get(of)])

    def failures(self, proxy: str, point: str) -> int:
        """Of requests, over all rounds."""
        return sum(row["failures"] for row in self._of(proxy, point))

    def _of(self, proxy: str, point: str) -> list[Row]:
        found = (self._rows.get((number, proxy, point)) for number in self.rounds)
        return [row for row in found if row]


def ratio(ours: float, theirs: float) -> float:
    """How many times as much."""
    return ours / theirs


def more_ms(ours: float, theirs: float) -> float:
    """How many milliseconds more."""
    return (ours - theirs) * 1e3
