"""When the first token of a request that arrives now will come: seconds from now.

At once: the time that prefills without others before them take, by tokens. In the queue: the work ahead of the request is
dealt to the instances, each of which first computes what it has; the last requests ahead one by one, those before them as a
sum. It also needs a free place among the requests that run, the ends of which are estimated from their expected output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from launcher.proxy.balancing.admission_queue import AdmissionQueue
from launcher.proxy.balancing.cost_model import KNOWN, CostModel
from launcher.proxy.balancing.pace import Pace
from launcher.proxy.balancing.queued_work import QueuedWork
from launcher.proxy.balancing.ticket import Ticket
from launcher.proxy.balancing.upstreams import Upstream

# Of the requests ahead, so many are dealt to instances one by one: those before them have ended when it starts, so that
# only their sum matters.
NEAREST: Final = 32
# Above that the ends of running requests are a rate.
MOST_PLACES: Final = 256
# The rest of a response that is already longer than expected, in lengths of a typical one.
OVERDUE: Final = 0.25
# Prompt tokens cached on one instance alone, from which on a request is expected to wait for it. Part of the prompt.
BOUND_BY: Final = 0.1


class Prediction:
    """Predicts first tokens, and learns from those that came."""

    def __init__(self, costs: CostModel, queue: AdmissionQueue) -> None:
        self._costs = costs
        self._queue = queue
        self._paces: dict[str, Pace] = {}

    def at_once(self, ticket: Ticket, upstream: Upstream) -> float | None:
        """Of a ticket that can start there now, after its work was measured. None: nothing is learned yet."""
        if upstream.fit.count < KNOWN:
            return None
        work, uncached = ticket.work, ticket.uncached
        if work == uncached:
            base, slope = self._pace(upstream).alone(upstream)
            return base + slope * uncached
        return upstream.fit.at(work) * upstream.lag

    def queued(self, ticket: Ticket, candidates: Sequence[Upstream], now: float) -> float | None:
        """Of a ticket that has its rank and is about to be queued, which is then noted. None: nothing is learned yet."""
        usable = [u for u in candidates if not u.outliers.out] or candidates
        if not usable:
            ticket.prefill_tokens = float(ticket.demand.prompt_tokens)
            return None
        pace = self._pace(usable[0])
        ahead, nearest = self._queue.ahead(ticket, NEAREST)
        starts = self._starts(usable, ahead, nearest, now)
        place_s = self._place_s(usable, pace, ahead.total + len(nearest) + 1, now)
        first_s = self._soonest(ticket, usable, starts, place_s)
        if usable[0].fit.count < KNOWN:
            return None
        ticket.unscaled_s = first_s
        return ticket.unscaled_s * pace.median.value

    def at_worst(self, ticket: Ticket, predicted_s: float) -> float:
        """When all but the latest first tokens have come that were predicted to come then."""
        pace = self._paces.get(ticket.demand.model or "")
        return predicted_s if pace is None or not ticket.unscaled_s else predicted_s * pace.worst.value

    def seen_bound(self, ticket: Ticket, upstream: Upstream) -> None:
        self._pace(upstream).output_tokens.add(ticket.demand.output_tokens)

    def seen_first_token(
        self, ticket: Ticket, upstream: Upstream, began: float, tokens: float, now: float
    ) -> None:
        self._pace(upstream).seen_first_token(ticket, upstream, began, tokens, now)

    def seen_free_place(self, upstream: Upstream, now: float) -> None:
        self._pace(upstream).seen_free_place(upstream, now)

    def seen_end(self, ticket: Ticket, upstream: Upstream, now: float) -> None:
        self._pace(upstream).seen_end(ticket, now)

    def _pace(self, upstream: Upstream) -> Pace:
        found = self._paces.get(upstream.model)
        if found is None:
            found = self._paces[upstream.model] = Pace()
        return found

    # --- the queue ---------------------------------------------------------------------------------

    def _soonest(
        self, ticket: Ticket, usable: Sequence[Upstream], starts: Sequence[float], place_s: float
    ) -> float:
        """Its first token where that comes soonest and costs others least, as the policy chooses (policies.PrefixAware)."""
        demand, block = ticket.demand, self._costs.block_tokens
        hits = [u.prefixes.match(demand.prefix) for u in usable]
        most = max(hits)
        shared = self._queue.shared_blocks(demand)  # computed by then, wherever
        first_s, least = 0.0, float("inf")
        for upstream, hit, start_s in zip(usable, hits, starts, strict=True):
            base, slope = self._pace(upstream).busy(upstream)
            uncached = max(1.0, demand.prompt_tokens - max(hit, shared) * block)
            own_s = base + slope * uncached
            cost = start_s + own_s + (most - hit) * block * slope
            if cost < least:
                first_s, least = max(start_s, place_s) + own_s, cost
                ticket.prefill_tokens = uncached
                ticket.expected_at = upstream
        if hits.count(most) > 1 or most * block < BOUND_BY * demand.prompt_tokens:
            ticket.expected_at = None
        return first_s

    def _starts(
        self, usable: Sequence[Upstream], ahead: QueuedWork, nearest: Sequence[Ticket], now: float
    ) -> list[float]:
        """Seconds until each instance has prefilled all that comes before."""
        paces = [self._pace(u).busy(u) for u in usable]
        starts = [self._outstanding_s(u, now) for u in usable]
        for at, (upstream, (base, slope)) in enumerate(zip(usable, paces, strict=True)):
            count, tokens = ahead.at.get(upstream, (0, 0.0))
            starts[at] += count * base + tokens * slope
        if ahead.count:
            base = sum(base for base, _ in paces) / len(paces)
            slope = sum(slope for _, slope in paces) / len(paces)
            level = filled_to(starts, ahead.count * base + ahead.tokens * slope)
            starts = [max(level, start_s) for start_s in starts]
        for ticket in nearest:
            expected = ticket.expected_at
            at = usable.index(expected) if expected in usable else starts.index(min(starts))
            starts[at] += paces[at][0] + paces[at][1] * ticket.prefill_tokens
        return starts

    def _outstanding_s(self, upstream: Upstream, now: float) -> float:
        """Seconds until what is bound to it is prefilled."""
        self._costs.prefill_s(upstream, now)  # removes what is done by now, as far as time tells
        load = upstream.load
        if not load.pending:
            return 0.0
        base, slope = self._pace(upstream).busy(upstream)
        head = next(iter(load.pending.values()))[0]
        rest_s = (len(load.pending) - 1) * base + (load.prefill - head) * slope
        return rest_s + max(0.0, base + head * slope - (now - load.head_since))

    @staticmethod
    def _place_s(usable: Sequence[Upstream], pace: Pace, number: int, now: float) -> float:
        """Seconds until the `number`-th request from now can be among those that run."""
        running = free = 0
        for upstream in usable:
            mine = upstream.in_flight + upstream.load.surplus
            running += mine
            free += max(0, upstream.max_num_seqs - mine)
        if number <= free:
            return 0.0
        needed, step_s, place_s = number - free, pace.step_s.value, pace.place_s(usable[0])
        by_rate = needed * place_s / running
        if needed >= running or running > MOST_PLACES:
            return by_rate
        lefts = [
            since - now + tokens * step_s
            for upstream in usable
            for since, tokens in upstream.load.running.values()
        ]
        by_ends = end_of([left if left > 0.0 else OVERDUE * place_s for left in lefts], needed, place_s)
        # The next end is that of a certain request; the more there are till then, the less the lengths of these tell.
        part = (needed - 1) / running
        return part * by_rate + (1.0 - part) * by_ends


def filled_to(busy: Sequence[float], work_s: float) -> float:
    """Until when instances that are busy for so long are, once `work_s` more went to whichever is free first."""
    total = 0.0
    ordered = sorted(busy)
    for count, until in enumerate(ordered, 1):
        total += until
        level = (total + work_s) / count
        if count == len(ordered) or level <= ordered[count]:
            return level
    return 0.0


def end_of(ends: Sequence[float], number: int, decode_s: float) -> float:
    """When the `number`-th request ends: of each place first the one that runs, then one each `decode_s` seconds."""
    total = 0.0
    ordered = sorted(ends)
    for count, end in enumerate(ordered, 1):
        total += end
        # At t, places whose request has ended have seen 1 + (t - end) / decode_s ends each.
        at = (total + (number - count) * decode_s) / count
        if count == len(ordered) or at <= ordered[count]:
            return max(at, end)
    return 0.0
