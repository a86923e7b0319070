"""The table of instances as the proxy sees them: which may get requests, and what is known about each."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from launcher.address import Address
from launcher.proxy.balancing.demand import InstanceId
from launcher.proxy.balancing.estimators import WINDOW_S, Arrivals, LinearFit
from launcher.proxy.balancing.load import Load
from launcher.proxy.balancing.outlier_detection import OutlierDetection
from launcher.proxy.balancing.prefix_cache import PrefixCache


class Upstream:
    """The proxy's view of one ready or draining instance. Changed by the table and the balancer only."""

    def __init__(
        self,
        slot: int,
        generation: int,
        model: str,
        address: Address,
        max_num_seqs: int,
        *,
        kv_tokens: int | None = None,
    ) -> None:
        """`kv_tokens`: the size of its KV cache; None: learned."""
        self.slot = slot
        self.generation = generation
        self.key: InstanceId = (slot, generation)
        self.model = model
        self.address = address
        self.max_num_seqs = max_num_seqs
        self.kv_tokens = kv_tokens
        self.in_flight: int = 0
        self.draining: bool = False
        self.gone: str | None = None  # why it was removed while it had requests
        self.idle_wanted: bool = False  # somebody waits for its last request to leave
        # Its model's: see CostModel.fit.
        self.fit: LinearFit = LinearFit()
        self.lag: float = 1.0  # how many times slower than its siblings it is
        self.arrivals: Arrivals = Arrivals(WINDOW_S)
        self.load: Load = Load()
        self.outliers: OutlierDetection = OutlierDetection()
        self.prefixes: PrefixCache = PrefixCache()


class UpstreamTable:
    """All upstreams. Events of a generation that is unknown or superseded change nothing."""

    def __init__(self) -> None:
        self._upstreams: dict[InstanceId, Upstream] = {}
        self._newest: dict[int, int] = {}
        self._ready: dict[str | None, list[Upstream]] = {}  # results of `of` since the last change

    def __iter__(self) -> Iterator[Upstream]:
        return iter(self._upstreams.values())

    def get(self, slot: int, generation: int) -> Upstream | None:
        return self._upstreams.get((slot, generation))

    def add(self, upstream: Upstream) -> Upstream | None:
        """It may get requests; a drain of it is cancelled. None: a newer generation was added before."""
        if upstream.generation < self._newest.get(upstream.slot, upstream.generation):
            return None
        self._ready.clear()
        self._newest[upstream.slot] = upstream.generation
        for other in self._upstreams.values():
            if other.slot == upstream.slot and other.generation < upstream.generation:
                other.draining = True
        known = self._upstreams.setdefault(upstream.key, upstream)
        known.draining = False
        known.idle_wanted = False
        return known

    def drain(self, slot: int, generation: int) -> Upstream | None:
        """No new requests; `became_idle` reports once when none is left."""
        upstream = self.get(slot, generation)
        if upstream is not None:
            self._ready.clear()
            upstream.draining = True
            upstream.idle_wanted = True
        return upstream

    def remove(self, slot: int, generation: int, reason: str) -> Upstream | None:
        upstream = self._upstreams.pop((slot, generation), None)
        if upstream is not None:
            self._ready.clear()
            upstream.draining = True
            upstream.gone = reason
        return upstream

    def of(self, model: str | None) -> list[Upstream]:
        """Upstreams that may get a request of `model` (None: of any), ordered by slot. Callers must not change it."""
        known = self._ready.get(model)
        if known is None:
            serving = [u for u in self._upstreams.values() if not u.draining and model in (None, u.model)]
            known = sorted(serving, key=lambda u: u.key)
            if known:  # unknown model names, which clients choose, must not fill the memory
                self._ready[model] = known
        return known

    def ready(self, model: str | None = None, without: Collection[InstanceId] = ()) -> list[Upstream]:
        return [upstream for upstream in self.of(model) if upstream.key not in without]

    def candidates(
        self, model: str | None, pinned: InstanceId | None, tried: Collection[InstanceId]
    ) -> list[Upstream]:
        """The instances that may serve a request, busy or not: the pinned one, else all of its model not yet tried."""
        if pinned is not None:
            upstream = self._upstreams.get(pinned)
            usable = upstream is not None and not upstream.draining and pinned not in tried
            if upstream is not None and usable and model in (None, upstream.model):
                return [upstream]
        return self.ready(model, tried) if tried else self.of(model)

    def became_idle(self, upstream: Upstream) -> bool:
        """True once per drain, when no request is left on it."""
        if not upstream.idle_wanted or upstream.in_flight or upstream.gone is not None:
            return False
        upstream.idle_wanted = False
        return True
