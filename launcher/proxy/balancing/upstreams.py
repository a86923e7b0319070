"""The table of instances as the proxy sees them: who may get requests, and what is known of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from launcher.address import Address
from launcher.proxy.balancing.demand import Key
from launcher.proxy.balancing.estimators import PREFILL, TYPICAL_PROMPT, WINDOW_S, Line, Rate
from launcher.proxy.balancing.load import Load
from launcher.proxy.balancing.outlier_detection import OutlierDetection
from launcher.proxy.balancing.prefix_cache import PrefixCache


@dataclass(slots=True, eq=False)
class Upstream:
    """The proxy's view of one ready or draining instance. Changed by the table and the scheduler only."""

    slot: int
    generation: int
    model: str
    address: Address
    max_num_seqs: int
    in_flight: int = 0
    draining: bool = False
    gone: str | None = None  # why it was removed while requests were still on it
    idle_wanted: bool = False  # somebody waits for its last request to leave
    added: float = 0.0  # when
    kv_tokens: int | None = None  # what its KV cache holds; None: learned
    line: Line = field(
        default_factory=lambda: Line(PREFILL, TYPICAL_PROMPT, 200)
    )  # its model's, see CostModel.line
    lag: float = 1.0  # how many times slower than its siblings it is known to be
    starts: Rate = field(default_factory=lambda: Rate(WINDOW_S))  # requests bound to it
    busy: Rate = field(default_factory=lambda: Rate(WINDOW_S))  # tokens of prefill bound to it
    ledger: Load = field(default_factory=Load)
    health: OutlierDetection = field(default_factory=OutlierDetection)
    store: PrefixCache = field(default_factory=PrefixCache)

    @property
    def key(self) -> Key:
        """Slot and generation: one process life."""
        return (self.slot, self.generation)


class UpstreamTable:
    """All upstreams. An event of a generation that is not there, or is overtaken, changes nothing."""

    def __init__(self) -> None:
        self._upstreams: dict[Key, Upstream] = {}
        self._newest: dict[int, int] = {}
        self._ready: dict[str | None, list[Upstream]] = {}  # kept between changes

    def __iter__(self) -> Iterator[Upstream]:
        return iter(self._upstreams.values())

    def get(self, slot: int, generation: int) -> Upstream | None:
        """The upstream of one process life, if it is known."""
        return self._upstreams.get((slot, generation))

    def newest(self, slot: int) -> Upstream | None:
        """The upstream of a slot's newest known process life, if it is not gone."""
        return self._upstreams.get((slot, self._newest.get(slot, -1)))

    def add(self, upstream: Upstream) -> Upstream | None:
        """It may get requests; a drain of it is taken back. None: a newer generation was there first."""
        if upstream.generation < self._newest.get(upstream.slot, upstream.generation):
            return None
        self._ready.clear()
        self._newest[upstream.slot] = upstream.generation
        for other in self:
            if other.slot == upstream.slot and other.generation < upstream.generation:
                other.draining = True
        known = self._upstreams.setdefault(upstream.key, upstream)
        known.draining = False
        known.idle_wanted = False
        return known

    def drain(self, slot: int, generation: int) -> Upstream | None:
        """No new requests; `became_idle` will say once when none is left."""
        upstream = self.get(slot, generation)
        if upstream is not None:
            self._ready.clear()
            upstream.draining = True
            upstream.idle_wanted = True
        return upstream

    def remove(self, slot: int, generation: int, reason: str) -> Upstream | None:
        """The instance is gone."""
        upstream = self._upstreams.pop((slot, generation), None)
        if upstream is not None:
            self._ready.clear()
            upstream.draining = True
            upstream.gone = reason
        return upstream

    def of(self, model: str | None) -> list[Upstream]:
        """Upstreams that may get a request of `model` (None: of any), ordered by slot. Not to be changed."""
        known = self._ready.get(model)
        if known is None:
            known = sorted(
                (u for u in self if not u.draining and model in (None, u.model)), key=lambda u: u.key
            )
            if known:  # a client's odd model names must not fill the memory
                self._ready[model] = known
        return known

    def ready(
        self, model: str | None = None, without: frozenset[Key] | set[Key] = frozenset()
    ) -> list[Upstream]:
        """As `of`, less those in `without`."""
        return [upstream for upstream in self.of(model) if upstream.key not in without]

    def begin(self, upstream: Upstream) -> None:
        """A request starts on it."""
        upstream.in_flight += 1

    def end(self, upstream: Upstream) -> None:
        """A request has left it, whichever way."""
        upstream.in_flight -= 1

    def became_idle(self, upstream: Upstream) -> bool:
        """True once per drain, when nothing is left on it."""
        if not upstream.idle_wanted or upstream.in_flight or upstream.gone is not None:
            return False
        upstream.idle_wanted = False
        return True
