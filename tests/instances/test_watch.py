"""Looking at one instance: until it is ready, and then whether it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from fakes import SOON_S, FakeClock, FakeEngine, FakeProber, FakeTraffic, a_slot

from launcher.address import UnixAddress
from launcher.instances.causes import Cause
from launcher.instances.instance import Instance, ProbeSettings
from launcher.instances.watch import DOOMED_S, UNHEALTHY_AFTER, Watcher
from launcher.telemetry.vllm_metrics import EngineMetrics

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
class Scene:
    """One watcher and what it looks at. Every probe takes `step_s` on the clock."""

    prober: FakeProber = field(default_factory=FakeProber)
    traffic: FakeTraffic = field(default_factory=FakeTraffic)
    clock: FakeClock = field(default_factory=FakeClock)
    engine: FakeEngine = field(default_factory=FakeEngine)
    instance: Instance = field(default_factory=Instance)
    pressure: float | None = 1.0
    words: list[str] = field(default_factory=list)
    looks: int = 0
    until: int = 10**9
    step_s: float = 10.0
    each: Callable[[], None] = lambda: None

    def lives(self) -> bool:
        """Asked twice a look."""
        self.looks += 1
        self.clock.now += self.step_s / 2
        self.each()
        return self.looks < self.until

    def watcher(self) -> Watcher:
        return Watcher(
            a_slot(), 1, self.instance, engine=self.engine, prober=self.prober, traffic=self.traffic, probing=PROBES,
            clock=self.clock, lives=self.lives, suspected=asyncio.Event(), last_words=lambda: self.words,
            pressure=lambda: self.pressure,
        )  # fmt: skip

    async def failure(self) -> Cause | None:
        async with asyncio.timeout(SOON_S):
            watcher = self.watcher()
            assert await watcher.ready(WHERE) is True
            return await watcher.failure(WHERE)


async def test_work_without_progress_is_hung_and_says_what_stood_still() -> None:
    scene = Scene(prober=FakeProber(counted=COUNTED), traffic=FakeTraffic(requests=3, events=7))
    cause = await scene.failure()
    assert cause is not None
    assert cause.name == "hung"
    assert cause.evidence[0].startswith("3 requests in flight and no progress for 6")
    assert "10 tokens generated, 5 steps, 1 running" in cause.evidence[1]
    assert scene.instance.progress.counted == COUNTED


async def test_tokens_that_the_front_door_relays_are_progress() -> None:
    scene = Scene(prober=FakeProber(counted=COUNTED), traffic=FakeTraffic(requests=3), until=200)

    def relay() -> None:
        scene.traffic.events += 1

    scene.each = relay
    assert await scene.failure() is None


async def test_a_starved_machine_is_given_time() -> None:
    quick = Scene(prober=FakeProber(counted=COUNTED), traffic=FakeTraffic(requests=1))
    starved = Scene(prober=FakeProber(counted=COUNTED), traffic=FakeTraffic(requests=1), pressure=95.0)
    await quick.failure()
    assert await starved.failure() is not None
    assert starved.looks > 3 * quick.looks


async def test_an_engine_that_counts_nothing_hangs_only_in_silence() -> None:
    busy = Scene(traffic=FakeTraffic(requests=1), until=100)
    assert await busy.failure() is None
    silent = Scene(traffic=FakeTraffic(requests=1))
    silent.each = lambda: setattr(silent.prober, "health", True if silent.looks < 5 else None)
    cause = await silent.failure()
    assert cause is not None
    assert cause.name == "hung"
    assert silent.instance.responsive is False


async def test_an_idle_one_is_asked_for_a_token_now_and_then() -> None:
    scene = Scene(until=400)
    assert await scene.failure() is None
    assert 4 <= scene.prober.canaries <= 7


@pytest.mark.parametrize(
    ("answer", "name", "asked"), [(None, "hung", 1), (False, "unhealthy", UNHEALTHY_AFTER)]
)
async def test_a_canary_that_dies(answer: bool | None, name: str, asked: int) -> None:
    scene = Scene(prober=FakeProber(token=answer))
    cause = await scene.failure()
    assert cause is not None
    assert (cause.name, scene.prober.canaries) == (name, asked)


async def test_no_canary_where_the_engine_completes_nothing() -> None:
    scene = Scene(engine=FakeEngine(wants_completion_probe=False), until=400)
    assert await scene.failure() is None
    assert scene.prober.canaries == 0


async def test_a_start_that_has_failed_and_does_not_end() -> None:
    scene = Scene(prober=FakeProber(health=False), words=["EngineCore failed to start.", "[Errno 98]"])
    scene.instance.doomed_at = scene.clock.now
    async with asyncio.timeout(SOON_S):
        cause = await scene.watcher().ready(WHERE)
    assert isinstance(cause, Cause)
    assert cause.name == "port-or-socket-in-use"
    assert scene.clock.now > 1000 + DOOMED_S


async def test_a_life_that_ends_while_it_loads() -> None:
    assert await Scene(prober=FakeProber(health=False), until=3).watcher().ready(WHERE) is False


async def test_one_that_lies_is_asked_for_a_token_beside_its_requests() -> None:
    scene = Scene(prober=FakeProber(token=None), traffic=FakeTraffic(requests=3, nothing_comes=True))
    cause = await scene.failure()
    assert cause is not None
    assert cause.name == "hung"
    assert cause.evidence[0] == "nothing has come of its 3 requests (proxy.hung_timeout_s)"
    assert "beside them within 60 s" in cause.evidence[1]
    assert scene.prober.canaries == 1


@pytest.mark.parametrize("answer", [True, False])
async def test_one_that_answers_it_is_left_to_its_work(answer: bool) -> None:
    """Too busy to take one more is an answer, too."""
    scene = Scene(
        prober=FakeProber(token=answer), traffic=FakeTraffic(requests=3, nothing_comes=True), until=100
    )
    assert await scene.failure() is None
    assert 2 <= scene.prober.canaries <= 9, "again after stall_timeout_s"


@pytest.mark.parametrize(
    ("health", "counted"), [(True, COUNTED), (None, None)], ids=["it counts", "it says nothing"]
)
async def test_it_is_not_asked_where_something_else_tells(
    health: bool | None, counted: EngineMetrics | None
) -> None:
    scene = Scene(
        prober=FakeProber(counted=counted), traffic=FakeTraffic(requests=3, nothing_comes=True), until=20
    )

    def move() -> None:
        scene.traffic.events += 1
        scene.prober.health = True if scene.looks < 3 else health

    scene.each = move
    assert await scene.failure() is None
    assert scene.prober.canaries == 0
