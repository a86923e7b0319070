"""Which instance is best for a ticket: one rule each. Pure; randomness and the clock are arguments.

`choose` gets the candidates (ordered by slot) and those of them that can start it now (at least one). It gives
one candidate: if that can't start it now, the ticket waits for it, and is asked again at every change.
"""

# ruff: noqa: ARG002 - one signature for all policies
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from math import ceil
from operator import itemgetter
from typing import Final, Protocol, assert_never

from launcher.config.schema import Policy as PolicyName
from launcher.proxy.balancing.cost_model import CostModel
from launcher.proxy.balancing.demand import Ticket
from launcher.proxy.balancing.upstreams import Upstream

Pick = Callable[[int], int]  # n -> a number in range(n): random.Random(seed).randrange, or a test's own


class Policy(Protocol):
    """One rule and what it remembers from request to request."""

    def choose(
        self, ticket: Ticket, candidates: Sequence[Upstream], opened: Sequence[Upstream], now: float
    ) -> Upstream:
        """One of `candidates`; of `opened` if it shall start now."""
        ...


class LeastRequests:
    """The one that works on the fewest requests for its weight; a random one of those that tie."""

    def __init__(self, pick: Pick) -> None:
        self._pick = pick

    def choose(
        self, ticket: Ticket, candidates: Sequence[Upstream], opened: Sequence[Upstream], now: float
    ) -> Upstream:
        """See Policy."""
        loads = [(u.in_flight + 1) * u.lag for u in opened]
        fewest = min(loads)
        tied = [u for u, load in zip(opened, loads, strict=True) if load == fewest]
        return tied[self._pick(len(tied))] if len(tied) > 1 else tied[0]


class RoundRobin:
    """The next slot that can start it, round the table, per model."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def choose(
        self, ticket: Ticket, candidates: Sequence[Upstream], opened: Sequence[Upstream], now: float
    ) -> Upstream:
        """See Policy."""
        last = self._last.get(opened[0].model, -1)
        chosen = next((u for u in opened if u.slot > last), opened[0])
        self._last[chosen.model] = chosen.slot
        return chosen


class LeastTokens:
    """The one with the least work: seconds of prefill before this prompt's end, then seconds of decode."""

    def __init__(self, speeds: CostModel) -> None:
        self._speeds = speeds

    def choose(
        self, ticket: Ticket, candidates: Sequence[Upstream], opened: Sequence[Upstream], now: float
    ) -> Upstream:
        """See Policy."""
        speeds = self._speeds
        return min(opened, key=lambda u: speeds.prefill_s(u, now) + speeds.decode_s(u))


class PrefixAware:
    """The one where the first token comes soonest and costs the others least; waits for it if it must.

    cost = wait for its turn there + own prefill + what a copy of the prompt costs (time, room, others' waits).
    """

    def __init__(self, speeds: CostModel, families: Mapping[int | None, int]) -> None:
        self._speeds = speeds
        self._families = families

    def choose(
        self, ticket: Ticket, candidates: Sequence[Upstream], opened: Sequence[Upstream], now: float
    ) -> Upstream:
        """See Policy."""
        speeds = self._speeds
        prefix = ticket.demand.prefix
        length = len(prefix)
        hits = [u.store.match(prefix) for u in candidates] if length else [0] * len(candidates)
        most = max(hits)
        found: Iterable[tuple[int, Upstream]] = zip(hits, candidates, strict=True)
        if most:
            found = sorted(
                found, key=_HIT, reverse=True
            )  # the likely ones first: most others need no closer look
        sharing = 1.0 + (self._families.get(prefix[most - 1], 0) if most else 0)
        block = speeds.block_tokens
        shortest = max(1.0, ticket.demand.prompt_tokens - most * block)
        typical = speeds.own_tokens
        here = most  # by an open one
        if len(opened) < len(candidates):
            here = max(hit for hit, u in zip(hits, candidates, strict=True) if u in opened)
        best, least = candidates[0], float("inf")
        for hit, upstream in found:
            if upstream in opened:
                start = self._start_s(upstream, now)
            elif hit > here:
                start = self._start_s(upstream, now) * (1.0 + UNSURE)
            else:
                continue  # nothing to wait for: an open one holds as much of the prompt
            token_s = upstream.line.slope * upstream.lag
            full = upstream.in_flight / upstream.max_num_seqs
            cost = start + (shortest + typical * full * full) * token_s
            if hit < length and cost < least:
                blocks = most - hit + self._regretted(upstream, candidates, length - hit)
                if blocks:
                    cost += self._copy_s(ticket, upstream, blocks * block * token_s, now) / sharing
            if cost < least:
                best, least = upstream, cost
        return best

    def _start_s(self, upstream: Upstream, now: float) -> float:
        """Seconds until it could begin with one more after those that wait for it: for its prefill, or for a seat."""
        ledger = upstream.ledger
        start = ledger.ahead_s
        if ledger.pending:
            start += ledger.remaining_s(now, upstream.line.slope * upstream.lag)
        lacking = upstream.in_flight + ledger.surplus + ledger.ahead + 1 - upstream.max_num_seqs
        return max(start, lacking * self._speeds.seat_s(upstream)) if lacking > 0 else start

    def _copy_s(self, ticket: Ticket, upstream: Upstream, more_s: float, now: float) -> float:
        """What `more_s` more seconds of prefill there cost: that time, and the same for all whom it delays."""
        ledger = upstream.ledger
        others = ledger.waiting - (ticket.home is upstream)
        backlog_s = ledger.waiting_s + self._speeds.prefill_s(upstream, now)
        return more_s * (1.0 + others + self._speeds.delayed(upstream, backlog_s, more_s, now))

    @staticmethod
    def _regretted(upstream: Upstream, candidates: Sequence[Upstream], new: int) -> float:
        """How many of the blocks that go from its cache when `new` ones come will be computed anew."""
        store = upstream.store
        gone = store.overflow(new)
        if not gone:
            return 0.0
        oldest = store.oldest()
        if oldest is not None and any(u is not upstream and u.store.holds(oldest) for u in candidates):
            return 0.25 * gone * store.ghosts.regret
        return gone * store.ghosts.regret


_HIT: Final = itemgetter(0)
UNSURE: Final = 0.1  # part by which a wait may turn out longer than it seems: one that is free now is sure


class Session:
    """Rendezvous hashing of the session with bounded load; without a session, least tokens.

    The instance is the highest hash(session, slot) among those whose load is at most LOAD times the mean
    (Mirrokni, Thorup, Zadimoghaddam 2016), so a session moves only when its instance is overfull or gone.
    """

    LOAD = 1.25

    def __init__(self, speeds: CostModel) -> None:
        self._otherwise = LeastTokens(speeds)

    def choose(
        self, ticket: Ticket, candidates: Sequence[Upstream], opened: Sequence[Upstream], now: float
    ) -> Upstream:
        """See Policy."""
        session = ticket.demand.session
        if session is None:
            return self._otherwise.choose(ticket, candidates, opened, now)
        bound = ceil(self.LOAD * (sum(u.in_flight for u in candidates) + 1) / len(candidates))
        fitting = [u for u in candidates if u.in_flight + 1 <= bound]  # the least loaded one always fits
        return max(fitting, key=lambda u: _score(session, u.slot))


def _score(session: str, slot: int) -> bytes:
    """A number that a session has for a slot, the same after every restart."""
    return blake2b(f"{slot}/{session}".encode(errors="surrogateescape"), digest_size=8).digest()


def make_policy(
    name: PolicyName, pick: Pick, speeds: CostModel, families: Mapping[int | None, int]
) -> Policy:
    """The policy of that name."""
    match name:
        case PolicyName.PREFIX_AWARE:
            return PrefixAware(speeds, families)
        case PolicyName.LEAST_TOKENS:
            return LeastTokens(speeds)
        case PolicyName.LEAST_REQUESTS:
            return LeastRequests(pick)
        case PolicyName.ROUND_ROBIN:
            return RoundRobin()
        case PolicyName.SESSION:
            return Session(speeds)
    assert_never(name)
