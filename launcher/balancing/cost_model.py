"""How fast instances are and how long requests take: learned from first tokens, ends and usage. In estimated tokens."""

from __future__ import annotations

from math import expm1, log
from typing import Final

from launcher.balancing.estimators import TYPICAL_PROMPT, LinearFit, Mean
from launcher.balancing.prefix_cache import BLOCK_BYTES
from launcher.balancing.upstreams import Ticket, Upstream

# Until usage says better. Beyond the bounds it is not text, or a template around almost none.
TOKENS_PER_BYTE: Final = 0.25
LEAST_PER_BYTE: Final = 0.05
MOST_PER_BYTE: Final = 1.0
# Between two tokens of one answer, and tokens of an answer, until some were seen.
TOKEN_S: Final = 0.05
OUTPUT: Final = 200.0
MOST_LOAD: Final = 0.9  # higher loads cannot be told apart in so short a time
LEAST_SIZE: Final = 0.01  # of a typical prefill: bounds how far a small prompt may pass others
# First tokens seen before the fit is trusted to tell a cached prompt from one that was not.
LEARNED: Final = 30
# First tokens seen before an instance's outstanding prefill is judged by its speed. Until then at most UNKNOWN_AT_ONCE
# streams may be without a first token: they soon tell. The more there are, the less a first burst waits.
KNOWN: Final = 4
UNKNOWN_AT_ONCE: Final = 4
LEARN: Final = 0.03  # part by which the believed size of a cache changes at a contradiction


class CostModel:
    """Everything learned, shared by all instances of one balancer except for each instance's own lag."""

    def __init__(self) -> None:
        self._fits: dict[str, LinearFit] = {}
        self._step: Mean = Mean(TOKEN_S, 500)
        self._output: Mean = Mean(OUTPUT, 500)
        self._used: Mean = Mean(1.0, 500)  # the share of max_tokens that is produced
        self._per_byte: Mean = Mean(TOKENS_PER_BYTE, 200)
        self._uncached: Mean = Mean(TYPICAL_PROMPT, 200)  # tokens of one prompt that are not cached
        self.block_tokens: float = BLOCK_BYTES * TOKENS_PER_BYTE

    def fit(self, model: str) -> LinearFit:
        """Seconds to the first token over tokens of prefill up to it."""
        return self._fits.setdefault(model, LinearFit())

    def token_s(self, upstream: Upstream) -> float:
        """Seconds of prefill per prompt token on this instance."""
        return upstream.fit.slope * upstream.lag

    def prefill_s(self, upstream: Upstream, now: float) -> float:
        """Seconds until what is bound to it is prefilled."""
        load = upstream.load
        return load.remaining_s(now, upstream.fit.slope * upstream.lag) if load.pending else 0.0

    def next_end_s(self, upstream: Upstream) -> float:
        """Seconds until one of its requests ends, when it runs as many as it can."""
        return self._output.value * self._step.value / upstream.max_num_seqs

    @property
    def typical_uncached(self) -> float:
        return self._uncached.value

    def delayed(self, upstream: Upstream, backlog_s: float, more_s: float, now: float) -> float:
        """How many requests that come to it `more_s` more seconds of prefill delay, by that time each.

        With W seconds of work at load r an instance stays busy for W / (1 - r). All that come meanwhile wait.
        """
        arrivals = upstream.arrivals
        load = min(MOST_LOAD, arrivals.amount_per_s(now) * self.token_s(upstream))
        return arrivals.per_s(now) * (backlog_s + 0.5 * more_s) / (1.0 - load)

    def head_start_s(self, tokens: float, token_s: float) -> float:
        """How much earlier than it came a request with that many tokens of prefill is ranked.

        Small ones pass large ones, by an amount that is bounded for all sizes but the smallest: the boost of Yu and
        Scully 2024 ("Strongly tail-optimal scheduling in the light-tailed M/G/1"), which thins the tail of waiting times
        compared to first come, first served, and starves no request.
        """
        typical = self._uncached.value
        size = min(50.0, max(LEAST_SIZE, tokens / typical)) if typical > 0.0 else 50.0
        return -typical * token_s * log(-expm1(-size))

    def horizon_s(self, upstream: Upstream) -> float:
        """Prefill that may be left when the next request is bound: one step, so that the engine never idles."""
        return upstream.fit.base + 0.01

    def prefills_enough(self, upstream: Upstream, now: float) -> bool:
        """Whether one more prompt would only wait there: by time, or by streams while its speed is unknown."""
        if upstream.fit.count >= KNOWN:
            return self.prefill_s(upstream, now) > self.horizon_s(upstream)
        return upstream.load.pending_streams() >= UNKNOWN_AT_ONCE

    def prompt_tokens(self, prompt_bytes: int) -> int:
        return int(prompt_bytes * self._per_byte.value) + 1

    def output_tokens(self, max_tokens: int | None, n: int = 1) -> int:
        likely = self._output.value
        if max_tokens is not None:
            likely = max_tokens * self._used.value if self._used.count else max_tokens
        return max(1, int(likely)) * n

    def seen_bound(self, upstream: Upstream, uncached: float, now: float) -> int:
        """The number of this prompt, for `seen_refused`."""
        upstream.arrivals.add(now, uncached)
        return self._uncached.add(uncached)

    def seen_refused(self, upstream: Upstream, uncached: float, bound_at: float, number: int) -> None:
        """The engine did not begin with it: it costs nothing, whatever its client asked for."""
        self._uncached.take_back(uncached, number)
        upstream.arrivals.take_back(bound_at, uncached)

    def seen_first_token(self, ticket: Ticket, upstream: Upstream, now: float) -> None:
        fit = upstream.fit
        took = now - ticket.bound_at
        expected = fit.at(ticket.work)
        if fit.count >= LEARNED and self._misjudged(ticket, upstream, took):
            return  # it says nothing about speed
        if expected > 0.0:
            upstream.outliers.slowness.add(min(10.0, took / expected))
        fit.add(ticket.work, took)

    def seen_end(self, ticket: Ticket, upstream: Upstream, now: float) -> None:
        demand = ticket.demand
        if not demand.stream and demand.prompt_tokens:
            self._seen_unstreamed(ticket, upstream, now - ticket.bound_at)
        if ticket.tokens and demand.max_tokens:
            self._used.add(min(1.0, ticket.tokens / demand.max_tokens))
        if ticket.tokens < 2 or ticket.first_token_at is None:
            return
        self._output.add(ticket.tokens)
        self._step.add((now - ticket.first_token_at) / (ticket.tokens - 1))

    def seen_prompt(self, prompt_bytes: int, tokens: int) -> None:
        if prompt_bytes > 0 and tokens > 0:
            self._per_byte.add(min(MOST_PER_BYTE, max(LEAST_PER_BYTE, tokens / prompt_bytes)))
            self.block_tokens = BLOCK_BYTES * self._per_byte.value

    def seen_cached(self, ticket: Ticket, upstream: Upstream, cached: float) -> None:
        """That many tokens of its prompt were cached: learn how much the cache holds."""
        if upstream.kv_tokens is not None:
            return
        prompt_tokens = ticket.demand.prompt_tokens
        believed = prompt_tokens - ticket.uncached
        doubt = max(2.0 * self.block_tokens, 0.3 * prompt_tokens)
        if cached < believed - doubt:
            upstream.prefixes.resize(1.0 - LEARN)
        elif cached > believed + doubt:
            upstream.prefixes.resize(1.0 + LEARN)

    def _seen_unstreamed(self, ticket: Ticket, upstream: Upstream, took: float) -> None:
        """It took at least its prefill's time. Sooner than its prefill should have taken: faster than was believed."""
        work, fit = ticket.work, upstream.fit
        if ticket.computed_tokens is not None:
            # Reported by usage, not estimated.
            work += ticket.computed_tokens - ticket.uncached
        if took < fit.at(work) and not (fit.count >= LEARNED and self._misjudged(ticket, upstream, took)):
            fit.add(work, took)

    def _misjudged(self, ticket: Ticket, upstream: Upstream, took: float) -> bool:
        """Whether a first token came so late, or so early, that the belief about its cached prompt was wrong."""
        fit = upstream.fit
        slope = fit.slope * upstream.lag
        if slope <= 0.0:
            return False
        prompt_tokens = ticket.demand.prompt_tokens
        computed = ticket.uncached + (took - fit.base) / slope - ticket.work
        computed = min(float(prompt_tokens), max(1.0, computed))
        doubt = max(4.0 * self.block_tokens, 0.5 * prompt_tokens)
        if abs(computed - ticket.uncached) <= doubt:
            return False
        self.seen_cached(ticket, upstream, prompt_tokens - computed)
        return True
