"""A discrete-event loop in model time: a workload, a balancer, engines. Nothing here takes real time.

The balancer sees what it would see in front of real engines: the bytes of a body, max_tokens, when a first token
and an end come; never the model's truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

from bench.engine_model import Cache, Engine, Kind, Shape, blocks_of, tokens_of
from bench.workloads import Request

FOREVER = float("inf")
HOP_S = 0.001  # between client, balancer and engine, one way


class Start(Protocol):
    """Tell the loop that a request goes to an engine now."""

    def __call__(self, request: Request, engine: int) -> None: ...


class Balancer(Protocol):
    """What is compared. It calls `start` from within any of these."""

    def attach(self, start: Start) -> None:
        """Before the first request."""
        ...

    def arrived(self, request: Request, body: bytes, now: float) -> None:
        """A request came."""
        ...

    def first(self, request: Request, engine: int, now: float) -> None:
        """Its first token came."""
        ...

    def finished(self, request: Request, engine: int, now: float) -> None:
        """Its answer has ended."""
        ...

    def tick(self, now: float) -> float | None:
        """Called after every event; when to be called although nothing has happened."""
        ...


@dataclass(slots=True)
class Outcome:
    """What became of one request. Seconds since it came."""

    ttft_s: float
    total_s: float


@dataclass(slots=True)
class Run:
    """One simulated run."""

    outcomes: list[Outcome]
    hit_rate: float
    span_s: float
    prefill_load: float  # part of the time that the engines prefilled


class Loop:
    """Engines, a balancer, and what is on its way between them."""

    def __init__(
        self, requests: Sequence[Request], balancer: Balancer, shapes: Sequence[Shape], cache: Cache | None
    ) -> None:
        self.engines = [Engine(shape, cache=cache) for shape in shapes]
        self.outcomes: list[Outcome] = []
        self.now = 0.0
        self._balancer = balancer
        self._order = count()
        self._heap: list[tuple[float, int, Kind | str, int, Request]] = []
        # When something happens next in an engine, and its number. Out of date where the engine says otherwise.
        self._due: list[tuple[float, int]] = []
        self._follows: dict[int, list[Request]] = {}
        self._came: dict[int, float] = {}
        self._ttft: dict[int, float] = {}
        self._by_id = {request.id: request for request in requests}
        balancer.attach(self._start)
        for request in requests:
            if request.after is not None:
                self._follows.setdefault(request.after, []).append(request)
            elif request.at_s is not None:
                self._push(request.at_s, "arrive", 0, request)

    def run(self) -> None:
        """Until every request has ended."""
        wake: float | None = None
        while len(self.outcomes) < len(self._by_id):
            at_heap = self._heap[0][0] if self._heap else FOREVER
            at_engine, which = self._next_engine()
            if wake is not None and wake <= min(at_heap, at_engine):
                self.now = max(self.now, wake)
            elif at_engine <= at_heap:
                for event in self.engines[which].advance(at_engine):
                    self._push(event.at + HOP_S, event.kind, which, self._by_id[int(str(event.request))])
                self._expect(which)
                continue
            else:
                self.now, _, what, engine, request = heappop(self._heap)
                self._happen(what, engine, request)
            wake = self._balancer.tick(self.now)

    def _happen(self, what: Kind | str, engine: int, request: Request) -> None:
        now = self.now
        if what == "arrive":
            self._came[request.id] = now
            self._balancer.arrived(request, request.body("m"), now)
        elif what == "submit":
            text, to = request.prompt, self.engines[engine]
            blocks = blocks_of(text, to.shape.block_tokens)
            to.submit(request.id, blocks, tokens_of(text), request.output_tokens, now)
            self._expect(engine)
        elif what is Kind.FIRST:
            self._ttft[request.id] = now - self._came[request.id]
            self._balancer.first(request, engine, now)
        else:
            self.outcomes.append(Outcome(self._ttft[request.id], now - self._came[request.id]))
            for follower in self._follows.pop(request.id, ()):
                self._push(now + follower.think_s, "arrive", 0, follower)
            self._balancer.finished(request, engine, now)

    def _expect(self, engine: int) -> None:
        """Note when something happens next in an engine that has changed."""
        at = self.engines[engine].next_at
        if at is not None:
            heappush(self._due, (at, engine))

    def _next_engine(self) -> tuple[float, int]:
        """The engine in which something happens first, and when."""
        due = self._due
        while due and due[0][0] != self.engines[due[0][1]].next_at:
            heappop(due)
        return due[0] if due else (FOREVER, 0)

    def _start(self, request: Request, engine: int) -> None:
        self._push(self.now + HOP_S, "submit", engine, request)

    def _push(self, at: float, what: Kind | str, engine: int, request: Request) -> None:
        heappush(self._heap, (at, next(self._order), what, engine, request))


def simulate(
    requests: Sequence[Request], balancer: Balancer, shapes: Sequence[Shape], cache: Cache | None = None
) -> Run:
    """Play the requests through the balancer to the engines; `cache`: one for all of them, instead of one each."""
    loop = Loop(requests, balancer, shapes, cache)
    loop.run()
    counts = [engine.counts for engine in loop.engines]
    return Run(
        loop.outcomes,
        sum(c.cached_tokens for c in counts) / max(1, sum(c.prompt_tokens for c in counts)),
        loop.now,
        sum(c.prefill_busy_s for c in counts) / loop.now / len(counts),
    )


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least `part` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
