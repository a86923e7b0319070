"""From what an operator asks to the event of a slot's owner, or the reason why it must not be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from launcher.control.messages import DISRUPTIVE, Request, Verb
from launcher.errors import RefusedError
from launcher.instances.disruption import Standing, check
from launcher.instances.lifecycle import (
    DrainRequested,
    Event,
    HoldRequested,
    Intent,
    QuarantineRequested,
    ReleaseRequested,
    RestartRequested,
    ResumeRequested,
    StartRequested,
    State,
    StopRequested,
)
from launcher.instances.slot_controller import SlotController

_EVENTS: Final[dict[Verb, Event]] = {
    Verb.RESTART: RestartRequested(),
    Verb.DRAIN: DrainRequested(),
    Verb.HOLD: HoldRequested(),
    Verb.QUARANTINE: QuarantineRequested(),
    Verb.RELEASE: ReleaseRequested(),
    Verb.RESUME: ResumeRequested(),
    Verb.STOP: StopRequested(),
    Verb.START: StartRequested(),
}

# What a held or quarantined slot does not do before its release, and what has nothing to keep alive.
_NEEDS_RELEASE: Final = frozenset({Verb.START, Verb.RESTART, Verb.RESUME, Verb.DRAIN})
_ALIVE: Final = frozenset({State.STARTING, State.READY, State.DRAINING})


def event_of(request: Request) -> Event:
    """What the slot's owner gets."""
    return DrainRequested(request.deadline_s) if request.verb is Verb.DRAIN else _EVENTS[request.verb]


def check_request(
    slot: int, request: Request, keepers: Mapping[int, SlotController], min_ready: int | None
) -> None:
    """Raise RefusedError where it would do nothing, or leave too few instances."""
    _check_intent(keepers[slot], request.verb)
    if request.verb in DISRUPTIVE and not request.force:
        check(request.verb, slot, standing(keepers), min_ready)


def standing(keepers: Mapping[int, SlotController]) -> dict[int, Standing]:
    """What counts of each slot."""
    return {number: Standing(keeper.slot.model.name, keeper.settled) for number, keeper in keepers.items()}


def _check_intent(keeper: SlotController, verb: Verb) -> None:
    """Say why a verb would do nothing. Raises RefusedError."""
    seat, slot = keeper.seat, keeper.slot.id
    kept = {Intent.HOLD: "held", Intent.QUARANTINE: "in quarantine"}.get(seat.intent)
    if kept is not None and verb in _NEEDS_RELEASE:
        raise RefusedError(f"cannot {verb} slot '{slot}': it is {kept}", f"numa-launcher release {slot}")
    if verb is Verb.RELEASE and kept is None and seat.intent is not Intent.RUN:
        remedy = f"numa-launcher {'resume' if seat.intent is Intent.DRAIN else 'start'} {slot}"
        raise RefusedError(f"cannot release slot '{slot}': it is neither held nor in quarantine", remedy)
    if verb is Verb.QUARANTINE and seat.state not in _ALIVE:
        raise RefusedError(
            f"cannot quarantine slot '{slot}': it is {seat.state}, and nothing is alive to look at",
            f"numa-launcher hold {slot} keeps it stopped; numa-launcher why {slot} shows its last words",
        )
    if verb in {Verb.DRAIN, Verb.RESUME} and seat.state in {State.STOPPED, State.FAILED}:
        raise RefusedError(f"cannot {verb} slot '{slot}': it is {seat.state}", f"numa-launcher start {slot}")
