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
    2. The largest that is too large gets its next number, until none is, or its numbers are used up: then it has one rank
       again, the next one is tried, and the plan's ledger says what is missing."""
    ranks = dict.fromkeys(candidates, 1)
    left = {name: list(its) for name, its in candidates.items()}
    reasons: dict[str, str] = {}
    while failed := next(((name, why) for name, why in too_large(ranks).items() if name in left), None):
        name, why = failed
        reasons.setdefault(name, why)
        if left[name]:
            ranks[name] = left[name].pop(0)
        else:
            ranks[name] = 1
            del left[name]
    return tuple(
        ChosenRanks(
            name, number, _why(number, reasons.get(name), candidates[name], fits=name in left),
            on_one_node=name not in reasons,
        )
        for name, number in ranks.items()
    )  # fmt: skip


def _why(ranks: int, too_large: str | None, tried: Collection[int], *, fits: bool) -> str:
    if too_large is None:
        return "an instance fits on one node"
    if fits:
        return f"{too_large}; it fits on {ranks} nodes, a rank on each"
    if tried:
        return f"{too_large}, nor does it fit on {_or(tried)} nodes with a rank on each"
    return f"{too_large}, and no number of ranks divides both its heads and the nodes that it may use"


def _or(numbers: Collection[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
