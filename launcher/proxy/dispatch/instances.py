"""The instances behind the proxy: the balancer, the connection pools, and which request is on which instance.

Each attempt enters and leaves the balancer exactly once, whichever way it ends, on the very upstream that it was bound to.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping

from launcher.balancing.balancer import Balancer
from launcher.balancing.upstreams import Ending, FullError, InstanceId, LateError, Ticket, Upstream
from launcher.base.api_errors import HttpError, too_many, unavailable
from launcher.config.schema import Proxy
from launcher.proxy.dispatch.traffic import Occupancy, Occupied, Traffic, hung
from launcher.proxy.observability.stats import Counters
from launcher.proxy.request.events import AttemptFailed, Bound, Event, InstanceDied, NoCapacity, PredictedLate
from launcher.proxy.request.record import Post, Request
from launcher.proxy.upstream.attempt import Attempt
from launcher.proxy.upstream.pool import ConnectionPool, Endpoint
from launcher.proxy.upstream.pulse import PulseReader
from launcher.telemetry.engine_metrics import EngineMetrics

STORED_RESPONSES = 65536  # ids of stored responses whose instance is remembered; the oldest are forgotten
GONE_GRACE_S = 0.2  # what a dead instance had sent already may still be read

OnIdle = Callable[[int, int], None]
OnSuspect = Callable[[int, int, str], None]

_LOG = logging.getLogger(__name__)


class Instances:
    """Owner of the connection pools and of what is bound."""

    def __init__(
        self,
        proxy: Proxy,
        balancer: Balancer,
        counters: Counters,
        post: Post,
        *,
        on_idle: OnIdle,
        on_suspect: OnSuspect,
    ) -> None:
        self._proxy = proxy
        self._counters = counters
        self._post = post
        self._on_idle = on_idle
        self._on_suspect = on_suspect
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._traffic: dict[InstanceId, Traffic] = {}
        self._waiting: dict[Ticket, Request] = {}
        self._stored: OrderedDict[str, InstanceId] = OrderedDict()
        self._seen: set[str] = set()  # models that had a ready instance
        self._pump_timer: asyncio.TimerHandle | None = None
        self._stopping = False
        self._occupancy = Occupancy()
        self._pulses = PulseReader(self._clock)
        # Of silence, and between two questions. The first reading of counters proves nothing: several come before the
        # shortest of the time limits is over.
        self._ask_s = min(proxy.hung_timeout_s, proxy.idle_timeout_s, proxy.first_token_timeout_s) / 8
        self.balancer = balancer
        self.table = balancer.table

    # --- instances come and go ---------------------------------------------------------------------

    def add(self, upstream: Upstream) -> None:
        now = self._clock()
        known = self.balancer.add(upstream)
        if known is None:
            return
        if known.key not in self._traffic:
            pool = ConnectionPool(Endpoint(known.address), self._proxy.connect_timeout_s)
            self._traffic[known.key] = Traffic(known, pool, self._counters.slot(known.slot, known.model), now)
            self._occupancy.added(known.key, now)
        self._seen.add(known.model)
        self.pump(now)

    def drain(self, slot: int, generation: int) -> None:
        """No new requests; on_idle comes from the event loop, never from this call."""
        upstream = self.table.drain(slot, generation)
        if upstream is not None:
            self._loop.call_soon(self._tell_if_idle, upstream)

    def remove(self, slot: int, generation: int, reason: str, *, crashed: bool) -> None:
        """It is gone. A request that has delivered nothing is tried elsewhere at once, also where its response had come
        already; of one that has, what the instance had sent is read before."""
        upstream = self.table.remove(slot, generation, reason)
        if upstream is None:
            return
        now, traffic = self._clock(), self._traffic.pop(upstream.key)
        self._occupancy.removed(upstream.key, now)
        traffic.pool.close()
        traffic.forget(now)
        if crashed:
            for request in traffic.died_under():
                self._post(request, InstanceDied())
        for attempt, request in tuple(traffic.attempts.items()):
            if request.committed:
                self._loop.call_later(GONE_GRACE_S, attempt.fail, reason)
            else:
                attempt.fail(reason, died=crashed)

    def was_ready(self, model: str | None) -> bool:
        """Some instance of the model has been ready: it may come back."""
        return bool(self._seen) if model is None else model in self._seen

    def retry_after_s(self) -> int:
        return self.balancer.retry_after_s(self._clock())

    def holder(self, response_id: str) -> InstanceId | None:
        """The instance that keeps a stored response, as far as is known."""
        return self._stored.get(response_id)

    # --- the queue ---------------------------------------------------------------------------------

    def enqueue(self, request: Request, ticket: Ticket, now: float) -> bool:
        """Bind it now, or let it wait (False); what becomes of it is posted."""
        try:
            upstream = self.balancer.offer(ticket, now)
        except LateError as late:
            request.predicted_s, request.latest_s = ticket.predicted_s, late.latest_s
            self._post(request, PredictedLate())
            return True
        except FullError as full:
            self._refuse(request, full)
            return True
        for displaced, full_for_it in self.balancer.displaced():
            self._refuse(self._waiting.pop(displaced), full_for_it)
        request.predicted_s = ticket.predicted_s
        if upstream is not None:
            self._post(request, Bound())
            return True
        self._waiting[ticket] = request
        self._arm(now)
        return False

    def _refuse(self, request: Request, full: FullError) -> None:
        self._counters.queue_rejected[full.bound] += 1
        self._post(request, NoCapacity(too_many(full.reason, full.retry_after_s)))

    def withdraw(self, ticket: Ticket, now: float) -> None:
        """It waits no more; one that is bound and was not sent leaves its instance."""
        if self._waiting.pop(ticket, None) is not None:
            self.balancer.withdraw(ticket)
        elif ticket.upstream is not None:
            self.balancer.release(ticket, now, Ending.LEFT)

    def pump(self, now: float) -> None:
        if self._waiting:
            for ticket in self.balancer.pump(now):
                if ticket.upstream is not None:
                    self._post(self._waiting.pop(ticket), Bound())
            self._arm(now)

    def first_token(self, request: Request, _event: Event, now: float) -> None:
        """Its prompt is computed: another one may start there."""
        if request.ticket is not None:
            self.balancer.first_token(request.ticket, now)
            self.pump(now)

    def _out_of_time(self, request: Request, now: float) -> HttpError:
        if self.table.ready(request.model):
            self._counters.queue_rejected["deadline"] += 1
            waited_s = now - request.started
            return too_many(f"no instance was free for it in {waited_s:.1f} s", self.retry_after_s())
        model = request.model or "any model"
        return unavailable(f"no instance of {model} became ready in time", self.retry_after_s())

    def ages(self, now: float) -> dict[str, list[float]]:
        """Seconds since the arrival of each queued request, by model."""
        found: dict[str, list[float]] = {}
        for request in self._waiting.values():
            if request.model is not None:
                found.setdefault(request.model, []).append(now - request.started)
        return found

    @property
    def waiting(self) -> Collection[Request]:
        return self._waiting.values()

    def adapters(self) -> tuple[frozenset[str], frozenset[str]]:
        """LoRA adapters of the requests on instances, and of those in the queue."""
        bound = (
            request.adapter for traffic in self._traffic.values() for request in traffic.attempts.values()
        )
        queued = (request.adapter for request in self.waiting)
        return frozenset(filter(None, bound)), frozenset(filter(None, queued))

    def models_waited_for(self) -> set[str | None]:
        """The models that requests in the queue want; None: any."""
        return {ticket.demand.model for ticket in self._waiting}

    # --- attempts ----------------------------------------------------------------------------------

    def begin(self, attempt: Attempt, request: Request, upstream: Upstream) -> ConnectionPool:
        """An attempt starts on an instance; its connections."""
        traffic = self._traffic.get(upstream.key)
        if traffic is None or traffic.upstream is not upstream:  # removed since it was bound
            pool = ConnectionPool(Endpoint(upstream.address), self._proxy.connect_timeout_s)
            pool.close()
            return pool
        traffic.sums.sent += 1
        if not traffic.attempts:
            self._occupancy.busy(upstream.key, attempt.asked_at)
        traffic.attempts[attempt] = request
        attempt.begin(traffic.pulse)
        return traffic.pool

    def leave(self, request: Request, attempt: Attempt, upstream: Upstream, event: Event, now: float) -> None:
        """An attempt is over, and how."""
        if request.ticket is not None:
            self.balancer.release(request.ticket, now, request.ending)
        if request.stored is not None:
            self._remember(request.stored, upstream.key)
        traffic = self._traffic.get(upstream.key)
        if traffic is not None:
            traffic.leave(attempt)
            if not traffic.attempts:
                self._occupancy.idle(upstream.key, now)
        if event.__class__ is AttemptFailed:
            self._note_failure(request, attempt, upstream, event, now)
        if upstream.idle_wanted:
            self._loop.call_soon(self._tell_if_idle, upstream)
        if self._waiting:
            self.pump(now)

    def _note_failure(
        self, request: Request, attempt: Attempt, upstream: Upstream, event: AttemptFailed, now: float
    ) -> None:
        self._counters.slot(upstream.slot, upstream.model).broken += not request.committed
        self._suspect(upstream, event.reason, now)
        failures = request.failures
        if failures is None or upstream not in failures.blamed:
            self._blame(upstream, now)
        traffic = self._traffic.get(upstream.key)
        if event.answer is None and attempt.reached and traffic is not None and traffic.upstream is upstream:
            traffic.note_break(request, now)

    def settle(self, request: Request, _event: Event, now: float) -> None:
        """Another instance did better: those that answered 5xx, or nothing, were at fault."""
        failures = request.failures
        if failures is not None:
            for upstream in failures.blamed:
                self._blame(upstream, now)
            failures.blamed.clear()
            failures.answer = None

    def _blame(self, upstream: Upstream, now: float) -> None:
        """A failure was this instance's fault: after some in a row it gets no requests for a while.

        The last one that is not ejected stays: with none at all there would be nothing to fail on.
        """
        others = (u for u in self.table.ready(upstream.model) if u is not upstream)
        if upstream.draining or self._stopping or all(u.outliers.ejected_until for u in others):
            return
        if _is_out(upstream, now):
            return  # it was asked before it was ejected
        if self.balancer.failed(upstream, now):
            self._counters.slot(upstream.slot, upstream.model).ejected += 1

    def _remember(self, response_id: str, key: InstanceId) -> None:
        self._stored[response_id] = key
        if len(self._stored) > STORED_RESPONSES:
            self._stored.popitem(last=False)

    # --- the clock ---------------------------------------------------------------------------------

    def reconcile(self, loads: Mapping[InstanceId, EngineMetrics]) -> None:
        """What the instances say they work on: requests that are not the proxy's take capacity there, too."""
        now = self._clock()
        for key, load in loads.items():
            if (traffic := self._traffic.get(key)) is not None:
                traffic.pulse.observe(load, now)
            if (upstream := self.table.get(*key)) is not None:
                self.balancer.reconcile(upstream, load.running, load.waiting, load.kv_usage, load.kv_tokens)
        self.pump(now)

    def awaited(self, slot: int, generation: int) -> int:
        """Attempts that wait for the instance: it is read, because the client takes what comes."""
        traffic = self._traffic.get((slot, generation))
        return 0 if traffic is None else traffic.awaited()

    def occupancy(self) -> dict[int, Occupied]:
        """Seconds since the proxy's start that each slot was ready, and busy."""
        return self._occupancy.read(self._clock())

    def progress(self, slot: int, generation: int) -> int:
        """Reads relayed from an instance so far; it rises while any of its responses moves."""
        traffic = self._traffic.get((slot, generation))
        return 0 if traffic is None else traffic.progress()

    def silent(self, slot: int, generation: int) -> bool:
        """Nothing has come of its requests for `hung_timeout_s`, and it could start a probe's request at once."""
        traffic = self._traffic.get((slot, generation))
        if traffic is None or not traffic.silence_told:
            return False
        return traffic.has_room()

    def excuse(self, seconds: float, now: float) -> None:
        """The event loop did not run for so long: neither silence of an instance nor a wait for one."""
        self.balancer.queue.extend(seconds)
        for traffic in self._traffic.values():
            traffic.excuse(seconds, now)

    def tick(self, now: float) -> None:
        for ticket in self.balancer.queue.expired(now):
            request = self._waiting.pop(ticket)
            self._post(request, NoCapacity(self._out_of_time(request, now)))
        for traffic in tuple(self._traffic.values()):
            traffic.forget(now)
            traffic.pool.sweep(now)
        timeout_s = self._proxy.hung_timeout_s
        for traffic in hung(self._traffic.values(), now, timeout_s):
            if not self._may_work(traffic, now):
                self._give_up(traffic, now)
        for traffic in tuple(self._traffic.values()):
            silent = traffic.silent_s(now) > timeout_s and not traffic.pulse.may_beat(now, timeout_s)
            if silent and not traffic.probe_fits:
                self._on_silence(traffic, now)
        self._ask(now)
        self.pump(now)
        for note in self.balancer.notes():
            _LOG.warning("%s", note)

    def _ask(self, now: float) -> None:
        """Ask the engines of silent requests whether they compute. A token is asked for where streams would be given up."""
        doubted = hung(self._traffic.values(), now, self._proxy.hung_timeout_s / 2)
        for traffic in self._traffic.values():
            pulse = traffic.pulse
            if now - pulse.asked_at >= self._ask_s and traffic.longest_wait_s(now) >= self._ask_s:
                token = traffic in doubted and traffic.has_room()
                self._pulses.ask(pulse, traffic.upstream, 2 * self._ask_s, token=token)

    def _may_work(self, traffic: Traffic, now: float) -> bool:
        """Whether its engine may compute; or nobody could ask it, and its only request may be silent."""
        if traffic.pulse.may_beat(now, self._proxy.hung_timeout_s):
            return True
        return traffic.pulse.counted is None and not traffic.has_room() and len(traffic.attempts) == 1

    def _on_silence(self, traffic: Traffic, now: float) -> None:
        """Tell the supervisor, which finds out whether the instance hangs or just takes long over a whole response.

        Where other instances can take them, new requests go there for a while, and one request leaves a full instance, so
        that the supervisor's probe need not wait. An instance that runs one request at a time keeps it.
        """
        upstream, requests = traffic.upstream, sum(1 for _ in traffic.computing())
        prefill_s = self._proxy.first_token_timeout_per_1k_s * traffic.largest_prompt() / 1000
        if (silent_s := traffic.silent_s(now)) <= self._proxy.hung_timeout_s + prefill_s:
            return
        reason = f"nothing has come of its {requests} requests for {silent_s:.0f} s"
        others = (u for u in self.table.ready(upstream.model) if u is not upstream and not _is_out(u, now))
        spare = not upstream.draining and upstream.max_num_seqs > 1 and next(others, None) is not None
        if spare or not traffic.silence_told:
            self._suspect(upstream, reason, now)
        traffic.told_silent(probe_fits=spare)
        if not spare:
            return
        self._eject(upstream, now)
        waiting = [attempt for attempt in traffic.computing() if not attempt.request.committed]
        if waiting and upstream.in_flight >= upstream.max_num_seqs:
            waiting[-1].fail(reason)

    def _give_up(self, traffic: Traffic, now: float) -> None:
        """It hangs: said once, and its requests are tried elsewhere."""
        upstream, eject_s = traffic.upstream, self._proxy.eject_s
        reason = f"it hangs: none of its streams has moved for {self._proxy.hung_timeout_s:g} s"
        self._suspect(upstream, reason, now)
        self._eject(upstream, now)
        where = {"slot": upstream.slot, "generation": upstream.generation}
        _LOG.warning("slot %d: ejected for %g s", upstream.slot, eject_s, extra=where)
        for attempt in tuple(traffic.attempts):
            attempt.fail(reason)

    def _eject(self, upstream: Upstream, now: float) -> None:
        upstream.outliers.eject(now + self._proxy.eject_s)
        self._counters.slot(upstream.slot, upstream.model).ejected += 1

    def _arm(self, now: float) -> None:
        """Some waits end by time alone: the balancer says when."""
        when = self.balancer.next_pump(now)
        if self._pump_timer is not None:
            self._pump_timer.cancel()
            self._pump_timer = None
        if when is not None:
            self._pump_timer = self._loop.call_later(max(0.001, when - now), self._pump_by_time)

    def _pump_by_time(self) -> None:
        self.pump(self._clock())

    # --- the end -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """From here on no instance is blamed or suspected."""
        self._stopping = True

    async def close(self) -> None:
        await self._pulses.close()
        if self._pump_timer is not None:
            self._pump_timer.cancel()
        for traffic in self._traffic.values():
            traffic.pool.close()

    def _tell_if_idle(self, upstream: Upstream) -> None:
        if self.table.became_idle(upstream):
            self._on_idle(upstream.slot, upstream.generation)

    def _suspect(self, upstream: Upstream, reason: str, now: float) -> None:
        """Once it is out, or drains (it may refuse then), a failure tells nothing new."""
        if not upstream.draining and not self._stopping and not _is_out(upstream, now):
            self._on_suspect(upstream.slot, upstream.generation, reason)


def _is_out(upstream: Upstream, now: float) -> bool:
    until = upstream.outliers.ejected_until
    return until is not None and now < until
