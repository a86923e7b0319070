"""An operator's command as an event for a slot, or the reason why it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from launcher.control.messages import DISRUPTIVE, Request, SlotCommand
from launcher.errors import RefusedError
from launcher.instances.disruption import Availability, check
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

# Refused for a held or quarantined slot.
_NEEDS_RELEASE: Final = frozenset(
    {SlotCommand.START, SlotCommand.RESTART, SlotCommand.RESUME, SlotCommand.DRAIN}
)
_WITH_INSTANCE: Final = frozenset({State.STARTING, State.READY, State.DRAINING})


def event_of(request: Request) -> Event:
    return (
        DrainRequested(request.deadline_s)
        if request.command is SlotCommand.DRAIN
        else _EVENTS[request.command]
    )


def check_request(
    slot: int, request: Request, controllers: Mapping[int, SlotController], min_ready: int | None
) -> None:
    """Raise RefusedError where the command has no effect, or would leave too few instances."""
    _check_intent(controllers[slot], request.command)
    if request.command in DISRUPTIVE and not request.force:
        check(request.command, slot, availability(controllers), min_ready)


def availability(controllers: Mapping[int, SlotController]) -> dict[int, Availability]:
    return {
        number: Availability(controller.slot.model.name, controller.in_rotation)
        for number, controller in controllers.items()
    }


def _check_intent(controller: SlotController, command: SlotCommand) -> None:
    slot_state, slot = controller.slot_state, controller.slot.id
    kept = {Intent.HOLD: "held", Intent.QUARANTINE: "in quarantine"}.get(slot_state.intent)
    if kept is not None and command in _NEEDS_RELEASE:
        raise RefusedError(f"cannot {command} slot '{slot}': it is {kept}", f"numa-launcher release {slot}")
    if command is SlotCommand.RELEASE and kept is None and slot_state.intent is not Intent.RUN:
        remedy = f"numa-launcher {'resume' if slot_state.intent is Intent.DRAIN else 'start'} {slot}"
        raise RefusedError(f"cannot release slot '{slot}': it is neither held nor in quarantine", remedy)
    if command is SlotCommand.QUARANTINE and slot_state.state not in _WITH_INSTANCE:
        raise RefusedError(
            f"cannot quarantine slot '{slot}': it is {slot_state.state}, with no running instance",
            f"numa-launcher hold {slot} keeps it stopped; numa-launcher why {slot} shows why it ended",
        )
    if command in {SlotCommand.DRAIN, SlotCommand.RESUME} and slot_state.state in {
        State.STOPPED,
        State.FAILED,
    }:
        raise RefusedError(
            f"cannot {command} slot '{slot}': it is {slot_state.state}", f"numa-launcher start {slot}"
        )
