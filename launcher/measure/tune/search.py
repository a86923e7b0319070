"""Decides every visit of a search from what was measured so far. Pure: to resume is to give the same history again.

1. Race: in each round every remaining layout is visited once, in random order and then in the reverse order, so that
   drift falls on all alike. Layouts are compared within rounds. After a round the worse ones leave: those that are
   certainly slower, and as many as the visits that are left demand.
2. Refine: the same among the refinements of the best layout.
3. Confirm: the best layout against the default in pairs of fresh visits. The published ratio is theirs alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Sequence
from typing import Final, Literal

import numpy as np

from launcher.base.intervals import LEVEL, student_t
from launcher.measure.tune.model import Candidate, Settings, Verdict, Visit, VisitResult
from launcher.measure.tune.search_record import (
    LEAST_REPEATS,
    MOST_REPEATS,
    START_SPREAD,
    Found,
    Record,
    Rounds,
    make_verdict,
)

# --- The visits that a search may still make, within its own bound and the budget of time. ---

# Half of five visits for every layout.
VISITS_PER_LAYOUT: Final = 2.5
# With fewer pairs Student's t, and so the interval, is twice as wide.
LEAST_PAIRS: Final = 4
# For visits that fail or that another job disturbs, in the confirmation.
SPARE: Final = 2
RESERVED: Final = 2 * LEAST_PAIRS + SPARE


class Allowance:
    """The visits of a search. What the confirmation needs is reserved for it."""

    def __init__(self, settings: Settings, record: Record) -> None:
        self._settings = settings
        self._record = record
        self._visits = 0
        self._refining = 0
        self._reserved: int | None = None
        self._most_repeats = MOST_REPEATS

    def for_race(self, layouts: int) -> None:
        """Race and confirmation. With fewer than 8 layouts the confirmation alone needs more than half of five each."""
        self._visits = max(math.floor(VISITS_PER_LAYOUT * layouts), layouts + SPARE + RESERVED)

    def for_refining(self, most: int) -> None:
        """Later, at most."""
        self._refining = math.floor(VISITS_PER_LAYOUT * most)

    def refining(self, layouts: int) -> None:
        """Now."""
        self._visits += math.floor(VISITS_PER_LAYOUT * layouts)
        self._refining = 0

    def extend(self, visits: int) -> None:
        """At least as many as that from now on. Failed starts may have taken those of a small field."""
        self._visits = max(self._visits, len(self._record) + visits)

    def reserve(self, visits: int) -> None:
        """For pairs after this one."""
        self._reserved = visits

    def yield_to(self, visits: int) -> None:
        """What is reserved for later pairs gives way to the visits of this one: half a pair compares nothing, and the
        visits so far may have taken longer than assumed."""
        if self._reserved is not None:
            self._reserved = max(0, min(self._reserved, self.left - visits))

    @property
    def to_come(self) -> int:
        """The most visits of all stages."""
        return self._within_budget(self._visits + self._refining)

    @property
    def left(self) -> int:
        """The most visits of this stage and the confirmation."""
        return self._within_budget(self._visits)

    @property
    def to_spend(self) -> int:
        """The most visits of this stage. Of a short budget the confirmation gets half."""
        if self._reserved is not None:
            return self.left - self._reserved
        budget_s = self._settings.budget_s
        whole = self._visits if budget_s is None else math.floor(budget_s / self.visit_s)
        return self.left - min(RESERVED, whole // 2)

    def _within_budget(self, visits: int) -> int:
        left = visits - len(self._record)
        if self._settings.budget_s is not None:
            left_s = self._settings.budget_s - self._record.used_s()
            left = min(left, math.floor(left_s / self.visit_s))
        return max(0, left)

    @property
    def repeats(self) -> int:
        """Measurements of the next visit."""
        best = self._record.repeats()
        return best if self._settings.repeats is not None else min(best, self._most_repeats)

    @property
    def visit_s(self) -> float:
        """Seconds of the next visit."""
        return self._record.visit_s(self.repeats)

    def spread(self, visits: int) -> None:
        """Fewer repeats, if with more the budget covers neither these visits nor the confirmation."""
        self._most_repeats = MOST_REPEATS
        if self._settings.budget_s is not None:
            while self._most_repeats > LEAST_REPEATS and self.to_spend < visits:
                self._most_repeats -= 1


# --- The stages of a search as one generator: it yields a visit, is sent its result, and returns the verdict.

Steps = Generator[Visit, VisitResult, Verdict]
_Scores = Generator[Visit, VisitResult, dict[int, float]]
_Done = Generator[Visit, VisitResult, None]
_Purpose = Literal["race", "refine", "confirm"]

MOST_PAIRS: Final = 8
# The best layout may fail in its fresh visits; then the second is confirmed.
_MOST_CHALLENGERS: Final = 2


class Search:
    """One search and what it knows. Its decisions depend on candidates, settings and results alone."""

    def __init__(self, candidates: Sequence[Candidate], settings: Settings) -> None:
        self._candidates = candidates
        self._settings = settings
        self._record = Record(settings)
        self._found = Found(default=next(i for i, each in enumerate(candidates) if each.is_default))
        self._unsteady: set[int] = set()
        self._block = 0
        self.allowance = Allowance(settings, self._record)

    def run(self) -> Steps:
        layouts = [i for i, each in enumerate(self._candidates) if each.refines is None]
        refinements = self._refinements()
        self.allowance.for_race(len(layouts))
        self.allowance.for_refining(max(map(len, refinements.values()), default=0))
        if len(layouts) == 2 and not refinements:
            # A race would choose nothing: there is one layout to confirm.
            yield from self._confirm([i for i in layouts if i != self._found.default])
            return self.verdict(ended=True)
        yield from self._race(layouts, "race")
        its = refinements[self._found.ranking[0]] if self._found.ranking else []
        self.allowance.refining(len(its))
        if its:
            yield from self._race([self._found.ranking[0], *its], "refine")
        yield from self._confirm(self._found.ranking[:_MOST_CHALLENGERS])
        return self.verdict(ended=True)

    def _refinements(self) -> dict[int, list[int]]:
        """By the layout that they refine."""
        found: dict[int, list[int]] = defaultdict(list)
        for i, each in enumerate(self._candidates):
            if self._settings.refine and each.refines is not None:
                found[each.refines].append(i)
        return found

    def verdict(self, *, ended: bool) -> Verdict:
        return make_verdict(self._candidates, self._settings, self._record, self._found, ended=ended)

    def _race(self, field: Sequence[int], purpose: Literal["race", "refine"]) -> _Done:
        """Sets the ranking: the best first."""
        rounds, losers, order = Rounds(), list[int](), list[int]()
        survivors = list(field)
        while not rounds or (len(survivors) > 1 and self.allowance.to_spend >= len(survivors)):
            order = self._order(survivors, order, len(rounds))
            scores = yield from self._round(order, purpose, first=not rounds)
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

    def _leave(self, layouts: Sequence[int], why: str) -> None:
        if layouts:
            self._found.complete = False
        self._found.left.update(dict.fromkeys(layouts, why))

    def _order(self, survivors: Sequence[int], last: Sequence[int], done: int) -> list[int]:
        """Every second round reverses the one before: even drift then adds the same to all."""
        if done % 2:
            return [each for each in reversed(last) if each in survivors]
        random = np.random.default_rng((self._settings.seed, len(self._record)))
        # Where the budget is too short for all, the first of the list: the default, one instance per socket, ...
        fits = len(survivors) if done else max(2, self.allowance.to_spend)
        mixed = [*random.permutation(survivors[:fits]), *random.permutation(survivors[fits:])]
        return [int(each) for each in mixed]

    def _round(self, order: Sequence[int], purpose: _Purpose, *, first: bool = False) -> _Scores:
        """One visit of each. Those that failed and those that another job disturbed are visited again at the end."""
        self._block += 1
        scores: dict[int, float] = {}
        numbers: dict[int, int] = {}
        waiting = list(order)
        while waiting:
            if first:
                self.allowance.extend(len(waiting) + RESERVED)
            self.allowance.spread(len(waiting) if first or purpose == "confirm" else 0)
            self.allowance.yield_to(len(waiting))
            if self.allowance.to_spend < 1:
                break
            candidate = waiting.pop(0)
            number = len(self._record) + 1
            score = yield from self._visit(candidate, purpose)
            if score is not None:
                scores[candidate], numbers[candidate] = score, number
            elif self._record.is_out(candidate):
                self._found.left[candidate] = f"failed twice: {self._record.last_failure(candidate)}"
            else:
                waiting.append(candidate)
        yield from self._again(numbers, scores, purpose)
        return scores

    def _visit(self, candidate: int, purpose: _Purpose) -> Generator[Visit, VisitResult, float | None]:
        number, repeats = len(self._record) + 1, self.allowance.repeats
        result = yield Visit(number=number, candidate=candidate, purpose=purpose, repeats=repeats)
        return self._record.add(result, self._block)

    def _again(self, numbers: dict[int, int], scores: dict[int, float], purpose: _Purpose) -> _Done:
        """Replaces the scores of disturbed visits by those of fresh ones. A layout whose second visit looks disturbed,
        too, has more noise than the others: both visits count, and it is not repeated again."""
        for candidate, first in numbers.items():
            if (
                candidate in self._unsteady
                or not self._record.disturbed(first)
                or self.allowance.to_spend < 1
            ):
                continue
            number = len(self._record) + 1
            score = yield from self._visit(candidate, purpose)
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
        margin = rounds.margin(layouts, self._record.noise() or 0.0, self.allowance.repeats)
        # Half of the visits for the next round, half for all after it.
        most = max(2, self.allowance.to_spend // 2)
        kept = []
        for place, each in enumerate(ranked):
            if broken[each] and not broken[best]:
                self._found.left[each] = "; ".join(broken[each])
            elif means[best] - means[each] > margin:
                self._found.left[each] = f"slower than {self._candidates[best].label}"
            elif place >= most:
                self._found.left[each] = f"not among the best {most} after round {len(rounds)}"
            else:
                kept.append(each)
        return ranked, kept

    def _confirm(self, challengers: Sequence[int]) -> _Done:
        default = self._found.default
        for challenger in challengers:
            if challenger == default or self._record.is_out(default):
                return
            self._found.challenger, self._found.pairs = challenger, []
            yield from self._pairs(challenger, default)
            if not self._record.is_out(challenger):
                return

    def _pairs(self, challenger: int, default: int) -> _Done:
        """Pairs of fresh visits in alternating order. Their number is fixed before the first: a number that depended on
        their results would bias the interval."""
        self.allowance.reserve(0)
        self.allowance.extend(2 * LEAST_PAIRS)
        self.allowance.spread(2 * LEAST_PAIRS)
        wanted, pairs = self._wanted_pairs(), self._found.pairs
        while len(pairs) < wanted:
            if self._record.is_out(challenger) or self._record.is_out(default):
                return
            self.allowance.reserve(2 * (wanted - len(pairs) - 1))
            self.allowance.spread(2)
            self.allowance.reserve(max(0, min(self.allowance.left - 2, 2 * (wanted - len(pairs) - 1))))
            if self.allowance.to_spend < 2:
                self._found.complete = False
                return
            order = (challenger, default) if (len(pairs) + self._settings.seed) % 2 else (default, challenger)
            scores = yield from self._round(order, "confirm")
            if len(scores) == 2:
                pairs.append(scores[challenger] - scores[default])

    def _wanted_pairs(self) -> int:
        """As many as make the interval ± the least gain, within what is left."""
        noise = math.sqrt(2 * ((self._record.noise() or 0.0) ** 2 / self.allowance.repeats + START_SPREAD**2))
        fit = max(LEAST_PAIRS, min(MOST_PAIRS, (self.allowance.left - SPARE) // 2))
        for pairs in range(LEAST_PAIRS, fit):
            if student_t(LEVEL, pairs - 1) * noise / math.sqrt(pairs) <= self._settings.least_gain:
                return pairs
        return fit


def next_step(
    history: Sequence[VisitResult], candidates: Sequence[Candidate], settings: Settings
) -> Visit | Verdict:
    """The next visit, or the verdict. Raises ValueError when the history is not of this search."""
    _, step = replay(history, candidates, settings)
    return step


def verdict_so_far(
    history: Sequence[VisitResult], candidates: Sequence[Candidate], settings: Settings
) -> Verdict:
    """The verdict if the search ended here: complete only if it has ended."""
    search, step = replay(history, candidates, settings)
    return step if isinstance(step, Verdict) else search.verdict(ended=False)


def replay(
    history: Sequence[VisitResult], candidates: Sequence[Candidate], settings: Settings
) -> tuple[Search, Visit | Verdict]:
    """The search after `history`, with its next step."""
    search = Search(candidates, settings)
    steps = search.run()
    step = _advance(steps, None)
    for result in history:
        if step != result.visit:
            raise ValueError(
                f"the history is not of this search: {_text(result.visit)}, expected {_text(step)}"
            )
        step = _advance(steps, result)
    return search, step


def _advance(steps: Steps, result: VisitResult | None) -> Visit | Verdict:
    try:
        return next(steps) if result is None else steps.send(result)
    except StopIteration as end:
        verdict: Verdict = end.value
        return verdict


def _text(step: Visit | Verdict) -> str:
    if isinstance(step, Verdict):
        return "none, the search has ended"
    return f"visit {step.number} of candidate {step.candidate} ({step.purpose}, {step.repeats} repeats)"
