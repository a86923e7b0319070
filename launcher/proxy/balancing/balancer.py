"""The one owner of queue, table, ledgers and policy. Called from one thread; `now` is the caller's clock, seconds.

Everything that may free room (release, first_token, add, reconcile) is followed by a call of `pump` by the owner
of the scheduler, which starts what has been bound; `next_pump` says when time alone makes it worth another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from launcher.config.schema import Policy as PolicyName
from launcher.proxy.balancing.admission_queue import AdmissionQueue
from launcher.proxy.balancing.cost_model import CostModel
from launcher.proxy.balancing.demand import Ending, FullError, Key, Ticket
from launcher.proxy.balancing.estimators import Rate
from launcher.proxy.balancing.policies import Pick, make_policy
from launcher.proxy.balancing.upstreams import Upstream, UpstreamTable

WINDOW = 64  # waiting tickets of a model that could start, looked at in one pump: bounds its time
KNOWN = 4  # first tokens seen before an instance's outstanding prefill is told by time
# Streams without a first token until then: they soon tell. The more there are, the less a first burst waits.
UNKNOWN_AT_ONCE = 4
JUDGE_EVERY = 8  # first tokens, between two looks at whether an instance lags behind its siblings
KV_FULL = 0.9  # of the KV cache in use, while requests wait inside: one more would only wait there
TICK_S = 0.001  # no sooner again: rounding must not make the owner spin
DRAIN_WINDOW_S = 30.0
RETRY_MAX_S = 600


class Balancer:
    """Admission, queue and choice for all models."""

    def __init__(
        self,
        policy: PolicyName,
        pick: Pick,
        *,
        max_requests: int = 4096,
        max_bytes: int = 512 * 1024 * 1024,
        eject_failures: int = 3,
        eject_s: float = 10.0,
        slow_start_s: float = 20.0,
    ) -> None:
        self.table = UpstreamTable()
        self.speeds = CostModel()
        self.queue = AdmissionQueue(max_requests, max_bytes)
        self._policy = make_policy(policy, pick, self.speeds, self.queue.families)
        self._drained = Rate(DRAIN_WINDOW_S)
        self._number = 0
        self._eject_failures = eject_failures
        self._eject_s = eject_s
        self._slow_start_s = slow_start_s
        self._notes: list[str] = []

    # Requests.

    def prompt_tokens(self, prompt_bytes: int) -> int:
        """A learned guess for Demand.prompt_tokens, from the bytes of the prompt's JSON text."""
        return self.speeds.prompt_tokens(prompt_bytes)

    def output_tokens(self, max_tokens: int | None, n: int = 1) -> int:
        """A learned guess for Demand.output_tokens."""
        return self.speeds.output_tokens(max_tokens, n)

    def possible(self, ticket: Ticket) -> bool:
        """Whether there is an instance that it has not tried yet (which may be busy or ejected)."""
        return bool(self._candidates(ticket))

    def offer(self, ticket: Ticket, now: float) -> Upstream | None:
        """Bind it now and give its upstream, or let it wait (None). Raises FullError; not for one that comes again."""
        queue = self.queue
        if new := ticket.number == 0:
            self._number += 1
            ticket.number = self._number
        if not queue.count:
            self._begin_pass()
        candidates = self._candidates(ticket)
        opened = self._opened(candidates, now)
        chosen = self._choose(ticket, candidates, opened, now) if opened else None
        if chosen is not None:
            self._bind(ticket, chosen, now)
            return chosen
        if new and (refusal := queue.refusal(ticket.demand.body_bytes)):
            seat = self._any_seat(ticket, now)
            if seat is None:
                raise FullError(refusal, self.retry_after_s(now))
            self._bind(ticket, seat, now)  # it may be late there; turned away it would be never
            return seat
        home = self._estimate(ticket)
        queue.add(ticket)
        queue.wait_for(ticket, home)
        return None

    def pump(self, now: float) -> list[Ticket]:
        """Bind what can start now; the owner starts them, in this order."""
        if not self.queue.count:
            return []
        self._begin_pass()
        started: list[Ticket] = []
        for model in self.queue.models():
            self._pump_line(model, started, now)
        return started

    def _pump_line(self, model: str | None, started: list[Ticket], now: float) -> None:
        """Bind what can start of those that wait for a model. Others can't use its instances."""
        before = len(started)
        candidates: Sequence[Upstream] = self.table.of(model)
        opened = self._opened(candidates, now)
        shut: set[Key | None] = set()  # of those that some are pinned to
        looked = 0
        for ticket in self.queue.ordered(model):
            if not opened or looked >= WINDOW:
                break
            own, own_opened = candidates, opened
            pinned = ticket.demand.pinned
            if ticket.tried or pinned is not None:
                if pinned in shut and not ticket.tried:
                    continue
                own = self._candidates(ticket)
                own_opened = [upstream for upstream in own if upstream in opened]
                if not own_opened:
                    if not ticket.tried:
                        shut.add(pinned)
                    continue
            looked += 1
            chosen = self._choose(ticket, own, own_opened, now)
            if chosen is not None:
                self._bind(ticket, chosen, now)
                started.append(ticket)
                opened = self._opened(candidates, now)
        for ticket in started[before:]:
            self.queue.take(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """It waits no longer: its client has left."""
        if ticket.waits:
            self.queue.remove(ticket)

    def expired(self, now: float) -> list[Ticket]:
        """Those whose deadline has come; they wait no longer."""
        return self.queue.expired(now)

    def next_pump(self, now: float) -> float | None:
        """When to call `expired` and `pump` although nothing has happened; None: not before something does."""
        if not self.queue.count:
            return None
        times = [deadline] if (deadline := self.queue.next_deadline()) is not None else []
        for upstream in self.table:
            if upstream.in_flight < upstream.max_num_seqs and not upstream.draining:
                over = self.speeds.prefill_s(upstream, now) - self.speeds.horizon_s(upstream)
                if over > 0.0:
                    times.append(now + max(over, TICK_S))
            until = upstream.health.ejected_until
            if until is not None and until > now:
                times.append(until)
        return max(now, min(times)) if times else None

    def first_token(self, ticket: Ticket, now: float) -> None:
        """The first byte of content of its answer came."""
        upstream = ticket.upstream
        if upstream is None or ticket.first is not None:
            return
        ticket.first = now
        upstream.health.spoke()
        if upstream.ledger.first(ticket, now) and ticket.demand.stream:
            self.speeds.seen_first(ticket, upstream, now)
            if upstream.health.slowness.count % JUDGE_EVERY == 0:
                self._judge(upstream)

    def progress(self, ticket: Ticket, tokens: int) -> None:
        """So many more tokens (or events) of its answer came. May be called rarely, with sums."""
        if ticket.upstream is not None:
            ticket.upstream.ledger.produced(ticket, tokens)
        ticket.tokens += tokens

    def usage(
        self,
        ticket: Ticket,
        prompt_bytes: int,
        prompt_tokens: int,
        completion_tokens: int,
        cached_tokens: int | None = None,
    ) -> None:
        """What the engine said in `usage`, before `release`.

        `prompt_bytes` is what prompt_tokens(...) was asked with; 0: they do not tell how many tokens it is.
        """
        if prompt_bytes > 0:
            self.speeds.seen_prompt(prompt_bytes, prompt_tokens)
            if cached_tokens is not None and ticket.upstream is not None:
                self.speeds.seen_cached(ticket, ticket.upstream, cached_tokens)
        if cached_tokens is None:
            cached_tokens = max(0, ticket.demand.prompt_tokens - int(ticket.uncached))
        ticket.computed = max(1.0, prompt_tokens - cached_tokens)
        if completion_tokens > ticket.tokens:
            self.progress(ticket, completion_tokens - ticket.tokens)

    def release(self, ticket: Ticket, now: float, ending: Ending) -> None:
        """It has left its instance. It may be offered again."""
        upstream = ticket.upstream
        if upstream is None:
            return
        self.speeds.prefill_s(upstream, now)  # counts off what is done, as far as time tells
        computed = ticket.first is not None or (
            ending is not Ending.REFUSED and ticket not in upstream.ledger.pending
        )
        self.table.end(upstream)
        upstream.ledger.leave(ticket, now)
        upstream.health.left(ticket)
        self._drained.add(now)
        if ending is Ending.WHOLE:
            upstream.health.succeeded()
            self.speeds.seen_end(ticket, upstream, now)
            self.speeds.seen_used(ticket.tokens, ticket.demand.max_tokens)
        elif ending is Ending.REFUSED:
            upstream.health.spoke()
        if not computed and ending is not Ending.WHOLE:
            upstream.store.forget(ticket.demand.prefix[ticket.held :], ticket.number)
        ticket.upstream = None
        ticket.first = None
        ticket.computed = None
        ticket.tokens = 0

    def failed(self, upstream: Upstream, now: float) -> bool:
        """A request failed through this instance's fault. True when it is ejected for that."""
        ejected = upstream.health.failed(now, self._eject_failures, self._eject_s)
        if ejected:
            self._notes.append(f"slot {upstream.slot}: ejected for {self._eject_s:g} s")
        return ejected

    def retry_after_s(self, now: float) -> int:
        """Seconds until the queue will have let in what waits now, at the rate at which requests leave."""
        rate = self._drained.per_s(now)
        if rate <= 0.0:
            heads = [next(self.queue.ordered(model)).arrived for model in self.queue.models()]
            return min(RETRY_MAX_S, 1 + int(now - min(heads, default=now)))
        return max(1, min(RETRY_MAX_S, ceil((self.queue.count + 1) / rate)))

    # Instances.

    def add(self, upstream: Upstream, now: float) -> Upstream | None:
        """It may get requests; None: a newer generation was there first."""
        known = self.table.add(upstream)
        if known is upstream:
            upstream.added = now
            upstream.line = self.speeds.line(upstream.model)
            upstream.store.ghosts = self.speeds.ghosts(upstream.model)
            if any(now - other.added >= self._slow_start_s for other in self.table.of(upstream.model)):
                upstream.health.ready_since = now  # others can carry the load meanwhile
        if known is upstream and upstream.kv_tokens is not None:
            self.holds(upstream, upstream.kv_tokens)
        return known

    def holds(self, upstream: Upstream, kv_tokens: int) -> None:
        """So many tokens fit into its KV cache."""
        upstream.kv_tokens = kv_tokens
        upstream.store.capacity = max(1, int(kv_tokens / self.speeds.block_tokens))

    def drain(self, slot: int, generation: int) -> Upstream | None:
        """No new requests."""
        return self.table.drain(slot, generation)

    def remove(self, slot: int, generation: int, reason: str) -> Upstream | None:
        """It is gone; what is bound to it is still to be released."""
        return self.table.remove(slot, generation, reason)

    def eject(self, key: Key, until: float) -> None:
        """No requests until then; after it one request tries it."""
        upstream = self.table.get(*key)
        if upstream is not None:
            upstream.health.eject(until)

    def reconcile(self, slot: int, running: int, waiting: int, kv_usage: float | None = None) -> None:
        """What the instance itself says it works on: requests that are not ours take room too."""
        upstream = self.table.newest(slot)
        if upstream is not None:
            full = waiting > 0 and kv_usage is not None and kv_usage >= KV_FULL
            upstream.ledger.told(running + waiting, upstream.in_flight, full=full)

    def notes(self) -> list[str]:
        """What is worth a line in the log since the last call."""
        notes, self._notes = self._notes, []
        return notes

    # Inside.

    def _candidates(self, ticket: Ticket) -> Sequence[Upstream]:
        demand = ticket.demand
        if demand.pinned is not None:
            pinned = self.table.get(*demand.pinned)
            if (
                pinned is not None
                and not pinned.draining
                and pinned.key not in ticket.tried
                and demand.model in (None, pinned.model)
            ):
                return [pinned]
        if ticket.tried:
            return self.table.ready(demand.model, ticket.tried)
        return self.table.of(demand.model)

    def _open(self, upstream: Upstream, now: float) -> bool:
        """Whether it can start one more now."""
        if not self._seated(upstream, now):
            return False
        if upstream.ledger.pending and self._prefills(upstream, now):
            return False
        health = upstream.health
        return (health.ejected_until is None and not health.half_open) or health.admits(now)

    def _seated(self, upstream: Upstream, now: float) -> bool:
        """Whether it has a seat for one more."""
        ledger, health = upstream.ledger, upstream.health
        seats = upstream.max_num_seqs
        if health.ready_since is not None:
            seats = ceil(seats * health.share(now, self._slow_start_s))
        return not ledger.full and upstream.in_flight + ledger.surplus < seats

    def _any_seat(self, ticket: Ticket, now: float) -> Upstream | None:
        """The instance with a seat that works on the fewest requests, prefill or not."""
        seated = (
            upstream
            for upstream in self._candidates(ticket)
            if self._seated(upstream, now)
            and not (upstream.health.ejected_until or upstream.health.half_open)
        )
        return min(seated, key=lambda upstream: upstream.in_flight, default=None)

    def _prefills(self, upstream: Upstream, now: float) -> bool:
        """Whether it has prefill enough for now; by count of streams while its speed is a guess."""
        if upstream.line.count >= KNOWN:
            return self.speeds.prefill_s(upstream, now) > self.speeds.horizon_s(upstream)
        return sum(ticket.demand.stream for ticket in upstream.ledger.pending) >= UNKNOWN_AT_ONCE

    def _judge(self, upstream: Upstream) -> None:
        others = sorted(u.health.slowness.value for u in self.table.of(upstream.model) if u is not upstream)
        if others and upstream.health.judge(others[len(others) // 2]):
            slow = upstream.health.slowness.value
            upstream.lag = slow if upstream.health.straggler else 1.0
            what = f"takes {slow:.1f} times as long to a first token as its siblings: it gets less"
            self._notes.append(
                f"slot {upstream.slot}: {what if upstream.health.straggler else 'is as fast as its siblings again'}"
            )

    def _estimate(self, ticket: Ticket) -> Upstream | None:
        """What it would cost where most of its prompt is cached, for its place in the queue; where that is."""
        demand = ticket.demand
        candidates = self._candidates(ticket)
        home, hit = None, 0
        if demand.prefix:
            for upstream in candidates:
                if (held := upstream.store.match(demand.prefix)) > hit:
                    home, hit = upstream, held
        ticket.family = demand.prefix[hit - 1] if hit else None
        token_s = min((self.speeds.token_s(u) for u in candidates), default=0.0)
        tokens = max(1.0, demand.prompt_tokens - hit * self.speeds.block_tokens)
        ticket.work_s = tokens * token_s
        ticket.rank = ticket.arrived - self.speeds.head_start_s(tokens, token_s)
        ticket.cost = demand.prompt_tokens + 4.0 * demand.output_tokens
        return home

    def _begin_pass(self) -> None:
        """Nobody is ahead of anybody: the pass over the queue that follows notes anew who is."""
        for upstream in self.table:
            upstream.ledger.ahead = 0
            upstream.ledger.ahead_s = 0.0

    def _opened(self, candidates: Sequence[Upstream], now: float) -> list[Upstream]:
        """Those of them that can start one more now."""
        return [upstream for upstream in candidates if self._open(upstream, now)]

    def _choose(
        self, ticket: Ticket, candidates: Sequence[Upstream], opened: Sequence[Upstream], now: float
    ) -> Upstream | None:
        """The upstream to bind it to now; None when it shall wait. Notes the room that it will take then."""
        healthy = candidates
        if len(opened) < len(
            candidates
        ):  # nobody waits for one that is ejected, or that a single request tries
            healthy = [
                u for u in candidates if u in opened or not (u.health.ejected_until or u.health.half_open)
            ]
        chosen = self._policy.choose(ticket, healthy, opened, now)
        if chosen in opened:
            return chosen
        hit = chosen.store.match(ticket.demand.prefix) * self.speeds.block_tokens
        chosen.ledger.ahead += 1
        chosen.ledger.ahead_s += max(1.0, ticket.demand.prompt_tokens - hit) * self.speeds.token_s(chosen)
        if ticket.waits:
            self.queue.wait_for(ticket, chosen)
        return None

    def _bind(self, ticket: Ticket, upstream: Upstream, now: float) -> None:
        demand = ticket.demand
        uncached = float(demand.prompt_tokens)
        ledger = upstream.ledger
        if demand.prefix:
            ticket.held = upstream.store.match(demand.prefix)
            uncached = max(1.0, uncached - ticket.held * self.speeds.block_tokens)
            upstream.store.use(demand.prefix, ticket.number)
        before = self.speeds.prefill_s(upstream, now)
        token_s = self.speeds.token_s(upstream)
        ticket.upstream = upstream
        ticket.bound = now
        ticket.uncached = uncached
        ticket.work = uncached + (before / token_s if token_s > 0.0 else 0.0)
        ledger.bind(ticket, uncached, now)
        if demand.prompt_tokens:  # what has none is no typical prefill, and is delayed by none
            self.speeds.seen_bound(upstream, uncached, now)
        self.table.begin(upstream)
        upstream.health.bound(ticket)
