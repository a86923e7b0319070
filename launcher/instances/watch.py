"""Probes one instance: first until it is ready, then for health and progress, which progress.py judges."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import aiohttp

from launcher.base.address import Address
from launcher.base.background import Failures, attempt, time_limit
from launcher.base.cpuset import CpuSet
from launcher.base.errors import OWN_SHORTAGE
from launcher.base.http_json import fetch, session_to, url_of
from launcher.engines.base import Engine
from launcher.engines.causes import Cause
from launcher.instances.diagnosis import exited, failed_start, hung, hung_or_dead
from launcher.instances.instance import Instance
from launcher.instances.ports import Prober, Traffic
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
from launcher.instances.slot_state import ProbeSettings
from launcher.machine.load import cpu_pressure
from launcher.machine.oom import NodeMemory, node_memory, process_ended, process_tree
from launcher.plan.plan import Slot
from launcher.telemetry.engine_metrics import EngineMetrics, parse

log = logging.getLogger("launcher.instances")


# --- Health path, completions and metrics of an instance, over HTTP. ---

# The first completion may wait for a compilation.
COMPLETION_TIMEOUT_S: Final = 600.0
# A UNIX socket with a full backlog: connect(2) returns EAGAIN, which uvloop reports; asyncio takes it for "in progress" and
# then uses a socket that is not connected (ENOTCONN, EINVAL).
BACKLOG_FULL: Final = frozenset({errno.EAGAIN, errno.ENOTCONN, errno.EINVAL})
# Between two tries while the daemon is short of descriptors or memory.
SHORTAGE_S: Final = 1.0
# Tried in this order until the model serves one of them.
_PROBES: Final = (
    ("/v1/completions", {"prompt": "Hello, what is your name?", "max_tokens": 1, "temperature": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}),
    ("/v1/embeddings", {"input": "Hello"}),
)


class HttpProber:
    """One connection per probe: none is reused after the instance has been replaced."""

    def __init__(self, health_path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` stands still while the event loop does not run: an engine's answer may wait unread then."""
        self._health_path = health_path
        self._clock = clock

    async def healthy(self, address: Address, timeout_s: float) -> bool | None:
        """True: answered 200. False: answered otherwise, or connection refused. None: no answer in time, or a full backlog.

        Raises OSError where the daemon itself is short of descriptors, memory or threads.
        """
        try:
            async with (
                time_limit(self._clock, timeout_s),
                session_to(address) as session,
                session.get(url_of(address, self._health_path)) as response,
            ):
                return response.status == 200
        except TimeoutError:
            return None
        except OSError as error:  # aiohttp.ClientOSError is one
            if error.errno in OWN_SHORTAGE:
                raise
            return None if error.errno in BACKLOG_FULL else False
        except aiohttp.ClientError:
            return False

    async def completes(self, address: Address, model: str) -> bool:
        """True when one completion of one token (or one embedding) comes back with 200."""
        return await self.canary(address, model, COMPLETION_TIMEOUT_S) is True

    async def canary(self, address: Address, model: str, timeout_s: float) -> bool | None:
        """As `completes`; None: no answer within `timeout_s`, counted from when the daemon has a descriptor for it."""
        while True:
            try:
                return await self._one_token(address, model, timeout_s)
            except OSError as error:
                if error.errno not in OWN_SHORTAGE:
                    return False
            await asyncio.sleep(SHORTAGE_S)

    async def _one_token(self, address: Address, model: str, timeout_s: float) -> bool | None:
        """Raises OSError where the connection fails."""
        try:
            async with time_limit(self._clock, timeout_s), session_to(address) as session:
                for path, body in _PROBES:
                    async with session.post(url_of(address, path), json={"model": model, **body}) as response:
                        await response.read()
                        if response.status == 200:
                            return True
        except TimeoutError:
            return None
        except aiohttp.ClientOSError:
            raise
        except aiohttp.ClientError:
            return False
        return False

    async def counters(self, address: Address, timeout_s: float) -> EngineMetrics | None:
        """The engine's own counters; None where it has none or does not answer in time. Raises OSError."""
        page = await fetch(address, "/metrics", timeout_s)
        return None if page is None else parse(page.decode(errors="replace"))


# Consecutive negative answers of the health path, or refused canaries, that end an instance.
UNHEALTHY_AFTER: Final = 2
# An engine that has printed that its start failed gets this long to exit: its processes wait up to 5 s for each other.
FAILED_START_EXIT_S: Final = 15.0
# Between two samples of an instance's memory and processes, which the diagnosis of its exit reads.
SAMPLE_S: Final = 2.0
# Between two looks whether a starting instance answers, at first: some engines are ready within a second, others in minutes.
_FIRST_POLL_S: Final = 0.05
_POLL_GROWTH: Final = 1.2


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
        pause_s = min(_FIRST_POLL_S, self._settings().ready_poll_s)
        while self._is_current():
            await self._sample()
            failed_at = self._instance.start_failed_at
            if failed_at is not None and self._clock() - failed_at > FAILED_START_EXIT_S:
                return failed_start(self._output(), self._clock() - failed_at, self._engine.log)
            healthy = await self._prober.healthy(address, self._settings().probe_timeout_s)
            self._probed(COMPLETION_TIMEOUT_S if healthy else 0.0)
            if healthy and (
                not self._engine.wants_completion_probe
                or await self._prober.completes(address, self._slot.model.name)
            ):
                self._instance.became_ready(self._clock())
                return True
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * _POLL_GROWTH, self._settings().ready_poll_s)
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
        if process is not None and process.pid is not None and self._ended(process.pid):
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
