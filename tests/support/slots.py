"""A slot controller with fakes around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace
from support.fakes import (
    FakeCaches,
    FakeClock,
    FakeEngine,
    FakeProber,
    FakeSpawner,
    FakeTraffic,
    a_slot,
    until,
)

from launcher.base.cpuset import CpuSet
from launcher.config.schema import Supervision
from launcher.instances.lifecycle import Limits
from launcher.instances.model_files_reader import Identify
from launcher.instances.ports import InstanceDraining, InstanceEvent, InstanceGone
from launcher.instances.slot_controller import SlotController
from launcher.instances.slot_state import Event, ProbeSettings, State, WentIdle
from launcher.machine.oom import OomWatch
from launcher.machine.placement import MisplacedThread, ProcessFacts, ThreadGroup
from launcher.plan.plan import Slot

LIMITS = replace(Limits.of(Supervision()), backoff_initial_s=0.01, backoff_max_s=0.02)
QUICK = ProbeSettings(probe_interval_s=0.001, tail_lines=50, ready_poll_s=0.001, recheck_s=0.001)
# Probes come only when somebody suspects the instance.
SLOW = replace(QUICK, probe_interval_s=1000.0)


def seen(cpus: str = "0-3") -> tuple[ProcessFacts, ...]:
    return (
        ProcessFacts(
            pid=1, name="vllm", groups=(ThreadGroup(CpuSet.parse(cpus), (("vllm", 2),)),),
            policies=frozenset({"bind:0"}), node_bytes=(), libraries=frozenset({"libzentorch"}),
        ),
    )  # fmt: skip


@dataclass
class Setup:
    """One controller and everything around it."""

    spawner: FakeSpawner = field(default_factory=FakeSpawner)
    prober: FakeProber = field(default_factory=FakeProber)
    engine: FakeEngine = field(default_factory=FakeEngine)
    clock: FakeClock = field(default_factory=FakeClock)
    traffic: FakeTraffic = field(default_factory=FakeTraffic)
    caches: FakeCaches = field(default_factory=FakeCaches)
    root: Path = Path("/nowhere")
    limits: Limits = LIMITS
    probing: ProbeSettings = SLOW
    observe: Callable[[int], Sequence[ProcessFacts]] = lambda _pid: seen()
    misplaced: list[MisplacedThread] = field(default_factory=list)
    announced: list[InstanceEvent] = field(default_factory=list)
    idle_at_once: bool = True
    slot: Slot = field(default_factory=a_slot)
    frozen_s: float = 0.0
    identify: Identify | None = None
    controller: SlotController = field(init=False)

    def build(self) -> SlotController:
        self.controller = SlotController(
            self.slot, engine=self.engine, spawner=self.spawner, prober=self.prober, limits=self.limits,
            probing=self.probing, announce=self.hear, clock=self.clock, draw=lambda: 0.0,
            skipped=lambda: self.frozen_s,
            observe=self.observe, misplaced=lambda _pids, _cpus: tuple(self.misplaced),
            watch_memory=lambda _pid: OomWatch(0, self.root), traffic=self.traffic,
            caches=self.caches, identify=self.identify,
        )  # fmt: skip
        return self.controller

    def hear(self, event: InstanceEvent) -> None:
        self.announced.append(event)
        if isinstance(event, InstanceDraining) and self.idle_at_once:
            asyncio.get_running_loop().call_soon(self.controller.post, WentIdle(event.generation))

    async def until(self, check: Callable[[], object]) -> None:
        await until(check)

    async def reach(self, state: State, generation: int | None = None) -> None:
        await self.until(
            lambda: (
                self.controller.slot_state.state is state
                and generation in {None, self.controller.slot_state.generation}
            )
        )

    async def post(self, *events: Event) -> None:
        for event in events:
            self.controller.post(event)

    @property
    def kinds(self) -> list[str]:
        return [
            f"{type(event).__name__.removeprefix('Instance')} {event.generation}" for event in self.announced
        ]

    @property
    def crashed(self) -> list[bool]:
        return [event.crashed for event in self.announced if isinstance(event, InstanceGone)]

    @property
    def reasons(self) -> list[str]:
        return [event.reason for event in self.announced if isinstance(event, InstanceGone)]
