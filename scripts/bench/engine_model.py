"""A model of one engine in model time: serial prefill, decode by batch, an LRU prefix cache. Pure.

Drive it with `submit`, `cancel` and `advance(now)`; `next_at` says when something happens next. A driver in
model time jumps there; one in real time sleeps until then. Two ways in which engines share their compute:

* mixed: chunked prefill as vLLM 1 does it: each step decodes all running sequences and prefills up to
  `budget_tokens` of the waiting prompts, in order; the step takes as long as both together.
* apart: prompts are prefilled one after the other, while decode steps go on beside it at their own pace.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush

CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """What an engine can do. Defaults: the stub engines that the balancing budgets were set with."""

    prefill_tokens_per_s: float = 1500.0
    step_s: float = 0.060  # one decode step of an empty batch
    step_per_seq_s: float = 0.0008  # added per sequence in the batch
    max_num_seqs: int = 32
    cache_tokens: int = 60_000
    block_tokens: int = 128
    mixed: bool = False
    budget_tokens: int = 2048  # tokens of one step, mixed only

    @property
    def full_step_s(self) -> float:
        """A decode step with all sequences running."""
        return self.step_s + self.step_per_seq_s * self.max_num_seqs


class Kind(StrEnum):
    """What happened to a request."""

    FIRST = "first"  # its first token
    TOKEN = "token"  # noqa: S105 - one more, the last one too
    FINISHED = "finished"  # its last token has come


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, and when."""

    at: float
    kind: Kind
    request: object


@dataclass(slots=True, eq=False)
class Running:
    """A request inside the engine."""

    request: object
    blocks: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    left: float = 0.0  # prompt tokens still to be prefilled
    cached: int = 0  # prompt tokens that were found in the cache
    joins: int = 0  # steps that had ended before the first one that it takes part in
    gone: bool = False


def tokens_of(text: str) -> int:
    """Tokens of a text."""
    return max(1, len(text) // CHARACTERS_PER_TOKEN)


def blocks_of(text: str, block_tokens: int = 128) -> tuple[int, ...]:
    """The chain hashes of a text's whole blocks."""
    size = block_tokens * CHARACTERS_PER_TOKEN
    chain = 0
    found = []
    for start in range(0, len(text) - size + 1, size):
        chain = hash((chain, text[start : start + size]))
        found.append(chain)
    return tuple(found)


class Cache:
    """Blocks of past prompts, least recently used first."""

    def __init__(self, blocks: int) -> None:
        self._capacity = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: tuple[int, ...]) -> int:
        """How many leading blocks are there."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        return count

    def use(self, blocks: tuple[int, ...]) -> None:
        """They were just used."""
        for block in reversed(blocks):  # the end of a chain goes first
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


@dataclass(slots=True)
class Counts:
    """Sums since the engine started."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefill_busy_s: float = 0.0


class Engine:
    """One engine. `every_token`: also say Kind.TOKEN for each token after the first."""

    def __init__(self, shape: Shape, *, every_token: bool = False, cache: Cache | None = None) -> None:
        self.shape = shape
        self.counts = Counts()
        self.next_at: float | None = None
        self._every_token = every_token
        self._cache = Cache(shape.cache_tokens // shape.block_tokens) if cache is None else cache
        self._all: dict[object, Running] = {}
        self._waiting: deque[Running] = deque()
        self._prefilling: deque[Running] = deque()
        self._decoding: dict[Running, None] = {}
        self._ends: list[tuple[int, int, Running]] = []  # (step of its last token, order, request)
        self._steps = 0
        self._order = 0
        self._prefill_until: float | None = None
        self._step_until: float | None = None
        self._chunks: list[tuple[Running, float]] = []

    @property
    def running(self) -> int:
        """Requests that are prefilled or decoded."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        """Requests that are in the engine and not started."""
        return len(self._waiting)

    def submit(
        self, request: object, blocks: tuple[int, ...], prompt_tokens: int, output_tokens: int, now: float
    ) -> None:
        """A request arrives at `now`, up to which `advance` must have been called."""
        entry = Running(request, blocks, prompt_tokens, max(1, output_tokens))
        self._all[request] = entry
        self._waiting.append(entry)
        self._admit()
        self._schedule(now)

    def cancel(self, request: object, now: float) -> None:
        """Its client has left."""
        entry = self._all.pop(request, None)
        if entry is None:
            return
        entry.gone = True
        self._decoding.pop(entry, None)
        for queue in (self._waiting, self._prefilling):
            if entry in queue and not (queue is self._prefilling and queue[0] is entry):
                queue.remove(entry)
        self._admit()
        self._schedule(now)

    def cached_tokens(self, request: object) -> int:
        """Prompt tokens of a request inside that the cache had."""
        return self._all[request].cached

    def advance(self, now: float) -> list[Event]:
        """Everything that happens up to `now`, in order."""
        events: list[Event] = []
        while self.next_at is not None and self.next_at <= now:
            at = self.next_at
            if self._prefill_until is not None and self._prefill_until <= at:
                self._prefilled(at, events)
            if self._step_until is not None and self._step_until <= at:
                self._stepped(at, events)
            self._admit()
            self._schedule(at)
        return events

    def _admit(self) -> None:
        while self._waiting and self.running < self.shape.max_num_seqs:
            entry = self._waiting.popleft()
            entry.left = -1.0  # looked up in the cache when its turn comes
            self._prefilling.append(entry)

    def _look_up(self, entry: Running) -> None:
        held = self._cache.match(entry.blocks) * self.shape.block_tokens
        entry.cached = min(held, entry.prompt_tokens - 1)  # the last token is always computed
        entry.left = float(entry.prompt_tokens - entry.cached)
        self._cache.use(entry.blocks[: entry.cached // self.shape.block_tokens])
        self.counts.prompt_tokens += entry.prompt_tokens
        self.counts.cached_tokens += entry.cached

    def _schedule(self, now: float) -> None:
        shape = self.shape
        if shape.mixed:
            if self._step_until is None and (self._prefilling or self._decoding):
                budget = float(max(0, shape.budget_tokens - len(self._decoding)))
                self._chunks = []
                work = 0.0
                for entry in self._prefilling:
                    if budget <= 0.0:
                        break
                    if entry.left < 0.0:
                        self._look_up(entry)
                    part = min(budget, entry.left)
                    done = int(entry.prompt_tokens - entry.left + part) // shape.block_tokens
                    self._cache.use(entry.blocks[:done])  # as vLLM: from when they are scheduled
                    budget -= part
                    work += part
                    self._chunks.append((entry, part))
                took = work / shape.prefill_tokens_per_s
                self.counts.prefill_busy_s += took
                self._step_until = now + took + shape.step_s + shape.step_per_seq_s * self.running
            self.next_at = self._step_until
            return
        if self._prefill_until is None and self._prefilling:
            entry = self._prefilling[0]
            self._look_up(entry)
            took = entry.left / shape.prefill_tokens_per_s
            self.counts.prefill_busy_s += took
            self._prefill_until = now + took
        if self._step_until is None and self._decoding:
            self._step_until = now + shape.step_s + shape.step_per_seq_s * len(self._decoding)
        times = [at for at in (self._prefill_until, self._step_until) if at is not None]
        self.next_at = min(times) if times else None

    def _prefilled(self, at: float, events: list[Event]) -> None:
        self._prefill_until = None
        self._begin(self._prefilling.popleft(), at, events)

    def _begin(self, entry: Running, at: float, events: list[Event]) -> None:
        """Its prompt is done: the first token."""
        self._cache.use(entry.blocks)
        if entry.gone:
            return
        self.counts.output_tokens += 1
        events.append(Event(at, Kind.FIRST, entry.request))
        if entry.output_tokens == 1:
            self._finish(entry, at, events)
            return
        self._decoding[entry] = None
        self._order += 1
        in_step = self._step_until is not None and not self.shape.mixed  # it joins at the next step
        entry.joins = self._steps + in_step
        heappush(self._ends, (entry.joins + entry.output_tokens - 1, self._order, entry))

    def _stepped(self, at: float, events: list[Event]) -> None:
        self._step_until = None
        self._steps += 1
        if self._every_token:
            events += [Event(at, Kind.TOKEN, e.request) for e in self._decoding if e.joins < self._steps]
        while self._ends and self._ends[0][0] <= self._steps:
            entry = heappop(self._ends)[2]
            if not entry.gone:
                del self._decoding[entry]
                self._finish(entry, at, events)
        for entry, part in self._chunks:
            entry.left -= part
            if entry.left <= 0.0 and entry in self._prefilling:
                self._prefilling.remove(entry)
                self._begin(entry, at, events)
        self._chunks = []

    def _finish(self, entry: Running, at: float, events: list[Event]) -> None:
        self.counts.output_tokens += entry.output_tokens - 1
        del self._all[entry.request]
        events.append(Event(at, Kind.FINISHED, entry.request))
