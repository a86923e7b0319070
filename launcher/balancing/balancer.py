"""The owner of queue, upstream table, cost model and policy. Called from one thread; `now` is the caller's clock, seconds.

Whatever may let another request start (release, first_token, add, reconcile) is followed by a call of `pump` by the
balancer's owner, which sends what was bound; `next_pump` returns when time alone makes another call worthwhile.
"""

from __future__ import annotations

from itertools import islice
from math import ceil
from typing import Final

from launcher.balancing.admission_queue import AdmissionQueue
from launcher.balancing.cost_model import CostModel
from launcher.balancing.estimators import Arrivals
from launcher.balancing.policies import (
    Pick,
    Policy,
    Upstreams,
    beside,
    least_busy,
    make_policy,
    open_upstreams,
)
from launcher.balancing.prediction import GuardedPrediction, Prediction, Predictor
from launcher.balancing.upstreams import (
    Demand,
    Ending,
    FullError,
    InstanceId,
    LateError,
    Load,
    Ticket,
    Upstream,
    UpstreamTable,
)
from launcher.config.schema import Policy as PolicyName

WINDOW: Final = 64  # waiting tickets of a model looked at in one pump, which bounds its time
JUDGE_EVERY: Final = 8  # first tokens between two comparisons of an instance with its siblings
# Of the KV cache in use while requests wait inside the engine: one more would only wait there.
KV_FULL: Final = 0.9
TICK_S: Final = 0.001  # the shortest delay of `next_pump`: rounding must not make the owner spin
DRAIN_WINDOW_S: Final = 30.0
RETRY_MAX_S: Final = 600


class Balancer:
    def __init__(
        self,
        policy: PolicyName,
        pick: Pick,
        *,
        max_requests: int = 4096,
        max_bytes: int = 512 * 1024 * 1024,
        eject_failures: int = 3,
        eject_s: float = 10.0,
        ask_again_s: float = 0.0,
        predictor: Predictor | None = None,
    ) -> None:
        """`predictor`: of first tokens; None: a Prediction.
        `ask_again_s`: how long a ticket that waits for a certain instance is not asked again while that one is not open.

        0: at each pump, which is best, and dear where many instances have many tickets that wait.
        """
        self.table: UpstreamTable = UpstreamTable()
        self.costs: CostModel = CostModel()
        self.queue: AdmissionQueue = AdmissionQueue(max_requests, max_bytes)
        self._policy: Policy = make_policy(policy, pick, self.costs, self.queue.sharing)
        self._drained: Arrivals = Arrivals(DRAIN_WINDOW_S)
        self._number: int = 0
        self._eject_failures: int = eject_failures
        self._eject_s: float = eject_s
        self._ask_again_s: float = ask_again_s
        self._displaced: list[tuple[Ticket, FullError]] = []
        self._notes: list[str] = []
        self._prediction: GuardedPrediction = GuardedPrediction(
            predictor or Prediction(self.costs, self.queue), self._notes.append
        )
        self._passed: list[Load] = []  # loads whose `ahead` this pass over the queue has changed

    # --- requests ----------------------------------------------------------------------------------

    def prompt_tokens(self, prompt_bytes: int) -> int:
        """A learned estimate for Demand.prompt_tokens, from the bytes of the prompt's JSON text."""
        return self.costs.prompt_tokens(prompt_bytes)

    def output_tokens(self, max_tokens: int | None, n: int = 1) -> int:
        return self.costs.output_tokens(max_tokens, n)

    def possible(self, ticket: Ticket) -> bool:
        """Whether there is an instance that it has not tried yet (which may be busy or ejected)."""
        return bool(self.table.candidates(ticket.demand.model, ticket.demand.pinned, ticket.tried))

    def offer(self, ticket: Ticket, now: float) -> Upstream | None:
        """Bind it now and return its upstream, or queue it (None). Raises FullError and LateError, but not for a retry.

        It may take the place of others in a full queue: `displaced`."""
        queue = self.queue
        new = ticket.number == 0
        if new:
            self._number += 1
            ticket.number = self._number
        if self._passed and not queue.count:
            self._begin_pass()
        candidates = self.table.candidates(ticket.demand.model, ticket.demand.pinned, ticket.tried)
        if not ticket.demand.takes_place:
            return self._offer_beside(ticket, candidates, now, new=new)
        opened = open_upstreams(candidates, self.costs, now)
        chosen = _wished(ticket, opened) if new else None
        if chosen is None and opened:
            chosen = self._choose(ticket, candidates, opened, now)
        if chosen is None and new and queue.refusal(ticket.demand.body_bytes) is not None:
            chosen = least_busy(candidates)  # late on a busy instance is better than refused
        if chosen is None:
            self._queue(ticket, candidates, now, new=new)
            return None
        self._measure(ticket, chosen, now)
        if new:
            self._predicted(ticket, self._prediction.at_once(ticket, chosen), now)
        self._bind(ticket, chosen, now)
        return chosen

    def _queue(self, ticket: Ticket, candidates: Upstreams, now: float, *, new: bool) -> None:
        displaced = self._displaceable(ticket, now) if new else []
        upstream = self._rank(ticket, candidates)
        predicted_s = self._prediction.queued(ticket, candidates, now)
        if new:
            self._predicted(ticket, predicted_s, now)
        self._displace(displaced)
        self.queue.add(ticket)
        self.queue.wait_for(ticket, upstream)

    def _displaceable(self, ticket: Ticket, now: float) -> list[tuple[Ticket, FullError]]:
        """Those that must leave a full queue for it. FullError where none has to."""
        refusal = self.queue.refusal(ticket.demand.body_bytes)
        if refusal is None:
            return []
        bound, why = refusal
        displaced = self.queue.displaced(ticket.demand)
        if not displaced:
            raise FullError(why, bound, self.retry_after_s(now))
        why = "its place in the full queue went to a model, or an API key, with fewer waiting requests"
        return [(each, FullError(why, bound, self.retry_after_s(now))) for each in displaced]

    def _displace(self, displaced: list[tuple[Ticket, FullError]]) -> None:
        for ticket, _ in displaced:
            self.queue.remove(ticket)
        self._displaced += displaced

    def displaced(self) -> list[tuple[Ticket, FullError]]:
        """Tickets that left the full queue for others since the last call; the owner refuses them."""
        displaced, self._displaced = self._displaced, []
        return displaced

    def _offer_beside(
        self, ticket: Ticket, candidates: Upstreams, now: float, *, new: bool
    ) -> Upstream | None:
        """It waits only where no instance is ready, or too many of its kind run."""
        chosen = beside(candidates)
        if chosen is None:
            if new:
                self._displace(self._displaceable(ticket, now))
            self.queue.add(ticket)
        else:
            _bind_beside(ticket, chosen, now)
        return chosen

    def predicted_ttft(self, demand: Demand, now: float) -> float | None:
        """Seconds to the first token of such a request if it came now; None: nothing is learned yet. Queues nothing."""
        ticket = Ticket(demand, now, now)
        ticket.number = self._number + 1
        candidates = self.table.candidates(demand.model, demand.pinned, ticket.tried)
        soonest: float | None = None
        for upstream in open_upstreams(candidates, self.costs, now):
            self._measure(ticket, upstream, now)
            first_s = self._prediction.at_once(ticket, upstream)
            if first_s is not None and (soonest is None or first_s < soonest):
                soonest = first_s
        if soonest is None:
            self._rank(ticket, candidates)
            soonest = self._prediction.queued(ticket, candidates, now)
        return soonest

    def pump(self, now: float) -> list[Ticket]:
        """Bind what can start now; the owner sends it, in this order."""
        if not self.queue.count:
            return []
        self._begin_pass()
        started: list[Ticket] = []
        for model in self.queue.models():
            started += self._pump_model(model, now)
        return started

    def _pump_model(self, model: str | None, now: float) -> list[Ticket]:
        started = self._pump_beside(model, now)
        candidates = self.table.of(model)
        opened = open_upstreams(candidates, self.costs, now)
        can_start = set(opened)
        closed: set[InstanceId | None] = set()  # pinned instances that are not open
        looked = 0
        for ticket in self.queue.ordered(model, takes_place=True):
            if not opened or looked >= WINDOW:
                break
            if now < ticket.ask_at and ticket.awaited is not None and ticket.awaited not in can_start:
                self._count_ahead(ticket, ticket.awaited)
                continue
            own, own_opened = candidates, opened
            pinned = ticket.demand.pinned
            if ticket.tried or pinned is not None:
                if pinned in closed and not ticket.tried:
                    continue
                own = self.table.candidates(ticket.demand.model, ticket.demand.pinned, ticket.tried)
                own_opened = [upstream for upstream in own if upstream in can_start]
                if not own_opened:
                    if not ticket.tried:
                        closed.add(pinned)
                    continue
            looked += 1
            chosen = self._choose(ticket, own, own_opened, now)
            if chosen is not None:
                self._measure(ticket, chosen, now)
                self._bind(ticket, chosen, now)
                started.append(ticket)
                opened = open_upstreams(candidates, self.costs, now)
                can_start = set(opened)
        for ticket in started:
            self.queue.take(ticket)
        return started

    def _pump_beside(self, model: str | None, now: float) -> list[Ticket]:
        """Those that need no place; they are the first of the queue."""
        started: list[Ticket] = []
        for ticket in islice(self.queue.ordered(model), WINDOW):
            demand = ticket.demand
            if demand.takes_place:  # nearly always the first
                break
            chosen = beside(self.table.candidates(demand.model, demand.pinned, ticket.tried))
            if chosen is not None:
                _bind_beside(ticket, chosen, now)
                started.append(ticket)
        return started

    def bind_soonest(self, ticket: Ticket, now: float) -> Upstream | None:
        """Bind it where it costs least, open or not: a queue further on takes it. None: there is no instance for it.

        The bytes that come first may be that queue's comments: they do not mark the end of its prefill."""
        self.withdraw(ticket)
        candidates = self.table.candidates(ticket.demand.model, ticket.demand.pinned, ticket.tried)
        usable = [u for u in candidates if not u.outliers.out] or candidates
        if not usable:
            return None
        chosen = self._policy.choose(ticket, usable, usable, now)
        ticket.demand.stream = False
        self._measure(ticket, chosen, now)
        self._bind(ticket, chosen, now)
        return chosen

    def withdraw(self, ticket: Ticket) -> None:
        if ticket.queued:
            self.queue.remove(ticket)

    def next_pump(self, now: float) -> float | None:
        """When to call `queue.expired` and `pump` although nothing has happened; None: not before something does."""
        if not self.queue.count:
            return None
        times = [deadline] if (deadline := self.queue.next_deadline()) is not None else []
        ask_again = False
        for upstream in self.table:
            load = upstream.load
            if upstream.in_flight < upstream.max_num_seqs and not upstream.draining:
                over = 0.0
                if load.pending:
                    over = self.costs.prefill_s(upstream, now) - self.costs.horizon_s(upstream)
                if over > 0.0:
                    times.append(now + max(over, TICK_S))
                else:
                    ask_again = self._ask_again_s > 0.0
            until = upstream.outliers.ejected_until
            if until is not None and until > now:
                times.append(until)
        if ask_again:
            times.append(now + self._ask_again_s)
        return max(now, min(times)) if times else None

    def first_token(self, ticket: Ticket, now: float) -> None:
        upstream = ticket.upstream
        if upstream is None or ticket.first_token_at is not None or not ticket.demand.takes_place:
            return
        self._accepted(ticket, upstream)
        ticket.first_token_at = now
        upstream.outliers.responded()
        load = upstream.load
        began, outstanding = load.head_since, load.prefill
        if load.first_token(ticket.number, now) and ticket.demand.stream:
            self._prediction.seen_first_token(ticket, upstream, began, outstanding - load.prefill, now)
            self.costs.seen_first_token(ticket, upstream, now)
            self._judge_straggler(upstream)

    def _accepted(self, ticket: Ticket, upstream: Upstream) -> None:
        """The engine works on it."""
        if ticket.demand.prompt_tokens:
            self._prediction.seen_accepted(ticket, upstream)

    def progress(self, ticket: Ticket, tokens: int) -> None:
        """That many more tokens (or events) of its answer came. May be called rarely, with sums."""
        ticket.tokens += tokens

    def usage(
        self,
        ticket: Ticket,
        prompt_bytes: int,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int | None = None,
    ) -> None:
        """What the engine reported in `usage`; called before `release`.

        `prompt_bytes` is what prompt_tokens(...) was called with; 0: they do not tell the number of tokens.
        """
        if prompt_bytes > 0:
            self.costs.seen_prompt(prompt_bytes, prompt_tokens)
            if cached_tokens is not None and ticket.upstream is not None:
                self.costs.seen_cached(ticket, ticket.upstream, cached_tokens)
        if cached_tokens is None:
            cached_tokens = max(0, ticket.demand.prompt_tokens - int(ticket.uncached))
        ticket.computed_tokens = max(1.0, prompt_tokens - cached_tokens)
        if completion_tokens > ticket.tokens:
            self.progress(ticket, completion_tokens - ticket.tokens)

    def release(self, ticket: Ticket, now: float, ending: Ending) -> None:
        """It has left its instance. It may be offered again."""
        upstream = ticket.upstream
        if upstream is None:
            return
        if not ticket.demand.takes_place:
            upstream.beside -= 1
            ticket.upstream = None
            return
        load, outliers, number = upstream.load, upstream.outliers, ticket.number
        # Removes what is done by now, as far as time tells.
        self.costs.prefill_s(upstream, now)
        prefilled = ending is not Ending.REFUSED and number not in load.pending
        computed = ticket.first_token_at is not None or prefilled
        upstream.in_flight -= 1
        if ending is not Ending.REFUSED:
            self._prediction.seen_free_place(upstream, now)
        else:
            load.full_since = None
        load.leave(number, now)
        outliers.left(number)
        self._drained.add(now)
        if ending is Ending.WHOLE:
            if ticket.first_token_at is None:
                self._accepted(ticket, upstream)
            outliers.succeeded()
            self.costs.seen_end(ticket, upstream, now)
            self._prediction.seen_end(ticket, upstream, now)
        else:
            if ending is Ending.REFUSED:
                outliers.responded()
                if ticket.demand.prompt_tokens:
                    self.costs.seen_refused(upstream, ticket.uncached, ticket.bound_at, ticket.prompt_number)
            if not computed:
                upstream.prefixes.forget(ticket.demand.prefix[ticket.cached_blocks :], number)
        ticket.upstream = None
        ticket.begun = True
        ticket.first_token_at = None
        ticket.computed_tokens = None
        ticket.tokens = 0

    def failed(self, upstream: Upstream, now: float) -> bool:
        """A request failed through this instance's fault. True when it is ejected for that."""
        ejected = upstream.outliers.failed(now, self._eject_failures, self._eject_s)
        if ejected:
            self._notes.append(f"slot {upstream.slot}: ejected for {self._eject_s:g} s")
        return ejected

    def retry_after_s(self, now: float) -> int:
        """Seconds until all that is queued now has started, at the rate at which requests leave."""
        rate = self._drained.per_s(now)
        if rate <= 0.0:
            heads = [next(self.queue.ordered(model)).arrived for model in self.queue.models()]
            return min(RETRY_MAX_S, 1 + int(now - min(heads, default=now)))
        # A rate of hours ago is so small that the quotient would be no number.
        if self.queue.count + 1 >= RETRY_MAX_S * rate:
            return RETRY_MAX_S
        return max(1, ceil((self.queue.count + 1) / rate))

    # --- instances ---------------------------------------------------------------------------------

    def add(self, upstream: Upstream) -> Upstream | None:
        """It may get requests. None: a newer generation was added before."""
        known = self.table.add(upstream)
        if known is upstream:
            upstream.fit = self.costs.fit(upstream.model)
            if upstream.kv_tokens is not None:
                self._set_kv_tokens(upstream, upstream.kv_tokens)
        return known

    def _set_kv_tokens(self, upstream: Upstream, kv_tokens: int) -> None:
        upstream.kv_tokens = kv_tokens
        upstream.prefixes.set_capacity(int(kv_tokens / self.costs.block_tokens))

    def reconcile(
        self,
        upstream: Upstream,
        running: int,
        waiting: int,
        kv_usage: float | None = None,
        kv_tokens: int | None = None,
    ) -> None:
        """What the instance reports: requests that are not the proxy's take capacity, too."""
        full = waiting > 0 and kv_usage is not None and kv_usage >= KV_FULL
        upstream.load.reported(running + waiting, upstream.in_flight, full=full)
        if kv_tokens is not None and upstream.kv_tokens is None:
            self._set_kv_tokens(upstream, kv_tokens)

    def notes(self) -> list[str]:
        """Lines for the log since the last call."""
        notes = self._notes.copy()
        self._notes.clear()
        return notes

    # --- choice ------------------------------------------------------------------------------------

    def _judge_straggler(self, upstream: Upstream) -> None:
        outliers = upstream.outliers
        if outliers.slowness.count % JUDGE_EVERY:
            return
        others = sorted(u.outliers.slowness.value for u in self.table.of(upstream.model) if u is not upstream)
        if others and outliers.judge(others[len(others) // 2]):
            slow = outliers.slowness.value
            upstream.lag = slow if outliers.straggler else 1.0
            if outliers.straggler:
                what = f"{slow:.1f} times slower to first token than its siblings, gets fewer requests"
            else:
                what = "as fast as its siblings again"
            self._notes.append(f"slot {upstream.slot}: {what}")

    def _begin_pass(self) -> None:
        """No ticket is ahead of another: the pass over the queue that follows counts them again."""
        for load in self._passed:
            load.ahead = 0
            load.ahead_s = 0.0
        self._passed.clear()

    def _choose(
        self, ticket: Ticket, candidates: Upstreams, opened: Upstreams, now: float
    ) -> Upstream | None:
        """The upstream to bind it to now; None when it has to wait, which is then noted where it waits."""
        if len(opened) == len(candidates):
            return self._policy.choose(ticket, candidates, opened, now)
        # No ticket waits for an instance that is ejected, or under trial.
        can_start = set(opened)
        healthy = [u for u in candidates if not u.outliers.out or u in can_start]
        chosen = self._policy.choose(ticket, healthy, opened, now)
        if chosen in opened:
            return chosen
        hit = chosen.prefixes.match(ticket.demand.prefix) * self.costs.block_tokens
        ticket.ahead_s = max(1.0, ticket.demand.prompt_tokens - hit) * self.costs.token_s(chosen)
        self._count_ahead(ticket, chosen)
        if ticket.queued:
            self.queue.wait_for(ticket, chosen)
            ticket.ask_at = now + self._ask_again_s
        return None

    def _count_ahead(self, ticket: Ticket, upstream: Upstream) -> None:
        """It is left waiting for that instance: the tickets that this pass looks at next come after it."""
        load = upstream.load
        load.ahead += 1
        load.ahead_s += ticket.ahead_s
        self._passed.append(load)

    def _rank(self, ticket: Ticket, candidates: Upstreams) -> Upstream | None:
        """Set its cost and rank for the queue, as if it started where most of its prompt is cached; return that instance."""
        demand = ticket.demand
        best: Upstream | None = None
        hit = 0
        for upstream in candidates:
            held = upstream.prefixes.match(demand.prefix)
            if held > hit:
                best, hit = upstream, held
        ticket.shared_block = demand.prefix[hit - 1] if hit else None
        token_s = min((self.costs.token_s(u) for u in candidates), default=0.0)
        tokens = max(1.0, demand.prompt_tokens - hit * self.costs.block_tokens)
        ticket.prefill_s = tokens * token_s
        ticket.rank = ticket.arrived - self.costs.head_start_s(tokens, token_s)
        ticket.cost = demand.prompt_tokens + 4.0 * demand.output_tokens
        return best

    def _predicted(self, ticket: Ticket, predicted_s: float | None, now: float) -> None:
        """Note the prediction, from its arrival on. Raises LateError when it is likely to miss the ticket's limit."""
        if predicted_s is None:
            return
        ticket.predicted_s = predicted_s + now - ticket.arrived
        if ticket.limit_s is not None:
            latest_s = self._prediction.at_worst(ticket, predicted_s)
            if latest_s > ticket.limit_s:
                ticket.number = 0
                raise LateError(latest_s)

    def _measure(self, ticket: Ticket, upstream: Upstream, now: float) -> None:
        """What there is to compute for it on that instance."""
        demand, load, costs = ticket.demand, upstream.load, self.costs
        uncached = float(demand.prompt_tokens)
        if demand.prefix:
            ticket.cached_blocks = upstream.prefixes.match(demand.prefix)
            uncached = max(1.0, uncached - ticket.cached_blocks * costs.block_tokens)
        ticket.uncached = ticket.work = uncached
        if load.pending:
            token_s = costs.token_s(upstream)
            before = load.remaining_s(now, token_s)
            ticket.work += before / token_s if token_s > 0.0 else 0.0

    def _bind(self, ticket: Ticket, upstream: Upstream, now: float) -> None:
        """After `_measure`."""
        demand, number, uncached = ticket.demand, ticket.number, ticket.uncached
        if demand.prefix:
            upstream.prefixes.use(demand.prefix, number)
        ticket.upstream = upstream
        ticket.bound_at = now
        upstream.load.bind(number, uncached, now, demand.output_tokens, stream=demand.stream)
        upstream.in_flight += 1
        if upstream.in_flight >= upstream.max_num_seqs and upstream.load.full_since is None:
            upstream.load.full_since = now
        upstream.outliers.bound(number)
        if demand.prompt_tokens:
            # Requests without a prompt are no typical prefill, and no prefill delays them.
            ticket.prompt_number = self.costs.seen_bound(upstream, uncached, now)


def _bind_beside(ticket: Ticket, upstream: Upstream, now: float) -> None:
    """What it says of the instance's API server says nothing of its engine: nothing is learned of it."""
    ticket.upstream = upstream
    ticket.bound_at = now
    upstream.beside += 1


def _wished(ticket: Ticket, opened: Upstreams) -> Upstream | None:
    """The open instance that a trusted proxy chose for it."""
    slot = ticket.demand.wished
    return None if slot is None else next((upstream for upstream in opened if upstream.slot == slot), None)
