"""The rounds of a race: who is best, and who is certainly not. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from launcher.tuning.record import START_SPREAD
from launcher.tuning.score import location

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
