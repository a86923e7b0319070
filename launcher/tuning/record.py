"""What a search has measured, and what follows from it: noise, cost of a visit, repeats, broken limits. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from launcher.tuning.model import Measurement, Settings, VisitResult
from launcher.tuning.score import broken_limits, failure, location, log_figures, spread

# Two starts of the same layout differ, too: memory lies elsewhere. No number of repeats averages this out.
START_SPREAD: Final = 0.01
# With 4 figures one outlier does not decide their location; with 3 it does in part.
LEAST_REPEATS: Final = 4
MOST_REPEATS: Final = 12
_FIRST_REPEATS: Final = 6
_MOST_FAILURES: Final = 2
# Visits that tell what the next one takes.
_LAST: Final = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One visit that has ended."""

    result: VisitResult
    block: int
    """The round or pair that it belongs to."""
    figures: npt.NDArray[np.float64]
    """Logarithms."""
    score: float | None

    @property
    def candidate(self) -> int:
        return self.result.visit.candidate


class Record:
    """All visits in their order. A visit that another job disturbed is kept, and no longer counts once it was repeated."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._entries: list[Entry] = []
        self._spreads: list[float] = []
        self._discarded: set[int] = set()
        self._failures: Counter[int] = Counter()
        self._goodput: bool | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, result: VisitResult, block: int) -> float | None:
        """The visit's score: the logarithm of its figure, or None where it failed."""
        if self._goodput is None and result.measurements:
            self._goodput = bool(self._settings.slo) and result.measurements[0].goodput_per_s is not None
        figures = log_figures(result.measurements, goodput=bool(self._goodput))
        entry = Entry(result, block, figures, location(figures) if len(figures) else None)
        self._entries.append(entry)
        if len(figures) >= LEAST_REPEATS:
            self._spreads.append(spread(figures))
        self._failures[entry.candidate] = 0 if len(figures) else self._failures[entry.candidate] + 1
        return entry.score

    def discard(self, number: int) -> None:
        """This visit no longer counts."""
        self._discarded.add(number)

    def is_out(self, layout: int) -> bool:
        """It failed twice in succession: it is not measured again."""
        return self._failures[layout] >= _MOST_FAILURES

    def last_failure(self, layout: int) -> str:
        return failure([each.result for each in self._entries if each.candidate == layout][-1])

    def scored(self) -> list[tuple[int, int, float]]:
        """Layout, block and score of every visit that counts."""
        return [
            (each.candidate, each.block, each.score)
            for i, each in enumerate(self._entries, 1)
            if each.score is not None and i not in self._discarded
        ]

    def visits(self) -> Counter[int]:
        return Counter(each.candidate for each in self._entries)

    def measurements(self, layout: int) -> list[Measurement]:
        return [
            measurement
            for each in self._entries
            if each.candidate == layout
            for measurement in each.result.measurements
        ]

    def broken(self, layout: int) -> list[str]:
        """The limits that it breaks."""
        return broken_limits(self.measurements(layout), self._settings)

    def noise(self) -> float | None:
        """Standard deviation of one measurement within a visit: the median over visits, as another job disturbs few."""
        return statistics.median(self._spreads) if self._spreads else None

    def disturbed(self, number: int) -> bool:
        """Another job ran during this visit: its figures are spread wider than the noise explains (1 in 1,000), also
        without the lowest fifth, which does not decide a score."""
        figures, noise = self._entries[number - 1].figures, self.noise()
        kept = np.sort(figures)[len(figures) // 5 :]
        if noise is None or len(kept) < LEAST_REPEATS - 1:
            return False
        # The square root of the chi-squared quantile over its degrees of freedom.
        return float(np.std(kept, ddof=1)) > noise * (1 + 2.3 / math.sqrt(len(kept) - 1))

    def costs(self) -> tuple[float, float]:
        """Seconds of a start and of one measurement, from the last visits."""
        done = [each.result for each in self._entries[-_LAST:] if each.result.measurements]
        if not done:
            return self._settings.start_s, self._settings.measure_s
        measured = sum(len(each.measurements) for each in done)
        return sum(each.start_s for each in done) / len(done), sum(each.measure_s for each in done) / measured

    def visit_s(self, repeats: int) -> float:
        """Seconds of a visit."""
        start, measure = self.costs()
        return max(start + repeats * measure, 1e-3)

    def used_s(self) -> float:
        return sum(each.result.start_s + each.result.measure_s for each in self._entries)

    def repeats(self) -> int:
        """Measurements of the next visit.

        The optimum of two-stage sampling (Cochran, Sampling Techniques, 1977, section 10.6): the square root of the
        cost of a start over that of a measurement, times the noise of a measurement over that between starts."""
        if self._settings.repeats is not None:
            return self._settings.repeats
        start, measure = self.costs()
        noise = self.noise()
        if noise is None:
            return _FIRST_REPEATS
        best = math.sqrt(max(start, 0.0) / max(measure, 1e-3)) * noise / START_SPREAD
        return round(min(MOST_REPEATS, max(LEAST_REPEATS, best)))
