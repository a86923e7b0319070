"""Renders the proxy's own pages: `/health` at once, those that need the instances' pages in one task per request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import parse_qs

import msgspec

from launcher.printable import quoted
from launcher.proxy.auth.api_keys import KeyEntry
from launcher.proxy.errors import HttpError, unavailable
from launcher.proxy.openai.models import unknown_model
from launcher.proxy.pages.engine_reports import EngineReports
from launcher.proxy.pages.host_load import HostLoad
from launcher.proxy.pages.merged_metrics import MergedMetrics
from launcher.proxy.pages.models import ModelList
from launcher.proxy.request.answer import Answer, own_answer
from launcher.proxy.request.events import Event, Faulted, PageReady, Refused
from launcher.proxy.request.model_traits import ModelTraits
from launcher.proxy.request.record import Post, Request
from launcher.proxy.routes import HOST_METRICS, Kind, Match, split_target
from launcher.proxy.upstream.scraper import Instance
from launcher.telemetry import host_view
from launcher.telemetry.rendering import render
from launcher.telemetry.spec import Values
from launcher.telemetry.timings import Timings
from launcher.telemetry.vllm_metrics import EngineMetrics, parse

PAGE_TIMEOUT_S: Final = 30.0
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
MAX_PROMPT_TOKENS: Final = 100_000_000

Query = Mapping[str, list[str]]


@dataclass(frozen=True, slots=True)
class Sources:
    instances: Callable[[], Sequence[Instance]]  # those that live, ready or draining, ordered by slot
    values: Callable[[], Values]  # the values of telemetry.metrics.TABLE
    timings: Timings
    load: HostLoad
    stopping: Callable[[], bool]
    retry_after_s: Callable[[], int]  # how long a client that finds no instance ready should wait


class PageRenderer:
    """Owner of the tasks that render pages. `close` ends them."""

    def __init__(self, traits: ModelTraits, sources: Sources, post: Post) -> None:
        self._clock = clock = asyncio.get_running_loop().time
        self._sources = sources
        self._post = post
        self._models = ModelList(traits, clock)
        self._merged = MergedMetrics(sources.instances, clock)
        self._reports = EngineReports(self.loads, clock)
        self._tasks: set[asyncio.Task[Answer]] = set()

    def render(self, request: Request, _event: Event, _now: float) -> None:
        """Post the page: `/health` at once, others from a task. Raises HttpError."""
        found = request.match
        if found is None:
            raise AssertionError("only a request on a route asks for a page")
        if found.route.kind is Kind.HEALTH:
            self._post(request, PageReady(self.health()))
            return
        task = asyncio.create_task(self._in_time(found, request), name=f"render {found.route.path}")
        self._tasks.add(task)
        task.add_done_callback(partial(self._rendered, request))
        request.pending = task

    def _rendered(self, request: Request, task: asyncio.Task[Answer]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._post(request, PageReady(task.result()))
        else:
            self._post(request, Refused(error) if isinstance(error, HttpError) else Faulted(error))

    async def _in_time(self, found: Match, request: Request) -> Answer:
        query = parse_qs(split_target(request.head.target)[1][1:], keep_blank_values=True)
        try:
            async with asyncio.timeout(PAGE_TIMEOUT_S):
                return await self.page(found, request.key, query)
        except TimeoutError:
            why = "the page was not ready in time: instances do not answer"
            raise unavailable(why, self._sources.retry_after_s()) from None

    async def page(self, found: Match, key: KeyEntry | None, query: Query) -> Answer:
        """The page of a route. Raises HttpError."""

        if found.route.kind is Kind.LOAD:
            return await self._load(query)
        if found.route.kind is Kind.METRICS:
            if found.route.path == HOST_METRICS:
                return await self._host_view({**query, "view": ["host"]})
            return await (self._host_view(query) if "view" in query else self.metrics_page())

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

    def health(self) -> Answer:
        ready = sum(instance.ready for instance in self._sources.instances())
        if not ready or self._sources.stopping():
            raise unavailable("no instance is ready", self._sources.retry_after_s())
        return _json({"status": "ok", "ready": ready})

    async def metrics_page(self) -> Answer:
        text = await self._merged.page(lambda: render(self._sources.values(), self._sources.timings))
        return own_answer(200, text.encode(), TEXT)

    async def _host_view(self, query: Query) -> Answer:
        if (view := query["view"][-1]) != "host":
            raise HttpError(400, f"cannot show view {quoted(view)}: the only view is host", param="view")
        names = self._sources.load.models(_last(query, "model"))
        found = self._sources.load.view(names, await self._reports.latest(), self._clock())
        return own_answer(200, host_view.render(found, time.time()).encode(), TEXT)

    async def _load(self, query: Query) -> Answer:
        names, tokens = self._sources.load.models(_last(query, "model")), _prompt_tokens(query)
        return _json(self._sources.load.load(names, await self._reports.latest(), tokens, self._clock()))

    async def loads(self) -> dict[tuple[int, int], EngineMetrics]:
        """What the ready instances' metrics say, by slot and generation; without those that say nothing."""
        found: dict[tuple[int, int], EngineMetrics] = {}
        for instance, page in await self._merged.latest():
            if instance.ready and (load := parse(page)) is not None:
                found[instance.slot, instance.generation] = load
            await asyncio.sleep(0)  # tokens that came meanwhile go first
        return found

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._reports.close()


def _last(query: Query, name: str) -> str | None:
    return query.get(name, [None])[-1]


def _prompt_tokens(query: Query) -> int | None:
    """Of the request to predict; None: a typical one. Raises HttpError."""
    text = _last(query, "prompt_tokens")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= MAX_PROMPT_TOKENS):
        raise HttpError(
            400, f"cannot predict for {quoted(text)} prompt tokens: not a count", param="prompt_tokens"
        )
    return int(text)


def _json(value: object) -> Answer:
    return own_answer(200, msgspec.json.encode(value))
