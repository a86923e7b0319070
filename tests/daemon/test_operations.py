"""What an operator asks, and why it may be refused."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.fakes import FakeEngine, FakeProber, FakeSpawner, a_slot

from launcher.base.errors import RefusedError
from launcher.config.schema import Supervision
from launcher.control.messages import DISRUPTIVE, Request, SlotCommand
from launcher.daemon.operations import check_request, event_of
from launcher.instances.lifecycle import Limits
from launcher.instances.slot_controller import SlotController
from launcher.instances.slot_state import DrainRequested, Intent, ProbeSettings, SlotState, State


def controllers(*slot_states: SlotState) -> dict[int, SlotController]:
    found = {}
    for number, slot_state in enumerate(slot_states):
        found[number] = SlotController(
            a_slot(number), engine=FakeEngine(), spawner=FakeSpawner(), prober=FakeProber(),
            limits=Limits.of(Supervision()), probing=ProbeSettings(1.0, 9),
            announce=lambda _event: None,
        )  # fmt: skip
        found[number].slot_state = slot_state
    return found


READY = SlotState(State.READY, Intent.RUN, generation=1)
HELD = SlotState(State.HELD, Intent.HOLD, generation=1)
LOOKED_AT = SlotState(State.DRAINING, Intent.QUARANTINE, generation=1)
DRAINED = SlotState(State.DRAINING, Intent.DRAIN, generation=1)
STOPPED = SlotState()
FAILED = SlotState(State.FAILED, Intent.RUN, generation=1)


def test_every_command_has_its_event() -> None:
    events = {verb: type(event_of(Request(verb))).__name__ for verb in SlotCommand}
    assert events == {verb: f"{verb.value.capitalize()}Requested" for verb in SlotCommand}
    assert event_of(Request(SlotCommand.DRAIN, deadline_s=4.0)) == DrainRequested(4.0)


@pytest.mark.parametrize(
    ("slot_state", "verb", "why"),
    [
        *(
            (HELD, verb, "it is held")
            for verb in (SlotCommand.START, SlotCommand.RESTART, SlotCommand.RESUME, SlotCommand.DRAIN)
        ),
        *(
            (LOOKED_AT, verb, "it is in quarantine")
            for verb in (SlotCommand.START, SlotCommand.RESTART, SlotCommand.RESUME)
        ),
        (STOPPED, SlotCommand.RELEASE, "neither held nor in quarantine"),
        (DRAINED, SlotCommand.RELEASE, "neither held nor in quarantine"),
        (STOPPED, SlotCommand.QUARANTINE, "with no running instance"),
        (FAILED, SlotCommand.QUARANTINE, "with no running instance"),
        (STOPPED, SlotCommand.DRAIN, "it is stopped"),
        (FAILED, SlotCommand.DRAIN, "it is failed"),
        (STOPPED, SlotCommand.RESUME, "it is stopped"),
        (FAILED, SlotCommand.RESUME, "it is failed"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_commands_without_effect_are_refused(
    slot_state: SlotState, verb: SlotCommand, why: str, force: bool
) -> None:
    with pytest.raises(RefusedError, match=why) as caught:
        check_request(0, Request(verb, force=force), controllers(slot_state, READY), None)
    assert "numa-launcher" in caught.value.remedy


@pytest.mark.parametrize(
    "verb",
    sorted(
        set(SlotCommand)
        - {SlotCommand.RELEASE, SlotCommand.DRAIN, SlotCommand.RESUME, SlotCommand.QUARANTINE}
    ),
)
@pytest.mark.parametrize("slot_state", [READY, STOPPED, FAILED, DRAINED])
def test_verbs_are_idempotent_and_allowed_everywhere_else(slot_state: SlotState, verb: SlotCommand) -> None:
    check_request(0, Request(verb), controllers(slot_state, READY), None)


@pytest.mark.parametrize("verb", sorted(DISRUPTIVE))
def test_the_last_one_stays(verb: SlotCommand) -> None:
    both = controllers(READY, READY)
    check_request(0, Request(verb), both, None)
    both[1].slot_state = replace(READY, state=State.STARTING)
    with pytest.raises(RefusedError, match="would be left ready"):
        check_request(0, Request(verb), both, None)
    check_request(0, Request(verb, force=True), both, None)
    check_request(0, Request(verb), both, 0)


def test_what_is_on_its_way_counts_as_gone() -> None:
    """Two who ask in the same moment."""
    both = controllers(READY, READY)
    both[1].post(event_of(Request(SlotCommand.RESTART)))
    with pytest.raises(RefusedError):
        check_request(0, Request(SlotCommand.RESTART), both, None)
