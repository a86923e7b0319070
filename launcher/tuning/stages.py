"""The stages of a search as one generator: it yields a visit, is sent its result, and returns the verdict. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Sequence
from typing import Final, Literal

import numpy as np

from launcher.intervals import LEVEL, student_t
from launcher.tuning.model import Candidate, Settings, Verdict, Visit, VisitResult
from launcher.tuning.record import START_SPREAD, Record
from launcher.tuning.rounds import Rounds
from launcher.tuning.verdict import Found, make_verdict

Steps = Generator[Visit, VisitResult, Verdict]
_Scores = Generator[Visit, VisitResult, dict[int, float]]
_Done = Generator[Visit, VisitResult, None]
_Purpose = Literal["race", "refine", "confirm"]

# Half of five visits for every layout.
VISITS_PER_LAYOUT: Final = 2.5
# With fewer pairs Student's t, and so the interval, is twice as wide.
LEAST_PAIRS: Final = 4
MOST_PAIRS: Final = 8
# Visits kept for the confirmation: its pairs, and two for visits that fail or that another job disturbs.
_SPARE: Final = 2
_RESERVED: Final = 2 * LEAST_PAIRS + _SPARE
# The best layout may fail in its fresh visits; then the second is confirmed.
_MOST_CHALLENGERS: Final = 2


def most_visits(layouts: int) -> int:
    """Visits of race and confirmation. With fewer than 8 layouts the confirmation alone needs more than half."""
    return max(math.floor(VISITS_PER_LAYOUT * layouts), layouts + _SPARE + _RESERVED)


class Search:
    """One search and what it knows. Its decisions depend on candidates, settings and results alone."""

    def __init__(self, candidates: Sequence[Candidate], settings: Settings) -> None:
        self._candidates = candidates
        self._settings = settings
        self._record = Record(settings)
        self._found = Found(default=next(i for i, each in enumerate(candidates) if each.is_default))
        self._unsteady: set[int] = set()
        self._block = 0
        self._allowance = 0
        self._refining = 0
        self._reserved = 0

    def run(self) -> Steps:
        layouts = [i for i, each in enumerate(self._candidates) if each.refines is None]
        self._allowance = most_visits(len(layouts))
        self._refining = self._most_refining()
        if len(layouts) == 2 and not self._refining:
            # A race would choose nothing: there is one layout to confirm.
            self._found.ranking = [i for i in layouts if i != self._found.default]
        else:
            yield from self._race(layouts, "race")
        if self._refining and self._found.ranking:
            best = self._found.ranking[0]
            refinements = [i for i, each in enumerate(self._candidates) if each.refines == best]
            self._allowance += math.floor(VISITS_PER_LAYOUT * len(refinements))
            self._refining = 0
            if refinements:
                yield from self._race([best, *refinements], "refine")
        yield from self._confirm()
        return self.verdict(ended=True)

    def _most_refining(self) -> int:
        """The most visits that refining the best layout can take."""
        counts = Counter(each.refines for each in self._candidates if each.refines is not None)
        return math.floor(VISITS_PER_LAYOUT * max(counts.values(), default=0)) if self._settings.refine else 0

    def verdict(self, *, ended: bool) -> Verdict:
        return make_verdict(self._candidates, self._settings, self._record, self._found, ended=ended)

    @property
    def visits_to_come(self) -> int:
        """The most visits of all stages that may follow, within the budget."""
        return self._within_budget(self._allowance + self._refining)

    @property
    def visit_s(self) -> float:
        """Seconds of the next visit."""
        return self._record.visit_s()

    @property
    def _visits_left(self) -> int:
        """The most visits of this stage and the confirmation that may follow, within the budget."""
        return self._within_budget(self._allowance)

    @property
    def _to_spend(self) -> int:
        """Visits that this stage may take of those; the others confirm its result."""
        return self._visits_left - self._reserved

    def _within_budget(self, allowed: int) -> int:
        left = allowed - len(self._record)
        if self._settings.budget_s is not None:
            left_s = self._settings.budget_s - self._record.used_s()
            left = min(left, math.floor(left_s / self._record.visit_s()))
        return max(0, left)

    def _race(self, field: Sequence[int], purpose: Literal["race", "refine"]) -> _Done:
        """Sets the ranking: the best first."""
        self._reserved = min(_RESERVED, self._visits_left // 2)
        rounds, losers, order = Rounds(), list[int](), list[int]()
        survivors = self._affordable(field)
        while not rounds or (len(survivors) > 1 and self._to_spend >= len(survivors)):
            order = self._order(survivors, order, len(rounds))
            scores = yield from self._round(order, purpose)
            survivors = [each for each in survivors if not self._record.is_out(each)]
            missing = [each for each in survivors if each not in scores]
            if missing and rounds:
                break  # out of time: an incomplete round compares nothing
            self._leave(missing, "not measured: the budget ended before")
            ranked, kept = self._compared([each for each in survivors if each in scores], scores, rounds)
            losers = [*(each for each in ranked if each not in kept), *losers]
            survivors = kept
            if not survivors:
                break
        self._found.ranking = [*survivors, *losers]

    def _affordable(self, field: Sequence[int]) -> list[int]:
        """The first of the field, as many as the budget has visits for: the default and one instance per socket first."""
        fits = max(1, self._to_spend)
        self._leave(field[fits:], "not measured: the budget ended before")
        return list(field[:fits])

    def _leave(self, layouts: Sequence[int], why: str) -> None:
        if layouts:
            self._found.complete = False
        self._found.left.update(dict.fromkeys(layouts, why))

    def _order(self, survivors: Sequence[int], last: Sequence[int], done: int) -> list[int]:
        """Every second round reverses the one before: even drift then adds the same to all."""
        if done % 2:
            return [each for each in reversed(last) if each in survivors]
        random = np.random.default_rng((self._settings.seed, len(self._record)))
        return [survivors[i] for i in random.permutation(len(survivors))]

    def _round(self, order: Sequence[int], purpose: _Purpose, repeats: int | None = None) -> _Scores:
        """One visit of each. Those that failed and those that another job disturbed are visited again at the end."""
        self._block += 1
        scores: dict[int, float] = {}
        numbers: dict[int, int] = {}
        waiting = list(order)
        while waiting and self._to_spend > 0:
            candidate = waiting.pop(0)
            number = len(self._record) + 1
            result = yield Visit(
                number=number, candidate=candidate, purpose=purpose, repeats=repeats or self._record.repeats()
            )
            score = self._record.add(result, self._block)
            if score is not None:
                scores[candidate], numbers[candidate] = score, number
            elif self._record.is_out(candidate):
                self._found.left[candidate] = f"failed twice: {self._record.last_failure(candidate)}"
            else:
                waiting.append(candidate)
        yield from self._again(numbers, scores, purpose, repeats)
        return scores

    def _again(
        self, numbers: dict[int, int], scores: dict[int, float], purpose: _Purpose, repeats: int | None
    ) -> _Done:
        """Replaces the scores of disturbed visits by those of fresh ones. A layout whose second visit looks disturbed,
        too, has more noise than the others: both visits count, and it is not repeated again."""
        for candidate, first in numbers.items():
            if candidate in self._unsteady or not self._record.disturbed(first) or self._to_spend < 1:
                continue
            number = len(self._record) + 1
            result = yield Visit(
                number=number, candidate=candidate, purpose=purpose, repeats=repeats or self._record.repeats()
            )
            score = self._record.add(result, self._block)
            if score is not None and self._record.disturbed(number):
                self._unsteady.add(candidate)
                scores[candidate] = (scores[candidate] + score) / 2
            elif score is not None:
                self._record.discard(first)
                scores[candidate] = score

    def _compared(
        self, layouts: Sequence[int], scores: dict[int, float], rounds: Rounds
    ) -> tuple[list[int], list[int]]:
        """The layouts, best first, with the round added; and those of them that stay."""
        rounds.add(scores)
        if not layouts:
            return [], []
        means = rounds.scores(layouts)
        broken = {each: self._record.broken(each) for each in layouts}
        ranked = sorted(layouts, key=lambda each: (bool(broken[each]), -means[each]))
        best = ranked[0]
        margin = rounds.margin(layouts, self._record.noise() or 0.0, self._record.repeats())
        # Half of the visits for the next round, half for all after it.
        most = max(2, self._to_spend // 2)
        kept = []
        for place, each in enumerate(ranked):
            if broken[each] and not broken[best]:
                self._found.left[each] = "; ".join(broken[each])
            elif place >= most or means[best] - means[each] > margin:
                self._found.left[each] = f"slower than {self._candidates[best].label}"
            else:
                kept.append(each)
        return ranked, kept

    def _confirm(self) -> _Done:
        default = self._found.default
        for challenger in self._found.ranking[:_MOST_CHALLENGERS]:
            if challenger == default or self._record.is_out(default):
                return
            self._found.challenger, self._found.pairs = challenger, []
            yield from self._pairs(challenger, default)
            if not self._record.is_out(challenger):
                return

    def _pairs(self, challenger: int, default: int) -> _Done:
        """Pairs of fresh visits in alternating order. Their number is fixed before the first: a number that depended on
        their results would bias the interval."""
        self._reserved = 0
        wanted, pairs = self._wanted_pairs(), self._found.pairs
        for attempt in range(wanted + _SPARE):
            if len(pairs) == wanted or self._record.is_out(challenger) or self._record.is_out(default):
                return
            self._reserved = 0
            if self._visits_left < 2:
                break
            self._reserved = min(self._visits_left - 2, 2 * (wanted - len(pairs) - 1))
            first = (attempt + self._settings.seed) % 2
            order = (challenger, default) if first else (default, challenger)
            scores = yield from self._round(order, "confirm", self._record.repeats())
            if len(scores) == 2:
                pairs.append(scores[challenger] - scores[default])
        self._found.complete = False

    def _wanted_pairs(self) -> int:
        """As many as make the interval narrower than the least gain, within what is left."""
        repeats = self._record.repeats()
        noise = math.sqrt(2 * ((self._record.noise() or 0.0) ** 2 / repeats + START_SPREAD**2))
        fit = max(LEAST_PAIRS, min(MOST_PAIRS, (self._visits_left - _SPARE) // 2))
        for pairs in range(LEAST_PAIRS, fit):
            if student_t(LEVEL, pairs - 1) * noise / math.sqrt(pairs) <= self._settings.least_gain / 2:
                return pairs
        return fit
