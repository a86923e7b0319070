"""From one configuration to another between fakes: one slot at a time, checked, and back when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace
from support.deployments import CHANGED, LIMITS, PROBES, TimedProber, lame, made
from support.fakes import SOON_S, FakeSpawner, until

from launcher.daemon.deployment import Deployment
from launcher.daemon.rollout import Rollout, Stage, compare
from launcher.instances.lifecycle import Limits
from launcher.instances.ports import InstanceDraining, InstanceEvent
from launcher.instances.slot_state import (
    DrainRequested,
    Event,
    HoldRequested,
    Intent,
    ProbeSucceeded,
    QuarantineRequested,
    ReleaseRequested,
    ResumeRequested,
    StartRequested,
    State,
    StopRequested,
)
from launcher.instances.supervisor import Supervisor


@dataclass
class Company:
    """A supervisor of `before`'s slots, and the way to `after`."""

    before: Deployment
    after: Deployment
    spawner: FakeSpawner = field(default_factory=FakeSpawner)
    prober: TimedProber = field(default_factory=TimedProber)
    force: bool = False
    limits: Limits = LIMITS
    most_away: int = 0
    meddle: Callable[[InstanceEvent], None] = lambda _event: None
    """Somebody who does something to the slots when he sees this."""

    def hear(self, event: InstanceEvent) -> None:
        self.meddle(event)
        if isinstance(event, InstanceDraining):
            ready = [k.slot_state.state is State.READY for k in self.supervisor.controllers.values()]
            self.most_away = max(self.most_away, ready.count(False))
            asyncio.get_running_loop().call_soon(self.supervisor.went_idle, event.slot, event.generation)

    @asynccontextmanager
    async def play(self) -> AsyncIterator[Rollout]:
        self.supervisor = Supervisor(
            self.before.plan, engine=self.before.engine, spawner=self.spawner, prober=self.prober, limits=self.limits,
            probing=PROBES, announce=self.hear,
        )  # fmt: skip
        task = asyncio.create_task(self.supervisor.run())
        await until(lambda: self.states == {State.READY})
        async with asyncio.timeout(SOON_S):
            yield self.rollout()
        await self.supervisor.stop()
        task.cancel()
        await asyncio.wait({task})

    def rollout(self) -> Rollout:
        return Rollout(
            self.supervisor,
            self.prober,
            self.before,
            self.after,
            compare(self.before, self.after),
            lambda _a: (self.limits, PROBES),
            self.prober.clock,
            force=self.force,
        )

    @property
    def states(self) -> set[State]:
        return {controller.slot_state.state for controller in self.supervisor.controllers.values()}

    def argv(self, slot: int) -> tuple[str, ...]:
        launch = self.supervisor.controllers[slot].instance.launch
        assert launch is not None
        return launch.argv


async def test_one_slot_after_the_other() -> None:
    company = Company(made(), made(engine=CHANGED))
    async with company.play() as rollout:
        assert await rollout.run()
        assert rollout.progress.stage is Stage.DONE
        assert list(rollout.progress.done) == ["restart slot 0", "restart slot 1"]
        assert all("--changed" in company.argv(slot) for slot in (0, 1))
        assert company.states == {State.READY}
        assert company.most_away == 1
        assert company.prober.canaries == 4 * 3, "each new one and its sibling, three times"


async def test_slots_that_come_and_go() -> None:
    two, one = made(), made(layout={"instances_per_socket": 1})
    for before, after, slots in ((two, one, [0]), (one, two, [0, 1])):
        company = Company(before, after, force=True)
        async with company.play() as rollout:
            assert await rollout.run()
            assert sorted(company.supervisor.controllers) == slots
            assert company.states == {State.READY}


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ({"took_s": {"slot1-2": 9.0}}, "slot 1 took 9.00 s for one token, its sibling 0.10 s"),
        ({"failing": "slot1-2"}, "slot 1 gave no answer to a completion of one token"),
    ],
)
async def test_one_that_is_worse_brings_all_back(trouble: dict[str, Any], said: str) -> None:
    company = Company(made(), made(engine=CHANGED), prober=TimedProber(**trouble))
    async with company.play() as rollout:
        assert not await rollout.run()
        assert rollout.progress.stage is Stage.ROLLED_BACK
        assert said in rollout.progress.error
        assert rollout.progress.remedy
        assert company.states == {State.READY}
        assert not any("--changed" in company.argv(slot) for slot in (0, 1))
        assert [k.slot_state.generation for k in company.supervisor.controllers.values()] == [3, 3]


async def test_one_that_does_not_come_up_is_named_and_the_other_is_not_touched() -> None:
    company = Company(made(), made(engine=CHANGED))

    async def fail_the_second() -> None:
        company.prober.health = None
        await until(lambda: len(company.spawner.started) == 3)
        company.spawner.started[2].say("vllm: error: unrecognized arguments: --changed")
        company.prober.health = True
        company.spawner.started[2].end(code=2)

    async with company.play() as rollout:
        failing = asyncio.create_task(fail_the_second())
        assert not await rollout.run()
        await failing
        assert "slot 0 did not become ready: bad-argument" in rollout.progress.error
        assert rollout.progress.stage is Stage.ROLLED_BACK
        assert [k.slot_state.generation for k in company.supervisor.controllers.values()] == [3, 1]


async def test_who_is_out_of_rotation_changes_when_it_starts_again() -> None:
    company = Company(made(), made(engine=CHANGED))
    async with company.play() as rollout:
        controllers = company.supervisor.controllers
        controllers[0].post(HoldRequested())
        controllers[1].post(DrainRequested())
        await until(lambda: company.states == {State.HELD, State.DRAINING})
        assert await rollout.run()
        assert company.states == {State.HELD, State.DRAINING}
        assert controllers[1].slot_state.generation == 1


# --- somebody else is at work too ---------------------------------------------------------------------


async def test_none_is_taken_away_while_too_few_would_be_left() -> None:
    company = Company(made(), made(engine=CHANGED))
    async with company.play() as rollout:
        company.supervisor.controllers[1].post(HoldRequested())
        await until(lambda: company.supervisor.controllers[1].slot_state.state is State.HELD)
        assert not await rollout.run()
        assert rollout.progress.error.startswith(
            "cannot reload slot '0': 0 instances of 'm' would be left ready"
        )
        assert "--force" in rollout.progress.remedy
        assert company.supervisor.controllers[0].slot_state.generation == 1, (
            "it is not even restarted on the way back"
        )


async def test_a_stop_and_then_a_restart_leave_enough_or_are_refused() -> None:
    company = Company(made(), made(layout={"instances_per_socket": 1}))
    async with company.play() as rollout:
        assert not await rollout.run(), "slot 1 goes, and slot 0 would have to be restarted alone"
        assert rollout.progress.stage is Stage.ROLLED_BACK
        assert sorted(company.supervisor.controllers) == [0, 1]
        assert company.states == {State.READY}
        assert company.supervisor.controllers[0].slot_state.generation == 1


async def test_a_sibling_that_is_on_its_way_is_waited_for() -> None:
    company = Company(made(), made(engine=CHANGED), limits=replace(LIMITS, crash_limit=3))
    async with company.play() as rollout:
        company.prober.health = None
        company.spawner.started[1].end(code=9)
        await until(lambda: company.supervisor.controllers[1].slot_state.state is State.STARTING)
        rolling = asyncio.create_task(rollout.run())
        await until(lambda: rollout.progress.doing.endswith("waits for slot 1"))
        assert rollout.progress.doing == "restart slot 0: waits for slot 1"
        assert company.supervisor.controllers[0].slot_state.state is State.READY
        company.prober.health = True
        assert await rolling
        assert list(rollout.progress.done) == ["restart slot 0", "restart slot 1"]


async def test_a_slot_that_starts_with_the_old_configuration_restarts() -> None:
    company = Company(made(), made(engine=CHANGED), limits=replace(LIMITS, crash_limit=3))
    async with company.play() as rollout:
        company.prober.health = None
        company.spawner.started[0].end(code=9)
        await until(lambda: len(company.spawner.started) == 3)
        rolling = asyncio.create_task(rollout.run())
        await until(lambda: len(company.spawner.started) == 4)
        company.prober.health = True
        assert await rolling
        assert all("--changed" in company.argv(slot) for slot in (0, 1))


@pytest.mark.parametrize("verb", [DrainRequested(), QuarantineRequested(), HoldRequested(), StopRequested()])
async def test_a_slot_that_leaves_rotation_meanwhile_ends_no_rollout(verb: Event) -> None:
    company = Company(made(), made(engine=CHANGED))

    def take_away(event: InstanceEvent) -> None:
        if isinstance(event, InstanceDraining) and event.generation == 1 and event.slot == 1:
            company.meddle = lambda _event: None
            company.supervisor.post(1, verb)

    company.meddle = take_away
    async with company.play() as rollout:
        assert await rollout.run()
        assert company.supervisor.controllers[0].slot_state.generation == 2
        assert company.supervisor.controllers[1].slot_state.intent is not Intent.RUN


@pytest.mark.parametrize("verb", [ResumeRequested(), StartRequested()])
async def test_a_slot_that_is_put_back_before_its_restart_is_reported(verb: Event) -> None:
    company = Company(made(), made(engine=CHANGED))

    def put_back(event: InstanceEvent) -> None:
        if isinstance(event, InstanceDraining):
            company.meddle = lambda _event: None
            company.supervisor.post(event.slot, verb)

    company.meddle = put_back
    async with company.play() as rollout:
        assert not await rollout.run()
        assert "slot 0 was put back into rotation" in rollout.progress.error
        assert rollout.progress.stage is Stage.ROLLED_BACK
        assert company.states == {State.READY}


async def test_a_removed_slot_stays_removed_when_it_is_started_meanwhile() -> None:
    company = Company(made(), made(layout={"instances_per_socket": 1}), force=True)

    def start_again(event: InstanceEvent) -> None:
        if isinstance(event, InstanceDraining) and event.slot == 1:
            company.meddle = lambda _event: None
            company.supervisor.post(1, StartRequested())

    company.meddle = start_again
    async with company.play() as rollout:
        assert await rollout.run()
        assert sorted(company.supervisor.controllers) == [0]


@pytest.mark.parametrize("verb", [DrainRequested(), QuarantineRequested()])
async def test_a_removed_slot_stays_removed_whatever_is_requested_meanwhile(verb: Event) -> None:
    company = Company(made(), made(layout={"instances_per_socket": 1}), force=True)

    def keep(event: InstanceEvent) -> None:
        if isinstance(event, InstanceDraining) and event.slot == 1:
            company.meddle = lambda _event: None
            company.supervisor.post(1, verb)

    company.meddle = keep
    async with company.play() as rollout:
        assert await rollout.run()
        assert sorted(company.supervisor.controllers) == [0]


@pytest.mark.parametrize("verb", [DrainRequested(), QuarantineRequested()])
async def test_a_slot_that_became_ready_before_its_stop_and_is_kept_ends_no_rollout(
    verb: Event,
) -> None:
    """It was starting with the old configuration, so it is stopped and started again."""
    company = Company(made(), made(engine=CHANGED), limits=replace(LIMITS, crash_limit=3), force=True)

    def keep(event: InstanceEvent) -> None:
        if isinstance(event, InstanceDraining) and event.slot == 0:
            company.meddle = lambda _event: None
            company.supervisor.post(0, verb)

    async with company.play() as rollout:
        company.prober.health = None
        company.spawner.started[0].end(code=9)
        await until(lambda: len(company.spawner.started) == 3)
        company.meddle = keep
        controller = company.supervisor.controllers[0]
        controller.post(ProbeSucceeded(controller.slot_state.generation))  # before the stop
        company.prober.health = True
        assert await rollout.run()
        assert controller.slot_state.state is State.DRAINING
        assert controller.slot_state.generation == 2


async def test_the_way_back_leaves_the_last_one_that_is_ready() -> None:
    company = Company(made(), made(engine=CHANGED))
    async with company.play() as rollout:
        lame(company.spawner, 1)
        assert not await rollout.run()
        assert rollout.progress.stage is Stage.STUCK
        assert rollout.progress.error.endswith(
            "; slot 0 keeps the new configuration: cannot reload slot '0': 0 instances of 'm' would be left "
            "ready, and supervision.min_ready is 1"
        )
        assert company.most_away == 1
        assert company.supervisor.controllers[0].slot_state.state is State.READY
        assert "--changed" in company.argv(0)


async def test_a_new_slot_that_a_way_back_left_is_restarted_by_the_next_reload() -> None:
    """It answers nothing, and is the only one: slot 0 is held."""
    one = made(layout={"instances_per_socket": 1}, supervision={"min_ready": 1})
    company = Company(one, made(supervision={"min_ready": 1}), prober=TimedProber(failing="slot1-1"))
    async with company.play() as rollout:
        controllers = company.supervisor.controllers
        controllers[0].post(HoldRequested())
        await until(lambda: controllers[0].slot_state.state is State.HELD)
        assert not await rollout.run()
        assert rollout.progress.stage is Stage.STUCK
        assert "slot 1 keeps the new configuration" in rollout.progress.error
        assert controllers[1].slot_state.state is State.READY
        controllers[0].post(ReleaseRequested())
        await until(lambda: company.states == {State.READY})
        again = company.rollout()
        assert await again.run(), again.progress.error
        assert company.states == {State.READY}
        assert controllers[1].slot_state.generation == 2
