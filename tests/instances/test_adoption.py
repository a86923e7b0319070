"""A supervisor that finds instances of an earlier daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace
from support.fakes import SOON_S, FakeEngine, FakeProber, FakeProcess, FakeSpawner, a_slot, until

from launcher.base.cpuset import CpuSet
from launcher.config.schema import Strategy, Supervision
from launcher.instances.lifecycle import Limits
from launcher.instances.output import LogLine
from launcher.instances.ports import Adopted, InstanceEvent, InstanceReady
from launcher.instances.slot_state import ProbeSettings, State
from launcher.instances.supervisor import Supervisor
from launcher.plan.plan import Plan

LIMITS = replace(Limits.of(Supervision()), backoff_initial_s=0.01, backoff_max_s=0.02)
PROBES = ProbeSettings(probe_interval_s=1000.0, tail_lines=50, ready_poll_s=0.001, recheck_s=0.001)


class Setup:
    """Three slots, of which some have an instance already."""

    def __init__(self, *adopted: int) -> None:
        self.heard: list[InstanceEvent] = []
        self.spawner, self.prober = FakeSpawner(), FakeProber()
        self.old: dict[int, FakeProcess] = {}
        self.said: list[Callable[[str, float], None]] = []
        for slot in adopted:
            process = self.old[slot] = FakeProcess(100 + slot, slot, 5, str)
            launch = FakeEngine().launch(a_slot(slot), 5)
            self.spawner.inheritance[slot] = Adopted(5, launch, process, self.said.append)
        plan = Plan(Strategy.CONTIGUOUS, tuple(map(a_slot, range(3))), CpuSet(), CpuSet.parse("0-3"), (), ())
        self.supervisor = Supervisor(
            plan, engine=FakeEngine(), spawner=self.spawner, prober=self.prober, limits=LIMITS, probing=PROBES,
            announce=self.heard.append,
        )  # fmt: skip
        self.task = asyncio.create_task(self.supervisor.run())

    async def end(self) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task

    def state(self, slot: int) -> State:
        return self.supervisor.controllers[slot].slot_state.state


async def test_what_runs_goes_on_and_the_rest_is_started() -> None:
    setup = Setup(0, 2)
    await until(lambda: {setup.state(slot) for slot in range(3)} == {State.READY})
    assert [process.slot for process in setup.spawner.started] == [1]
    ready = {event.slot: event.generation for event in setup.heard if isinstance(event, InstanceReady)}
    assert ready == {0: 5, 1: 1, 2: 5}
    setup.said[0]("a line from before", 12.5)
    assert LogLine(12.5, 5, "a line from before") in setup.supervisor.controllers[0].log.last(10)
    await setup.end()
    assert all(process.orders == ["kill"] for process in setup.old.values()), "leave() of a fake kills"


async def test_clients_are_let_in_once_one_of_them_serves() -> None:
    setup = Setup(0, 2)
    setup.prober.health = None
    waiting = asyncio.create_task(setup.supervisor.adopted_ready())
    await until(lambda: setup.prober.asked > 3)
    assert not waiting.done()
    setup.prober.health = True
    async with asyncio.timeout(SOON_S):
        await waiting
    assert State.READY in {setup.state(0), setup.state(2)}
    await setup.end()


async def test_clients_are_served_when_no_adopted_instance_is_left() -> None:
    setup = Setup(1)
    setup.prober.health = None
    waiting = asyncio.create_task(setup.supervisor.adopted_ready())
    await until(lambda: setup.prober.asked > 3)
    setup.old[1].end(signal=9)
    async with asyncio.timeout(SOON_S):
        await waiting
    await setup.end()


async def test_without_adopted_instances_clients_do_not_wait() -> None:
    setup = Setup()
    async with asyncio.timeout(SOON_S):
        await setup.supervisor.adopted_ready()
    await until(lambda: {setup.state(slot) for slot in range(3)} == {State.READY})
    assert setup.supervisor.makes_progress(0.0)
    await setup.end()
