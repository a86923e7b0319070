"""Probes one instance: first until it is ready, then for health and progress, which progress.py judges."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from launcher.address import Address
from launcher.background import Failures, attempt
from launcher.cpuset import CpuSet
from launcher.engines.base import Engine
from launcher.host.oom import NodeMemory, node_memory, process_ended, process_tree
from launcher.host.pressure import cpu_pressure
from launcher.instances.causes import Cause
from launcher.instances.diagnosis import exited, failed_start, hung, hung_or_dead
from launcher.instances.health import COMPLETION_TIMEOUT_S
from launcher.instances.instance import Instance
from launcher.instances.ports import Prober, Traffic
from launcher.instances.probe_settings import ProbeSettings
from launcher.instances.progress import (
    Observation,
    Progress,
    canary_is_due,
    observe,
    patience,
    pressure_line,
    proved,
    stall,
)
from launcher.plan import Slot

log = logging.getLogger("launcher.instances")

# Consecutive negative answers of the health path, or refused canaries, that end an instance.
UNHEALTHY_AFTER: Final = 2
# An engine that has printed that its start failed gets this long to exit: its processes wait up to 5 s for each other.
FAILED_START_EXIT_S: Final = 15.0
# Between two samples of an instance's memory and processes, which the diagnosis of its exit reads.
SAMPLE_S: Final = 2.0


class Watcher:
    """Probes `instance` in `slot` for as long as `is_current`."""

    def __init__(
        self,
        slot: Slot,
        instance: Instance,
        *,
        engine: Engine,
        prober: Prober,
        traffic: Traffic,
        settings: Callable[[], ProbeSettings],
        clock: Callable[[], float],
        is_current: Callable[[], bool],
        suspected: asyncio.Event,
        output: Callable[[], Sequence[str]],
        pressure: Callable[[], float | None] = cpu_pressure,
        ended: Callable[[int], bool] = process_ended,
        on_probed: Callable[[], None] = lambda: None,
    ) -> None:
        """`settings` is read at each probe; `output` returns the instance's last lines; `on_probed` is called after each
        probe that succeeded. A probe that fails because of the daemon itself raises OSError."""
        self._slot = slot
        self._instance = instance
        self._engine = engine
        self._prober = prober
        self._traffic = traffic
        self._settings = settings
        self._clock = clock
        self._is_current = is_current
        self._suspected = suspected
        self._output = output
        self._pressure = pressure
        self._ended = ended
        self._on_probed = on_probed
        self._sample_failures = Failures(log, f"slot {slot.id}: sample memory and processes", slot=slot.id)
        self._refusals = 0
        self._canaries_refused = 0
        self._sample_at = 0.0
        self._canary_beside_at = 0.0

    async def ready(self, address: Address) -> bool | Cause:
        """True after the health path and one completion have succeeded; False when the instance ended before; a Cause
        when its start has failed and its process still runs."""
        while self._is_current():
            await self._sample()
            failed_at = self._instance.start_failed_at
            if failed_at is not None and self._clock() - failed_at > FAILED_START_EXIT_S:
                return failed_start(self._output(), self._clock() - failed_at)
            healthy = await self._prober.healthy(address, self._settings().probe_timeout_s)
            self._probed(COMPLETION_TIMEOUT_S if healthy else 0.0)
            if healthy and (
                not self._engine.wants_completion_probe
                or await self._prober.completes(address, self._slot.model.name)
            ):
                self._instance.became_ready(self._clock())
                return True
            await asyncio.sleep(self._settings().ready_poll_s)
        return False

    async def failure(self, address: Address) -> Cause | None:
        """Probe until the instance has ended (None), or has failed while its process still runs (why).

        Two negative answers are a failure. Silence alone is not: a busy engine may not answer. Work without progress is.
        """
        while self._is_current():
            if self._refusals:  # the whole pause, however often the proxy reports the instance
                await asyncio.sleep(self._settings().recheck_s)
            else:
                await self._pause(self._settings().probe_interval_s)
            if not self._is_current():
                return None
            if (cause := await self._probe(address)) is not None:
                return cause
        return None

    async def _probe(self, address: Address) -> Cause | None:
        await self._sample()
        settings = self._settings()
        healthy = await self._prober.healthy(address, settings.probe_timeout_s)
        self._instance.answered(responsive=healthy is not None)
        self._refusals = self._refusals + 1 if healthy is False else 0
        if healthy is False:
            self._probed()
            return self._refused() if self._refusals >= UNHEALTHY_AFTER else None
        counters = await self._prober.counters(address, settings.probe_timeout_s)
        self._probed()
        now = self._clock()
        slot, generation = self._slot.id, self._instance.generation
        seen = Observation(
            at=now, responsive=healthy is not None, counters=counters,
            in_flight=self._traffic.in_flight(slot, generation),
            relayed=self._traffic.relayed(slot, generation),
        )  # fmt: skip
        progress = observe(self._instance.progress, seen)
        self._instance.progressed(progress)
        if evidence := stall(progress, now, settings.stall_timeout_s, self._pressure()):
            return hung(evidence)
        if not self._engine.wants_completion_probe:
            return None
        if canary_is_due(progress, now, settings.canary_interval_s):
            return await self._canary(address)
        return await self._canary_beside(address, seen) if self._may_lie(progress, seen) else None

    def _refused(self) -> Cause:
        process = self._instance.process
        if process is not None and self._ended(process.pid):
            return exited()
        return hung_or_dead("its health path no longer answers 200")

    def _may_lie(self, progress: Progress, seen: Observation) -> bool:
        """It answers its health path and shows no exact counters, and its requests get no answers."""
        counts = progress.counted is not None and not progress.counted.rounded
        if counts or not seen.responsive or seen.at < self._canary_beside_at:
            return False
        return self._traffic.silent(self._slot.id, self._instance.generation)

    async def _canary_beside(self, address: Address, seen: Observation) -> Cause | None:
        """One token beside its requests. Any answer, also a refusal, shows that it does not hang."""
        answer, limit_s, pressure = await self._one_token(address)
        self._canary_beside_at = self._clock() + self._settings().stall_timeout_s
        if answer is not None or not self._is_current():
            return None
        silent = f"none of its {seen.in_flight} requests was answered (proxy.hung_timeout_s)"
        canary = f"no answer to a completion of one token beside them within {limit_s:.0f} s (canary)"
        return hung((silent, canary, pressure_line(pressure)))

    async def _canary(self, address: Address) -> Cause | None:
        answer, limit_s, pressure = await self._one_token(address)
        if not self._is_current():
            return None
        if answer is None:
            canary = f"idle, and no answer to a completion of one token within {limit_s:.0f} s (canary)"
            return hung((canary, pressure_line(pressure)))
        if answer:
            self._instance.progressed(proved(self._instance.progress, self._clock()))
            self._canaries_refused = 0
            return None
        self._canaries_refused += 1
        if self._canaries_refused < UNHEALTHY_AFTER:
            return None
        return hung_or_dead("it refused a completion of one token (canary), twice")

    async def _one_token(self, address: Address) -> tuple[bool | None, float, float | None]:
        """The answer, its time limit in seconds, and the cpu pressure at its begin."""
        pressure = self._pressure()
        limit_s = patience(self._settings().stall_timeout_s, pressure)
        self._probed(limit_s)
        return await self._prober.canary(address, self._slot.model.name, limit_s), limit_s, pressure

    def _probed(self, next_takes_s: float = 0.0) -> None:
        now = self._clock()
        self._instance.probed(now, now + next_takes_s + self._settings().unwatched_s)
        self._on_probed()

    async def _sample(self) -> None:
        if self._clock() >= self._sample_at:
            self._sample_at = self._clock() + SAMPLE_S
            await attempt(self._read_memory, self._sample_failures)

    async def _read_memory(self) -> None:
        process = self._instance.process
        nodes = self._slot.placement.membind
        self._instance.sampled(*await asyncio.to_thread(_memory_of, nodes, process.pid if process else None))

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._suspected.wait()
        except TimeoutError:
            return
        self._suspected.clear()


def _memory_of(nodes: CpuSet, pid: int | None) -> tuple[tuple[NodeMemory, ...], frozenset[int]]:
    return node_memory(nodes), frozenset() if pid is None else process_tree(pid)
