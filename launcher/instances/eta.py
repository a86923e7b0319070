"""When the current transition of a slot will likely end. Pure."""

from __future__ import annotations

from launcher.instances.slot_state import Intent, SlotState, State


def eta(slot: SlotState, *, in_flight: int, start_s: float | None) -> float | None:
    """The time, on the slot's clock; None without a transition, or where it is unknown.

    `start_s`: duration of the slot's last start, None before the first. A drain with requests in flight is assumed to
    last until its deadline: the duration of requests is unknown."""
    match slot.state:
        case State.STARTING:
            return None if start_s is None else slot.since + start_s
        case State.BACKOFF:
            return None if start_s is None or slot.deadline is None else slot.deadline + start_s
        case State.STOPPING:
            return _then_start(slot, slot.deadline, start_s)
        case State.DRAINING if slot.intent not in {Intent.DRAIN, Intent.QUARANTINE}:
            return _then_start(slot, slot.deadline if in_flight else slot.since, start_s)
        case State.DRAINING if in_flight:
            return slot.deadline
        case _:
            return None


def _then_start(slot: SlotState, ends: float | None, start_s: float | None) -> float | None:
    """A restart ends when the next instance is ready."""
    if slot.intent in {Intent.STOP, Intent.HOLD}:
        return ends
    return None if ends is None or start_s is None else ends + start_s
