"""From what an operator asks to the event of a slot's owner, or the reason why it must not be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from launcher.control.messages import DISRUPTIVE, Request, SlotCommand
from launcher.errors import RefusedError
from launcher.instances.disruption import Standing, check
from launcher.instances.slot_controller import SlotController
from launcher.instances.slot_state import (
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

_EVENTS: Final[dict[SlotCommand, Event]] = {
    SlotCommand.RESTART: RestartRequested(),
    SlotCommand.DRAIN: DrainRequested(),
    SlotCommand.HOLD: HoldRequested(),
    SlotCommand.QUARANTINE: QuarantineRequested(),
    SlotCommand.RELEASE: ReleaseRequested(),
    SlotCommand.RESUME: ResumeRequested(),
    SlotCommand.STOP: StopRequested(),
    SlotCommand.START: StartRequested(),
}

# What a held or quarantined slot does not do before its release, and what has nothing to keep alive.
_NEEDS_RELEASE: Final = frozenset(
    {SlotCommand.START, SlotCommand.RESTART, SlotCommand.RESUME, SlotCommand.DRAIN}
)
_ALIVE: Final = frozenset({State.STARTING, State.READY, State.DRAINING})


def event_of(request: Request) -> Event:
    """What the slot's owner gets."""
    return DrainRequested(request.deadline_s) if request.verb is SlotCommand.DRAIN else _EVENTS[request.verb]


def check_request(
    slot: int, request: Request, controllers: Mapping[int, SlotController], min_ready: int | None
) -> None:
    """Raise RefusedError where it would do nothing, or leave too few instances."""
    _check_intent(controllers[slot], request.verb)
    if request.verb in DISRUPTIVE and not request.force:
        check(request.verb, slot, standing(controllers), min_ready)


def standing(controllers: Mapping[int, SlotController]) -> dict[int, Standing]:
    """What counts of each slot."""
    return {
        number: Standing(controller.slot.model.name, controller.in_rotation)
        for number, controller in controllers.items()
    }


def _check_intent(controller: SlotController, verb: SlotCommand) -> None:
    """Say why a verb would do nothing. Raises RefusedError."""
    slot_state, slot = controller.slot_state, controller.slot.id
    kept = {Intent.HOLD: "held", Intent.QUARANTINE: "in quarantine"}.get(slot_state.intent)
    if kept is not None and verb in _NEEDS_RELEASE:
        raise RefusedError(f"cannot {verb} slot '{slot}': it is {kept}", f"numa-launcher release {slot}")
    if verb is SlotCommand.RELEASE and kept is None and slot_state.intent is not Intent.RUN:
        remedy = f"numa-launcher {'resume' if slot_state.intent is Intent.DRAIN else 'start'} {slot}"
        raise RefusedError(f"cannot release slot '{slot}': it is neither held nor in quarantine", remedy)
    if verb is SlotCommand.QUARANTINE and slot_state.state not in _ALIVE:
        raise RefusedError(
            f"cannot quarantine slot '{slot}': it is {slot_state.state}, and nothing is alive to look at",
            f"numa-launcher hold {slot} keeps it stopped; numa-launcher why {slot} shows its last words",
        )
    if verb in {SlotCommand.DRAIN, SlotCommand.RESUME} and slot_state.state in {State.STOPPED, State.FAILED}:
        raise RefusedError(
            f"cannot {verb} slot '{slot}': it is {slot_state.state}", f"numa-launcher start {slot}"
        )
