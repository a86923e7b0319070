"""A slot's owner between fakes: what it starts, announces and remembers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.fakes import (
    SOON_S,
    FakeCaches,
    FakeEngine,
    FakeProber,
    FakeSpawner,
    a_slot,
    until,
)
from support.plans import make_plan
from support.slots import LIMITS, QUICK, SLOW, Setup, seen

from launcher.base.address import Address, UnixAddress
from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError, PassingError
from launcher.config.schema import Config, Engine, Model, Strategy
from launcher.instances.instance import Instance
from launcher.instances.ports import InstanceDraining, InstanceEvent, InstanceGone, InstanceReady
from launcher.instances.slot_state import (
    DeadlinePassed,
    DrainRequested,
    HoldRequested,
    ProbeSettings,
    QuarantineRequested,
    ReleaseRequested,
    RestartRequested,
    ResumeRequested,
    StartRequested,
    State,
    StopRequested,
    WentIdle,
)
from launcher.instances.state_file import HeldFile
from launcher.instances.supervisor import Supervisor
from launcher.machine.named import find_topology
from launcher.machine.oom import KernelReport, OomWatch
from launcher.machine.placement import MisplacedThread, ProcessFacts
from launcher.models.identity import ModelFiles
from launcher.plan.plan import LedgerRow, Plan
from launcher.telemetry.engine_metrics import EngineMetrics

Play = Callable[[Setup], Awaitable[Setup]]


@pytest.fixture
async def play() -> AsyncIterator[Play]:
    """play(setup): its controller runs until the test ends."""
    running: list[asyncio.Task[None]] = []

    async def start(setup: Setup) -> Setup:
        running.append(asyncio.create_task(setup.build().run(), name="controller"))
        return setup

    yield start
    for task in running:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_the_announced_limit_is_the_one_that_engine_args_set(play: Play) -> None:
    config = Config(models=(Model(name="m", path="/m"),), engine=Engine(args=("--max_num_seqs", "8")))
    slot = make_plan(find_topology("epyc-7763-1p"), config, {}, cpus_only=True).slots[0]
    setup = await play(Setup(slot=slot))
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    assert setup.announced == [InstanceReady(0, 1, "m", UnixAddress("/run/slot0-1.sock"), 8)]


async def test_start_probe_announce(play: Play) -> None:
    setup = await play(Setup())
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    assert setup.announced == [InstanceReady(0, 1, "m", UnixAddress("/run/slot0-1.sock"), 64)]
    instance = setup.controller.instance
    assert (instance.phase, instance.responsive, instance.served) == ("serving", True, True)
    assert instance.process is setup.spawner.started[0]
    assert setup.prober.completions == 1
    await setup.until(lambda: setup.controller.instance.verification)
    assert instance.verification is not None
    assert instance.verification.ok
    assert instance.zentorch


async def test_ready_needs_a_completion_unless_the_engine_wants_none(play: Play) -> None:
    setup = await play(Setup(prober=FakeProber(completion=False), probing=QUICK))
    await setup.post(StartRequested())
    await setup.until(lambda: setup.prober.completions > 2)
    assert setup.controller.slot_state.state is State.STARTING
    setup.prober.completion = True
    await setup.reach(State.READY)
    modest = await play(
        Setup(engine=FakeEngine(wants_completion_probe=False), prober=FakeProber(completion=False))
    )
    await modest.post(StartRequested())
    await modest.reach(State.READY)
    assert modest.prober.completions == 0


async def test_a_loading_instance_says_how_far_it_is(play: Play) -> None:
    setup = await play(Setup(prober=FakeProber(health=False)))
    await setup.post(StartRequested())
    await setup.until(lambda: setup.spawner.started)
    setup.spawner.started[0].say("INFO Starting to load model /m...")
    assert setup.controller.instance.phase == "loading weights"
    assert [line.text for line in setup.controller.log.last(5)] == ["INFO Starting to load model /m..."]


async def test_a_crash_is_diagnosed_and_a_new_instance_starts(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    setup = await play(Setup())
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    first = setup.spawner.started[0]
    first.say("Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.")
    first.end(code=0)
    await setup.until(lambda: setup.controller.slot_state.state is State.BACKOFF)
    assert setup.controller.instance.process is None
    assert setup.controller.instance.address is None
    setup.clock.now += 1
    await setup.post(StartRequested())
    await setup.reach(State.READY, generation=2)
    cause = setup.controller.slot_state.last_cause
    assert cause is not None
    assert cause.name == "node-oom"
    assert setup.kinds == ["Ready 1", "Gone 1", "Ready 2"]
    (event,) = [record.__dict__ for record in caplog.records if record.levelname == "ERROR"]
    assert (event["slot"], event["generation"], event["cause"]) == (0, 1, "node-oom")
    assert (event["evidence"], event["remedy"]) == (cause.evidence, cause.of_slot(0).remedy)
    gone = setup.announced[1]
    assert isinstance(gone, InstanceGone)
    assert "memory" in gone.reason


async def test_the_back_off_ends_by_itself(play: Play) -> None:
    setup = await play(Setup())
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    setup.spawner.started[0].end(code=1)
    await setup.reach(State.READY, generation=2)


async def test_a_cause_that_forbids_a_restart_fails_the_slot(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    setup = await play(Setup(prober=FakeProber(health=False)))
    await setup.post(StartRequested())
    await setup.until(lambda: setup.spawner.started)
    setup.spawner.started[0].say("vllm: error: unrecognized arguments: --x")
    setup.spawner.started[0].end(code=2)
    await setup.reach(State.FAILED)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "bad-argument" in record.getMessage()
    assert record.__dict__["slot"] == 0


async def test_the_same_line_after_it_has_served_does_not(play: Play) -> None:
    setup = await play(Setup())
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    setup.spawner.started[0].say("Value error, a client's bad request")
    setup.spawner.started[0].end(code=1)
    await setup.reach(State.READY, generation=2)


async def test_restart_drains_first(play: Play) -> None:
    setup = await play(Setup(idle_at_once=False))
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    await setup.post(RestartRequested(), RestartRequested())
    await setup.reach(State.DRAINING)
    assert setup.spawner.started[0].orders == []
    await setup.post(WentIdle(1))
    await setup.reach(State.READY, generation=2)
    assert setup.kinds == ["Ready 1", "Draining 1", "Gone 1", "Ready 2"]
    assert setup.spawner.started[0].orders == ["terminate"]
    assert setup.controller.slot_state.crashes == ()


async def test_restart_of_a_starting_slot_stops_that_start(play: Play) -> None:
    setup = await play(Setup(prober=FakeProber(health=False), probing=QUICK))
    await setup.post(StartRequested())
    await setup.until(lambda: setup.spawner.started)
    await setup.post(RestartRequested())
    await setup.until(lambda: len(setup.spawner.started) == 2)
    assert setup.spawner.started[0].orders == ["terminate"]
    setup.prober.health = True
    await setup.reach(State.READY, generation=2)
    assert setup.kinds == ["Ready 2"]
    assert setup.controller.slot_state.crashes == ()


async def test_an_idle_drained_slot_stops_at_once(play: Play) -> None:
    """Its idleness was reported before; the second announcement asks for it again."""
    setup = await play(Setup())
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    await setup.post(DrainRequested())
    await setup.until(lambda: setup.kinds == ["Ready 1", "Draining 1"])
    await setup.post(StopRequested())
    await setup.reach(State.STOPPED)
    assert setup.kinds == ["Ready 1", "Draining 1", "Draining 1", "Gone 1"]


async def test_drain_while_it_loads_then_resume(play: Play) -> None:
    setup = await play(Setup(prober=FakeProber(health=False), probing=QUICK))
    await setup.post(StartRequested(), DrainRequested())
    await setup.until(lambda: setup.spawner.started)
    setup.prober.health = True
    await setup.reach(State.DRAINING)
    assert setup.kinds == ["Ready 1", "Draining 1"]
    await setup.post(ResumeRequested())
    await setup.reach(State.READY)
    assert setup.kinds[-1] == "Ready 1"


async def test_a_stubborn_instance_is_killed(play: Play) -> None:
    setup = await play(
        Setup(spawner=FakeSpawner(stubborn=True), limits=replace(LIMITS, stop_timeout_s=0.005))
    )
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    await setup.post(StopRequested())
    await setup.until(lambda: setup.spawner.started[0].orders)
    setup.clock.now += 1  # any deadline has passed now
    await setup.reach(State.STOPPED)
    assert setup.spawner.started[0].orders == ["terminate", "kill"]


async def test_no_deadline_counts_a_freeze_of_the_whole_host(play: Play) -> None:
    setup = await play(
        Setup(spawner=FakeSpawner(stubborn=True), limits=replace(LIMITS, stop_timeout_s=0.005))
    )
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    await setup.post(StopRequested())
    await setup.until(lambda: setup.spawner.started[0].orders)
    setup.clock.now += 3600
    setup.frozen_s += 3600
    await setup.until(lambda: (setup.controller.slot_state.deadline or 0) > setup.clock.now)
    assert setup.spawner.started[0].orders == ["terminate"]
    setup.clock.now += 1
    await setup.reach(State.STOPPED)
    assert setup.spawner.started[0].orders == ["terminate", "kill"]


async def test_one_that_is_being_stopped_need_not_be_watched(play: Play) -> None:
    """Its watch has ended with its life; a planned restart is no alarm."""
    setup = await play(Setup(spawner=FakeSpawner(stubborn=True), probing=QUICK))
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    await setup.post(StopRequested())
    await setup.until(lambda: setup.spawner.started[0].orders)
    watch = setup.controller._monitor._probes
    await setup.until(lambda: watch is not None and not watch.alive)
    assert setup.controller.slot_state.state is State.STOPPING
    assert setup.controller.unwatched is None
    setup.spawner.started[0].end(code=0)
    await setup.reach(State.STOPPED)


async def test_two_refusals_end_an_instance(play: Play) -> None:
    setup = await play(Setup(probing=QUICK))
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    setup.prober.health = False
    await setup.until(lambda: setup.spawner.started[0].orders == ["kill"])
    setup.prober.health = True
    await setup.reach(State.READY, generation=2)
    cause = setup.controller.slot_state.last_cause
    assert cause is not None
    assert cause.name == "unhealthy"
    assert setup.reasons == [cause.message], "not that it is being stopped"
    assert setup.crashed == [True]


async def test_a_rank_that_died_is_the_cause_and_not_the_health_that_it_took(play: Play) -> None:
    """vLLM answers 503 before it ends; all its processes are killed then, and the log says which ended first."""
    setup = await play(Setup(probing=QUICK))
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    setup.spawner.started[0].say(
        "(EngineCore pid=9) ERROR Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor."
    )
    setup.prober.health = False
    await setup.until(lambda: setup.spawner.started[0].orders == ["kill"])
    setup.prober.health = True
    await setup.reach(State.READY, generation=2)
    cause = setup.controller.slot_state.last_cause
    assert cause is not None
    assert (cause.name, cause.message) == (
        "unknown",
        "its worker process ended, and the engine saw no exit code",
    )
    assert "VllmWorker-0" in cause.evidence[0]
    assert setup.reasons == ["one of its processes has ended"]


async def test_a_planned_end_does_not_give_the_cause_of_an_earlier_crash(play: Play) -> None:
    setup = await play(Setup(idle_at_once=False))
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    setup.spawner.started[0].end(code=1)
    await setup.reach(State.READY, generation=2)
    await setup.post(DrainRequested(deadline_s=1.0))
    await setup.reach(State.DRAINING)
    setup.clock.now += 2
    await setup.post(DeadlinePassed())
    await setup.until(lambda: setup.controller.slot_state.cut)
    await setup.post(ResumeRequested(), RestartRequested(), WentIdle(2))
    await setup.reach(State.READY, generation=3)
    assert setup.reasons[1:] == ["its drain deadline has passed", "it is being stopped"]
    assert setup.crashed == [True, False, False]


async def test_silence_is_noted_and_nothing_more(play: Play) -> None:
    setup = await play(Setup(probing=QUICK))
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    setup.prober.health = None
    await setup.until(lambda: setup.controller.instance.responsive is False)
    asked = setup.prober.asked
    await setup.until(lambda: setup.prober.asked > asked + 5)
    assert setup.controller.slot_state.state is State.READY
    setup.prober.health = True
    await setup.until(lambda: setup.controller.instance.responsive)


async def test_a_suspected_instance_is_probed_at_once(play: Play) -> None:
    setup = await play(Setup(probing=SLOW))
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    asked = setup.prober.asked
    setup.controller.suspect(generation=0)  # of an instance that has ended
    setup.controller.suspect(generation=1)
    await setup.until(lambda: setup.prober.asked > asked)


async def test_new_probe_settings_apply_to_a_running_instance(play: Play) -> None:
    setup = await play(Setup(probing=QUICK))
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    controller = setup.controller
    controller.reconfigure(controller.slot, controller.engine, LIMITS, SLOW)
    asked = setup.prober.asked
    await asyncio.sleep(0.05)
    assert setup.prober.asked <= asked + 2, "no new probe begins"


async def test_suspicions_do_not_shorten_the_recheck(play: Play) -> None:
    setup = await play(Setup(probing=replace(SLOW, recheck_s=1000.0)))
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    setup.prober.health = False
    asked = setup.prober.asked
    setup.controller.suspect(1)
    await setup.until(lambda: setup.prober.asked == asked + 1)
    for _ in range(50):
        setup.controller.suspect(1)
        await asyncio.sleep(0)
    assert setup.prober.asked == asked + 1
    assert setup.controller.slot_state.state is State.READY


@pytest.mark.parametrize("part", ["spawner", "engine"])
async def test_what_can_not_be_started_backs_off_and_fails_in_the_end(play: Play, part: str) -> None:
    setup = Setup(limits=replace(LIMITS, crash_limit=3, backoff_initial_s=1e-9))
    getattr(setup, part).refusal = LauncherError("cannot start slot 0: no memory", "free some")
    await play(setup)
    await setup.post(StartRequested())
    await setup.reach(State.FAILED)
    slot_state = setup.controller.slot_state
    assert (slot_state.generation, len(slot_state.crashes), setup.announced) == (3, 3, [])
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
    monkeypatch.setattr("launcher.instances.lifecycle.SHORTAGE_DELAY_S", 0.001)
    setup = Setup(limits=replace(LIMITS, crash_limit=99))
    getattr(setup, part).refusal = error
    await play(setup)
    await setup.post(StartRequested())
    await setup.until(lambda: setup.controller.slot_state.last_cause is not None)
    getattr(setup, part).refusal = None
    await setup.reach(State.READY)
    cause = setup.controller.slot_state.last_cause
    assert cause is not None
    assert cause.name == "cannot-start"
    assert cause.message.startswith("cannot start slot 0: ")
    assert str(error.args[-1])[1:] in cause.message


async def test_a_stopped_slot_shows_nothing_of_its_last_instance(play: Play) -> None:
    setup = await play(Setup())
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    await setup.controller.verify()
    assert setup.controller.instance.verification is not None
    await setup.post(StopRequested())
    await setup.reach(State.STOPPED)
    await setup.until(lambda: setup.controller.stopped)
    instance = setup.controller.instance
    assert instance == Instance()
    await setup.controller.verify()
    assert setup.controller.instance.verification is None


async def test_a_different_placement_is_logged(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    setup = await play(Setup(observe=lambda _pid: seen(cpus="0-9")))
    await setup.post(StartRequested())
    await setup.until(lambda: "placement differs from the plan" in caplog.text)
    said = caplog.text.count("threads of vllm (pid 1)")
    await setup.controller.verify()
    assert caplog.text.count("threads of vllm (pid 1)") == said, "once is enough"


async def test_a_thread_that_moves_has_the_slot_verified(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    where = ["0-3"]
    probing = replace(QUICK, verify_interval_s=1000.0, threads_interval_s=0.01)
    setup = await play(Setup(observe=lambda _pid: seen(where[0]), probing=probing))
    await setup.post(StartRequested())
    await setup.until(lambda: setup.controller.instance.verification)
    where[0] = "0-9"
    setup.misplaced.append(MisplacedThread(7, "vllm", CpuSet.parse("0-9")))
    await setup.until(lambda: "placement differs from the plan" in caplog.text)
    assert setup.controller.instance.misplaced == (setup.misplaced[0],)
    verification = setup.controller.instance.verification
    assert verification is not None
    assert not verification.ok


async def test_a_container_is_verified_once_its_main_process_is_found(play: Play) -> None:
    seen_pids: list[int] = []

    def observe(pid: int) -> Sequence[ProcessFacts]:
        seen_pids.append(pid)
        return seen("0-3")

    probing = replace(QUICK, verify_interval_s=1000.0, threads_interval_s=0.01)
    setup = await play(Setup(observe=observe, probing=probing, spawner=FakeSpawner(pid=None)))
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    await setup.controller.verify()
    assert setup.controller.instance.verification is None, "the client of a container is not what was placed"
    setup.spawner.started[-1].pid = 7
    await setup.until(lambda: setup.controller.instance.verification)
    assert set(seen_pids) == {7}


async def test_a_failing_verification_does_not_end_the_watch(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_pid: int) -> Sequence[ProcessFacts]:
        raise RuntimeError("numa_maps is broken")

    setup = await play(Setup(observe=broken, probing=QUICK))
    await setup.post(StartRequested())
    await setup.until(lambda: "numa_maps is broken" in caplog.text)
    asked = setup.prober.asked
    await setup.until(lambda: setup.prober.asked > asked + 2)


async def test_cancelled_it_kills_what_runs() -> None:
    setup = Setup()
    task = asyncio.create_task(setup.build().run())
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert setup.spawner.started[0].orders == ["kill"]


# --- all slots -------------------------------------------------------------------------------


@dataclass
class SeveralSlots:
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
            announce=self.hear, caches=self.caches, held=self.held,
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
    several = SeveralSlots()
    supervisor = several.build()
    task = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(SOON_S):
        await until(lambda: several.states == {State.READY})
        supervisor.suspect(1, 1)
        await getattr(supervisor, way)()
    assert several.states == {State.STOPPED}
    assert all(process.ended.done() for process in several.spawner.started)
    assert len(several.spawner.started) == 3
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# A node with less memory free than its three slots want.
TIGHT = LedgerRow(
    node=0, total_bytes=9, available_bytes=2, reserve_bytes=0, weights_bytes=0, overhead_bytes=3, kv_bytes=0,
    slots=(0, 1, 2),
)  # fmt: skip


async def test_slots_of_a_tight_node_start_one_after_the_other() -> None:
    several = SeveralSlots(ledger=(TIGHT,), probing=QUICK)
    several.prober.health = None
    task = asyncio.create_task(several.build().run())
    await until(lambda: several.prober.asked > 3)
    assert [process.slot for process in several.spawner.started] == [0]
    several.prober.health = True
    await until(lambda: several.states == {State.READY})
    assert [process.slot for process in several.spawner.started] == [0, 1, 2]
    await several.supervisor.stop()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_stop_during_the_first_batch_starts_no_second() -> None:
    several = SeveralSlots(ledger=(TIGHT,), probing=QUICK)
    several.prober.health = None
    task = asyncio.create_task(several.build().run())
    await until(lambda: several.prober.asked > 1)
    await several.supervisor.stop()
    await asyncio.sleep(0.01)
    assert several.states == {State.STOPPED}
    assert [process.slot for process in several.spawner.started] == [0]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_all_start_at_once_and_what_is_compiled_is_kept_before_they_are_ready() -> None:
    several = SeveralSlots(probing=QUICK)
    several.prober.health = None
    task = asyncio.create_task(several.build().run())
    await until(lambda: len(several.spawner.started) == 3)
    assert several.caches.asked == ["prepare 0", "prepare 1", "prepare 2"]
    several.spawner.started[0].say("init engine (profile, create kv cache, warmup model) took 9 s")
    await until(lambda: "keep 0" in several.caches.asked)
    assert several.supervisor.controllers[0].slot_state.state is State.STARTING, (
        "it has compiled, and is not ready yet"
    )
    await several.supervisor.stop()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_failed_start_delays_no_batch() -> None:
    several = SeveralSlots(probing=QUICK)
    several.prober.health = None
    task = asyncio.create_task(several.build().run())
    await until(lambda: len(several.spawner.started) == 3)
    several.spawner.started[0].end(code=1)
    several.prober.health = True
    await until(lambda: several.states == {State.READY})
    await several.supervisor.kill()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_slots_come_and_go() -> None:
    several = SeveralSlots()
    supervisor = several.build()
    task = asyncio.create_task(supervisor.run())
    await until(lambda: several.states == {State.READY})
    several.spawner.started[1].end(code=3)
    await until(lambda: supervisor.failures.total() == 1)
    failures = supervisor.failures
    await supervisor.remove(1)
    assert sorted(supervisor.controllers) == [0, 2]
    assert supervisor.failures == failures  # they are counted on, without their slot
    controller = supervisor.add(a_slot(7), FakeEngine(), LIMITS, SLOW)
    controller.post(StartRequested())
    await until(lambda: controller.slot_state.state is State.READY)
    await supervisor.stop()
    # Slot 1 may have started again before it was removed.
    assert sorted(process.slot for process in several.spawner.started if process.slot != 1) == [0, 2, 7]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_damaged_compile_cache_is_emptied_before_the_next_start(play: Play) -> None:
    setup = await play(Setup(probing=QUICK, prober=FakeProber(health=None)))
    await setup.post(StartRequested())
    await setup.until(lambda: setup.spawner.started)
    setup.spawner.started[0].say("OSError: /c/x.so: file too short")
    setup.spawner.started[0].end(code=1)
    await setup.until(lambda: len(setup.spawner.started) == 2)
    assert setup.caches.asked == ["prepare 0", "purge 0", "prepare 0"]


async def test_a_quarantined_instance_is_probed_and_kept(play: Play) -> None:
    setup = await play(Setup(probing=QUICK))
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    await setup.post(QuarantineRequested())
    await setup.reach(State.DRAINING)
    setup.prober.health = False
    await setup.until(lambda: setup.controller.slot_state.last_cause)
    asked = setup.prober.asked
    await setup.until(lambda: setup.prober.asked > asked + 5)
    assert setup.spawner.started[0].orders == []
    await setup.post(HoldRequested())
    await setup.reach(State.HELD)
    assert setup.controller.stopped


async def test_supervisor_knows_no_other_slot() -> None:
    supervisor = SeveralSlots().build()
    with pytest.raises(LauncherError, match="cannot use slot '7': no such slot") as caught:
        supervisor.post(7, StopRequested())
    assert caught.value.remedy == "slots are 0, 1, 2"


async def test_a_held_slot_is_held_by_the_next_daemon_too(tmp_path: Path) -> None:
    path = tmp_path / "run" / "c.held"
    for life in (1, 2):
        several = SeveralSlots(held=HeldFile(path))
        task = asyncio.create_task(several.build().run())
        controllers = several.supervisor.controllers
        if life == 1:
            await until(lambda t=several: t.states == {State.READY})
            controllers[1].post(HoldRequested())
        await until(lambda t=several: t.states == {State.READY, State.HELD})
        assert controllers[1].slot_state.state is State.HELD
        assert HeldFile(path).slots == {1}
        if life == 2:
            assert {process.slot for process in several.spawner.started} == {0, 2}
            controllers[1].post(ReleaseRequested())
            await until(lambda t=several: t.states == {State.READY})
            assert not path.exists()
        await several.supervisor.stop()
        task.cancel()
        await asyncio.wait({task})


async def test_what_is_no_list_of_slots_holds_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x").write_text("{not json")
    held = HeldFile(tmp_path / "x")
    assert held.slots == frozenset()
    (tmp_path / "file").write_text("")
    lost = HeldFile(tmp_path / "file" / "c.held")
    await lost.note(3, held=True)
    assert lost.slots == {3}
    assert "slot 3: cannot write" in caplog.text
    assert "the next daemon will not know that it is held" in caplog.text


async def test_a_hold_that_cannot_be_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the log and by `status`, until an operator holds or releases a slot: the file is whole then."""
    path = tmp_path / "c.held"
    assert HeldFile(path).lost == ""
    for broken in (b"[1", b"\xff", b"7", b'["one"]'):
        path.write_bytes(broken)
        caplog.clear()
        held = HeldFile(path)
        assert held.lost.startswith(f"cannot read '{path}': it is damaged; slots that were held are started")
        assert held.lost in caplog.text
    supervisor = SeveralSlots(held=held).build()
    assert supervisor.warnings == (held.lost,)
    await held.note(2, held=True)
    assert supervisor.warnings == ()
    assert HeldFile(path).slots == {2}
    path.unlink()
    path.mkdir()
    assert "is a directory" in HeldFile(path).lost


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
    monkeypatch.setattr("launcher.base.background.RETRY_S", 0.001)
    prober = BrokenProber()
    setup = await play(Setup(probing=QUICK, prober=prober))
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    prober.errors[where] = error
    asked = prober.asked

    def late() -> bool:
        setup.clock.now += 1
        return str(error) in (setup.controller.unwatched or "")

    await setup.until(late)
    assert setup.controller.slot_state.state is State.READY
    prober.errors.clear()
    await setup.until(lambda: setup.controller.unwatched is None and prober.asked > asked + 2)
    prober.health = False
    await setup.until(lambda: setup.spawner.started[0].orders == ["kill"])
    prober.health = True
    await setup.reach(State.READY, generation=2)


async def test_a_failing_probe_while_it_loads(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.base.background.RETRY_S", 0.001)
    prober = BrokenProber(errors={"healthy": OSError(24, "Too many open files")})
    setup = await play(Setup(probing=QUICK, prober=prober))
    await setup.post(StartRequested())
    await setup.until(lambda: setup.spawner.started)
    assert setup.controller.unwatched is None, "not yet"
    setup.clock.now += QUICK.unwatched_s + 1
    await setup.until(lambda: setup.controller.unwatched is not None)
    assert "no probe has succeeded" in str(setup.controller.unwatched)
    prober.errors.clear()
    await setup.reach(State.READY)
    await setup.until(lambda: setup.controller.unwatched is None)


async def test_every_cancelled_task_of_an_instance_restarts(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.base.background.RETRY_S", 0.001)
    setup = await play(Setup(probing=QUICK))
    await setup.post(StartRequested())
    await setup.reach(State.READY)
    for task in asyncio.all_tasks():
        if task.get_name().startswith("slot 0: "):
            task.cancel()
    asked = setup.prober.asked
    await setup.until(lambda: setup.prober.asked > asked + 2)
    setup.spawner.started[0].end(code=1)
    await setup.reach(State.READY, generation=2)


async def test_an_exit_is_reported_when_its_diagnosis_fails(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = await play(Setup())
    await setup.post(StartRequested())
    await setup.reach(State.READY)

    def fails(*_: object) -> KernelReport:
        raise ValueError("an odd line")

    monkeypatch.setattr(OomWatch, "report", fails)
    setup.spawner.started[0].end(code=1)
    await setup.reach(State.READY, generation=2)


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
    monkeypatch.setattr("launcher.instances.lifecycle.SHORTAGE_DELAY_S", 0.001)
    caplog.set_level(logging.INFO, "launcher.instances")
    setup = Setup()
    setup.spawner.refusal = shortage
    await play(setup)
    await setup.post(StartRequested())
    await setup.until(lambda: setup.controller.slot_state.generation > LIMITS.crash_limit + 3)
    assert setup.controller.slot_state.crashes == ()
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2, "the cause, and when it is tried again"
    setup.spawner.refusal = None
    await setup.reach(State.READY)


@dataclass
class Share:
    """A network mount with a model: its files, or why they cannot be read."""

    now: ModelFiles | LauncherError
    looks: int = 0

    async def __call__(self, _path: str) -> ModelFiles:
        self.looks += 1
        if isinstance(self.now, LauncherError):
            raise self.now
        return self.now


V1, V2 = ModelFiles("/models/v1", "d1"), ModelFiles("/models/v2", "d2")


async def test_a_model_that_is_away_for_a_while_is_looked_at_again(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.instances.lifecycle.SHORTAGE_DELAY_S", 0.001)
    share = Share(V1)
    setup = await play(
        Setup(slot=replace(a_slot(), files=V1), limits=replace(LIMITS, crash_limit=2), identify=share)
    )
    await setup.post(StartRequested())
    await setup.reach(State.READY, 1)
    share.now = PassingError("cannot read model '/m': no such directory", "mount it")
    setup.spawner.started[0].end(code=1)
    await setup.until(lambda: share.looks > 8)
    cause = setup.controller.slot_state.last_cause
    assert cause is not None
    assert cause.message == "cannot read model '/m': no such directory"
    assert len(setup.spawner.started) == 1, "no engine starts without it"
    share.now = V1
    await setup.reach(State.READY)
    assert len(setup.controller.slot_state.crashes) == 1, "only the exit itself"


async def test_an_instance_is_what_its_path_named_when_it_started(play: Play) -> None:
    share = Share(V1)
    setup = await play(Setup(slot=replace(a_slot(), files=V1), identify=share))
    await setup.post(StartRequested())
    await setup.reach(State.READY, 1)
    share.now = V2
    assert setup.controller.started_from.files == V1
    setup.spawner.started[0].end(code=1)
    await setup.reach(State.READY, 2)
    assert setup.controller.started_from.files == V2
    assert setup.controller.slot.files == V1, "as it was planned"


async def test_a_model_that_was_never_here_is_the_engines_affair(play: Play) -> None:
    share = Share(PassingError("cannot read model '/m': no such directory", "mount it"))
    setup = await play(Setup(identify=share))
    await setup.post(StartRequested())
    await setup.reach(State.READY, 1)


async def test_a_stop_during_the_daemons_own_shortage(play: Play) -> None:
    setup = Setup()
    setup.spawner.refusal = OSError(24, "Too many open files")
    await play(setup)
    await setup.post(StartRequested())
    await setup.reach(State.BACKOFF)
    await setup.post(StopRequested())
    await setup.reach(State.STOPPED)
