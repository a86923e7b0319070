"""A request's place in the schedule."""

from __future__ import annotations

from launcher.proxy.balancing.demand import Demand, InstanceId
from launcher.proxy.balancing.upstreams import Upstream


class Ticket:
    """A request at the balancer, over all its attempts. Times are the caller's clock, seconds."""

    __slots__ = (
        "arrived", "awaited", "bound_at", "cached_blocks", "computed_tokens", "cost", "deadline", "demand",
        "first_token_at", "number", "prefill_s", "queued", "rank", "shared_block", "tokens", "tried", "uncached",
        "upstream", "work",
    )  # fmt: skip

    def __init__(self, demand: Demand, arrived: float, deadline: float) -> None:
        self.demand = demand
        self.arrived = arrived
        self.deadline = deadline  # the ticket expires when it is still queued then
        self.number: int = 0  # order of arrival; 0: never offered
        self.tried: set[InstanceId] = set()  # instances that failed it, since the last pause before a retry

        # While it is queued: its place within the queue of its API key (smaller first), what it is charged in the fair
        # share of its key, seconds of prefill it adds to the queue, the instance it waits for (None: whichever is free
        # first), and the last block of its prompt that some instance has cached.
        self.queued: bool = False
        self.rank: float = 0.0
        self.cost: float = 0.0
        self.prefill_s: float = 0.0
        self.awaited: Upstream | None = None
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
