"""The verdict from a search's record. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher import intervals
from launcher.tuning.fit import fit
from launcher.tuning.model import Candidate, Comparison, Settings, Standing, Verdict
from launcher.tuning.record import Record
from launcher.tuning.score import LIMITS


@dataclass(slots=True)
class Found:
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
