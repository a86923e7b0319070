"""Scores of layouts that were visited in different rounds, with intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from launcher.intervals import LEVEL, student_t


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
