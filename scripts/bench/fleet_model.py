"""Hosts of a fleet in model time: each a daemon's balancer over its own engines; and ways to choose a host for a request.

The picker is the fleet's own (launcher/fleet/picker.py). It sees the first 16 KiB of a body; first tokens and ends reach
it late; each host's load comes once a second. The daemon that gets a request takes the wished instance if that one can
start it, else decides as it does on its own.
"""

# ruff: noqa: S311, ARG002 - a seeded Random is the point; one signature for all ways
from __future__ import annotations

import json
import time
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import count
from math import ceil
from random import Random
from typing import Final

from bench.balancers import Ours
from bench.engine_model import Shape
from bench.sim import Start
from bench.workloads import Request
from launcher.balancing.prefix_cache import fingerprint
from launcher.balancing.upstreams import Demand, Ticket
from launcher.config.schema import Policy
from launcher.fleet.loads import HostLoad, InstanceLoad
from launcher.fleet.picker import Choice, Picker
from launcher.proxy.request.beginning import read_asked

LATE_S: Final = 0.001  # from a host's first token, or end, until the picker has it
REPORT_S: Final = 1.0  # between two loads of a host
SEEN_BYTES: Final = 16_384  # of a body, by the picker
TAKE_OVER_S: Final = 1.0  # from the death of a picker until the other one answers
POINTS: Final = 100  # of a host on the ring


class Daemon(Ours):
    """One host's balancer; `wished`: the slot that the picker chose for the request that comes next."""

    wished: int | None = None

    def offer(self, request: Request, ticket: Ticket, now: float) -> None:
        """See Ours."""
        ticket.demand.wished, self.wished = self.wished, None
        super().offer(request, ticket, now)

    def load(self) -> HostLoad:
        """What it would say of itself."""
        upstreams = list(self.scheduler.table)
        return HostLoad(
            running=sum(upstream.in_flight for upstream in upstreams),
            waiting=self.scheduler.queue.count,
            instances=tuple(
                InstanceLoad(
                    slot=u.slot, generation=u.generation, model=u.model, ready=True, running=u.in_flight,
                    waiting=0, concurrency_limit=u.max_num_seqs, kv_tokens=u.kv_tokens,
                )
                for u in upstreams
            ),
        )  # fmt: skip


class Hosts:
    """What all ways have in common. See sim.Balancer for the methods that the loop calls."""

    def __init__(self, hosts: int, per: int, shape: Shape, seed: int) -> None:
        self.per, self.random = per, Random(seed)
        self.daemons = [
            Daemon(
                Policy.PREFIX_AWARE, per, shape.max_num_seqs, seed * 1000 + host, kv_tokens=shape.cache_tokens
            )
            for host in range(hosts)
        ]
        self.requests = [0] * hosts  # on each host
        self.where: dict[int, int] = {}
        self._touched: set[int] = set()
        self._pump_at: dict[int, float] = {}
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()

    def attach(self, start: Start) -> None:
        """See sim.Balancer."""
        for number, daemon in enumerate(self.daemons):
            daemon.attach(lambda request, engine, first=number * self.per: start(request, first + engine))

    def choose(self, request: Request, body: bytes, now: float) -> int:
        """The host for a request."""
        raise NotImplementedError

    def arrived(self, request: Request, body: bytes, now: float) -> None:
        """See sim.Balancer."""
        self.send(self.choose(request, body, now), request, body, now)

    def send(self, host: int, request: Request, body: bytes, now: float, wished: int | None = None) -> None:
        """It goes to that host."""
        self.where[request.id] = host
        self.requests[host] += 1
        self.daemons[host].wished = wished
        self.daemons[host].arrived(request, body, now)
        self._touched.add(host)

    def first(self, request: Request, engine: int, now: float) -> None:
        """See sim.Balancer."""
        self.daemons[engine // self.per].first(request, engine % self.per, now)
        self._touched.add(engine // self.per)

    def finished(self, request: Request, engine: int, now: float) -> None:
        """See sim.Balancer."""
        host = engine // self.per
        self.daemons[host].finished(request, engine % self.per, now)
        self.requests[host] -= 1
        del self.where[request.id]
        self._touched.add(host)

    def after(self, at: float, call: Callable[[float], None]) -> None:
        """Call it then."""
        heappush(self._timers, (at, next(self._order), call))

    def tick(self, now: float) -> float | None:
        """See sim.Balancer."""
        while self._timers and self._timers[0][0] <= now:
            heappop(self._timers)[2](now)
        due = self._touched | {host for host, at in self._pump_at.items() if at <= now}
        self._touched = set()
        for host in sorted(due):
            at = self.daemons[host].tick(now)
            if at is None:
                self._pump_at.pop(host, None)
            else:
                self._pump_at[host] = at
        times = [*self._pump_at.values(), *(timer[0] for timer in self._timers[:1])]
        return min(times, default=None)

    def least(self) -> int:
        """The host with the fewest requests, a random one of those that tie: HAProxy's leastconn."""
        fewest = min(self.requests)
        return self.random.choice([host for host, has in enumerate(self.requests) if has == fewest])


class LeastConnections(Hosts):
    """The fewest requests: what HAProxy does without a picker."""

    def choose(self, request: Request, body: bytes, now: float) -> int:
        """See Hosts."""
        return self.least()


class RoundRobin(Hosts):
    """One after the other."""

    _last = 0

    def choose(self, request: Request, body: bytes, now: float) -> int:
        """See Hosts."""
        self._last += 1
        return self._last % len(self.requests)


class Predicted(Hosts):
    """Each host's own prediction for the very request, exact and fresh; the shortest wins: the best of binding early."""

    def choose(self, request: Request, body: bytes, now: float) -> int:
        """See Hosts."""
        raw = prompt(body)
        found = []
        for host, daemon in enumerate(self.daemons):
            balancer = daemon.scheduler
            tokens, output = balancer.prompt_tokens(len(raw)), balancer.output_tokens(request.max_tokens)
            demand = Demand("m", tokens, output, fingerprint(raw), len(body), max_tokens=request.max_tokens)
            predicted_s = balancer.predicted_ttft(demand, now)
            found.append(
                (
                    0.01 * self.requests[host] if predicted_s is None else predicted_s,
                    self.requests[host],
                    host,
                )
            )
        return min(found)[2]


class Bounded(Hosts):
    """Consistent hashing with bounded loads (1.25) of the prompt's first 512 bytes, or of system prompt and first question.

    `shed`: where the chosen host would queue it, to the shortest queue of that and three others at random.
    """

    BOUND = 1.25

    def __init__(
        self, hosts: int, per: int, shape: Shape, seed: int, *, session: bool = False, shed: bool = False
    ) -> None:
        super().__init__(hosts, per, shape, seed)
        self._session, self._shed = session, shed
        ring = sorted((digest(b"%d-%d" % (h, point)), h) for h in range(hosts) for point in range(POINTS))
        self._points, self._hosts = [point for point, _ in ring], [host for _, host in ring]

    def choose(self, request: Request, body: bytes, now: float) -> int:
        """See Hosts."""
        if self._session:
            key = "".join(message["content"][:400] for message in json.loads(body)["messages"][:2]).encode()
        else:
            key = prompt(body)[:512]
        at = bisect(self._points, digest(key))
        most = ceil(self.BOUND * (sum(self.requests) + 1) / len(self.requests))
        ordered = (self._hosts[(at + step) % len(self._hosts)] for step in range(len(self._hosts)))
        host = next(host for host in ordered if self.requests[host] < most)
        if not self._shed or not self._waiting(host):
            return host
        others = self.random.sample(range(len(self.requests)), min(3, len(self.requests)))
        return min([host, *others], key=lambda h: (self._waiting(h), self.requests[h]))

    def _waiting(self, host: int) -> int:
        return self.daemons[host].scheduler.queue.waiting("m")


@dataclass(frozen=True, slots=True)
class Failure:
    """From `at_s` on there is no picker; after `for_s` another one takes over, which knows nothing."""

    at_s: float
    for_s: float


class Picked(Hosts):
    """The fleet's picker. Where it does not answer: the fewest requests."""

    def __init__(self, hosts: int, per: int, shape: Shape, seed: int, failure: Failure | None = None) -> None:
        super().__init__(hosts, per, shape, seed)
        self._seed = seed
        self._held: dict[int, tuple[Request, bytes]] = {}
        self._picker: Picker | None = None
        self.spent_ns = 0  # by the picker, all told
        self._take_over(0.0)
        for host in range(hosts):
            self.after(REPORT_S * (1 + host / hosts), partial(self._report, host))
        if failure is not None:
            self.after(failure.at_s, self._fail)
            self.after(failure.at_s + failure.for_s, self._take_over)

    def arrived(self, request: Request, body: bytes, now: float) -> None:
        """See sim.Balancer."""
        begun = time.thread_time_ns()
        choice, held = None, False
        if self._picker is not None:
            asked = read_asked({
                "id": str(request.id), "path": "/v1/chat/completions", "body": body[:SEEN_BYTES], "length": len(body),
            })  # fmt: skip
            assert asked is not None  # noqa: S101
            # What reads the request is no part of a decision's cost.
            begun = time.thread_time_ns()
            choice = self._picker.offer(asked, now)
            held = self._picker.holds(str(request.id)) and choice is None
            self.spent_ns += time.thread_time_ns() - begun
        if held:
            self._held[request.id] = (request, body)
        else:
            self._go(request, body, choice, now)

    def first(self, request: Request, engine: int, now: float) -> None:
        """See sim.Balancer."""
        super().first(request, engine, now)
        self.after(
            now + LATE_S, lambda now: self._tell(lambda picker: picker.first(str(request.id), 200, now))
        )

    def finished(self, request: Request, engine: int, now: float) -> None:
        """See sim.Balancer."""
        super().finished(request, engine, now)
        self.after(
            now + LATE_S,
            lambda now: self._tell(lambda picker: picker.ended(str(request.id), 200, "--", now)),
        )

    def tick(self, now: float) -> float | None:
        """See sim.Balancer."""
        at = super().tick(now)
        if self._picker is None:
            return at
        begun = time.thread_time_ns()
        decided = self._picker.turn(now)
        turn_at = self._picker.next_turn(now)
        self.spent_ns += time.thread_time_ns() - begun
        for id_, choice in decided:
            request, body = self._held.pop(int(id_))
            self._go(request, body, choice, now)
        if self._touched:
            at = super().tick(now)
        return min((time_s for time_s in (at, turn_at) if time_s is not None), default=None)

    def _go(self, request: Request, body: bytes, choice: Choice | None, now: float) -> None:
        if choice is None:
            self.send(self.least(), request, body, now)
        else:
            self.send(int(choice.host), request, body, now, choice.slot)

    def _tell(self, what: Callable[[Picker], None]) -> None:
        if self._picker is not None:
            begun = time.thread_time_ns()
            what(self._picker)
            self.spent_ns += time.thread_time_ns() - begun

    def _report(self, host: int, now: float) -> None:
        load = self.daemons[host].load()
        self._tell(lambda picker: picker.report(str(host), load, now))
        self.after(now + REPORT_S, partial(self._report, host))

    def _fail(self, now: float) -> None:
        self._picker = None
        held, self._held = self._held, {}
        for request, body in held.values():
            self._go(request, body, None, now)

    def _take_over(self, now: float) -> None:
        self._picker = Picker(Random(self._seed).randrange)
        self._picker.serve(dict.fromkeys(map(str, range(len(self.daemons))), False), now)
        for host, daemon in enumerate(self.daemons):
            self._picker.report(str(host), daemon.load(), now)


def prompt(body: bytes) -> bytes:
    """The messages' JSON text, as Ours sees it."""
    return body[body.index(b'"messages":') + 11 : body.rindex(b'],"max_tokens"')]


def digest(data: bytes) -> int:
    """A place on the ring."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
