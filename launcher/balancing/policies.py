"""Which instance is best for a ticket: one rule each. Pure; randomness and the clock are arguments.

`choose` gets the candidates (ordered by slot) and those of them that are open: that can start the ticket now (at least
one). It returns one candidate. If that one is not open, the ticket waits for it, and is asked again at every change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Final, Protocol, assert_never

from launcher.balancing.cost_model import CostModel
from launcher.balancing.upstreams import Ticket, Upstream
from launcher.config.schema import Policy as PolicyName

# ruff: noqa: ARG002 - one signature for all policies


Upstreams = Sequence[Upstream]
Pick = Callable[[int], int]  # n -> a number in range(n): random.Random(seed).randrange, or a test's own

_HIT: Final = itemgetter(0)


class Policy(Protocol):
    def choose(self, ticket: Ticket, candidates: Upstreams, opened: Upstreams, now: float) -> Upstream:
        """One of `candidates`; one of `opened` if it shall start now."""


class LeastRequests:
    """The instance with the fewest requests for its speed; a random one of those that tie."""

    def __init__(self, pick: Pick) -> None:
        self._pick = pick

    def choose(self, ticket: Ticket, candidates: Upstreams, opened: Upstreams, now: float) -> Upstream:
        loads = [(u.in_flight + 1) * u.lag for u in opened]
        fewest = min(loads)
        tied = [u for u, load in zip(opened, loads, strict=True) if load == fewest]
        return tied[self._pick(len(tied))] if len(tied) > 1 else tied[0]


class RoundRobin:
    """The next open slot of the model, in turn."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def choose(self, ticket: Ticket, candidates: Upstreams, opened: Upstreams, now: float) -> Upstream:
        last = self._last.get(opened[0].model, -1)
        chosen = next((u for u in opened if u.slot > last), opened[0])
        self._last[chosen.model] = chosen.slot
        return chosen


class PrefixAware:
    """The instance where the first token comes soonest and costs other requests least; it may have to be waited for.

    cost = wait for its turn there + own prefill + what a copy of the prompt costs (time, others' waits).
    """

    def __init__(self, costs: CostModel, sharing: Mapping[int | None, int]) -> None:
        """`sharing`: how many queued tickets share a cached block."""
        self._costs = costs
        self._sharing = sharing

    def choose(self, ticket: Ticket, candidates: Upstreams, opened: Upstreams, now: float) -> Upstream:
        prefix = ticket.demand.prefix
        if not prefix:
            return self._soonest(ticket, opened, now)
        costs = self._costs
        hits = [u.prefixes.match(prefix) for u in candidates]
        most = max(hits)
        found: Iterable[tuple[int, Upstream]] = zip(hits, candidates, strict=True)
        if most:
            # The likely ones first: most others need no closer look.
            found = sorted(found, key=_HIT, reverse=True)
        sharing = 1.0 + (self._sharing.get(prefix[most - 1], 0) if most else 0)
        block = costs.block_tokens
        shortest = max(1.0, ticket.demand.prompt_tokens - most * block)
        typical = costs.typical_uncached
        here = most  # the best hit of an open instance
        can_start: Collection[Upstream] = opened
        if len(opened) < len(candidates):
            can_start = set(opened)
            here = max(hit for hit, u in zip(hits, candidates, strict=True) if u in can_start)
        best, least = candidates[0], float("inf")
        for hit, upstream in found:
            if hit <= here and upstream not in can_start:
                continue  # no reason to wait: an open one has as much of the prompt
            token_s = upstream.fit.slope * upstream.lag
            start = self._start_s(upstream, token_s, now)
            full = upstream.in_flight / upstream.max_num_seqs
            cost = start + (shortest + typical * full * full) * token_s
            if hit < most and cost < least:
                cost += self._copy_s(ticket, upstream, (most - hit) * block * token_s, now) / sharing
            if cost < least:
                best, least = upstream, cost
        return best

    def _soonest(self, ticket: Ticket, opened: Upstreams, now: float) -> Upstream:
        """The same rule without a prefix: no cache, so no copy and no reason to wait."""
        tokens, typical = max(1.0, ticket.demand.prompt_tokens), self._costs.typical_uncached
        best, least = opened[0], float("inf")
        for upstream in opened:
            token_s = upstream.fit.slope * upstream.lag
            full = upstream.in_flight / upstream.max_num_seqs
            cost = (tokens + typical * full * full) * token_s
            if upstream.load.pending or upstream.load.ahead:
                cost += self._start_s(upstream, token_s, now)
            if cost < least:
                best, least = upstream, cost
        return best

    def _start_s(self, upstream: Upstream, token_s: float, now: float) -> float:
        """Seconds until it could begin one more request after those that wait for it."""
        load = upstream.load
        start = load.ahead_s
        if load.pending:
            start += load.remaining_s(now, token_s)
        lacking = upstream.in_flight + load.surplus + load.ahead + 1 - upstream.max_num_seqs
        return max(start, lacking * self._costs.next_end_s(upstream)) if lacking > 0 else start

    def _copy_s(self, ticket: Ticket, upstream: Upstream, more_s: float, now: float) -> float:
        """What `more_s` more seconds of prefill there cost: that time, and the same for all requests it delays."""
        load = upstream.load
        others = load.waiting - (ticket.awaited is upstream)
        backlog_s = load.waiting_s + self._costs.prefill_s(upstream, now)
        return more_s * (1.0 + others + self._costs.delayed(upstream, backlog_s, more_s, now))


def make_policy(name: PolicyName, pick: Pick, costs: CostModel, sharing: Mapping[int | None, int]) -> Policy:
    match name:
        case PolicyName.PREFIX_AWARE | PolicyName.LEAST_TOKENS | PolicyName.SESSION:
            return PrefixAware(costs, sharing)
        case PolicyName.LEAST_REQUESTS:
            return LeastRequests(pick)
        case PolicyName.ROUND_ROBIN:
            return RoundRobin()
    assert_never(name)


# --- Which instances can start one more request now. ---

# Requests that take no place, at one instance: they share its API server with all streams.
MOST_BESIDE: Final = 64


def open_upstreams(candidates: Sequence[Upstream], costs: CostModel, now: float) -> list[Upstream]:
    """Those that would start it at once; an ejection whose time is over ends."""
    opened: list[Upstream] = []
    for upstream in candidates:
        load, outliers = upstream.load, upstream.outliers
        if load.full or upstream.in_flight + load.surplus >= upstream.max_num_seqs:
            continue
        if load.pending and costs.prefills_enough(upstream, now):
            continue
        if outliers.ejected_until is not None:
            outliers.end_pause(now)
        if outliers.ejected_until is None and (not outliers.half_open or outliers.admits):
            opened.append(upstream)
    return opened


def beside(candidates: Sequence[Upstream]) -> Upstream | None:
    """The instance that answers a request without a place now: the one with the fewest, ejected ones last."""
    best = min(candidates, key=_beside_order, default=None)
    return best if best is not None and best.beside < MOST_BESIDE else None


def _beside_order(upstream: Upstream) -> tuple[bool, bool, int]:
    return upstream.beside >= MOST_BESIDE, upstream.outliers.out, upstream.beside


def least_busy(candidates: Sequence[Upstream]) -> Upstream | None:
    """The instance with the fewest requests that runs fewer than it can, whatever it prefills."""
    best: Upstream | None = None
    for upstream in candidates:
        load = upstream.load
        below = not load.full and upstream.in_flight + load.surplus < upstream.max_num_seqs
        if below and not upstream.outliers.out and (best is None or upstream.in_flight < best.in_flight):
            best = upstream
    return best
