"""What the instances said last of their load, asked in the background: nobody who reads it waits for a slow instance."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from launcher.background import Failures, attempt
from launcher.proxy.balancing.demand import InstanceId
from launcher.telemetry.metrics import METRICS_AGE_S
from launcher.telemetry.vllm_metrics import EngineMetrics

_LOG = logging.getLogger(__name__)

Reports = dict[InstanceId, EngineMetrics]


class EngineReports:
    """Owner of the task that asks. `close` ends it."""

    def __init__(self, ask: Callable[[], Awaitable[Reports]], clock: Callable[[], float]) -> None:
        self._ask = ask
        self._clock = clock
        self._failures = Failures(_LOG, "proxy: read the instances' load")
        self._asked_at: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._known = False
        self._reports: Reports = {}

    async def latest(self) -> Reports:
        """At most METRICS_AGE_S older than the last call; only the first call waits for the instances."""
        now = self._clock()
        due = self._asked_at is None or now - self._asked_at >= METRICS_AGE_S
        if due and (self._task is None or self._task.done()):
            self._asked_at = now
            self._task = asyncio.create_task(attempt(self._read, self._failures), name="engine reports")
        if not self._known and self._task is not None:
            await asyncio.wait({self._task})
        return self._reports

    async def _read(self) -> None:
        self._reports = await self._ask()
        self._known = True

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
