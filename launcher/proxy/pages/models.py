"""What is gathered from the instances and shown as one: /metrics and /v1/models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from launcher.config.schema import Model
from launcher.proxy.upstream.scraper import Instance, PageFetcher
from launcher.telemetry.merge import Merger, Page

METRICS_AGE_S = 1.0  # instances' pages are fetched at most this often
MODELS_AGE_S = 1.0

Entry = dict[str, object]
Instances = Callable[[], Sequence[Instance]]
Clock = Callable[[], float]


class MetricsPages:
    """What the instances' own metrics pages say, asked at most once a second, however many want to know."""

    def __init__(self, fetcher: PageFetcher, instances: Instances, clock: Clock) -> None:
        self._fetcher = fetcher
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

    async def merged(self) -> str:
        """One page of all. Of an instance that is gone, or does not answer in time, the counters stand still and the
        gauges are missing."""
        async with self._lock:
            pages = await self._latest()
            if self._merged_of != self._fetched:
                await self._merge(pages)
                self._merged_of = self._fetched
            return self._merged

    async def _latest(self) -> list[tuple[Instance, str]]:
        if self._fetched is None or self._clock() - self._fetched >= METRICS_AGE_S:
            instances = self._instances()
            bodies = await self._fetcher.fetch(instances, "/metrics")
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
            self._merger.add(Page(text, _labels(instance), instance.slot, instance.generation))
            await asyncio.sleep(0)  # tokens that came meanwhile go first
        self._merged = self._merger.end()


def _labels(instance: Instance) -> dict[str, str]:
    labels = {"slot": str(instance.slot), "model": instance.model}
    if instance.numa_node:
        labels["numa_node"] = instance.numa_node
    return labels


class ModelList:
    """/v1/models: one entry per configured model, as its instances describe it (max_model_len and all), and
    one per alias and LoRA adapter.

    A model whose instances restart keeps its last entry: clients build menus from this list, and asking for
    the model gets an honest 503 with Retry-After. One that was never ready is not listed.
    """

    def __init__(
        self, models: Sequence[Model], adapters: Mapping[str, str], fetcher: PageFetcher, clock: Clock
    ) -> None:
        """`adapters`: models by the names of their adapters; it may grow."""
        self._adapters = adapters
        self._fetcher = fetcher
        self._clock = clock
        self._aliases: dict[str, tuple[str, ...]] = {}
        for model in models:
            self._aliases[model.name] = tuple(
                dict.fromkeys((*self._aliases.get(model.name, ()), *model.aliases))
            )
        self._lock = asyncio.Lock()
        self._asked: dict[str, tuple[float, tuple[int, int]]] = {}  # when, and which life it was
        self._failed: dict[str, float] = {}  # when an instance did not answer
        self._known: dict[str, Entry] = {}

    def names_of(self, wanted: str) -> tuple[str, ...]:
        """A model's own name and its aliases, by any of them; an adapter's own; () when none of ours is called so."""
        for name, aliases in self._aliases.items():
            if wanted == name or wanted in aliases:
                return (name, *aliases)
        return (wanted,) if wanted in self._adapters else ()

    def own_name(self, wanted: str | None) -> str | None:
        """A model's own name by any of its names; the only model's by none."""
        if wanted is None:
            return next(iter(self._aliases)) if len(self._aliases) == 1 else None
        return next(iter(self.names_of(wanted)), None)

    async def entries(self, instances: Sequence[Instance]) -> list[Entry]:
        """The entries, in the order of the configuration, a model's aliases and adapters after it."""
        async with self._lock:
            await asyncio.gather(*(self._refresh(name, instances) for name in self._aliases))
        found: list[Entry] = []
        for name, aliases in self._aliases.items():
            if (entry := self._known.get(name)) is not None:
                found += (entry, *({**entry, "id": alias} for alias in aliases))
                found += (self._known[other] for other in self._adapters_of(name) if other in self._known)
        return found

    def _adapters_of(self, model: str) -> list[str]:
        return [adapter for adapter, base in self._adapters.items() if base == model]

    async def _refresh(self, name: str, instances: Sequence[Instance]) -> None:
        """Ask the model's ready instances in turn until one describes it; once a second also when none does."""
        now = self._clock()
        if now - self._failed.get(name, -MODELS_AGE_S) < MODELS_AGE_S:
            return
        for instance in instances:
            if instance.model != name or not instance.ready:
                continue
            life = (instance.slot, instance.generation)
            if (
                (asked := self._asked.get(name)) is not None
                and asked[1] == life
                and now - asked[0] < MODELS_AGE_S
            ):
                return
            (body,) = await self._fetcher.fetch((instance,), "/v1/models")
            listed = [] if body is None else read_list(body)
            entry = describe(name, listed)
            if entry is not None:
                self._known[name] = entry
                self._known |= {
                    other: own for other in self._adapters_of(name) if (own := _own(other, listed))
                }
                self._asked[name] = (now, life)
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
