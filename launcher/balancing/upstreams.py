"""The table of instances as the proxy sees them: which may get requests, and what is known about each."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum
from typing import Final

from launcher.balancing.estimators import WINDOW_S, Arrivals, LinearFit
from launcher.balancing.outlier_detection import OutlierDetection
from launcher.balancing.prefix_cache import PrefixCache
from launcher.base.address import Address

# --- What a request asks of an instance, how it leaves one, and why the queue refuses it. ---

InstanceId = tuple[int, int]  # (slot, generation): one process
FIRST: Final = -(1 << 31)  # before all priorities that clients may set


class Ending(Enum):
    """How a request left its instance, which decides what may be learned from it."""

    WHOLE = "whole"  # a complete answer below 400
    REFUSED = "refused"  # a 4xx: the instance works, and computed nothing
    LEFT = "left"  # given up by its client or by the proxy; says nothing about the instance
    BROKEN = "broken"  # the instance could not be used


class Demand:
    """One request, as far as its cost and its place in the queue depend on it. Tokens are estimates.

    `model` None: any instance will do. `pinned`: the instance that has the stored response; ignored once it is gone.
    `wished`: the slot that a trusted proxy chose, which has it if its instance can start it when it comes.
    `takes_place` False: the model does not run for it, so it needs no place among the requests that do.
    `stream` False: the answer comes whole, so its first byte does not mark the end of its prefill.
    """

    __slots__ = (
        "body_bytes", "key", "max_tokens", "model", "output_tokens", "pinned", "prefix", "priority", "prompt_tokens",
        "stream", "takes_place", "wished",
    )  # fmt: skip

    def __init__(
        self,
        model: str | None,
        prompt_tokens: int = 0,
        output_tokens: int = 0,
        prefix: tuple[int, ...] = (),
        body_bytes: int = 0,
        *,
        key: str | None = None,
        priority: int = 0,
        pinned: InstanceId | None = None,
        max_tokens: int | None = None,
        stream: bool = True,
        wished: int | None = None,
        takes_place: bool = True,
    ) -> None:
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.prefix = prefix  # prefix_cache.fingerprint of the prompt's raw bytes
        self.body_bytes = body_bytes
        self.key = key  # the API key's name: keys share fairly
        self.priority = priority if takes_place else FIRST  # smaller first, as in vLLM
        self.pinned = pinned
        self.max_tokens = max_tokens  # what the client asked for, per choice
        self.stream = stream
        self.wished = wished
        self.takes_place = takes_place


class LateError(Exception):
    """Its first token may come later than the ticket allows; nothing was queued or bound. `latest_s`: by when it will."""

    def __init__(self, latest_s: float) -> None:
        super().__init__(f"first token in up to {latest_s:.1f} s")
        self.latest_s = latest_s


class FullError(Exception):
    """The queue is full. `reason` is for a person; `bound`: "requests" or "bytes"; `retry_after_s` is at least 1."""

    def __init__(self, reason: str, bound: str, retry_after_s: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.bound = bound
        self.retry_after_s = retry_after_s


# --- The unfinished work of one instance. An engine prefills in the order of arrival. ---


class Load:
    """Outstanding prefill of one instance, and who waits for it. Tokens; seconds where the name ends in `_s`."""

    def __init__(self) -> None:
        # Requests without a first token, in the order in which they were bound: ticket number -> (uncached tokens, stream).
        self.pending: dict[int, tuple[float, bool]] = {}
        # The sum of their uncached tokens, and when the prefill of the first of them began.
        self.prefill: float = 0.0
        self.head_since: float = 0.0
        self.last_first: float | None = None  # when its last first token came
        # Ticket number -> when it was bound, or had its first token, and the tokens that its response is expected to have.
        self.running: dict[int, tuple[float, int]] = {}
        # When its last request ended, and since when it has run as many as it can (None: it runs fewer).
        self.last_end: float | None = None
        self.full_since: float | None = None
        # Queued requests that wait for just this instance, and how many of them this pass over the queue has left waiting.
        self.waiting: int = 0
        self.waiting_s: float = 0.0
        self.ahead: int = 0
        self.ahead_s: float = 0.0
        # Requests the instance reports beyond the proxy's own: in its last two reports, and in its last one.
        self.surplus: int = 0
        self._beyond: int = 0
        self.full: bool = False  # the instance reports that its KV cache is too small for the requests it has

    def bind(self, number: int, uncached: float, now: float, output_tokens: int = 0, *, stream: bool) -> None:
        self.running[number] = (now, output_tokens)
        if not self.pending:
            self.head_since = now
        self.pending[number] = (uncached, stream)
        self.prefill += uncached

    def first_token(self, number: int, now: float) -> bool:
        """Its prefill is done, and so is that of all bound before it. False: that was known."""
        if (found := self.running.get(number)) is not None:
            self.running[number] = (now, found[1])
        if number not in self.pending:
            return False
        while number in self.pending:
            self._remove(next(iter(self.pending)))
        self.head_since = now
        return True

    def leave(self, number: int, now: float) -> None:
        self.running.pop(number, None)
        if number in self.pending:
            if next(iter(self.pending)) == number:
                self.head_since = now
            self._remove(number)
        self.full = False

    def pending_streams(self) -> int:
        return sum(stream for _, stream in self.pending.values())

    def remaining_s(self, now: float, token_s: float) -> float:
        """Seconds of prefill left at `token_s` seconds per token; time already spent on the first is subtracted.

        The first byte of an answer that is not streamed does not mark the end of its prefill: elapsed time does.
        """
        while self.pending:
            number, (tokens, stream) = next(iter(self.pending.items()))
            head = tokens * token_s
            since = now - self.head_since
            if since < head:
                return self.prefill * token_s - since
            if stream:
                return (self.prefill - tokens) * token_s
            self.head_since += head
            self._remove(number)
        return 0.0

    def expect(self, prefill_s: float) -> None:
        self.waiting += 1
        self.waiting_s += prefill_s

    def expect_no_more(self, prefill_s: float) -> None:
        self.waiting -= 1
        # Rounding errors must not add up.
        self.waiting_s = self.waiting_s - prefill_s if self.waiting else 0.0

    def reported(self, requests: int, ours: int, *, full: bool) -> None:
        """The instance reports its requests. A single report may be older than what the proxy has done since."""
        beyond = max(0, requests - ours)
        self.surplus = min(beyond, self._beyond)
        self._beyond = beyond
        self.full = full

    def _remove(self, number: int) -> None:
        self.prefill -= self.pending.pop(number)[0]
        if not self.pending:
            self.prefill = 0.0  # rounding errors must not add up


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
        self.in_flight: int = 0  # requests that take a place
        self.beside: int = 0  # requests that take none
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
        busy = upstream.in_flight or upstream.beside
        if not upstream.idle_wanted or busy or upstream.gone is not None:
            return False
        upstream.idle_wanted = False
        return True


# --- A request's place in the schedule. ---


class Ticket:
    """A request at the balancer, over all its attempts. Times are the caller's clock, seconds."""

    __slots__ = (
        "ahead_s", "arrived", "ask_at", "awaited", "begun", "bound_at", "cached_blocks", "computed_tokens", "cost",
        "deadline", "demand", "expected_at", "first_token_at", "limit_s", "number", "predicted_s", "prefill_s",
        "prefill_tokens", "prompt_number", "queued", "rank", "shared_block", "tokens", "tried", "uncached", "unscaled_s",
        "upstream", "work",
    )  # fmt: skip

    def __init__(self, demand: Demand, arrived: float, deadline: float) -> None:
        self.demand = demand
        self.arrived = arrived
        self.deadline = deadline  # the ticket expires when it is still queued then
        self.number: int = 0  # order of arrival; 0: never offered
        self.begun: bool = False  # it was on an instance: the queue never refuses it
        self.tried: set[InstanceId] = set()  # instances that failed it, since the last pause before a retry

        # Seconds to its first token as predicted when it was first offered (None: nothing to predict from), and the
        # longest that its first token may take before another endpoint shall have it (None: it stays here).
        self.predicted_s: float | None = None
        self.limit_s: float | None = None

        # While it is queued: its place within the queue of its API key (smaller first), what it is charged in the fair
        # share of its key, seconds of prefill it adds to the queue, the instance it waits for (None: whichever is free
        # first), and the last block of its prompt that some instance has cached.
        self.queued: bool = False
        self.rank: float = 0.0
        self.cost: float = 0.0
        self.prefill_s: float = 0.0
        self.awaited: Upstream | None = None
        # Seconds of prefill there for those behind it, and until when it need not be asked again while that one is not open.
        self.ahead_s: float = 0.0
        self.ask_at: float = 0.0
        # The prediction's view: tokens of its prompt to compute and where (None: on whichever is free first), and what
        # it said before its correction (0: it was bound at once).
        self.prefill_tokens: float = 0.0
        self.unscaled_s: float = 0.0
        self.expected_at: Upstream | None = None
        self.shared_block: int | None = None

        # While it is bound: prompt tokens believed to be uncached (and the same as its usage reports it), blocks of
        # its prefix that were cached before, prompt tokens to compute there before its first token, its own included,
        # tokens produced so far, and the number of its prompt among all that were bound (CostModel.seen_bound).
        self.upstream: Upstream | None = None
        self.bound_at: float = 0.0
        self.first_token_at: float | None = None
        self.uncached: float = 0.0
        self.computed_tokens: float | None = None
        self.cached_blocks: int = 0
        self.work: float = 0.0
        self.tokens: int = 0
        self.prompt_number: int = 0
