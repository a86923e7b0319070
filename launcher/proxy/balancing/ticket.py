"""A request's place in the schedule."""

from __future__ import annotations

from launcher.proxy.balancing.demand import Demand, InstanceId
from launcher.proxy.balancing.upstreams import Upstream


class Ticket:
    """A request at the balancer, over all its attempts. Times are the caller's clock, seconds."""

    __slots__ = (
        "ahead_s", "arrived", "ask_at", "awaited", "bound_at", "cached_blocks", "computed_tokens", "cost", "deadline",
        "demand", "expected_at", "first_token_at", "limit_s", "number", "predicted_s", "prefill_s", "prefill_tokens",
        "queued", "rank", "shared_block", "tokens", "tried", "uncached", "unscaled_s", "upstream", "work",
    )  # fmt: skip

    def __init__(self, demand: Demand, arrived: float, deadline: float) -> None:
        self.demand = demand
        self.arrived = arrived
        self.deadline = deadline  # the ticket expires when it is still queued then
        self.number: int = 0  # order of arrival; 0: never offered
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
        # and tokens produced so far.
        self.upstream: Upstream | None = None
        self.bound_at: float = 0.0
        self.first_token_at: float | None = None
        self.uncached: float = 0.0
        self.computed_tokens: float | None = None
        self.cached_blocks: int = 0
        self.work: float = 0.0
        self.tokens: int = 0
