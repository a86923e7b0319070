"""All slots while their first starts come batch by batch, and slots that go and come again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from msgspec.structs import replace
from support.fakes import SOON_S, FakeEngine, FakeProber, FakeSpawner, a_slot, until
from support.scripted_engine import FakeEngine as Listening

from launcher.base.cpuset import CpuSet
from launcher.config.schema import Model, Proxy, Strategy, Supervision
from launcher.instances.lifecycle import Limits
from launcher.instances.ports import InstanceDraining, InstanceEvent, InstanceGone, InstanceReady
from launcher.instances.slot_state import (
    DrainRequested,
    Event,
    HoldRequested,
    ProbeSettings,
    QuarantineRequested,
    RestartRequested,
    ResumeRequested,
    StartRequested,
    State,
    StopRequested,
)
from launcher.instances.supervisor import Supervisor
from launcher.plan.plan import LedgerRow, Plan
from launcher.proxy.server import ProxyServer

LIMITS = replace(Limits.of(Supervision()), backoff_initial_s=0.01, backoff_max_s=0.02)
PROBES = ProbeSettings(probe_interval_s=1000.0, tail_lines=9, ready_poll_s=0.001)
# A node with less memory free than its three slots want: each is a batch of its own.
TIGHT = LedgerRow(
    node=0, total_bytes=9, available_bytes=2, reserve_bytes=0, weights_bytes=0, overhead_bytes=3, kv_bytes=0,
    slots=(0, 1, 2),
)  # fmt: skip


@dataclass
class Batches:
    """A supervisor whose first slot is loading, and whose two others wait for it."""

    prober: FakeProber = field(default_factory=lambda: FakeProber(health=None))
    spawner: FakeSpawner = field(default_factory=FakeSpawner)

    task: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self.hear: Callable[[InstanceEvent], None] = self.idle_at_once

    def build(self) -> Supervisor:
        plan = Plan(
            Strategy.CONTIGUOUS, tuple(map(a_slot, range(3))), CpuSet(), CpuSet.parse("0-3"), (TIGHT,), ()
        )
        self.supervisor = Supervisor(
            plan, engine=FakeEngine(), spawner=self.spawner, prober=self.prober, limits=LIMITS, probing=PROBES,
            announce=lambda event: self.hear(event),  # noqa: PLW0108  `hear` changes
        )  # fmt: skip
        return self.supervisor

    def idle_at_once(self, event: InstanceEvent) -> None:
        if isinstance(event, InstanceDraining):
            asyncio.get_running_loop().call_soon(self.supervisor.went_idle, event.slot, event.generation)

    def state(self, slot: int) -> State:
        return self.supervisor.controllers[slot].slot_state.state

    async def reach(self, **states: State) -> None:
        """`slot0=State.READY`, and so on; the supervisor lives."""
        wanted = {int(slot.removeprefix("slot")): state for slot, state in states.items()}
        await until(lambda: self.task.done() or all(self.state(slot) is s for slot, s in wanted.items()))
        assert not self.task.done()


@pytest.fixture
async def batches() -> AsyncIterator[Batches]:
    """Its first slot is loading."""
    batches = Batches()
    batches.task = asyncio.create_task(batches.build().run())
    await batches.reach(slot0=State.STARTING)
    yield batches
    if not batches.task.done():
        async with asyncio.timeout(SOON_S):
            await batches.supervisor.kill()
    batches.task.cancel()
    await asyncio.wait({batches.task})
    assert batches.task.cancelled()


async def test_a_slot_that_is_removed_before_its_batch(batches: Batches) -> None:
    await batches.supervisor.remove(1)
    batches.prober.health = True
    await batches.reach(slot0=State.READY, slot2=State.READY)
    assert sorted(batches.supervisor.controllers) == [0, 2]


async def test_a_slot_that_is_removed_while_it_loads_delays_no_batch(batches: Batches) -> None:
    await batches.supervisor.remove(0)
    batches.prober.health = True
    await batches.reach(slot1=State.READY, slot2=State.READY)


@pytest.mark.parametrize(
    ("verb", "rests"),
    [
        (HoldRequested(), State.HELD),
        (StopRequested(), State.STOPPED),
        (DrainRequested(), State.STOPPED),
        (QuarantineRequested(), State.STOPPED),
    ],
)
async def test_a_slot_that_is_stopped_before_its_batch_is_not_started(
    batches: Batches, verb: Event, rests: State
) -> None:
    batches.supervisor.post(1, verb)
    batches.prober.health = True
    await batches.reach(slot0=State.READY, slot1=rests, slot2=State.READY)
    assert [process.slot for process in batches.spawner.started] == [0, 2]


async def test_a_drain_before_the_batch_stays_in_force(batches: Batches) -> None:
    batches.supervisor.post(1, StartRequested())
    batches.supervisor.post(1, DrainRequested())
    batches.prober.health = True
    await batches.reach(slot0=State.READY, slot1=State.DRAINING, slot2=State.READY)


async def test_a_resume_before_the_batch_changes_nothing(batches: Batches) -> None:
    batches.supervisor.post(1, ResumeRequested())
    batches.prober.health = True
    await batches.reach(slot0=State.READY, slot1=State.READY, slot2=State.READY)


async def test_a_quarantined_slot_delays_no_batch(batches: Batches) -> None:
    batches.supervisor.post(0, QuarantineRequested())
    await batches.reach(slot0=State.STARTING, slot1=State.STARTING)


async def test_a_slot_that_comes_while_all_end_does_not_end_the_end(batches: Batches) -> None:
    batches.prober.health = True
    await batches.reach(slot0=State.READY, slot1=State.READY, slot2=State.READY)
    ending = asyncio.create_task(batches.supervisor.stop())
    await asyncio.sleep(0)
    batches.supervisor.add(a_slot(7), FakeEngine(), LIMITS, PROBES)
    async with asyncio.timeout(SOON_S):
        await ending
    assert {batches.state(slot) for slot in range(3)} == {State.STOPPED}


async def test_a_slot_that_is_removed_and_added_again_gets_requests(batches: Batches, tmp_path: Path) -> None:
    """Its lives go on being counted: the proxy takes a lower one for overtaken."""
    supervisor = batches.supervisor
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Listening(tmp_path / "engine.sock"))
        proxy = ProxyServer(
            Proxy(listen=("127.0.0.1:0",)),
            models=[Model(name="m", path="/m")],
            on_idle=supervisor.went_idle,
            on_suspect=lambda *_: None,
        )
        await proxy.start()
        stack.push_async_callback(proxy.stop, 0.0)
        client = await stack.enter_async_context(aiohttp.ClientSession(proxy.endpoint))

        def announce(event: InstanceEvent) -> None:
            match event:
                case InstanceReady():
                    proxy.add_upstream(event.slot, event.generation, event.model, engine.address, 8)
                case InstanceDraining():
                    proxy.drain_upstream(event.slot, event.generation)
                case InstanceGone():
                    proxy.remove_upstream(event.slot, event.generation, event.reason, crashed=event.crashed)

        batches.hear = announce
        batches.prober.health = True
        await batches.reach(slot0=State.READY, slot1=State.READY, slot2=State.READY)
        supervisor.post(2, RestartRequested())
        await until(
            lambda: (
                supervisor.controllers[2].slot_state.generation == 2 and supervisor.controllers[2].in_rotation
            )
        )
        supervisor.post(0, HoldRequested())
        supervisor.post(1, HoldRequested())
        await batches.reach(slot0=State.HELD, slot1=State.HELD)
        async with asyncio.timeout(SOON_S):
            await supervisor.remove(2)
        supervisor.add(a_slot(2), FakeEngine(), LIMITS, PROBES)
        supervisor.post(2, StartRequested())
        await batches.reach(slot2=State.READY)
        assert supervisor.controllers[2].slot_state.generation == 3
        body = {"model": "m", "messages": []}
        async with asyncio.timeout(SOON_S), client.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
        assert len(engine.calls) == 1
