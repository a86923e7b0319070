"""Renders the proxy's own pages: `/health` at once, those that need the instances' pages in one task per request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final
from urllib.parse import parse_qs

import msgspec
from msgspec import Struct

from launcher.base.address import Address
from launcher.base.api_errors import HttpError, unavailable
from launcher.base.errors import reason
from launcher.base.http_json import fetch
from launcher.base.text import quoted
from launcher.keys.api_keys import KeyEntry
from launcher.proxy.openai.models import ModelTraits, unknown_model
from launcher.proxy.pages import host_load
from launcher.proxy.pages.host_load import EngineReports, HostLoad
from launcher.proxy.request.events import Event, Faulted, PageReady, Refused
from launcher.proxy.request.ports import Answer, own_answer
from launcher.proxy.request.record import Post, Request
from launcher.proxy.routes import HOST_METRICS, Kind, Match, split_target
from launcher.telemetry.engine_metrics import EngineMetrics, parse
from launcher.telemetry.machine_metrics import Values
from launcher.telemetry.merge import Merger, Page
from launcher.telemetry.metrics import METRICS_AGE_S, render
from launcher.telemetry.timings import Timings

# --- Pages of the instances, fetched all at once with one deadline. ---

FETCH_TIMEOUT_S = 2.0  # an instance that is slower is left out of this page

_LOG = logging.getLogger(__name__)


class Instance(Struct, frozen=True):
    """A running instance, as far as pages show it."""

    slot: int
    generation: int
    model: str
    address: Address
    ready: bool = True
    """False while it drains: it gets no requests, and its counters still move."""
    numa_node: str = ""
    """NUMA nodes of its cores, a list such as "0"; empty: not known."""


async def fetch_pages(instances: Sequence[Instance], path: str) -> list[bytes | None]:
    """`path` of each instance, in order; None where it does not answer 200 in time."""
    return list(await asyncio.gather(*(_fetch(instance, path) for instance in instances)))


async def _fetch(instance: Instance, path: str) -> bytes | None:
    why = ""
    try:
        page = await fetch(instance.address, path, FETCH_TIMEOUT_S)
    except OSError as error:
        page, why = None, f": {reason(error)}"
    if page is None:
        slot = instance.slot
        _LOG.debug("slot %d: no answer to GET %s%s", slot, path, why, extra={"slot": slot})
    return page


# --- The instances' metrics pages, merged into one. ---


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


# --- The model list, from what the instances say of their models. ---

MODELS_AGE_S = 1.0  # an instance is asked at most this often

Entry = dict[str, object]
Clock = Callable[[], float]


class ModelList:
    """/v1/models: one entry per configured model, as its instances describe it (max_model_len and all), and
    one per alias and LoRA adapter.

    A model whose instances restart keeps its last entry: clients build menus from this list, and asking for
    the model gets an honest 503 with Retry-After. One that was never ready is not listed.
    """

    def __init__(self, traits: ModelTraits, clock: Clock) -> None:
        self._traits = traits
        self._names = traits.names
        self._clock = clock
        self._lock = asyncio.Lock()
        self._asked: dict[str, tuple[float, tuple[int, int]]] = {}  # when, and which slot and generation
        self._failed: dict[str, float] = {}  # when an instance did not answer
        self._known: dict[str, Entry] = {}

    def names_of(self, wanted: str) -> tuple[str, ...]:
        """A model's own name and its aliases, by any of them; an adapter's own; () when nothing is called so."""
        own = wanted if wanted in self._names.names else self._names.aliases.get(wanted)
        if own is not None:
            return self._names.all_of(own)
        return () if self._traits.base_of(wanted) is None else (wanted,)

    async def entries(self, instances: Sequence[Instance]) -> list[Entry]:
        """The entries, in the order of the configuration, a model's aliases and adapters after it."""
        async with self._lock:
            await asyncio.gather(*(self._refresh(name, instances) for name in self._names.names))
        found: list[Entry] = []
        for name in self._names.names:
            if (entry := self._known.get(name)) is not None:
                found += ({**entry, "id": own} for own in self._names.all_of(name))
                adapters = self._traits.adapters_of(name)
                found += (self._known[adapter] for adapter in adapters if adapter in self._known)
        return found

    async def _refresh(self, name: str, instances: Sequence[Instance]) -> None:
        """Ask the model's ready instances in turn until one describes it; once a second also when none does."""
        now = self._clock()
        if now - self._failed.get(name, -MODELS_AGE_S) < MODELS_AGE_S:
            return
        for instance in instances:
            if instance.model != name or not instance.ready:
                continue
            instance_key = (instance.slot, instance.generation)
            asked_at, asked_key = self._asked.get(name, (0.0, None))
            if asked_key == instance_key and now - asked_at < MODELS_AGE_S:
                return
            (body,) = await fetch_pages((instance,), "/v1/models")
            listed = [] if body is None else read_list(body)
            entry = describe(name, listed)
            if entry is not None:
                self._known[name] = entry
                adapters = self._traits.adapters_of(name)
                self._known |= {adapter: own for adapter in adapters if (own := _own(adapter, listed))}
                self._asked[name] = (now, instance_key)
                return
            self._failed[name] = self._clock()


class _List(msgspec.Struct):
    data: list[Entry]


def read_list(body: bytes) -> list[Entry]:
    """The entries of an instance's /v1/models; none where it can't be read."""
    try:
        return msgspec.json.decode(body, type=_List).data
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []


def describe(name: str, listed: Sequence[Entry]) -> Entry | None:
    """An instance's entry for `name`: its own of that id, else its first under our name."""
    own = _own(name, listed)
    return {**listed[0], "id": name} if own is None and listed else own


def _own(name: str, listed: Sequence[Entry]) -> Entry | None:
    return next((entry for entry in listed if entry.get("id") == name), None)


PAGE_TIMEOUT_S: Final = 30.0
TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
MAX_PROMPT_TOKENS: Final = 100_000_000

Query = Mapping[str, list[str]]


class Sources(Struct, frozen=True):
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
        return own_answer(200, host_load.render(found, time.time()).encode(), TEXT)

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
