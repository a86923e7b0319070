"""How fast the instances are and how long requests last: from first tokens, ends and usage. In our estimated tokens."""

from __future__ import annotations

from math import expm1, log

from launcher.proxy.balancing.demand import Ticket
from launcher.proxy.balancing.estimators import PREFILL, TYPICAL_PROMPT, Line, Mean
from launcher.proxy.balancing.prefix_cache import BLOCK_BYTES, Ghosts
from launcher.proxy.balancing.upstreams import Upstream

TOKENS_PER_BYTE = 0.25  # until usage tells better
LEAST_PER_BYTE, MOST_PER_BYTE = 0.05, 1.0  # beyond it is no text, or a template around next to none
TOKEN_S = 0.05  # between two tokens of one answer, until some have been seen
MOST_LOAD = 0.9  # a higher one is not told from this in so short a time
LEAST_SIZE = 0.01  # of a typical prefill: nothing is so small that it may pass more than this lets it
LEARNED = 30  # first tokens seen before the line is trusted to tell a cached prompt from one that was not
LEARN = 0.03  # part by which the belief of a cache's size changes at a contradiction
OUTPUT = 200.0  # tokens of an answer, until some have been seen


class CostModel:
    """Everything learned, shared by all instances of one scheduler but for each one's own slowness."""

    def __init__(self) -> None:
        self._prefill: dict[str, Line] = {}
        self._ghosts: dict[str, Ghosts] = {}
        self._step = Mean(TOKEN_S, 500)
        self._output = Mean(OUTPUT, 500)
        self._used = Mean(1.0, 500)  # share of max_tokens that is really produced
        self._per_byte = Mean(TOKENS_PER_BYTE, 200)
        self._own = Mean(TYPICAL_PROMPT, 200)  # tokens of one prompt that are not cached
        self.block_tokens = BLOCK_BYTES * TOKENS_PER_BYTE

    def line(self, model: str) -> Line:
        """Seconds to the first token over tokens of prefill before and in it."""
        line = self._prefill.get(model)
        if line is None:
            line = self._prefill[model] = Line(PREFILL, TYPICAL_PROMPT, 200)
        return line

    def ghosts(self, model: str) -> Ghosts:
        """What the instances of a model have forgotten."""
        return self._ghosts.setdefault(model, Ghosts())

    def token_s(self, upstream: Upstream) -> float:
        """Seconds of prefill per prompt token on this instance."""
        return upstream.line.slope * upstream.lag

    def prefill_s(self, upstream: Upstream, now: float) -> float:
        """Seconds until what is bound to it is prefilled."""
        ledger = upstream.ledger
        return ledger.remaining_s(now, upstream.line.slope * upstream.lag) if ledger.pending else 0.0

    def decode_s(self, upstream: Upstream) -> float:
        """Seconds of decode left on it, as if all of its seats were taken."""
        return upstream.ledger.decode * self._step.value / upstream.max_num_seqs

    def seat_s(self, upstream: Upstream) -> float:
        """Seconds until one of its requests leaves, when all of its seats are taken."""
        return self._output.value * self._step.value / upstream.max_num_seqs

    @property
    def own_tokens(self) -> float:
        """Tokens that a typical request has prefilled."""
        return self._own.value

    def delayed(self, upstream: Upstream, backlog_s: float, more_s: float, now: float) -> float:
        """How many requests that come to it `more_s` more seconds of prefill delay, by that time each.

        With W seconds of work at load r an instance stays busy for W / (1 - r). All that come meanwhile wait.
        """
        load = min(MOST_LOAD, upstream.busy.per_s(now) * self.token_s(upstream))
        return upstream.starts.per_s(now) * (backlog_s + 0.5 * more_s) / (1.0 - load)

    def seen_bound(self, upstream: Upstream, uncached: float, now: float) -> None:
        """A request with so many tokens to be prefilled was bound to it."""
        self._own.add(uncached)
        upstream.starts.add(now)
        upstream.busy.add(now, uncached)

    def head_start_s(self, tokens: float, token_s: float) -> float:
        """How much earlier than it came a request with so many tokens of prefill is ranked.

        Small ones pass large ones, by an amount that is bounded for all sizes but the smallest: the boost of
        Yu and Scully 2024 ("Strongly tail-optimal scheduling in the light-tailed M/G/1"), which thins the tail
        of the waiting times against first come, first served, and starves nobody.
        """
        typical = self._own.value
        size = min(50.0, max(LEAST_SIZE, tokens / typical)) if typical > 0.0 else 50.0
        return -typical * token_s * log(-expm1(-size))

    def horizon_s(self, upstream: Upstream) -> float:
        """Prefill that may be left when the next one is bound: a step, so that the engine never waits for us."""
        return upstream.line.base + 0.01

    def prompt_tokens(self, prompt_bytes: int) -> int:
        """Tokens of a prompt of so many bytes of JSON text."""
        return int(prompt_bytes * self._per_byte.value) + 1

    def output_tokens(self, max_tokens: int | None, n: int = 1) -> int:
        """Tokens of an answer, `n` of them, when at most `max_tokens` are asked for each."""
        likely = self._output.value
        if max_tokens is not None:
            likely = max_tokens * self._used.value if self._used.count else max_tokens
        return max(1, int(likely)) * n

    def seen_first(self, ticket: Ticket, upstream: Upstream, now: float) -> None:
        """A streamed answer began."""
        line = upstream.line
        took = now - ticket.bound
        expected = line.at(ticket.work)
        if line.count >= LEARNED and self._misjudged(ticket, upstream, took, line):
            return  # it says nothing of speed
        if expected > 0.0:
            upstream.health.slowness.add(min(10.0, took / expected))
        line.add(ticket.work, took)

    def seen_cached(self, ticket: Ticket, upstream: Upstream, cached: float) -> None:
        """So many tokens of its prompt were found in the cache: learn how much the cache holds."""
        if upstream.kv_tokens is not None:
            return
        believed = ticket.demand.prompt_tokens - ticket.uncached
        doubt = max(2.0 * self.block_tokens, 0.3 * ticket.demand.prompt_tokens)
        if cached < believed - doubt:
            upstream.store.resize(1.0 - LEARN)
        elif cached > believed + doubt:
            upstream.store.resize(1.0 + LEARN)

    def _misjudged(self, ticket: Ticket, upstream: Upstream, took: float, line: Line) -> bool:
        """Whether a first token came so late, or so soon, that its prompt was not cached, or was, against belief."""
        slope = line.slope * upstream.lag
        if slope <= 0.0:
            return False
        really = ticket.uncached + (took - line.base) / slope - ticket.work
        really = min(float(ticket.demand.prompt_tokens), max(1.0, really))
        doubt = max(4.0 * self.block_tokens, 0.5 * ticket.demand.prompt_tokens)
        if abs(really - ticket.uncached) <= doubt:
            return False
        self.seen_cached(ticket, upstream, ticket.demand.prompt_tokens - really)
        return True

    def seen_end(self, ticket: Ticket, upstream: Upstream, now: float) -> None:
        """An answer ended well, `ticket.tokens` long. One that came whole took at least its prefill's time."""
        if not ticket.demand.stream and ticket.demand.prompt_tokens:
            self._seen_whole(ticket, upstream, now - ticket.bound)
        if ticket.tokens < 2 or ticket.first is None:
            return
        self._output.add(ticket.tokens)
        self._step.add((now - ticket.first) / (ticket.tokens - 1))

    def _seen_whole(self, ticket: Ticket, upstream: Upstream, took: float) -> None:
        """A whole answer came; if sooner than its prefill alone should have taken, that is faster than was thought."""
        work, line = ticket.work, upstream.line
        if ticket.computed is not None:  # it was told, so it is no guess
            work += ticket.computed - ticket.uncached
        if took < line.at(work) and not (
            line.count >= LEARNED and self._misjudged(ticket, upstream, took, line)
        ):
            line.add(work, took)

    def seen_used(self, produced: int, asked: int | None) -> None:
        """An answer ended with so many tokens, `asked` being its max_tokens."""
        if asked and produced:
            self._used.add(min(1.0, produced / asked))

    def seen_prompt(self, prompt_bytes: int, tokens: int) -> None:
        """Usage told how many tokens a prompt was."""
        if prompt_bytes > 0 and tokens > 0:
            self._per_byte.add(min(MOST_PER_BYTE, max(LEAST_PER_BYTE, tokens / prompt_bytes)))
            self.block_tokens = BLOCK_BYTES * self._per_byte.value
