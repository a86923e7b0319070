"""The instances' metrics pages, merged into one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from launcher.proxy.upstream.scraper import Instance, fetch_pages
from launcher.telemetry.merge import Merger, Page
from launcher.telemetry.metrics import METRICS_AGE_S


class MergedMetrics:
    """The instances' metrics pages, fetched at most once in METRICS_AGE_S however many requests want them."""

    def __init__(self, instances: Callable[[], Sequence[Instance]], clock: Callable[[], float]) -> None:
        self._instances = instances
        self._clock = clock
        self._lock = asyncio.Lock()
        self._fetched: float | None = None
        self._pages: list[tuple[Instance, str]] = []
        self._merger = Merger()
        self._merged = ""
        self._merged_of: float | None = None  # which fetch

    async def latest(self) -> list[tuple[Instance, str]]:
        """The pages of those that answered in time."""
        async with self._lock:
            return await self._latest()

    async def page(self, own: Callable[[], str]) -> str:
        """The proxy's own page, then one of all instances: of one that is gone, or does not answer in time, the counters
        stand still and the gauges are missing."""
        async with self._lock:  # one in each turn of the loop, however many want it
            pages = await self._latest()
            if self._merged_of != self._fetched:
                await self._merge(pages)
                self._merged_of = self._fetched
            await asyncio.sleep(0)
            return own() + self._merged

    async def _latest(self) -> list[tuple[Instance, str]]:
        if self._fetched is None or self._clock() - self._fetched >= METRICS_AGE_S:
            instances = self._instances()
            bodies = await fetch_pages(instances, "/metrics")
            self._pages = [
                (instance, body.decode("utf-8", "replace"))
                for instance, body in zip(instances, bodies, strict=True)
                if body is not None
            ]
            self._fetched = self._clock()
        return self._pages

    async def _merge(self, pages: Sequence[tuple[Instance, str]]) -> None:
        self._merger.begin()
        for instance, text in pages:
            labels = {"slot": str(instance.slot), "model": instance.model}
            if instance.numa_node:
                labels["numa_node"] = instance.numa_node
            self._merger.add(Page(text, labels, instance.slot, instance.generation))
            await asyncio.sleep(0)  # tokens that came meanwhile go first
        self._merged = self._merger.end()
