"""When the first token of a request that arrives now will come: seconds from now.

At once: the time that prefills without others before them take, by tokens. In the queue: the work ahead of the request is
dealt to the instances, each of which first computes what it has; the last requests ahead one by one, those before them as a
sum. It also needs a free place among the requests that run, the ends of which are estimated from their expected output.
While all instances are ejected, nothing starts before the first of them may be tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from launcher.balancing.admission_queue import AdmissionQueue, QueuedWork
from launcher.balancing.cost_model import KNOWN, OUTPUT, TOKEN_S, CostModel
from launcher.balancing.estimators import LinearFit, Mean, Quantile, RelativeFit
from launcher.balancing.upstreams import Ticket, Upstream

# --- What predictions of first tokens learn about the instances of one model. Times in seconds; prompts in estimated
# tokens.

# Between a first token and the next request's start: the same turn of the event loop.
SAME_TURN_S: Final = 0.001
# Part of the first tokens that come no later than a prediction "at worst". At the start: 30 % later.
WORST: Final = 0.98
KNOWN_TURNS: Final = 20  # ends seen before the time between them is trusted
WORST_PRIOR: Final = 1.3


class Pace:
    """All instances of a model; one that lags its siblings counts in their speed."""

    def __init__(self) -> None:
        # First tokens of prefills that had no other before them, over tokens.
        self._alone: RelativeFit = RelativeFit()
        # From one first token to the next of an instance that had no pause in between, over tokens.
        self._busy: LinearFit = LinearFit(memory=100)
        # From one end to the next of an instance that runs as many as it can.
        self._turn_s: Mean = Mean(0.0, 100)
        self.step_s: Mean = Mean(TOKEN_S, 50)
        self.output_tokens: Mean = Mean(OUTPUT, 100)  # that those of late were expected to have
        # Measured ÷ predicted of those that were queued: the median before its correction, the worst after it.
        self.median: Quantile = Quantile(0.5, 1.0, 0.03, 0.4, 2.5)
        self.worst: Quantile = Quantile(WORST, WORST_PRIOR, 0.1, 1.0, 3.0)

    def alone(self, upstream: Upstream) -> tuple[float, float]:
        """Base and seconds per token of a prefill that begins at once."""
        found = self._alone if self._alone.count >= KNOWN else upstream.fit
        return found.base * upstream.lag, found.slope * upstream.lag

    def busy(self, upstream: Upstream) -> tuple[float, float]:
        """The same of one that follows others without a pause."""
        found = self._busy if self._busy.count >= KNOWN else upstream.fit
        return found.base * upstream.lag, found.slope * upstream.lag

    def place_s(self, upstream: Upstream) -> float:
        """How long a request keeps its place on an instance that runs as many as it can."""
        if self._turn_s.count >= KNOWN_TURNS:
            return self._turn_s.value * upstream.max_num_seqs * upstream.lag
        return self.step_s.value * self.output_tokens.value

    def seen_free_place(self, upstream: Upstream, now: float) -> None:
        """One of its requests has left it."""
        load = upstream.load
        last, since = load.last_end, load.full_since
        if last is not None and since is not None and since <= last + SAME_TURN_S:
            self._turn_s.add((now - last) / upstream.lag)
        load.last_end, load.full_since = now, None

    def seen_first_token(
        self, ticket: Ticket, upstream: Upstream, began: float, tokens: float, now: float
    ) -> None:
        """`began`: since when that instance worked on these `tokens`, its own and those of others before it."""
        lag, last = upstream.lag, upstream.load.last_first
        upstream.load.last_first = now
        if ticket.work == ticket.uncached:
            self._alone.add(ticket.uncached, (now - ticket.bound_at) / lag)
        if last is not None and 0.0 <= began - last <= SAME_TURN_S:
            self._busy.add(tokens, (now - last) / lag)
        if ticket.unscaled_s and ticket.predicted_s and not ticket.tried:
            took = now - ticket.arrived
            self.median.add(took / ticket.unscaled_s)
            self.worst.add(took / ticket.predicted_s)

    def seen_end(self, ticket: Ticket, now: float) -> None:
        if ticket.tokens > 1 and ticket.first_token_at is not None:
            self.step_s.add((now - ticket.first_token_at) / (ticket.tokens - 1))


# Of the requests ahead, so many are dealt to instances one by one: those before them have ended when it starts, so that
# only their sum matters.
NEAREST: Final = 32
# Above that the ends of running requests are a rate.
MOST_PLACES: Final = 256
# The rest of a response that is already longer than expected, in lengths of a typical one.
OVERDUE: Final = 0.25
# Prompt tokens cached on one instance alone, from which on a request is expected to wait for it. Part of the prompt.
BOUND_BY: Final = 0.1
# The most tokens that one request adds to the mean of its model: more is many choices, or a limit that nothing reaches.
MOST_OUTPUT: Final = 131_072
T = TypeVar("T")


class Predictor(Protocol):
    """Predicts first tokens, and learns from those that came. See Prediction."""

    def at_once(self, ticket: Ticket, upstream: Upstream) -> float | None: ...
    def queued(self, ticket: Ticket, candidates: Sequence[Upstream], now: float) -> float | None: ...
    def at_worst(self, ticket: Ticket, predicted_s: float) -> float: ...
    def seen_accepted(self, ticket: Ticket, upstream: Upstream) -> None: ...
    def seen_first_token(
        self, ticket: Ticket, upstream: Upstream, began: float, tokens: float, now: float
    ) -> None: ...
    def seen_free_place(self, upstream: Upstream, now: float) -> None: ...
    def seen_end(self, ticket: Ticket, upstream: Upstream, now: float) -> None: ...


class GuardedPrediction:
    """A predictor that costs no request anything when it fails: nothing is predicted then, or learned.

    `told` gets one line for each kind of failure.
    """

    def __init__(self, predictor: Predictor, told: Callable[[str], None]) -> None:
        self._predictor = predictor
        self._told = told
        self._known: set[str] = set()

    def at_once(self, ticket: Ticket, upstream: Upstream) -> float | None:
        return self._guarded(lambda: self._predictor.at_once(ticket, upstream), None)

    def queued(self, ticket: Ticket, candidates: Sequence[Upstream], now: float) -> float | None:
        return self._guarded(lambda: self._predictor.queued(ticket, candidates, now), None)

    def at_worst(self, ticket: Ticket, predicted_s: float) -> float:
        return self._guarded(lambda: self._predictor.at_worst(ticket, predicted_s), predicted_s)

    def seen_accepted(self, ticket: Ticket, upstream: Upstream) -> None:
        self._guarded(lambda: self._predictor.seen_accepted(ticket, upstream), None)

    def seen_first_token(
        self, ticket: Ticket, upstream: Upstream, began: float, tokens: float, now: float
    ) -> None:
        self._guarded(lambda: self._predictor.seen_first_token(ticket, upstream, began, tokens, now), None)

    def seen_free_place(self, upstream: Upstream, now: float) -> None:
        self._guarded(lambda: self._predictor.seen_free_place(upstream, now), None)

    def seen_end(self, ticket: Ticket, upstream: Upstream, now: float) -> None:
        self._guarded(lambda: self._predictor.seen_end(ticket, upstream, now), None)

    def _guarded(self, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return ask()
        except Exception as error:
            kind = error.__class__.__name__
            if kind not in self._known:
                self._known.add(kind)
                self._told(
                    f"cannot predict first tokens: {kind}: {error}; requests are served without a prediction"
                )
            return otherwise


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
        returns_s = min(_returns_s(upstream, now) for upstream in usable)
        place_s = self._place_s(usable, pace, ahead.total + len(nearest) + 1, returns_s, now)
        first_s = self._soonest(ticket, usable, starts, place_s)
        if usable[0].fit.count < KNOWN:
            return None
        ticket.unscaled_s = first_s
        return ticket.unscaled_s * pace.median.value

    def at_worst(self, ticket: Ticket, predicted_s: float) -> float:
        """When all but the latest first tokens have come that were predicted to come then."""
        pace = self._paces.get(ticket.demand.model or "")
        return predicted_s if pace is None or not ticket.unscaled_s else predicted_s * pace.worst.value

    def seen_accepted(self, ticket: Ticket, upstream: Upstream) -> None:
        self._pace(upstream).output_tokens.add(min(MOST_OUTPUT, ticket.demand.output_tokens))

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
        """Seconds until what is bound to it is prefilled, and it may get more."""
        self._costs.prefill_s(upstream, now)  # removes what is done by now, as far as time tells
        load, returns_s = upstream.load, _returns_s(upstream, now)
        if not load.pending:
            return returns_s
        base, slope = self._pace(upstream).busy(upstream)
        head = next(iter(load.pending.values()))[0]
        rest_s = (len(load.pending) - 1) * base + (load.prefill - head) * slope
        return max(returns_s, rest_s + max(0.0, base + head * slope - (now - load.head_since)))

    @staticmethod
    def _place_s(usable: Sequence[Upstream], pace: Pace, number: int, returns_s: float, now: float) -> float:
        """Seconds until the `number`-th request from now can be among those that run; none starts before `returns_s`."""
        running = free = 0
        for upstream in usable:
            mine = upstream.in_flight + upstream.load.surplus
            running += mine
            free += max(0, upstream.max_num_seqs - mine)
        if number <= free:
            return 0.0
        needed, step_s, place_s = number - free, pace.step_s.value, pace.place_s(usable[0])
        if not running:  # all places are free, and may not be used yet
            return returns_s + needed * place_s / max(1, free)
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


def _returns_s(upstream: Upstream, now: float) -> float:
    """Seconds until the end of its ejection."""
    until = upstream.outliers.ejected_until
    return 0.0 if until is None else max(0.0, until - now)


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
