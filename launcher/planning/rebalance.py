"""Balances instances by moving and swapping whole pieces (L3 domains). Pure.

Only this module imports numpy, and it is imported only when the first distribution is uneven, which keeps other
plans fast. All exchanges between a pair of instances are evaluated at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Sizes = np.ndarray[tuple[int, ...], np.dtype[np.intp]]
Groups = list[list[int]]


def even_out(groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> Groups:
    """The groups (piece indices per instance) after the last exchange that improves the balance.

    1. Two instances swap pieces, or one gives one away, when that reduces their difference.
    2. The pair with the largest difference comes first; ties go to the lower instance.
    3. Each exchange lowers the sum of squares, so the process ends.

    No instance gives its last piece away: that would not reduce the difference."""
    array = np.array([*sizes, 0], dtype=np.intp)  # the last index stands for no piece
    found = [sorted(group) for group in groups]
    while (best := _best(found, array)) is not None:
        giver, taker, give, take = best
        found[giver] = sorted({*found[giver], take} - {give, len(sizes)})
        found[taker] = sorted({*found[taker], give} - {take})
    return found


def _best(groups: Groups, sizes: Sizes) -> tuple[int, int, int, int] | None:
    """The best exchange: giver, taker, piece given, piece taken back (the last index: none)."""
    held = [int(sizes[group].sum()) for group in groups]
    pairs = [(a, b) for a in range(len(groups)) for b in range(len(groups)) if held[a] - held[b] > 1]
    for a, b in sorted(pairs, key=lambda pair: held[pair[1]] - held[pair[0]]):
        back = [*groups[b], len(sizes) - 1]
        shift = sizes[groups[a]][:, None] - sizes[back][None, :]
        good = np.argwhere((shift > 0) & (shift < held[a] - held[b]))
        if len(good):
            return a, b, groups[a][int(good[0, 0])], back[int(good[0, 1])]
    return None
