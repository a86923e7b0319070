"""What an operator asks, and why it may be refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import FakeEngine, FakeProber, FakeSpawner, a_slot

from launcher.config.schema import Supervision
from launcher.control.messages import DISRUPTIVE, Request, Verb
from launcher.daemon.slot_commands import check_request, event_of
from launcher.errors import RefusedError
from launcher.instances.backoff import Limits
from launcher.instances.life import Pace
from launcher.instances.lifecycle import DrainRequested, Intent, SlotState, State
from launcher.instances.slot_controller import SlotController


def keepers(*seats: SlotState) -> dict[int, SlotController]:
    found = {}
    for number, seat in enumerate(seats):
        found[number] = SlotController(
            a_slot(number), engine=FakeEngine(), spawner=FakeSpawner(), prober=FakeProber(),
            limits=Limits.of(Supervision()), pace=Pace(1.0, 9), strict_binding=False, announce=lambda _event: None,
        )  # fmt: skip
        found[number].seat = seat
    return found


READY = SlotState(State.READY, Intent.RUN, generation=1)
HELD = SlotState(State.HELD, Intent.HOLD, generation=1)
LOOKED_AT = SlotState(State.DRAINING, Intent.QUARANTINE, generation=1)
DRAINED = SlotState(State.DRAINING, Intent.DRAIN, generation=1)
STOPPED = SlotState()
FAILED = SlotState(State.FAILED, Intent.RUN, generation=1)


def test_every_verb_has_its_event() -> None:
    events = {verb: type(event_of(Request(verb))).__name__ for verb in Verb}
    assert events == {verb: f"{verb.value.capitalize()}Requested" for verb in Verb}
    assert event_of(Request(Verb.DRAIN, deadline_s=4.0)) == DrainRequested(4.0)


@pytest.mark.parametrize(
    ("seat", "verb", "why"),
    [
        *((HELD, verb, "it is held") for verb in (Verb.START, Verb.RESTART, Verb.RESUME, Verb.DRAIN)),
        *((LOOKED_AT, verb, "it is in quarantine") for verb in (Verb.START, Verb.RESTART, Verb.RESUME)),
        (STOPPED, Verb.RELEASE, "neither held nor in quarantine"),
        (DRAINED, Verb.RELEASE, "neither held nor in quarantine"),
        (STOPPED, Verb.QUARANTINE, "nothing is alive to look at"),
        (FAILED, Verb.QUARANTINE, "nothing is alive to look at"),
        (STOPPED, Verb.DRAIN, "it is stopped"),
        (FAILED, Verb.DRAIN, "it is failed"),
        (STOPPED, Verb.RESUME, "it is stopped"),
        (FAILED, Verb.RESUME, "it is failed"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_what_would_do_nothing_is_said(seat: SlotState, verb: Verb, why: str, force: bool) -> None:
    with pytest.raises(RefusedError, match=why) as caught:
        check_request(0, Request(verb, force=force), keepers(seat, READY), None)
    assert "numa-launcher" in caught.value.remedy


@pytest.mark.parametrize("verb", sorted(set(Verb) - {Verb.RELEASE, Verb.DRAIN, Verb.RESUME, Verb.QUARANTINE}))
@pytest.mark.parametrize("seat", [READY, STOPPED, FAILED, DRAINED])
def test_verbs_are_idempotent_and_allowed_everywhere_else(seat: SlotState, verb: Verb) -> None:
    check_request(0, Request(verb), keepers(seat, READY), None)


@pytest.mark.parametrize("verb", sorted(DISRUPTIVE))
def test_the_last_one_stays(verb: Verb) -> None:
    both = keepers(READY, READY)
    check_request(0, Request(verb), both, None)
    both[1].seat = replace(READY, state=State.STARTING)
    with pytest.raises(RefusedError, match="would be left ready"):
        check_request(0, Request(verb), both, None)
    check_request(0, Request(verb, force=True), both, None)
    check_request(0, Request(verb), both, 0)


def test_what_is_on_its_way_counts_as_gone() -> None:
    """Two who ask in the same moment."""
    both = keepers(READY, READY)
    both[1].post(event_of(Request(Verb.RESTART)))
    with pytest.raises(RefusedError):
        check_request(0, Request(Verb.RESTART), both, None)
