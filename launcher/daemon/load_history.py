"""The daemon's history: what is read every 2 s, where the file is, and its recorder."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path

from launcher.base.errors import LauncherError, NotFoundError
from launcher.base.files import state_folder
from launcher.config.schema import Telemetry
from launcher.instances.progress import Progress
from launcher.instances.slot_controller import SlotController
from launcher.instances.slot_state import State
from launcher.machine.oom import NodeMemory, node_memory
from launcher.proxy.server import ProxyServer
from launcher.telemetry.engine_metrics import EngineCounts
from launcher.telemetry.history_file import SUFFIX
from launcher.telemetry.recorder import Recorder, Sample, SlotSample


class LoadHistory:
    """Off where [telemetry] says so. `controllers`: of the slots; `busy`: share of each CPU since the last call;
    `cost_per_hour`: None without a price."""

    def __init__(
        self,
        settings: Telemetry,
        proxy: ProxyServer,
        controllers: Callable[[], Mapping[int, SlotController]],
        busy: Callable[[], Awaitable[Mapping[int, float]]],
        cost_per_hour: Callable[[], float | None],
        *,
        environ: Mapping[str, str] = os.environ,
        read_memory: Callable[[Iterable[int]], tuple[NodeMemory, ...]] = node_memory,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`clock`: monotonic; the event loop's by default."""
        self._proxy = proxy
        self._controllers = controllers
        self._busy = busy
        self._cost_per_hour = cost_per_hour
        self._read_memory = read_memory
        self._clock = clock or asyncio.get_running_loop().time
        self._since = self._clock()
        self._no_path = ""
        self._file = self._path(settings, environ) if settings.history else None
        self.recorder = Recorder(self._file, self.sample) if settings.history else None

    def _path(self, settings: Telemetry, environ: Mapping[str, str]) -> Path | None:
        if settings.history_path is not None:
            return Path(settings.history_path).absolute()
        try:
            # A folder of its own: instances may write into the service's state folder.
            return state_folder(None, environ, os.geteuid()) / "history" / f"history{SUFFIX}"
        except LauncherError as error:
            self._no_path = f"the history is kept in memory: {error.message}; set [telemetry] history_path"
            return None

    def folders(self) -> dict[str, Path]:
        """The folder that is written to, by what is kept there; empty without a file."""
        return {} if self._file is None else {"history": self._file.parent}

    def warnings(self) -> tuple[str, ...]:
        """What `status` says of it."""
        said = () if self.recorder is None else self.recorder.warnings
        return (self._no_path, *said) if self._no_path else said

    async def answer(self, span: str, after: int, slots: str) -> bytes:
        """Raises LauncherError."""
        if self.recorder is None:
            raise NotFoundError(
                "cannot show the history: it is off",
                "set history = true in [telemetry] and restart the daemon",
            )
        return await self.recorder.answer(span, after, slots)

    async def close(self) -> None:
        if self.recorder is not None:
            await self.recorder.close()

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
