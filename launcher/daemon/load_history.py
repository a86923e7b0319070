"""The daemon's history of the load: what is read every 2 s, and answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from launcher.base.background import Failures
from launcher.base.errors import NotFoundError
from launcher.instances.progress import Progress
from launcher.instances.slot_controller import SlotController
from launcher.instances.slot_state import State
from launcher.machine.oom import NodeMemory, node_memory
from launcher.proxy.server import ProxyServer
from launcher.telemetry.engine_metrics import EngineCounts
from launcher.telemetry.history import HOUR, Reply
from launcher.telemetry.load_rows import Sample, Sampling, SlotSample
from launcher.telemetry.load_table import LoadTable

log = logging.getLogger("launcher.history")

_STEP_S: Final = HOUR.step_ms / 1000


class LoadHistory:
    """`table`: None where [telemetry] disables it. `controllers`: of the slots; `busy`: share of each CPU since the last
    call; `cost_per_hour`: None without a price."""

    def __init__(
        self,
        table: LoadTable | None,
        proxy: ProxyServer,
        controllers: Callable[[], Mapping[int, SlotController]],
        busy: Callable[[], Awaitable[Mapping[int, float]]],
        cost_per_hour: Callable[[], float | None],
        *,
        read_memory: Callable[[Iterable[int]], tuple[NodeMemory, ...]] = node_memory,
        clock: Callable[[], float] | None = None,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`clock`: monotonic; the event loop's by default."""
        self._table = table
        self._proxy = proxy
        self._controllers = controllers
        self._busy = busy
        self._cost_per_hour = cost_per_hour
        self._read_memory = read_memory
        self._clock = clock or asyncio.get_running_loop().time
        self._wall = wall
        self._sleep = sleep
        self._since = self._clock()
        self._sampling = Sampling()
        self.failures = Failures(log, "record the history")

    async def run(self) -> None:
        """Until it is cancelled."""
        if self._table is None:
            return
        ms = await self._next(0)
        while True:
            rows = self._sampling.rows(await self.sample(), ms)
            await asyncio.to_thread(self._table.add, rows)
            self.failures.end()
            ms = await self._next(ms)

    async def _next(self, last: int) -> int:
        """Sleep until a step after `last` ends; its end. The clock may be set meanwhile."""
        now = self._wall()
        wait_s = _STEP_S - now % _STEP_S
        if round((now + wait_s) / _STEP_S) * HOUR.step_ms == last:
            wait_s += _STEP_S  # it woke up a moment before the step's end
        await self._sleep(wait_s)
        return round(self._wall() / _STEP_S) * HOUR.step_ms

    def warnings(self) -> tuple[str, ...]:
        """What `status` says of it."""
        return (f"the history is not recorded: {self.failures.last}",) if self.failures.count else ()

    async def answer(self, span: str, after: int, slots: str) -> bytes:
        """The reply of ``GET /v1/history``. Raises LauncherError."""
        if self._table is None:
            raise NotFoundError(
                "cannot show the history: it is off",
                "set history = true in [telemetry] and restart the daemon",
            )
        text = bytearray()
        found = await asyncio.to_thread(self._table.find, span, after)
        for part in Reply(found, slots).parts():
            text += part
            await asyncio.sleep(0)
        return bytes(text)

    async def sample(self) -> Sample:
        memory, busy = await asyncio.gather(asyncio.to_thread(self._free_bytes), self._busy())
        since, self._since = self._since, self._clock()
        proxy, queue, controllers = (
            self._proxy.readings.totals(since),
            self._proxy.readings.queue(),
            self._controllers().values(),
        )
        return Sample(
            at=self._since,
            totals={
                "requests_per_s": proxy.accepted,
                "failed_per_s": proxy.failed,
                "prompt_tokens_per_s": proxy.prompt_tokens,
                "output_tokens_per_s": proxy.output_tokens,
                "overflow_per_s": proxy.overflowed,
                "queue_rejected_per_s": proxy.queue_rejected,
            },
            gauges={
                "queued": queue.requests,
                "oldest_queued_s": queue.oldest_s or 0.0,
                "in_flight": proxy.in_flight,
                "ready": sum(controller.slot_state.state is State.READY for controller in controllers),
                "memory_free_bytes": memory,
                "cost_per_hour": self._cost_per_hour(),
            },
            spent=proxy.overflow_spent,
            first_tokens=proxy.first_tokens,
            busy=busy,
            slots=tuple(self._slot(controller) for controller in controllers),
        )

    def _free_bytes(self) -> float | None:
        """What a new process could have. Blocking."""
        found = self._read_memory(())
        return found[0].free_bytes if found else None

    def _slot(self, controller: SlotController) -> SlotSample:
        slot, state, progress = controller.slot, controller.slot_state, controller.instance.progress
        counted = None if progress.last is None else progress.last.counters
        return SlotSample(
            slot=slot.id,
            state=state.state.value,
            in_flight=self._proxy.in_flight(slot.id, state.generation),
            kv_usage=None if counted is None else counted.kv_usage,
            kv_tokens=None if counted is None else counted.kv_tokens,
            cpus=tuple(slot.placement.cpus),
            counts=_counts(state.generation, progress),
        )


def _counts(generation: int, progress: Progress) -> EngineCounts | None:
    if progress.last is None or progress.last.counters is None:
        return None
    counted = progress.last.counters
    return EngineCounts(
        generation, progress.last.at, counted.generated, counted.prefix_queries, counted.prefix_hits
    )
