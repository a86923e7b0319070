"""The stages of a search as one generator: it yields a visit, is sent its result, and returns the verdict. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Final, Literal

import numpy as np

from launcher import intervals
from launcher.tuning.fit import fit
from launcher.tuning.model import (
    Candidate,
    Comparison,
    Measurement,
    Settings,
    Standing,
    Verdict,
    Visit,
    VisitResult,
)
from launcher.tuning.score import LIMITS, broken_limits, failure, location, log_figures, spread

Steps = Generator[Visit, VisitResult, Verdict]
_Scores = Generator[Visit, VisitResult, float | None]
_Done = Generator[Visit, VisitResult, None]
_Purpose = Literal["race", "refine", "confirm"]

# Half of five visits for every layout.
VISITS_PER_LAYOUT: Final = 2.5
# Student's t has 3 degrees of freedom with 4 pairs; with fewer its quantile, and so the interval, doubles.
LEAST_PAIRS: Final = 4
MOST_PAIRS: Final = 8
# Two starts of the same layout differ, too: memory lies elsewhere. No number of repeats averages this out.
START_SPREAD: Final = 0.01
LEAST_REPEATS: Final = 3
MOST_REPEATS: Final = 12
_FIRST_REPEATS: Final = 5
_MOST_FAILURES: Final = 2
# Of up to 24 layouts none that is equal to the best leaves by this rule in 19 of 20 searches.
_CERTAINLY_SLOWER: Final = 3.0
_MOST_CHALLENGERS: Final = 2
# Weight of the noise within visits beside the noise between rounds, in degrees of freedom.
_PRIOR_DF: Final = 4


def most_visits(layouts: int) -> int:
    """Visits of race and confirmation. Below 6 layouts the confirmation needs more than its part of the half."""
    return max(math.floor(VISITS_PER_LAYOUT * layouts), layouts + 2 * LEAST_PAIRS)


class Search:
    """One search and what it knows. Its decisions depend on candidates, settings and results alone."""

    def __init__(self, candidates: Sequence[Candidate], settings: Settings) -> None:
        self._candidates = candidates
        self._settings = settings
        self._results: list[VisitResult] = []
        self._blocks: list[int] = []
        self._scores: list[float | None] = []
        self._left: dict[int, str] = {}
        self._failures: Counter[int] = Counter()
        self._goodput: bool | None = None
        self._block = 0
        self._allowance = 0
        self._refining = 0
        self._reserved = 0
        self._complete = True
        self._pairs: list[float] = []
        self._challenger: int | None = None
        self._ranking: list[int] = []
        self._default = next(i for i, each in enumerate(candidates) if each.is_default)

    def run(self) -> Steps:
        layouts = [i for i, each in enumerate(self._candidates) if each.refines is None]
        self._allowance = most_visits(len(layouts))
        self._refining = self._most_refining()
        if len(layouts) == 2 and not self._refining:
            # A race would choose nothing: there is one layout to confirm.
            self._ranking = [i for i in layouts if i != self._default]
        else:
            yield from self._race(layouts, "race")
        if self._refining and self._ranking:
            best = self._ranking[0]
            refinements = [i for i, each in enumerate(self._candidates) if each.refines == best]
            self._allowance += math.floor(VISITS_PER_LAYOUT * len(refinements))
            self._refining = 0
            if refinements:
                yield from self._race([best, *refinements], "refine")
        yield from self._confirm()
        return self.verdict(complete=self._complete)

    def _most_refining(self) -> int:
        """The most visits that refining the best layout can take."""
        counts = Counter(each.refines for each in self._candidates if each.refines is not None)
        most = max(counts.values(), default=0) if self._settings.refine else 0
        return math.floor(VISITS_PER_LAYOUT * most)

    @property
    def visits_to_come(self) -> int:
        """The most visits of all stages that may follow, within the budget."""
        return self._within_budget(self._allowance + self._refining)

    @property
    def visits_left(self) -> int:
        """The most visits of this stage and the confirmation that may follow, within the budget."""
        return self._within_budget(self._allowance)

    def _within_budget(self, allowed: int) -> int:
        left = allowed - len(self._results)
        if self._settings.budget_s is not None:
            used = sum(each.start_s + each.measure_s for each in self._results)
            left = min(left, math.floor((self._settings.budget_s - used) / self.visit_s))
        return max(0, left)

    @property
    def visit_s(self) -> float:
        """The time of one visit, from the last starts and measurements."""
        start, measure = self._costs()
        return start + self._repeats() * measure

    def _costs(self) -> tuple[float, float]:
        """Seconds of a start and of one measurement."""
        done = [each for each in self._results if each.measurements]
        if not done:
            return self._settings.start_s, self._settings.measure_s
        start = float(np.mean([each.start_s for each in done[-8:]]))
        measured = sum(len(each.measurements) for each in done[-8:])
        return max(start, 1e-3), max(sum(each.measure_s for each in done[-8:]) / measured, 1e-3)

    def _repeats(self) -> int:
        """Measurements of a visit. Cochran's optimum of two-level sampling: the square root of the cost of a start over
        that of a measurement, times the noise of a measurement over that of a start."""
        if self._settings.repeats is not None:
            return self._settings.repeats
        spreads = [
            spread(figures)
            for each in self._results
            if len(figures := log_figures(each, goodput=bool(self._goodput))) >= LEAST_REPEATS
        ]
        if not spreads:
            return _FIRST_REPEATS
        start, measure = self._costs()
        noise = math.sqrt(float(np.mean(np.square(spreads))))
        best = math.ceil(math.sqrt(start / measure) * noise / START_SPREAD)
        return min(MOST_REPEATS, max(LEAST_REPEATS, best))

    def _visit(self, candidate: int, purpose: _Purpose, repeats: int) -> _Scores:
        number = len(self._results) + 1
        result = yield Visit(number=number, candidate=candidate, purpose=purpose, repeats=repeats)
        if self._goodput is None and result.measurements:
            self._goodput = bool(self._settings.slo) and result.measurements[0].goodput_per_s is not None
        figures = log_figures(result, goodput=bool(self._goodput))
        score = location(figures) if len(figures) else None
        self._results.append(result)
        self._blocks.append(self._block)
        self._scores.append(score)
        self._failures[candidate] = 0 if score is not None else self._failures[candidate] + 1
        if self._is_out(candidate):
            self._left[candidate] = f"failed twice: {failure(result)}"
        return score

    def _is_out(self, layout: int) -> bool:
        """It failed twice in succession: not measured again."""
        return self._failures[layout] >= _MOST_FAILURES

    def _race(self, field: Sequence[int], purpose: Literal["race", "refine"]) -> _Done:
        """Sets the ranking: the best first."""
        self._reserved = min(2 * LEAST_PAIRS, self.visits_left // 2)
        rounds: list[dict[int, float]] = []
        order: list[int] = []
        losers: list[int] = []
        survivors = self._affordable(field)
        while len(survivors) > bool(rounds) and (not rounds or self._to_spend >= 2):
            order = self._order(survivors, order, len(rounds))
            scores = yield from self._round(order, purpose)
            survivors = [each for each in survivors if not self._is_out(each)]
            if rounds and not scores.keys() >= set(survivors):
                break  # out of time: this round compares nothing
            rounds.append(scores)
            survivors = self._ranked([each for each in survivors if each in scores], rounds)
            kept = self._without_losers(survivors, rounds)
            losers = [*(each for each in survivors if each not in kept), *losers]
            survivors = kept
        self._ranking = [*survivors, *losers]

    @property
    def _to_spend(self) -> int:
        """Visits that the race may take from those that are left: the rest confirms its result."""
        return self.visits_left - self._reserved

    def _affordable(self, field: Sequence[int]) -> list[int]:
        fits = max(1, self._to_spend)
        for each in field[fits:]:
            self._left[each] = "not measured: the budget ended before"
            self._complete = False
        return list(field[:fits])

    def _order(self, survivors: Sequence[int], last: Sequence[int], done: int) -> list[int]:
        """Every second round reverses the one before: even drift then adds the same to all."""
        if done % 2:
            return [each for each in reversed(last) if each in survivors]
        random = np.random.default_rng((self._settings.seed, len(self._results)))
        return [survivors[i] for i in random.permutation(len(survivors))]

    def _round(
        self, order: Sequence[int], purpose: _Purpose, repeats: int | None = None
    ) -> Generator[Visit, VisitResult, dict[int, float]]:
        """The scores of the round. A layout that failed is tried again at its end."""
        self._block += 1
        scores: dict[int, float] = {}
        waiting = list(order)
        while waiting and self._to_spend > 0:
            candidate = waiting.pop(0)
            score = yield from self._visit(candidate, purpose, repeats or self._repeats())
            if score is not None:
                scores[candidate] = score
            elif not self._is_out(candidate):
                waiting.append(candidate)
        return scores

    def _ranked(self, layouts: Sequence[int], rounds: Sequence[dict[int, float]]) -> list[int]:
        """Best first; those that break a limit behind those that break none."""

        def key(layout: int) -> tuple[bool, float]:
            return bool(self._broken(layout)), -float(np.mean([scores[layout] for scores in rounds]))

        return sorted(layouts, key=key)

    def _broken(self, layout: int) -> list[str]:
        return broken_limits(self._measurements(layout), self._settings)

    def _measurements(self, layout: int) -> list[Measurement]:
        return [
            measurement
            for result in self._results
            if result.visit.candidate == layout
            for measurement in result.measurements
        ]

    def _without_losers(self, ranked: list[int], rounds: Sequence[dict[int, float]]) -> list[int]:
        """Without those that are certainly slower than the best, and those for which no visits are left."""
        if not ranked:
            return []
        most = max(2, self._to_spend // 2)  # half for the next round, half for all after it
        means = {each: float(np.mean([scores[each] for scores in rounds])) for each in ranked}
        margin = _CERTAINLY_SLOWER * self._noise(ranked, rounds) * math.sqrt(2 / len(rounds))
        best, kept = ranked[0], []
        for place, each in enumerate(ranked):
            broken = self._broken(each) if not self._broken(best) else []
            if place < most and not broken and means[best] - means[each] <= margin:
                kept.append(each)
            else:
                reason = "; ".join(broken) or f"slower than {self._candidates[best].label}"
                self._left[each] = reason
        return kept

    def _noise(self, layouts: Sequence[int], rounds: Sequence[dict[int, float]]) -> float:
        """Standard deviation of one visit's score: from the rounds, and from the measurements within visits."""
        spreads = [
            spread(figures) ** 2 / len(figures)
            for each in self._results
            if len(figures := log_figures(each, goodput=bool(self._goodput))) >= LEAST_REPEATS
        ]
        within = (float(np.mean(spreads)) if spreads else 0.0) + START_SPREAD**2
        table = np.array([[scores[each] for each in layouts] for scores in rounds])
        rest = table - table.mean(axis=0) - table.mean(axis=1, keepdims=True) + table.mean()
        df = (len(rounds) - 1) * (len(layouts) - 1)
        return math.sqrt((float(np.sum(rest**2)) + _PRIOR_DF * within) / (df + _PRIOR_DF))

    def _confirm(self) -> _Done:
        self._reserved = 0
        for challenger in self._ranking[:_MOST_CHALLENGERS]:
            if challenger == self._default or self._is_out(self._default):
                return
            self._challenger, self._pairs = challenger, []
            yield from self._pairs_of(challenger)
            if not self._is_out(challenger):
                return

    def _pairs_of(self, challenger: int) -> _Done:
        """Pairs of fresh visits in alternating order. Their number is fixed before the first: a number that depended on
        their results would bias the interval."""
        wanted = min(MOST_PAIRS, max(LEAST_PAIRS, self.visits_left // 2))
        for attempt in range(wanted + 2):
            if len(self._pairs) == wanted or self._is_out(challenger) or self._is_out(self._default):
                return
            if self.visits_left < 2:
                self._complete = False
                return
            pair = (
                (challenger, self._default)
                if (attempt + self._settings.seed) % 2
                else (self._default, challenger)
            )
            scores = yield from self._round(pair, "confirm", self._repeats())
            if len(scores) == 2:
                self._pairs.append(scores[challenger] - scores[self._default])

    def comparison(self) -> Comparison | None:
        found = intervals.mean(self._pairs)
        if self._challenger is None or found is None:
            return None
        return Comparison(
            candidate=self._challenger, pairs=len(self._pairs), ratio=math.exp(found.estimate),
            interval=(math.exp(found.low), math.exp(found.high)),
        )  # fmt: skip

    def verdict(self, *, complete: bool) -> Verdict:
        found = self.comparison()
        winner, different = self._winner(found)
        ratio, interval = (1.0, (1.0, 1.0)) if winner == self._default else (None, None)
        if found is not None and found.candidate == winner:
            ratio, interval = found.ratio, found.interval
        return Verdict(
            winner=winner, different=different, ratio_to_default=ratio, interval=interval, comparison=found,
            standings=self._standings(), complete=complete,
        )  # fmt: skip

    def _winner(self, found: Comparison | None) -> tuple[int | None, bool]:
        """The winner, and whether it differs from the default."""
        ranking = [each for each in self._ranking if not self._is_out(each)] or self._so_far()
        if not ranking:
            return None, False
        best = ranking[0]
        if self._is_out(self._default):
            return best, True  # the default gives no figure: nothing to compare with
        if found is None or self._is_out(found.candidate):
            return best, False
        challenger, default = bool(self._broken(found.candidate)), bool(self._broken(self._default))
        if challenger != default:
            return (self._default, False) if challenger else (found.candidate, True)
        if found.ratio < 1:
            return self._default, False
        return found.candidate, found.interval[0] > 1 and found.ratio >= 1 + self._settings.least_gain

    def _so_far(self) -> list[int]:
        """The ranking of a race that has not ended."""
        standings = [each for each in self._standings() if each.score is not None]
        return [each.candidate for each in standings if not self._is_out(each.candidate)]

    def _standings(self) -> list[Standing]:
        """All layouts that were visited or left, best first."""
        scored = [
            (result.visit.candidate, score, block)
            for result, score, block in zip(self._results, self._scores, self._blocks, strict=True)
            if score is not None
        ]
        scores = fit([each[0] for each in scored], [each[1] for each in scored], [each[2] for each in scored])
        standings = []
        visits = Counter(each.visit.candidate for each in self._results)
        for i in sorted(
            {*visits, *self._left, *(j for j, each in enumerate(self._candidates) if each.refines is None)}
        ):
            measurements = self._measurements(i)
            score, interval = scores.get(i, (None, None))
            limited = any(name in self._settings.slo for name in LIMITS)
            standings.append(
                Standing(
                    candidate=i, score=score, interval=interval,
                    meets_slo=not self._broken(i) if limited and measurements else None,
                    visits=visits[i], measurements=len(measurements), left=self._left.get(i),
                )
            )  # fmt: skip
        return sorted(
            standings, key=lambda each: (each.score is None, each.meets_slo is False, -(each.score or 0))
        )
