"""What scripts/sim-balance compares: our scheduler by each policy, models of other routers, an ideal queue.

The models follow what the routers' own documentation and sources say of their algorithms: nginx round robin and
least_conn; power of two choices; cache_aware of sglang's router and of its descendants (a tree of characters per
worker; the longest match if it covers a share of the text, else the smallest tree; the fewest requests while
the load is out of balance).
"""

# ruff: noqa: S311, ARG002 - a seeded Random is the point; one signature for all balancers
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from bench.engine_model import Cache, Shape, blocks_of
from bench.sim import Start
from bench.workloads import Request
from launcher.balancing.balancer import Balancer
from launcher.balancing.prefix_cache import fingerprint
from launcher.balancing.upstreams import Demand, Ending, Ticket, Upstream
from launcher.base.address import UnixAddress
from launcher.config.schema import Policy


class Ours:
    """The proxy's balancer, given what the proxy would give it."""

    def __init__(
        self,
        policy: Policy,
        instances: int,
        max_num_seqs: int,
        seed: int,
        *,
        kv_tokens: int | None = None,
        ask_again_s: float = 0.0,
    ) -> None:
        self.scheduler = Balancer(policy, Random(seed).randrange, ask_again_s=ask_again_s)
        for slot in range(instances):
            self.scheduler.add(Upstream(slot, 1, "m", UnixAddress("/x"), max_num_seqs, kv_tokens=kv_tokens))
        self._tickets: dict[int, Ticket] = {}
        self._requests: dict[Ticket, Request] = {}

    def attach(self, start: Start) -> None:
        """See sim.Balancer."""
        self._start = start

    def arrived(self, request: Request, body: bytes, now: float) -> None:
        """See sim.Balancer."""
        begin = body.index(b'"messages":') + 11
        raw = body[begin : body.rindex(b'],"max_tokens"')]
        demand = Demand(
            "m",
            self.scheduler.prompt_tokens(len(raw)),
            self.scheduler.output_tokens(request.max_tokens),
            fingerprint(raw),
            len(body),
            max_tokens=request.max_tokens,
        )
        ticket = Ticket(demand, now, now + 1e9)
        self._tickets[request.id] = ticket
        self._requests[ticket] = request
        self.offer(request, ticket, now)

    def offer(self, request: Request, ticket: Ticket, now: float) -> None:
        """Give it to the balancer."""
        upstream = self.scheduler.offer(ticket, now)
        if upstream is not None:
            self._start(request, upstream.slot)

    def forget(self, request: Request) -> None:
        """It went elsewhere."""
        del self._requests[self._tickets.pop(request.id)]

    def first(self, request: Request, engine: int, now: float) -> None:
        """See sim.Balancer."""
        self.scheduler.first_token(self._tickets[request.id], now)

    def finished(self, request: Request, engine: int, now: float) -> None:
        """See sim.Balancer."""
        ticket = self._tickets.pop(request.id)
        del self._requests[ticket]
        self.scheduler.progress(ticket, request.output_tokens)
        self.scheduler.release(ticket, now, Ending.WHOLE)

    def tick(self, now: float) -> float | None:
        """See sim.Balancer."""
        for ticket in self.scheduler.pump(now):
            assert ticket.upstream is not None  # noqa: S101
            self._start(self._requests[ticket], ticket.upstream.slot)
        return self.scheduler.next_pump(now)


class Counting:
    """Routers that choose at once, by the requests they have on each engine."""

    def __init__(self, instances: int, seed: int) -> None:
        self.load = [0] * instances
        self.random = Random(seed)

    def attach(self, start: Start) -> None:
        """See sim.Balancer."""
        self._start = start

    def choose(self, request: Request) -> int:
        """The engine for a request."""
        raise NotImplementedError

    def arrived(self, request: Request, body: bytes, now: float) -> None:
        """See sim.Balancer."""
        engine = self.choose(request)
        self.load[engine] += 1
        self._start(request, engine)

    def first(self, request: Request, engine: int, now: float) -> None:
        """See sim.Balancer."""

    def finished(self, request: Request, engine: int, now: float) -> None:
        """See sim.Balancer."""
        self.load[engine] -= 1

    def tick(self, now: float) -> float | None:
        """See sim.Balancer."""
        return None

    def least(self) -> int:
        """The engine with the fewest requests, a random one of those that tie."""
        fewest = min(self.load)
        return self.random.choice([n for n, load in enumerate(self.load) if load == fewest])


class RoundRobin(Counting):
    """One after the other."""

    _next = 0

    def choose(self, request: Request) -> int:
        """See Counting."""
        self._next += 1
        return self._next % len(self.load)


class LeastConnections(Counting):
    """The fewest requests."""

    def choose(self, request: Request) -> int:
        """See Counting."""
        return self.least()


class PowerOfTwo(Counting):
    """The lighter of two at random."""

    def choose(self, request: Request) -> int:
        """See Counting."""
        one, two = self.random.sample(range(len(self.load)), 2)
        return one if self.load[one] <= self.load[two] else two


@dataclass(frozen=True, slots=True)
class Thresholds:
    """cache_aware's three settings."""

    match: float = 0.3
    absolute: int = 64
    relative: float = 1.5


class CacheAware(Counting):
    """Longest match in a tree per engine, unless the load is out of balance; trees are never trimmed here."""

    BLOCK_TOKENS = 8  # stands for characters: fine enough to tell prompts apart

    def __init__(self, instances: int, seed: int, thresholds: Thresholds, *, by_load: bool = False) -> None:
        super().__init__(instances, seed)
        self._trees: list[set[int]] = [set() for _ in range(instances)]
        self._thresholds = thresholds
        self._by_load = by_load

    def choose(self, request: Request) -> int:
        """See Counting."""
        limits = self._thresholds
        blocks = blocks_of(request.prompt, self.BLOCK_TOKENS)
        most, fewest = max(self.load), min(self.load)
        if most - fewest > limits.absolute and most > limits.relative * fewest:
            chosen = self.least()
        else:
            matches = [self._match(tree, blocks) for tree in self._trees]
            best = max(matches)
            if best > limits.match * max(1, len(blocks)):
                chosen = self.random.choice([n for n, match in enumerate(matches) if match == best])
            elif self._by_load:
                chosen = self.least()
            else:
                chosen = min(range(len(self._trees)), key=lambda n: len(self._trees[n]))
        self._trees[chosen].update(blocks)
        return chosen

    @staticmethod
    def _match(tree: set[int], blocks: tuple[int, ...]) -> int:
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in tree:
                low = middle + 1
            else:
                high = middle
        return low


class IdealQueue(Counting):
    """One queue, first come, first served: an engine gets the next when its last prefill has ended. Knows no prefix."""

    def __init__(self, instances: int, seed: int, max_num_seqs: int) -> None:
        super().__init__(instances, seed)
        self._waiting: deque[Request] = deque()
        self._prefilling = [False] * instances
        self._max_num_seqs = max_num_seqs

    def arrived(self, request: Request, body: bytes, now: float) -> None:
        """See sim.Balancer."""
        self._waiting.append(request)

    def first(self, request: Request, engine: int, now: float) -> None:
        """See sim.Balancer."""
        self._prefilling[engine] = False

    def tick(self, now: float) -> float | None:
        """See sim.Balancer."""
        for engine in sorted(range(len(self.load)), key=lambda n: self.load[n]):
            if self._waiting and not self._prefilling[engine] and self.load[engine] < self._max_num_seqs:
                self._prefilling[engine] = True
                self.load[engine] += 1
                self._start(self._waiting.popleft(), engine)
        return None


class OneCache(IdealQueue):
    """A bound, no router: all engines share one cache, so that a copy costs nothing and each prompt is computed once.

    One queue in the order of arrival; a request whose prompt is just being computed elsewhere lets others pass.
    """

    def __init__(self, instances: int, seed: int, shape: Shape) -> None:
        super().__init__(instances, seed, shape.max_num_seqs)
        self.cache = Cache(instances * (shape.cache_tokens // shape.block_tokens))
        self._block_tokens = shape.block_tokens
        self._computed: dict[int, tuple[int, ...]] = {}  # blocks that an engine computes now

    def first(self, request: Request, engine: int, now: float) -> None:
        """See sim.Balancer."""
        super().first(request, engine, now)
        self._computed.pop(engine, None)

    def tick(self, now: float) -> float | None:
        """See sim.Balancer."""
        for engine in sorted(range(len(self.load)), key=lambda n: self.load[n]):
            if self._prefilling[engine] or self.load[engine] >= self._max_num_seqs:
                continue
            for request in self._waiting:
                blocks = blocks_of(request.prompt, self._block_tokens)
                new = blocks[self.cache.match(blocks) :]
                if not new or all(new[0] not in others for others in self._computed.values()):
                    self._waiting.remove(request)
                    self._computed[engine] = new
                    self._prefilling[engine] = True
                    self.load[engine] += 1
                    self._start(request, engine)
                    break
        return None


# The settings that were also run live (scripts/bench-balance), and a cache_aware whose trees are all it needs: the
# smallest tree is then a good measure of the work, which the routers' own trees are not, as they are trimmed.
RIVALS: dict[str, Callable[[int, int], Counting]] = {
    "round robin": RoundRobin,
    "least_conn": LeastConnections,
    "power of two": PowerOfTwo,
    "cache_aware 0.3/64/1.5": lambda n, seed: CacheAware(n, seed, Thresholds(), by_load=True),
    "cache_aware 0.3/8/1.1": lambda n, seed: CacheAware(n, seed, Thresholds(0.3, 8, 1.1), by_load=True),
}
EXTRAS: dict[str, Callable[[int, int], Counting]] = {
    "cache_aware, perfect trees": lambda n, seed: CacheAware(n, seed, Thresholds(0.5, 32, 1.0001)),
}
