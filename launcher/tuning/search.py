"""Decides every visit of a search from what was measured so far. Pure: to resume is to give the same history again.

1. Race: in each round every remaining layout is visited once, in random order and then in the reverse order, so that
   drift falls on all alike. Layouts are compared within rounds. After a round the worse ones leave: those that are
   certainly slower, and as many as the visits that are left demand.
2. Refine: the same among the refinements of the best layout.
3. Confirm: the best layout against the default in pairs of fresh visits. The published ratio is theirs alone."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.tuning.model import Candidate, Settings, Verdict, Visit, VisitResult
from launcher.tuning.stages import Search, Steps


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
