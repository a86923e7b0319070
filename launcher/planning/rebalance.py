"""Whole pieces moved and swapped between instances until they are as even as that makes them. No effects.

The only module that imports numpy, and imported only where dealing alone left instances apart: a plan does
not wait for it otherwise. All exchanges of a pair of instances are judged at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Sizes = np.ndarray[tuple[int, ...], np.dtype[np.intp]]
Hands = list[list[int]]


def even_out(hands: Sequence[Sequence[int]], sizes: Sequence[int]) -> Hands:
    """The hands (indices of pieces, by instance) after the last exchange that helps.

    1. Two instances swap a piece, or one gives one away, when that brings them closer.
    2. The pair that is furthest apart comes first, ties go to the lower instance.
    3. Each exchange lowers the sum of squares, so there is a last one.

    Nobody gives its last piece away: no piece is smaller than the lead of one that has only this.
    """
    array = np.array([*sizes, 0], dtype=np.intp)  # the last one is nothing
    found = [sorted(hand) for hand in hands]
    while (best := _best(found, array)) is not None:
        giver, taker, give, take = best
        found[giver] = sorted({*found[giver], take} - {give, len(sizes)})
        found[taker] = sorted({*found[taker], give} - {take})
    return found


def _best(hands: Hands, sizes: Sizes) -> tuple[int, int, int, int] | None:
    """Giver, taker, the piece given and the one taken back (the last one: nothing): the first exchange that helps."""
    held = [int(sizes[hand].sum()) for hand in hands]
    pairs = [(a, b) for a in range(len(hands)) for b in range(len(hands)) if held[a] - held[b] > 1]
    for a, b in sorted(pairs, key=lambda pair: held[pair[1]] - held[pair[0]]):
        back = [*hands[b], len(sizes) - 1]
        shift = sizes[hands[a]][:, None] - sizes[back][None, :]
        good = np.argwhere((shift > 0) & (shift < held[a] - held[b]))
        if len(good):
            return a, b, hands[a][int(good[0, 0])], back[int(good[0, 1])]
    return None
