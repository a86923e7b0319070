"""A slot's owner between fakes: what it starts, announces and remembers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from fakes import (
    SOON_S,
    FakeCaches,
    FakeClock,
    FakeEngine,
    FakeProber,
    FakeSpawner,
    FakeTraffic,
    a_slot,
    until,
)

from launcher.address import Address, UnixAddress
from launcher.config.schema import Strategy, Supervision
from launcher.cpuset import CpuSet
from launcher.errors import LauncherError
from launcher.host.oom import KernelReport, OomWatch
from launcher.host.placement import ProcessFacts, ThreadGroup
from launcher.instances.backoff import Limits
from launcher.instances.held_file import HeldFile
from launcher.instances.instance import Instance
from launcher.instances.ports import InstanceDraining, InstanceEvent, InstanceGone, InstanceReady
from launcher.instances.probe_settings import ProbeSettings
from launcher.instances.slot_controller import SlotController
from launcher.instances.slot_state import (
    DrainRequested,
    Event,
    HoldRequested,
    QuarantineRequested,
    ReleaseRequested,
    RestartRequested,
    ResumeRequested,
    StartRequested,
    State,
    StopRequested,
    WentIdle,
)
from launcher.instances.supervisor import Supervisor
from launcher.plan import LedgerRow, Plan
from launcher.telemetry.vllm_metrics import EngineMetrics

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
class Stage:
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
    announced: list[InstanceEvent] = field(default_factory=list)
    idle_at_once: bool = True
    controller: SlotController = field(init=False)

    def build(self) -> SlotController:
        self.controller = SlotController(
            a_slot(), engine=self.engine, spawner=self.spawner, prober=self.prober, limits=self.limits,
            probing=self.probing, strict_binding=True, announce=self.hear, clock=self.clock, draw=lambda: 0.0,
            observe=self.observe, watch_memory=lambda _pid: OomWatch(0, self.root), traffic=self.traffic,
            caches=self.caches,
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


Play = Callable[[Stage], Awaitable[Stage]]


@pytest.fixture
async def play() -> AsyncIterator[Play]:
    """play(stage): its controller runs until the test ends."""
    running: list[asyncio.Task[None]] = []

    async def start(stage: Stage) -> Stage:
        running.append(asyncio.create_task(stage.build().run(), name="controller"))
        return stage

    yield start
    for task in running:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_start_probe_announce(play: Play) -> None:
    stage = await play(Stage())
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    assert stage.announced == [InstanceReady(0, 1, "m", UnixAddress("/run/slot0-1.sock"), 64)]
    instance = stage.controller.instance
    assert (instance.phase, instance.responsive, instance.served) == ("serving", True, True)
    assert instance.process is stage.spawner.started[0]
    assert stage.prober.completions == 1
    await stage.until(lambda: stage.controller.instance.verification)
    assert instance.verification is not None
    assert instance.verification.ok
    assert instance.zentorch


async def test_ready_needs_a_completion_unless_the_engine_wants_none(play: Play) -> None:
    stage = await play(Stage(prober=FakeProber(completion=False), probing=QUICK))
    await stage.post(StartRequested())
    await stage.until(lambda: stage.prober.completions > 2)
    assert stage.controller.slot_state.state is State.STARTING
    stage.prober.completion = True
    await stage.reach(State.READY)
    modest = await play(
        Stage(engine=FakeEngine(wants_completion_probe=False), prober=FakeProber(completion=False))
    )
    await modest.post(StartRequested())
    await modest.reach(State.READY)
    assert modest.prober.completions == 0


async def test_a_loading_instance_says_how_far_it_is(play: Play) -> None:
    stage = await play(Stage(prober=FakeProber(health=False)))
    await stage.post(StartRequested())
    await stage.until(lambda: stage.spawner.started)
    stage.spawner.started[0].say("INFO Starting to load model /m...")
    assert stage.controller.instance.phase == "loading weights"
    assert [line.text for line in stage.controller.log.last(5)] == ["INFO Starting to load model /m..."]


async def test_a_crash_is_diagnosed_and_a_new_instance_starts(play: Play) -> None:
    stage = await play(Stage())
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    first = stage.spawner.started[0]
    first.say("Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.")
    first.end(code=0)
    await stage.until(lambda: stage.controller.slot_state.state is State.BACKOFF)
    assert stage.controller.instance.process is None
    assert stage.controller.instance.address is None
    stage.clock.now += 1
    await stage.post(StartRequested())
    await stage.reach(State.READY, generation=2)
    cause = stage.controller.slot_state.last_cause
    assert cause is not None
    assert cause.name == "node-oom"
    assert stage.kinds == ["Ready 1", "Gone 1", "Ready 2"]
    gone = stage.announced[1]
    assert isinstance(gone, InstanceGone)
    assert "memory" in gone.reason


async def test_the_back_off_ends_by_itself(play: Play) -> None:
    stage = await play(Stage())
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    stage.spawner.started[0].end(code=1)
    await stage.reach(State.READY, generation=2)


async def test_a_cause_that_forbids_a_restart_fails_the_slot(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    stage = await play(Stage(prober=FakeProber(health=False)))
    await stage.post(StartRequested())
    await stage.until(lambda: stage.spawner.started)
    stage.spawner.started[0].say("vllm: error: unrecognized arguments: --x")
    stage.spawner.started[0].end(code=2)
    await stage.reach(State.FAILED)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "bad-argument" in record.getMessage()
    assert record.__dict__["slot"] == 0


async def test_the_same_line_after_it_has_served_does_not(play: Play) -> None:
    stage = await play(Stage())
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    stage.spawner.started[0].say("Value error, a client's bad request")
    stage.spawner.started[0].end(code=1)
    await stage.reach(State.READY, generation=2)


async def test_restart_drains_first(play: Play) -> None:
    stage = await play(Stage(idle_at_once=False))
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    await stage.post(RestartRequested(), RestartRequested())
    await stage.reach(State.DRAINING)
    assert stage.spawner.started[0].orders == []
    await stage.post(WentIdle(1))
    await stage.reach(State.READY, generation=2)
    assert stage.kinds == ["Ready 1", "Draining 1", "Gone 1", "Ready 2"]
    assert stage.spawner.started[0].orders == ["terminate"]
    assert stage.controller.slot_state.crashes == ()


async def test_an_idle_drained_slot_stops_at_once(play: Play) -> None:
    """Its idleness was reported before; the second announcement asks for it again."""
    stage = await play(Stage())
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    await stage.post(DrainRequested())
    await stage.until(lambda: stage.kinds == ["Ready 1", "Draining 1"])
    await stage.post(StopRequested())
    await stage.reach(State.STOPPED)
    assert stage.kinds == ["Ready 1", "Draining 1", "Draining 1", "Gone 1"]


async def test_drain_while_it_loads_then_resume(play: Play) -> None:
    stage = await play(Stage(prober=FakeProber(health=False), probing=QUICK))
    await stage.post(StartRequested(), DrainRequested())
    await stage.until(lambda: stage.spawner.started)
    stage.prober.health = True
    await stage.reach(State.DRAINING)
    assert stage.kinds == ["Ready 1", "Draining 1"]
    await stage.post(ResumeRequested())
    await stage.reach(State.READY)
    assert stage.kinds[-1] == "Ready 1"


async def test_a_stubborn_instance_is_killed(play: Play) -> None:
    stage = await play(
        Stage(spawner=FakeSpawner(stubborn=True), limits=replace(LIMITS, stop_timeout_s=0.005))
    )
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    await stage.post(StopRequested())
    await stage.until(lambda: stage.spawner.started[0].orders)
    stage.clock.now += 1  # any deadline has passed now
    await stage.reach(State.STOPPED)
    assert stage.spawner.started[0].orders == ["terminate", "kill"]


async def test_one_that_is_being_stopped_need_not_be_watched(play: Play) -> None:
    """Its watch has ended with its life; a planned restart is no alarm."""
    stage = await play(Stage(spawner=FakeSpawner(stubborn=True), probing=QUICK))
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    await stage.post(StopRequested())
    await stage.until(lambda: stage.spawner.started[0].orders)
    watch = stage.controller._monitor._probes
    await stage.until(lambda: watch is not None and not watch.alive)
    assert stage.controller.slot_state.state is State.STOPPING
    assert stage.controller.unwatched is None
    stage.spawner.started[0].end(code=0)
    await stage.reach(State.STOPPED)


async def test_two_refusals_end_an_instance(play: Play) -> None:
    stage = await play(Stage(probing=QUICK))
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    stage.prober.health = False
    await stage.until(lambda: stage.spawner.started[0].orders == ["kill"])
    stage.prober.health = True
    await stage.reach(State.READY, generation=2)
    cause = stage.controller.slot_state.last_cause
    assert cause is not None
    assert cause.name == "unhealthy"


async def test_silence_is_noted_and_nothing_more(play: Play) -> None:
    stage = await play(Stage(probing=QUICK))
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    stage.prober.health = None
    await stage.until(lambda: stage.controller.instance.responsive is False)
    asked = stage.prober.asked
    await stage.until(lambda: stage.prober.asked > asked + 5)
    assert stage.controller.slot_state.state is State.READY
    stage.prober.health = True
    await stage.until(lambda: stage.controller.instance.responsive)


async def test_a_suspicion_is_looked_into_at_once(play: Play) -> None:
    stage = await play(Stage(probing=SLOW))
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    asked = stage.prober.asked
    stage.controller.suspect(generation=0)  # of an instance that has ended
    stage.controller.suspect(generation=1)
    await stage.until(lambda: stage.prober.asked > asked)


async def test_new_probe_settings_apply_to_a_running_instance(play: Play) -> None:
    stage = await play(Stage(probing=QUICK))
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    controller = stage.controller
    controller.reconfigure(controller.slot, controller.engine, LIMITS, SLOW)
    asked = stage.prober.asked
    await asyncio.sleep(0.05)
    assert stage.prober.asked <= asked + 2, "no new probe begins"


async def test_suspicions_do_not_shorten_the_recheck(play: Play) -> None:
    stage = await play(Stage(probing=replace(SLOW, recheck_s=1000.0)))
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    stage.prober.health = False
    asked = stage.prober.asked
    stage.controller.suspect(1)
    await stage.until(lambda: stage.prober.asked == asked + 1)
    for _ in range(50):
        stage.controller.suspect(1)
        await asyncio.sleep(0)
    assert stage.prober.asked == asked + 1
    assert stage.controller.slot_state.state is State.READY


@pytest.mark.parametrize("part", ["spawner", "engine"])
async def test_what_can_not_be_started_backs_off_and_fails_in_the_end(play: Play, part: str) -> None:
    stage = Stage(limits=replace(LIMITS, crash_limit=3, backoff_initial_s=1e-9))
    getattr(stage, part).refusal = LauncherError("cannot start slot 0: no memory", "free some")
    await play(stage)
    await stage.post(StartRequested())
    await stage.reach(State.FAILED)
    slot_state = stage.controller.slot_state
    assert (slot_state.generation, len(slot_state.crashes), stage.announced) == (3, 3, [])
    assert slot_state.last_cause is not None
    assert (slot_state.last_cause.message, slot_state.last_cause.remedy) == (
        "cannot start slot 0: no memory",
        "free some",
    )


@pytest.mark.parametrize("part", ["spawner", "engine"])
@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files"), RuntimeError("can't start new thread")]
)
async def test_a_shortage_at_a_start_ends_no_daemon(
    play: Play, part: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No port, no thread: a free port and the compile cache are asked of the system before the spawner is."""
    monkeypatch.setattr("launcher.instances.transitions.SHORTAGE_DELAY_S", 0.001)
    stage = Stage(limits=replace(LIMITS, crash_limit=99))
    getattr(stage, part).refusal = error
    await play(stage)
    await stage.post(StartRequested())
    await stage.until(lambda: stage.controller.slot_state.last_cause is not None)
    getattr(stage, part).refusal = None
    await stage.reach(State.READY)
    cause = stage.controller.slot_state.last_cause
    assert cause is not None
    assert cause.name == "cannot-start"
    assert cause.message.startswith("cannot start slot 0: ")
    assert str(error.args[-1])[1:] in cause.message


async def test_a_stopped_slot_shows_nothing_of_its_last_instance(play: Play) -> None:
    stage = await play(Stage())
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    await stage.controller.verify()
    assert stage.controller.instance.verification is not None
    await stage.post(StopRequested())
    await stage.reach(State.STOPPED)
    await stage.until(lambda: stage.controller.stopped)
    instance = stage.controller.instance
    assert instance == Instance()
    await stage.controller.verify()
    assert stage.controller.instance.verification is None


async def test_a_placement_that_differs_is_said(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    stage = await play(Stage(observe=lambda _pid: seen(cpus="0-9")))
    await stage.post(StartRequested())
    await stage.until(lambda: "placement differs from the plan" in caplog.text)
    said = caplog.text.count("threads of vllm (pid 1)")
    await stage.controller.verify()
    assert caplog.text.count("threads of vllm (pid 1)") == said, "once is enough"


async def test_a_look_that_fails_does_not_end_the_watch(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_pid: int) -> Sequence[ProcessFacts]:
        raise RuntimeError("numa_maps is broken")

    stage = await play(Stage(observe=broken, probing=QUICK))
    await stage.post(StartRequested())
    await stage.until(lambda: "numa_maps is broken" in caplog.text)
    asked = stage.prober.asked
    await stage.until(lambda: stage.prober.asked > asked + 2)


async def test_cancelled_it_kills_what_runs() -> None:
    stage = Stage()
    task = asyncio.create_task(stage.build().run())
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stage.spawner.started[0].orders == ["kill"]


# --- all slots -------------------------------------------------------------------------------


@dataclass
class Troupe:
    """A supervisor of three slots."""

    spawner: FakeSpawner = field(default_factory=FakeSpawner)
    announced: list[InstanceEvent] = field(default_factory=list)
    prober: FakeProber = field(default_factory=FakeProber)
    ledger: tuple[LedgerRow, ...] = ()
    probing: ProbeSettings = SLOW
    caches: FakeCaches = field(default_factory=FakeCaches)
    held: HeldFile | None = None

    def build(self) -> Supervisor:
        slots = tuple(a_slot(number) for number in (0, 1, 2))
        plan = Plan(Strategy.CONTIGUOUS, slots, CpuSet(), CpuSet.parse("0-3"), self.ledger, ())
        self.supervisor = Supervisor(
            plan, engine=FakeEngine(), spawner=self.spawner, prober=self.prober, limits=LIMITS, probing=self.probing,
            strict_binding=False, announce=self.hear, caches=self.caches, held=self.held,
        )  # fmt: skip
        return self.supervisor

    def hear(self, event: InstanceEvent) -> None:
        self.announced.append(event)
        if isinstance(event, InstanceDraining):
            loop = asyncio.get_running_loop()
            loop.call_soon(self.supervisor.went_idle, event.slot, event.generation)

    @property
    def states(self) -> set[State]:
        return {controller.slot_state.state for controller in self.supervisor.controllers.values()}


@pytest.mark.parametrize("way", ["stop", "kill"])
async def test_supervisor_starts_all_and_ends_all(way: str) -> None:
    troupe = Troupe()
    supervisor = troupe.build()
    task = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(SOON_S):
        await until(lambda: troupe.states == {State.READY})
        supervisor.suspect(1, 1)
        await getattr(supervisor, way)()
    assert troupe.states == {State.STOPPED}
    assert all(process.ended.done() for process in troupe.spawner.started)
    assert len(troupe.spawner.started) == 3
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# A node with less memory free than its three slots want.
TIGHT = LedgerRow(
    node=0, total_bytes=9, available_bytes=2, reserve_bytes=0, weights_bytes=0, overhead_bytes=3, kv_bytes=0,
    slots=(0, 1, 2),
)  # fmt: skip


async def test_slots_of_a_tight_node_start_one_after_the_other() -> None:
    troupe = Troupe(ledger=(TIGHT,), probing=QUICK)
    troupe.prober.health = None
    task = asyncio.create_task(troupe.build().run())
    await until(lambda: troupe.prober.asked > 3)
    assert [process.slot for process in troupe.spawner.started] == [0]
    troupe.prober.health = True
    await until(lambda: troupe.states == {State.READY})
    assert [process.slot for process in troupe.spawner.started] == [0, 1, 2]
    await troupe.supervisor.stop()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_stop_during_the_first_wave_starts_no_second() -> None:
    troupe = Troupe(ledger=(TIGHT,), probing=QUICK)
    troupe.prober.health = None
    task = asyncio.create_task(troupe.build().run())
    await until(lambda: troupe.prober.asked > 1)
    await troupe.supervisor.stop()
    await asyncio.sleep(0.01)
    assert troupe.states == {State.STOPPED}
    assert [process.slot for process in troupe.spawner.started] == [0]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_all_start_at_once_and_what_is_compiled_is_kept_before_they_are_ready() -> None:
    troupe = Troupe(probing=QUICK)
    troupe.prober.health = None
    task = asyncio.create_task(troupe.build().run())
    await until(lambda: len(troupe.spawner.started) == 3)
    assert troupe.caches.asked == ["prepare 0", "prepare 1", "prepare 2"]
    troupe.spawner.started[0].say("init engine (profile, create kv cache, warmup model) took 9 s")
    await until(lambda: "keep 0" in troupe.caches.asked)
    assert troupe.supervisor.controllers[0].slot_state.state is State.STARTING, (
        "it has compiled, and is not ready yet"
    )
    await troupe.supervisor.stop()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_one_that_fails_to_start_holds_nobody_up() -> None:
    troupe = Troupe(probing=QUICK)
    troupe.prober.health = None
    task = asyncio.create_task(troupe.build().run())
    await until(lambda: len(troupe.spawner.started) == 3)
    troupe.spawner.started[0].end(code=1)
    troupe.prober.health = True
    await until(lambda: troupe.states == {State.READY})
    await troupe.supervisor.kill()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_slots_come_and_go() -> None:
    troupe = Troupe()
    supervisor = troupe.build()
    task = asyncio.create_task(supervisor.run())
    await until(lambda: troupe.states == {State.READY})
    await supervisor.remove(1)
    assert sorted(supervisor.controllers) == [0, 2]
    controller = supervisor.add(a_slot(7), FakeEngine(), LIMITS, SLOW)
    controller.post(StartRequested())
    await until(lambda: controller.slot_state.state is State.READY)
    await supervisor.stop()
    assert len(troupe.spawner.started) == 4
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_damaged_compile_cache_is_emptied_before_the_next_start(play: Play) -> None:
    stage = await play(Stage(probing=QUICK, prober=FakeProber(health=None)))
    await stage.post(StartRequested())
    await stage.until(lambda: stage.spawner.started)
    stage.spawner.started[0].say("OSError: /c/x.so: file too short")
    stage.spawner.started[0].end(code=1)
    await stage.until(lambda: len(stage.spawner.started) == 2)
    assert stage.caches.asked == ["prepare 0", "purge 0", "prepare 0"]


async def test_one_in_quarantine_is_looked_at_and_left_alone(play: Play) -> None:
    stage = await play(Stage(probing=QUICK))
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    await stage.post(QuarantineRequested())
    await stage.reach(State.DRAINING)
    stage.prober.health = False
    await stage.until(lambda: stage.controller.slot_state.last_cause)
    asked = stage.prober.asked
    await stage.until(lambda: stage.prober.asked > asked + 5)
    assert stage.spawner.started[0].orders == []
    await stage.post(HoldRequested())
    await stage.reach(State.HELD)
    assert stage.controller.stopped


async def test_supervisor_knows_no_other_slot() -> None:
    supervisor = Troupe().build()
    with pytest.raises(LauncherError, match="cannot use slot '7': no such slot") as caught:
        supervisor.post(7, StopRequested())
    assert caught.value.remedy == "slots are 0, 1, 2"


async def test_a_held_slot_is_held_by_the_next_daemon_too(tmp_path: Path) -> None:
    path = tmp_path / "run" / "c.held"
    for life in (1, 2):
        troupe = Troupe(held=HeldFile(path))
        task = asyncio.create_task(troupe.build().run())
        controllers = troupe.supervisor.controllers
        if life == 1:
            await until(lambda t=troupe: t.states == {State.READY})
            controllers[1].post(HoldRequested())
        await until(lambda t=troupe: t.states == {State.READY, State.HELD})
        assert controllers[1].slot_state.state is State.HELD
        assert HeldFile(path).slots == {1}
        if life == 2:
            assert {process.slot for process in troupe.spawner.started} == {0, 2}
            controllers[1].post(ReleaseRequested())
            await until(lambda t=troupe: t.states == {State.READY})
            assert not path.exists()
        await troupe.supervisor.stop()
        task.cancel()
        await asyncio.wait({task})


def test_what_is_no_list_of_slots_holds_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x").write_text("{not json")
    held = HeldFile(tmp_path / "x")
    assert held.slots == frozenset()
    (tmp_path / "file").write_text("")
    lost = HeldFile(tmp_path / "file" / "c.held")
    lost.note(3, held=True)
    assert lost.slots == {3}
    assert "slot 3: cannot write" in caplog.text
    assert "the next daemon will not know that it is held" in caplog.text


@dataclass
class BrokenProber(FakeProber):
    """Raises what it is told to."""

    errors: dict[str, Exception] = field(default_factory=dict)

    async def healthy(self, address: Address, timeout_s: float) -> bool | None:
        if "healthy" in self.errors:
            raise self.errors["healthy"]
        return await super().healthy(address, timeout_s)

    async def counters(self, address: Address, timeout_s: float) -> EngineMetrics | None:
        if "counters" in self.errors:
            raise self.errors["counters"]
        return await super().counters(address, timeout_s)


@pytest.mark.parametrize("where", ["healthy", "counters"])
@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files"), RuntimeError("can't start new thread"), KeyError("x")]
)
async def test_a_failing_probe_ends_no_watch(
    play: Play, where: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.background.RETRY_S", 0.001)
    prober = BrokenProber()
    stage = await play(Stage(probing=QUICK, prober=prober))
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    prober.errors[where] = error
    asked = prober.asked

    def late() -> bool:
        stage.clock.now += 1
        return str(error) in (stage.controller.unwatched or "")

    await stage.until(late)
    assert stage.controller.slot_state.state is State.READY
    prober.errors.clear()
    await stage.until(lambda: stage.controller.unwatched is None and prober.asked > asked + 2)
    prober.health = False
    await stage.until(lambda: stage.spawner.started[0].orders == ["kill"])
    prober.health = True
    await stage.reach(State.READY, generation=2)


async def test_a_failing_probe_while_it_loads(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.background.RETRY_S", 0.001)
    prober = BrokenProber(errors={"healthy": OSError(24, "Too many open files")})
    stage = await play(Stage(probing=QUICK, prober=prober))
    await stage.post(StartRequested())
    await stage.until(lambda: stage.spawner.started)
    assert stage.controller.unwatched is None, "not yet"
    stage.clock.now += QUICK.unwatched_s + 1
    await stage.until(lambda: stage.controller.unwatched is not None)
    assert "no probe has succeeded" in str(stage.controller.unwatched)
    prober.errors.clear()
    await stage.reach(State.READY)
    await stage.until(lambda: stage.controller.unwatched is None)


async def test_every_task_of_an_instance_that_somebody_cancels_is_begun_again(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.background.RETRY_S", 0.001)
    stage = await play(Stage(probing=QUICK))
    await stage.post(StartRequested())
    await stage.reach(State.READY)
    for task in asyncio.all_tasks():
        if task.get_name().startswith("slot 0: "):
            task.cancel()
    asked = stage.prober.asked
    await stage.until(lambda: stage.prober.asked > asked + 2)
    stage.spawner.started[0].end(code=1)
    await stage.reach(State.READY, generation=2)


async def test_an_exit_is_reported_when_its_diagnosis_fails(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = await play(Stage())
    await stage.post(StartRequested())
    await stage.reach(State.READY)

    def fails(*_: object) -> KernelReport:
        raise ValueError("an odd line")

    monkeypatch.setattr(OomWatch, "report", fails)
    stage.spawner.started[0].end(code=1)
    await stage.reach(State.READY, generation=2)


def of_spawner() -> LauncherError:
    """As spawners raise it."""
    error = LauncherError("cannot start slot 0: too many open files", "check the limits")
    error.__cause__ = OSError(24, "Too many open files")
    return error


@pytest.mark.parametrize(
    "shortage",
    [
        OSError(24, "Too many open files"),
        OSError(11, "x"),
        MemoryError(),
        RuntimeError("can't start new thread"),
        of_spawner(),
    ],
)
async def test_the_daemons_own_shortage_is_no_crash_of_an_instance(
    play: Play, shortage: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.instances.transitions.SHORTAGE_DELAY_S", 0.001)
    caplog.set_level(logging.INFO, "launcher.instances")
    stage = Stage()
    stage.spawner.refusal = shortage
    await play(stage)
    await stage.post(StartRequested())
    await stage.until(lambda: stage.controller.slot_state.generation > LIMITS.crash_limit + 3)
    assert stage.controller.slot_state.crashes == ()
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2, "the cause, and when it is tried again"
    stage.spawner.refusal = None
    await stage.reach(State.READY)


async def test_a_stop_during_the_daemons_own_shortage(play: Play) -> None:
    stage = Stage()
    stage.spawner.refusal = OSError(24, "Too many open files")
    await play(stage)
    await stage.post(StartRequested())
    await stage.reach(State.BACKOFF)
    await stage.post(StopRequested())
    await stage.reach(State.STOPPED)
