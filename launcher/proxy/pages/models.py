"""The model list, from what the instances say of their models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from launcher.proxy.request.model_traits import ModelTraits
from launcher.proxy.upstream.scraper import Instance, fetch_pages

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
