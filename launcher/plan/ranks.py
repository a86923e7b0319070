"""The number of tensor-parallel ranks of models with tensor_parallel_size = "auto". Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from launcher.plan.plan import ChosenRanks

TooLarge = Callable[[Mapping[str, int]], Mapping[str, str]]
"""The models that are too large for the nodes of their ranks, each with the reason, the largest first. The argument: ranks
by model; 1 for one that is not in it."""


def choose_ranks(candidates: Mapping[str, Sequence[int]], too_large: TooLarge) -> tuple[ChosenRanks, ...]:
    """The fewest ranks with which each model fits. `candidates`: numbers above 1 by model, ascending.

    1. All models begin with one rank.
    2. The largest that is too large and has a number left gets its next one, until none is too large or none has one left.
    3. Models that are still too large have one rank again, and the plan's ledger says what is missing. Else one that grew
       only for the sake of another, which needs more, has one rank again."""
    ranks = dict.fromkeys(candidates, 1)
    left = {name: list(its) for name, its in candidates.items()}
    reasons: dict[str, str] = {}
    while large := too_large(ranks):
        name = next((name for name in large if left.get(name)), None)
        if name is None:
            break
        reasons.setdefault(name, large[name])
        ranks[name] = left[name].pop(0)
    for name in ranks.keys() & large.keys():
        reasons.setdefault(name, large[name])
        ranks[name] = 1
    if not large and len(reasons) > 1:
        for name in tuple(reasons):
            if not too_large({**ranks, name: 1}):
                ranks[name] = 1
                del reasons[name]
    return tuple(
        ChosenRanks(
            name, number, _why(number, reasons.get(name), candidates[name]), on_one_node=name not in reasons
        )
        for name, number in ranks.items()
    )


def _why(ranks: int, too_large: str | None, tried: Collection[int]) -> str:
    if too_large is None:
        return "an instance fits on one node"
    if ranks > 1:
        return f"{too_large}; it fits on {ranks} nodes, a rank on each"
    if tried:
        return f"{too_large}, nor does it fit on {_or(tried)} nodes with a rank on each"
    return f"{too_large}, and there is no number of ranks for more nodes"


def _or(numbers: Collection[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
