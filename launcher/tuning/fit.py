"""Scores of layouts that were visited in different rounds, with intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from launcher.intervals import LEVEL, student_t


def fit(
    layouts: Sequence[int], scores: Sequence[float], blocks: Sequence[int]
) -> dict[int, tuple[float, tuple[float, float] | None]]:
    """The figure of each layout with its 95 % interval, from one log score per visit.

    A score is the layout's, plus that of the block (a round or a pair) in which it was measured: a layout that was
    measured in warm rounds only is not ranked lower for it. The noise is that of all visits together."""
    names, blocks_seen = sorted(set(layouts)), sorted(set(blocks))
    if not names:
        return {}
    design = np.zeros((len(scores), len(names) + len(blocks_seen)))
    for row, (layout, block) in enumerate(zip(layouts, blocks, strict=True)):
        design[row, names.index(layout)] = 1
        design[row, len(names) + blocks_seen.index(block)] = 1
    values = np.asarray(scores)
    solution, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    df = len(scores) - int(rank)
    of_blocks = float(np.mean(design[:, len(names) :] @ solution[len(names) :]))
    variance = float(np.sum((values - design @ solution) ** 2)) / df if df else None
    found = {}
    for i, layout in enumerate(names):
        mean, visits = float(solution[i]) + of_blocks, int(design[:, i].sum())
        half = None if variance is None else student_t(LEVEL, df) * math.sqrt(variance / visits)
        interval = None if half is None else (math.exp(mean - half), math.exp(mean + half))
        found[layout] = math.exp(mean), interval
    return found
