"""The probes of one instance: until it is ready, then for health and progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace
from support.fakes import SOON_S, FakeClock, FakeEngine, FakeProber, FakeProcess, FakeTraffic, a_slot

from launcher.base.address import UnixAddress
from launcher.base.background import RunningClock
from launcher.engines.causes import Cause
from launcher.instances.instance import Instance
from launcher.instances.slot_state import ProbeSettings
from launcher.instances.watch import FAILED_START_EXIT_S, UNHEALTHY_AFTER, Watcher
from launcher.machine.oom import OomWatch
from launcher.telemetry.engine_metrics import EngineMetrics

WHERE = UnixAddress("/x")
PROBES = ProbeSettings(
    probe_interval_s=0.001,
    tail_lines=9,
    ready_poll_s=0.001,
    recheck_s=0.001,
    stall_timeout_s=60,
    canary_interval_s=300,
)
COUNTED = EngineMetrics(running=1, waiting=0, generated=10, steps=5)


@dataclass
class Setup:
    """One watcher and what it probes at. Every probe takes `step_s` on the clock."""

    prober: FakeProber = field(default_factory=FakeProber)
    traffic: FakeTraffic = field(default_factory=FakeTraffic)
    clock: FakeClock = field(default_factory=FakeClock)
    engine: FakeEngine = field(default_factory=FakeEngine)
    instance: Instance = field(default_factory=Instance)
    pressure: float | None = 1.0
    ended: bool = False
    output: list[str] = field(default_factory=list)
    probes: int = 0
    until: int = 10**9
    step_s: float = 10.0
    running: RunningClock | None = None
    settings: ProbeSettings = PROBES
    each: Callable[[], None] = lambda: None

    def is_current(self) -> bool:
        """Called twice per probe."""
        self.probes += 1
        self.clock.now += self.step_s / 2
        self.each()
        return self.probes < self.until

    def watcher(self) -> Watcher:
        return Watcher(
            a_slot(), self.instance, engine=self.engine, prober=self.prober, traffic=self.traffic,
            settings=lambda: self.settings, clock=self.running or self.clock, is_current=self.is_current,
            suspected=asyncio.Event(), output=lambda: self.output, pressure=lambda: self.pressure,
            ended=lambda _pid: self.ended,
        )  # fmt: skip

    async def failure(self) -> Cause | None:
        async with asyncio.timeout(SOON_S):
            watcher = self.watcher()
            assert await watcher.ready(WHERE) is True
            return await watcher.failure(WHERE)


async def test_work_without_progress_is_hung_with_evidence() -> None:
    setup = Setup(prober=FakeProber(counted=COUNTED), traffic=FakeTraffic(requests=3, events=7))
    cause = await setup.failure()
    assert cause is not None
    assert cause.name == "hung"
    assert cause.evidence[0].startswith("3 requests in flight and no progress for 6")
    assert "10 tokens generated, 5 steps, 1 running" in cause.evidence[1]
    assert setup.instance.progress.counted == COUNTED


async def test_a_freeze_of_the_whole_host_is_no_hang() -> None:
    setup = Setup(prober=FakeProber(counted=COUNTED), traffic=FakeTraffic(requests=3), step_s=1.0, until=60)
    setup.running = RunningClock(setup.clock)

    def freeze() -> None:
        setup.clock.now += 3600 if setup.probes == 20 else 0

    setup.each = freeze
    assert await setup.failure() is None
    setup.until = 10**9
    cause = await setup.failure()
    assert cause is not None
    assert cause.name == "hung"


async def test_tokens_that_the_proxy_relays_are_progress() -> None:
    setup = Setup(prober=FakeProber(counted=COUNTED), traffic=FakeTraffic(requests=3), until=200)

    def relay() -> None:
        setup.traffic.events += 1

    setup.each = relay
    assert await setup.failure() is None


async def test_a_starved_instance_gets_more_time() -> None:
    quick = Setup(prober=FakeProber(counted=COUNTED), traffic=FakeTraffic(requests=1))
    starved = Setup(prober=FakeProber(counted=COUNTED), traffic=FakeTraffic(requests=1), pressure=95.0)
    await quick.failure()
    assert await starved.failure() is not None
    assert starved.probes > 3 * quick.probes


async def test_an_engine_without_counters_is_hung_only_when_it_is_silent() -> None:
    busy = Setup(traffic=FakeTraffic(requests=1), until=100)
    assert await busy.failure() is None
    silent = Setup(traffic=FakeTraffic(requests=1))
    silent.each = lambda: setattr(silent.prober, "health", True if silent.probes < 5 else None)
    cause = await silent.failure()
    assert cause is not None
    assert cause.name == "hung"
    assert silent.instance.responsive is False


async def test_an_idle_instance_gets_canaries() -> None:
    setup = Setup(until=400)
    assert await setup.failure() is None
    assert 4 <= setup.prober.canaries <= 7


@pytest.mark.parametrize(
    ("answer", "name", "asked"), [(None, "hung", 1), (False, "unhealthy", UNHEALTHY_AFTER)]
)
async def test_a_failed_canary(answer: bool | None, name: str, asked: int) -> None:
    setup = Setup(prober=FakeProber(token=answer))
    cause = await setup.failure()
    assert cause is not None
    assert (cause.name, setup.prober.canaries) == (name, asked)


@pytest.mark.parametrize(("ended", "name"), [(False, "unhealthy"), (True, "exited")])
async def test_refusals(ended: bool, name: str) -> None:
    """Of an instance whose main process has ended, the exit tells the cause."""
    setup = Setup(ended=ended)
    setup.instance.spawned(FakeProcess(7, 0, 1, print), OomWatch(7), 0.0, 0.0)
    setup.each = lambda: setattr(setup.prober, "health", setup.probes < 5)
    cause = await setup.failure()
    assert cause is not None
    assert cause.name == name


async def test_a_container_whose_main_process_is_not_found_has_not_ended() -> None:
    setup = Setup(ended=True)
    setup.instance.spawned(FakeProcess(None, 0, 1, print), OomWatch(None), 0.0, 0.0)
    assert setup.instance.pids == frozenset()
    setup.each = lambda: setattr(setup.prober, "health", setup.probes < 5)
    cause = await setup.failure()
    assert cause is not None
    assert cause.name == "unhealthy"


async def test_no_canary_for_an_engine_without_completions() -> None:
    setup = Setup(engine=FakeEngine(wants_completion_probe=False), until=400)
    assert await setup.failure() is None
    assert setup.prober.canaries == 0


async def test_a_failed_start_that_does_not_exit() -> None:
    setup = Setup(prober=FakeProber(health=False), output=["EngineCore failed to start.", "[Errno 98]"])
    setup.instance.start_failed(setup.clock.now)
    async with asyncio.timeout(SOON_S):
        cause = await setup.watcher().ready(WHERE)
    assert isinstance(cause, Cause)
    assert cause.name == "port-or-socket-in-use"
    assert setup.clock.now > 1000 + FAILED_START_EXIT_S


async def test_a_starting_instance_is_looked_at_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        paused.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", pause)
    setup = Setup(prober=FakeProber(health=False), until=60, settings=replace(PROBES, ready_poll_s=0.5))
    assert await setup.watcher().ready(WHERE) is False
    assert sum(paused[:5]) < 0.4
    assert paused == sorted(paused)
    assert paused[-1] == 0.5


async def test_an_instance_that_ends_while_it_loads() -> None:
    assert await Setup(prober=FakeProber(health=False), until=3).watcher().ready(WHERE) is False


async def test_a_canary_beside_silent_requests() -> None:
    setup = Setup(prober=FakeProber(token=None), traffic=FakeTraffic(requests=3, nothing_comes=True))
    cause = await setup.failure()
    assert cause is not None
    assert cause.name == "hung"
    assert cause.evidence[0] == "none of its 3 requests was answered (proxy.hung_timeout_s)"
    assert "beside them within 60 s" in cause.evidence[1]
    assert setup.prober.canaries == 1


@pytest.mark.parametrize("answer", [True, False])
async def test_an_answered_canary_ends_nothing(answer: bool) -> None:
    """A refusal is an answer, too."""
    setup = Setup(
        prober=FakeProber(token=answer), traffic=FakeTraffic(requests=3, nothing_comes=True), until=100
    )
    assert await setup.failure() is None
    assert 2 <= setup.prober.canaries <= 9, "again after stall_timeout_s"


@pytest.mark.parametrize(("health", "counted"), [(True, COUNTED), (None, None)], ids=["counters", "silence"])
async def test_no_canary_where_counters_or_the_health_path_tell(
    health: bool | None, counted: EngineMetrics | None
) -> None:
    setup = Setup(
        prober=FakeProber(counted=counted), traffic=FakeTraffic(requests=3, nothing_comes=True), until=20
    )

    def move() -> None:
        setup.traffic.events += 1
        setup.prober.health = True if setup.probes < 3 else health

    setup.each = move
    assert await setup.failure() is None
    assert setup.prober.canaries == 0
