"""Stand-ins for the effects that the supervisor needs (launcher.instances.ports): no processes, no sockets."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from launcher.base.address import Address, UnixAddress
from launcher.base.cpuset import CpuSet
from launcher.base.watched_file import Looks
from launcher.config.schema import Config, Model
from launcher.engines.base import Expected, Launch, Traits, Unwanted
from launcher.engines.log import Accelerator, EngineLog
from launcher.engines.vllm.output import VLLM_LOG, ZENTORCH
from launcher.engines.vllm.settings import effective_config
from launcher.instances.ports import Adopted, Exit
from launcher.plan.plan import Placement, Slot
from launcher.telemetry.engine_metrics import EngineMetrics

# The longest that a test waits for what has to happen: generous, because other jobs may have the cpus.
SOON_S = float(os.environ.get("NUMA_LAUNCHER_TEST_SOON_S", "60"))


async def until(check: Callable[[], object], pause_s: float = 0.001) -> None:
    """Wait for what nothing announces."""
    async with asyncio.timeout(SOON_S):
        while not check():  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(pause_s)


def looked() -> None:
    """Wait until the looks at watched files that have begun have ended."""
    until = time.monotonic() + SOON_S
    for thread in threading.enumerate():
        while isinstance(thread, Looks) and thread.since is not None:
            assert time.monotonic() < until
            time.sleep(0.001)


def a_slot(number: int = 0, *, cpus: str = "0-3", nodes: str = "0") -> Slot:
    """A slot of a model called "m"."""
    cpu_set, membind = CpuSet.parse(cpus), CpuSet.parse(nodes)
    placement = Placement(
        socket=0, node=membind.first if membind else None, cpus=cpu_set, membind=membind, omp_cpus=(cpu_set,)
    )
    model = Model(name="m", path="/m")
    effective = effective_config(model, Config(models=(model,)))
    return Slot(id=number, model=model, effective=effective, placement=placement, kv_cache_bytes=None)


@dataclass
class FakeClock:
    """Seconds that pass when a test says so."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeEngine:
    """Nothing but an address per generation."""

    wants_completion_probe: bool = True
    health_path: str = "/health"
    refusal: Exception | None = None
    log: EngineLog = VLLM_LOG
    accelerator: Accelerator | None = ZENTORCH
    unwanted: tuple[Unwanted, ...] = ()

    def traits(self, model: Model) -> Traits:
        return Traits()

    def launch(self, slot: Slot, generation: int) -> Launch:
        if self.refusal is not None:
            raise self.refusal
        address = UnixAddress(f"/run/slot{slot.id}-{generation}.sock")
        return Launch(argv=("engine",), env={}, secrets=frozenset(), address=address, files=slot.files,
            expected=Expected(binds_memory=True),
        )  # fmt: skip


@dataclass
class FakeProcess:
    """A process that ends when it is told to, or at once by a signal unless it is stubborn."""

    pid: int | None
    slot: int
    generation: int
    say: Callable[[str], None]
    stubborn: bool = False
    """SIGTERM is ignored."""
    orders: list[str] = field(default_factory=list)
    ended: asyncio.Future[Exit] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def wait(self) -> Exit:
        return await asyncio.shield(self.ended)

    def end(self, code: int | None = None, signal: int | None = None) -> None:
        if not self.ended.done():
            self.ended.set_result(Exit(code, signal))

    def terminate(self) -> None:
        self.orders.append("terminate")
        if not self.stubborn:
            self.end(code=0)

    def kill(self) -> None:
        self.orders.append("kill")
        self.end(signal=9)

    def leave(self) -> None:
        self.kill()


@dataclass
class FakeSpawner:
    """Remembers what was started, and fails a test that starts a second process in an occupied slot."""

    refusal: Exception | None = None
    stubborn: bool = False
    started: list[FakeProcess] = field(default_factory=list)
    inheritance: dict[int, Adopted] = field(default_factory=dict)
    """What an earlier daemon left."""
    pid: int | None = field(default_factory=os.getpid)
    """The pid of each process that it starts."""

    async def spawn(
        self, slot: int, generation: int, launch: Launch, on_line: Callable[[str], None]
    ) -> FakeProcess:
        if self.refusal is not None:
            raise self.refusal
        living = [old for old in self.started if old.slot == slot and not old.ended.done()]
        assert not living, f"two processes in slot {slot}"
        process = FakeProcess(self.pid, slot, generation, on_line, self.stubborn)
        self.started.append(process)
        return process

    async def adopt(self, slots: Mapping[int, Callable[[int], Launch]]) -> Mapping[int, Adopted]:
        return self.inheritance

    async def keeps_instances(self) -> bool:
        return False

    async def close(self, *, for_good: bool) -> None:
        pass


@dataclass
class FakeProber:
    """Answers as it is told to; counts the questions."""

    health: bool | None = True
    completion: bool = True
    token: bool | None = True
    """A canary's answer."""
    counted: EngineMetrics | None = None
    asked: int = 0
    completions: int = 0
    canaries: int = 0

    async def healthy(self, address: Address, timeout_s: float) -> bool | None:
        self.asked += 1
        return self.health

    async def completes(self, address: Address, model: str) -> bool:
        self.completions += 1
        return self.completion

    async def canary(self, address: Address, model: str, timeout_s: float) -> bool | None:
        self.canaries += 1
        return self.token

    async def counters(self, address: Address, timeout_s: float) -> EngineMetrics | None:
        return self.counted


@dataclass
class FakeCaches:
    """Remembers what was asked of the compile caches."""

    asked: list[str] = field(default_factory=list)

    def prepare(self, slot: int, launch: Launch) -> None:
        self.asked.append(f"prepare {slot}")

    def purge(self, slot: int, launch: Launch) -> None:
        self.asked.append(f"purge {slot}")

    def keep(self, slot: int, launch: Launch) -> None:
        self.asked.append(f"keep {slot}")


@dataclass
class FakeTraffic:
    """What the proxy would say."""

    requests: int = 0
    events: int = 0
    nothing_comes: bool = False

    def in_flight(self, slot: int, generation: int) -> int:
        return self.requests

    def relayed(self, slot: int, generation: int) -> int:
        return self.events

    def silent(self, slot: int, generation: int) -> bool:
        return self.nothing_comes
