"""What the metrics page says of slots: one controller between fakes."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from support.slots import Setup, seen

from launcher.daemon.status import daemon_values, failure_values, on_clock, slot_values
from launcher.engines.log import PLAIN_LOG
from launcher.engines.software import Stack
from launcher.instances.diagnosis import cause_names
from launcher.instances.slot_state import StartRequested, State
from launcher.telemetry import machine_metrics as names

SLOT = ("0", "m")


async def test_a_slot_from_its_start_to_its_failure() -> None:
    setup = Setup(observe=lambda _pid: seen("0-7"))
    running = asyncio.create_task(setup.build().run(), name="controller")
    try:
        before = slot_values([setup.controller])
        assert before[names.SLOT_FAILURES] == before[names.SLOT_RESTARTS] == {SLOT: 0}
        assert (
            before[names.SLOT_LAST_FAILURE] == before[names.SLOT_PLACED] == before[names.SLOT_WATCHED] == {}
        )
        await setup.post(StartRequested())
        await setup.until(lambda: setup.controller.instance.verification and setup.controller.instance.served)
        ready = slot_values([setup.controller])
        assert {labels[2]: value for labels, value in ready[names.SLOT_STATE].items()} == {
            state.value: float(state is State.READY) for state in State
        }
        assert ready[names.SLOT_RESPONSIVE] == ready[names.SLOT_ZENTORCH] == {SLOT: 1}
        assert (ready[names.SLOT_PLACED], ready[names.SLOT_MISPLACED]) == ({SLOT: 0}, {SLOT: 2})
        setup.spawner.started[0].end(code=-9)
        await setup.reach(State.BACKOFF)
        after = slot_values([setup.controller])
        assert after[names.SLOT_FAILURES] == {SLOT: 1}
        [(slot, model, cause)] = after[names.SLOT_LAST_FAILURE]
        assert (slot, model) == SLOT
        assert setup.controller.failures == {cause: 1}
        assert after[names.SLOT_WATCHED] == after[names.SLOT_PLACED] == {}
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


CAUSES = cause_names(PLAIN_LOG)


def test_each_cause_is_a_series_from_the_start() -> None:
    assert failure_values({}, CAUSES)[names.FAILURES] == {(cause,): 0 for cause in CAUSES}
    assert failure_values({"hung": 2, "new": 1}, CAUSES)[names.FAILURES]["hung",] == 2
    assert failure_values({"new": 1}, CAUSES)[names.FAILURES]["new",] == 1


def test_a_daemon_is_up_as_long_as_it_runs_whatever_becomes_of_the_clock() -> None:
    """Started at 1000 s of the wall clock and 50 s of the monotonic one, a minute ago: set back, and ahead."""
    for wall in (1060.0, 10.0, 4_000_000.0):
        assert wall - on_clock(50.0, 110.0, wall) == 60.0


def test_the_build() -> None:
    values = daemon_values(Stack("vllm", vllm="0.32.0"), 5.0)
    [(_, build, *versions)] = values[names.BUILD_INFO]
    assert build in {"python", "compiled", "stale"}
    assert versions == ["0.32.0", "", ""]
    assert values[names.START_TIME] == {(): 5.0}
