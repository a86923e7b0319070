"""What the instances said last: asked in the background, at most once a second."""

from __future__ import annotations

import asyncio

from support.proxy_under_test import until

from launcher.proxy.pages.host_load import EngineReports
from launcher.telemetry.engine_metrics import EngineMetrics
from launcher.telemetry.metrics import METRICS_AGE_S


class Asked:
    """Answers when told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.count = 0
        self.error: Exception | None = None
        self.answered = asyncio.Event()
        self.answered.set()
        self.reports = EngineReports(self.ask, lambda: self.now)

    async def ask(self) -> EngineReports:
        self.count += 1
        await self.answered.wait()
        if self.error is not None:
            raise self.error
        return {(0, 1): EngineMetrics(running=self.count, waiting=0, generated=0, steps=0)}

    async def running(self) -> list[int]:
        return [report.running for report in (await self.reports.latest()).values()]


async def test_the_first_call_waits_and_the_next_second_is_served_from_memory() -> None:
    asked = Asked()
    assert await asked.running() == [1]
    asked.now += 0.9 * METRICS_AGE_S
    assert await asked.running() == [1]
    assert asked.count == 1
    asked.now += METRICS_AGE_S
    assert await asked.running() == [1]
    await until(lambda: asked.count == 2)
    assert await asked.running() == [2]


async def test_a_slow_instance_delays_no_later_call() -> None:
    asked = Asked()
    await asked.running()
    asked.answered.clear()
    for _ in range(3):
        asked.now += 2 * METRICS_AGE_S
        assert await asked.running() == [1]
        await asyncio.sleep(0)
    assert asked.count == 2  # one at a time
    await asked.reports.close()


async def test_after_a_failure_the_instances_are_asked_again() -> None:
    asked = Asked()
    asked.error = OSError("no descriptors")
    assert await asked.running() == []
    asked.error = None
    asked.now += METRICS_AGE_S
    assert await asked.running() == [2]
    await asked.reports.close()
