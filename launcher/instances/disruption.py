"""N−1: whether a verb may take one more instance out of rotation. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.errors import RefusedError


@dataclass(frozen=True, slots=True)
class Standing:
    """What counts of one slot."""

    model: str
    ready: bool
    """In rotation, and nothing has been asked of it that will change that."""


def least_ready(min_ready: int | None, slots: int) -> int:
    """Instances of a model that stay ready: `supervision.min_ready`; unset it is 1 where the model has two or more."""
    return (1 if slots > 1 else 0) if min_ready is None else min_ready


def check(verb: str, slot: int, slots: Mapping[int, Standing], min_ready: int | None) -> None:
    """Raise RefusedError where `verb` on `slot` would leave fewer than `min_ready` of its model.

    A slot that is not in rotation takes nothing away, so whatever is asked of it is allowed.
    """
    its = slots[slot]
    same = {number: other for number, other in slots.items() if other.model == its.model}
    least = least_ready(min_ready, len(same))
    left = sum(other.ready for number, other in same.items() if number != slot)
    if its.ready and left < least:
        raise RefusedError(
            f"cannot {verb} slot '{slot}': {left} instances of '{its.model}' would be left ready, "
            f"and supervision.min_ready is {least}",
            "wait until the others are ready (`numa-launcher status`), or add --force",
        )
