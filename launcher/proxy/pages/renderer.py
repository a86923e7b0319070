"""Renders the proxy's own pages: `/health` at once, those that need the instances' pages in one task per request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from launcher.printable import quoted
from launcher.proxy.auth.api_keys import KeyEntry
from launcher.proxy.errors import HttpError, unavailable
from launcher.proxy.openai.answers import JSON
from launcher.proxy.openai.models import unknown_model
from launcher.proxy.pages.merged_metrics import MergedMetrics
from launcher.proxy.pages.models import ModelList
from launcher.proxy.request.model_traits import ModelTraits
from launcher.proxy.routes import Kind, Match
from launcher.proxy.upstream.scraper import Instance
from launcher.telemetry import metrics
from launcher.telemetry.vllm_metrics import EngineMetrics, parse

PAGE_TIMEOUT_S: Final = 30.0
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


class Page(NamedTuple):
    """A response of the proxy's own, with status 200."""

    content_type: str
    body: bytes


Deliver = Callable[[Page | BaseException], None]
"""Gets the page, the error response in its place (HttpError), or what went wrong in rendering it."""


@dataclass(frozen=True, slots=True)
class Sources:
    instances: Callable[[], Sequence[Instance]]  # those that live, ready or draining, ordered by slot
    values: Callable[[], metrics.Values]  # the values of telemetry.metrics.TABLE
    timings: metrics.Timings
    stopping: Callable[[], bool]
    retry_after_s: Callable[[], int]  # how long a client that finds no instance ready should wait


class PageRenderer:
    """Owner of the tasks that render pages. `close` ends them."""

    def __init__(self, traits: ModelTraits, sources: Sources) -> None:
        clock = asyncio.get_running_loop().time
        self._sources = sources
        self._models = ModelList(traits, clock)
        self._merged = MergedMetrics(sources.instances, clock)
        self._tasks: set[asyncio.Task[Page]] = set()

    def begin(self, found: Match, key: KeyEntry | None, deliver: Deliver) -> asyncio.Task[Page] | None:
        """Render a page for the request's API key, now (None) or in the task that is returned.

        `deliver` is called once, unless the task is cancelled.
        """
        if found.route.kind is Kind.HEALTH:
            try:
                deliver(self.health())
            except HttpError as error:
                deliver(error)
            return None

        def rendered(task: asyncio.Task[Page]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                error = task.exception()
                deliver(task.result() if error is None else error)

        task = asyncio.create_task(self._in_time(found, key), name=f"render {found.route.path}")
        self._tasks.add(task)
        task.add_done_callback(rendered)
        return task

    async def _in_time(self, found: Match, key: KeyEntry | None) -> Page:
        try:
            async with asyncio.timeout(PAGE_TIMEOUT_S):
                return await self.page(found, key)
        except TimeoutError:
            why = "the page was not ready in time: instances do not answer"
            raise unavailable(why, self._sources.retry_after_s()) from None

    async def page(self, found: Match, key: KeyEntry | None) -> Page:
        """The page of a route. Raises HttpError."""

        if found.route.kind is Kind.METRICS:
            return await self.metrics_page()

        def visible(name: str) -> bool:
            names = self._models.names_of(name)
            return bool(names) and (key is None or key.limits.allows(*names))

        entries = await self._models.entries(self._sources.instances())
        if found.route.kind is Kind.MODELS:
            shown = [entry for entry in entries if visible(str(entry["id"]))]
            return _json({"object": "list", "data": shown})
        if not visible(found.item):
            raise unknown_model(found.item)
        for entry in entries:
            if entry["id"] == found.item:
                return _json(entry)
        # It is configured, and no instance of it was ready yet.
        raise unavailable(f"no instance of {quoted(found.item)} is ready", self._sources.retry_after_s())

    def health(self) -> Page:
        ready = sum(instance.ready for instance in self._sources.instances())
        if not ready or self._sources.stopping():
            raise unavailable("no instance is ready", self._sources.retry_after_s())
        return _json({"status": "ok", "ready": ready})

    async def metrics_page(self) -> Page:
        text = await self._merged.page(lambda: metrics.render(self._sources.values(), self._sources.timings))
        return Page(TEXT, text.encode())

    async def loads(self) -> dict[tuple[int, int], EngineMetrics]:
        """What the ready instances' metrics say, by slot and generation; without those that say nothing."""
        found = (
            ((instance.slot, instance.generation), parse(page))
            for instance, page in await self._merged.latest()
            if instance.ready
        )
        return {key: load for key, load in found if load is not None}

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))


def _json(value: object) -> Page:
    return Page(JSON, msgspec.json.encode(value))
