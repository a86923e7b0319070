"""Whether a command may take one more instance out of rotation (N-1). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.errors import RefusedError


@dataclass(frozen=True, slots=True)
class Availability:
    model: str
    ready: bool
    """In rotation, and no request is waiting that will change that."""


def min_ready_of(min_ready: int | None, slots: int) -> int:
    """Instances of a model that must stay ready: `supervision.min_ready`; if unset, 1 for a model with two or more."""
    return (1 if slots > 1 else 0) if min_ready is None else min_ready


def check(command: str, slot: int, slots: Mapping[int, Availability], min_ready: int | None) -> None:
    """Raise RefusedError where `command` on `slot` would leave fewer than `min_ready` of its model.

    A slot that is not in rotation may always be changed."""
    target = slots[slot]
    same = {number: other for number, other in slots.items() if other.model == target.model}
    minimum = min_ready_of(min_ready, len(same))
    left = sum(other.ready for number, other in same.items() if number != slot)
    if target.ready and left < minimum:
        raise RefusedError(
            f"cannot {command} slot '{slot}': {left} instances of '{target.model}' would be left ready, "
            f"and supervision.min_ready is {minimum}",
            "wait until the others are ready (`numa-launcher status`), or add --force",
        )
