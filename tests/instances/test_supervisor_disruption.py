"""N−1, and when what is under way is over."""

from __future__ import annotations

import pytest

from launcher.base.errors import RefusedError
from launcher.instances.instance import eta
from launcher.instances.slot_state import Intent, SlotState, State
from launcher.instances.supervisor import Availability, check, min_ready_of

READY, AWAY = Availability("m", True), Availability("m", False)


@pytest.mark.parametrize(
    ("slots", "min_ready", "allowed"),
    [
        ({0: READY}, None, True),
        ({0: READY, 1: READY}, None, True),
        ({0: READY, 1: AWAY}, None, False),
        ({0: AWAY, 1: READY}, None, True),
        ({0: AWAY, 1: AWAY}, None, True),
        ({0: READY, 1: Availability("other", True)}, None, True),
        ({0: READY}, 1, False),
        ({0: READY, 1: AWAY}, 0, True),
        ({0: READY, 1: READY, 2: READY}, 2, True),
        ({0: READY, 1: READY, 2: AWAY}, 2, False),
    ],
)
def test_check(slots: dict[int, Availability], min_ready: int | None, allowed: bool) -> None:
    if allowed:
        check("restart", 0, slots, min_ready)
        return
    with pytest.raises(RefusedError, match="cannot restart slot '0': ") as caught:
        check("restart", 0, slots, min_ready)
    assert "--force" in caught.value.remedy


def test_least_ready() -> None:
    assert [min_ready_of(None, 1), min_ready_of(None, 2), min_ready_of(3, 2)] == [0, 1, 3]


@pytest.mark.parametrize(
    ("slot_state", "in_flight", "start_s", "ends"),
    [
        (SlotState(State.STARTING, Intent.RUN, since=10), 0, 60.0, 70.0),
        (SlotState(State.STARTING, Intent.RUN, since=10), 0, None, None),
        (SlotState(State.BACKOFF, Intent.RUN, since=10, deadline=12), 0, 60.0, 72.0),
        (SlotState(State.BACKOFF, Intent.RUN, since=10, deadline=12), 0, None, None),
        (SlotState(State.STOPPING, Intent.STOP, since=10, deadline=40), 0, 60.0, 40.0),
        (SlotState(State.STOPPING, Intent.RUN, since=10, deadline=40), 0, 60.0, 100.0),
        (SlotState(State.STOPPING, Intent.RUN, since=10, deadline=40), 0, None, None),
        (SlotState(State.DRAINING, Intent.STOP, since=10, deadline=310), 2, 60.0, 310.0),
        (SlotState(State.DRAINING, Intent.HOLD, since=10, deadline=310), 0, 60.0, 10.0),
        (SlotState(State.DRAINING, Intent.RUN, since=10, deadline=310), 0, 60.0, 70.0),
        (SlotState(State.DRAINING, Intent.DRAIN, since=10, deadline=40), 1, 60.0, 40.0),
        (SlotState(State.DRAINING, Intent.DRAIN, since=10), 1, 60.0, None),
        (SlotState(State.DRAINING, Intent.QUARANTINE, since=10), 0, 60.0, None),
        (SlotState(State.READY, Intent.RUN), 5, 60.0, None),
    ],
)
def test_eta(slot_state: SlotState, in_flight: int, start_s: float | None, ends: float | None) -> None:
    assert eta(slot_state, in_flight=in_flight, start_s=start_s) == ends
