"""What a search has measured, and what follows from it: noise, cost of a visit, repeats, broken limits. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from launcher.base import intervals
from launcher.base.intervals import LEVEL, student_t
from launcher.measure.tune.model import (
    Candidate,
    Comparison,
    Measurement,
    Settings,
    Standing,
    Verdict,
    VisitResult,
)

# --- What one visit says about its layout: a score, its noise, and the limits it broke. ---

_LOWEST: Final = 1e-9
_HIGHEST: Final = 1e12
LIMITS: Final = ("ttft_p99", "itl_p99")


def log_figures(measurements: Sequence[Measurement], *, goodput: bool) -> npt.NDArray[np.float64]:
    """Natural logarithms of a visit's figures; without those that no machine reaches, 0 and NaN among them."""
    figures = ((each.goodput_per_s if goodput else each.output_tokens_per_s) for each in measurements)
    return np.log([each for each in figures if each is not None and _LOWEST < each < _HIGHEST])


def location(values: npt.NDArray[np.float64]) -> float:
    """Hodges-Lehmann: the median of the means of all pairs. Nearly as exact as the mean where noise is normal; outliers
    (another job on the machine) do not decide it while they are fewer than 29 %."""
    rows, columns = np.triu_indices(len(values))
    return float(np.median((values[rows] + values[columns]) / 2))


def spread(values: npt.NDArray[np.float64]) -> float:
    """Standard deviation, from the median distance to the median; of 3 values or more."""
    distance = float(np.median(np.abs(values - np.median(values))))
    return 1.4826 * distance * len(values) / (len(values) - 0.8)


def broken_limits(measurements: Sequence[Measurement], settings: Settings) -> list[str]:
    """Limits that the median of the measurements breaks, with the figure. A failed request counts as one."""
    broken = []
    for name in LIMITS:
        limit = settings.slo.get(name)
        figures = [figure for each in measurements if (figure := getattr(each, f"{name}_s")) is not None]
        # What is no number keeps no limit.
        median = (
            statistics.median(each if math.isfinite(each) else math.inf for each in figures) if figures else 0
        )
        if limit is not None and median > limit:
            broken.append(f"{name} {median:.3g} s over {limit:g} s")
    failed = statistics.median(each.failed for each in measurements) if measurements else 0
    return [*broken, f"{failed:g} requests failed"] if failed else broken


def failure(result: VisitResult) -> str:
    """Why a visit has no score."""
    if result.cause is not None:
        return result.cause
    return "no measurement gave a figure above 0" if result.measurements else "nothing was measured"


# Two starts of the same layout differ, too: memory lies elsewhere. No number of repeats averages this out.
START_SPREAD: Final = 0.01
# With 4 figures one outlier does not decide their location; with 3 it does in part.
LEAST_REPEATS: Final = 4
MOST_REPEATS: Final = 12
_FIRST_REPEATS: Final = 6
_MOST_FAILURES: Final = 2
# Visits that tell what the next one takes.
_LAST: Final = 8


class Entry(Struct, frozen=True):
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


# --- Scores of layouts that were visited in different rounds, with intervals. ---


def fit(scored: Sequence[tuple[int, int, float]]) -> dict[int, tuple[float, tuple[float, float] | None]]:
    """The figure of each layout with its 95 % interval, from (layout, block, log score) of every visit.

    A score is the layout's, plus that of the block (a round or a pair) in which it was measured: a layout that was
    measured in warm rounds only is not ranked lower for it. The noise is that of all visits together."""
    if not scored:
        return {}
    layouts, blocks, values = (np.asarray(column) for column in zip(*scored, strict=True))
    names, blocks_seen = np.unique(layouts), np.unique(blocks)
    design = np.hstack([layouts[:, None] == names, blocks[:, None] == blocks_seen]).astype(float)
    solution, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    df = len(values) - int(rank)
    of_blocks = float(np.mean(design[:, len(names) :] @ solution[len(names) :]))
    variance = float(np.sum((values - design @ solution) ** 2)) / df if df else None
    found = {}
    for i, layout in enumerate(names):
        mean, visits = float(solution[i]) + of_blocks, int(design[:, i].sum())
        half = None if variance is None else student_t(LEVEL, df) * math.sqrt(variance / visits)
        interval = None if half is None else (math.exp(mean - half), math.exp(mean + half))
        found[int(layout)] = math.exp(mean), interval
    return found


# --- The rounds of a race: who is best, and who is certainly not. ---

# Of 24 equal layouts none leaves by this rule in about 19 of 20 rounds.
_CERTAIN: Final = 3.0
# Weight of the noise within visits beside the noise between rounds, in degrees of freedom.
_PRIOR: Final = 4


class Rounds:
    """Scores of layouts, one of each in every round. Layouts are compared within rounds, so that drift cancels."""

    def __init__(self) -> None:
        self._rounds: list[dict[int, float]] = []

    def __len__(self) -> int:
        return len(self._rounds)

    def add(self, scores: dict[int, float]) -> None:
        self._rounds.append(dict(scores))

    def scores(self, layouts: Sequence[int]) -> dict[int, float]:
        """Of layouts that every round has, less what a round adds to all of them."""
        table = np.array([[scores[each] for each in layouts] for scores in self._rounds])
        table -= np.median(table, axis=1, keepdims=True)
        return {each: location(table[:, column]) for column, each in enumerate(layouts)}

    def margin(self, layouts: Sequence[int], noise: float, repeats: int) -> float:
        """A layout that is further behind is certainly slower. `noise`: of one measurement within a visit."""
        table = np.array([[scores[each] for each in layouts] for scores in self._rounds])
        rest = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
        freedom = (len(self._rounds) - 1) * (len(layouts) - 1)
        expected = noise**2 / repeats + START_SPREAD**2
        variance = (float(np.sum(rest**2)) + _PRIOR * expected) / (freedom + _PRIOR)
        return _CERTAIN * math.sqrt(2 * variance / len(self._rounds))


# --- The verdict from a search's record. ---


class Found(Struct):
    """What the stages of a search have found."""

    default: int
    ranking: list[int] = field(default_factory=list)
    """Of the last race, best first."""
    left: dict[int, str] = field(default_factory=dict)
    """Why a layout left."""
    challenger: int | None = None
    """The layout that is compared with the default."""
    pairs: list[float] = field(default_factory=list)
    """Challenger's score less the default's, of each pair of fresh visits."""
    complete: bool = True


def make_verdict(
    candidates: Sequence[Candidate], settings: Settings, record: Record, found: Found, *, ended: bool
) -> Verdict:
    standings = _standings(candidates, settings, record, found)
    comparison = _comparison(found)
    winner, different = _winner(standings, comparison, settings, record, found)
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    if winner == found.default:
        ratio, interval = 1.0, (1.0, 1.0)
    elif comparison is not None and comparison.candidate == winner:
        ratio, interval = comparison.ratio, comparison.interval
    return Verdict(
        winner=winner, different=different, ratio_to_default=ratio, interval=interval, comparison=comparison,
        standings=sorted(standings, key=lambda each: each.candidate != winner), complete=ended and found.complete,
    )  # fmt: skip


def _comparison(found: Found) -> Comparison | None:
    mean = intervals.mean(found.pairs)
    if found.challenger is None or mean is None:
        return None
    return Comparison(
        candidate=found.challenger, pairs=len(found.pairs), ratio=math.exp(mean.estimate),
        interval=(math.exp(mean.low), math.exp(mean.high)),
    )  # fmt: skip


def _winner(
    standings: Sequence[Standing],
    comparison: Comparison | None,
    settings: Settings,
    record: Record,
    found: Found,
) -> tuple[int | None, bool]:
    """The winner, and whether it differs from the default."""
    measured = [each.candidate for each in standings if each.score is not None]
    ranking = [each for each in found.ranking or measured if each in measured and not record.is_out(each)]
    if not ranking:
        return None, False
    if record.is_out(found.default):
        return ranking[0], True  # the default gives no figure that could be compared
    if comparison is None or record.is_out(comparison.candidate):
        return ranking[0], False
    challenger, default = bool(record.broken(comparison.candidate)), bool(record.broken(found.default))
    if challenger != default:
        return (found.default, False) if challenger else (comparison.candidate, True)
    if comparison.ratio < 1:
        return found.default, False
    return comparison.candidate, comparison.interval[0] > 1 and comparison.ratio >= 1 + settings.least_gain


def _standings(
    candidates: Sequence[Candidate], settings: Settings, record: Record, found: Found
) -> list[Standing]:
    """All layouts of the race and the refinements that were measured, by score."""
    scores = fit(record.scored())
    visits, limited = record.visits(), any(name in settings.slo for name in LIMITS)
    standings = []
    for i, candidate in enumerate(candidates):
        if candidate.refines is not None and i not in visits:
            continue
        measurements = record.measurements(i)
        score, interval = scores.get(i, (None, None))
        standings.append(
            Standing(
                candidate=i, score=score, interval=interval, visits=visits[i], measurements=len(measurements),
                meets_slo=not record.broken(i) if limited and measurements else None, left=found.left.get(i),
            )
        )  # fmt: skip
    return sorted(
        standings, key=lambda each: (each.score is None, each.meets_slo is False, -(each.score or 0))
    )
