"""The instances behind the front door: scheduler, links, and what is asked of which instance.

Each attempt enters and leaves the scheduler exactly once, whichever way it ends, on the very upstream that it
was bound to. What is kept of an upstream (`Target`) is of that object: an instance that is removed and comes
again under the same slot and generation is another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from launcher.config.schema import Proxy
from launcher.proxy.balancing.balancer import Balancer
from launcher.proxy.balancing.demand import Ending, Key
from launcher.proxy.balancing.policies import Pick
from launcher.proxy.balancing.ticket import Ticket
from launcher.proxy.balancing.upstreams import Upstream
from launcher.proxy.observability.exchange import Counters
from launcher.proxy.upstream.endpoint import Endpoint
from launcher.proxy.upstream.pool import ConnectionPool
from launcher.proxy.upstream.reader import Attempt
from launcher.telemetry.vllm_metrics import EngineMetrics

if TYPE_CHECKING:
    from launcher.proxy.dispatch.relay import Relay

STORED_RESPONSES = 65536  # ids of stored responses whose instance is remembered; the oldest are forgotten
GONE_GRACE_S = 0.2  # what a dead instance had sent already may still be read
DEATH_MEMORY_S = 2.0  # from a connection's break to the supervisor's word that the process is gone

OnIdle = Callable[[int, int], None]
OnSuspect = Callable[[int, int, str], None]

_LOG = logging.getLogger(__name__)


class Target:
    """An upstream, the way to it, and what is asked of it."""

    __slots__ = (
        "_moved_at", "_seen", "attempts", "left_lately", "link", "made_room", "reads", "silence_told",
        "upstream",
    )  # fmt: skip

    def __init__(self, upstream: Upstream, link: ConnectionPool, now: float) -> None:
        self.upstream = upstream
        self.link = link
        self.attempts: dict[Attempt, Relay] = {}
        self.reads = 0  # by attempts that have left
        self._seen = 0  # reads at the last tick
        self._moved_at = now  # when there were more, or nothing was owed
        self.silence_told = False
        self.made_room = False  # in this silence, for the supervisor's question
        self.left_lately: deque[tuple[float, Relay]] = deque()  # because their connections broke, and when

    def progress(self) -> int:
        """Reads so far; rises while any of its answers moves."""
        return self.reads + sum(attempt.reads for attempt in self.attempts)

    def silent_s(self, now: float) -> float:
        """How long nothing has come of any of its requests, streamed or not. Called at each tick."""
        reads = self.progress()
        if reads != self._seen or all(attempt.held_back for attempt in self.attempts):
            self._seen, self._moved_at = reads, now
            self.silence_told = self.made_room = False
        return now - self._moved_at

    def largest_prompt(self) -> int:
        """Tokens of the longest prompt on it."""
        tickets = (relay.ticket for relay in self.attempts.values())
        return max((ticket.demand.prompt_tokens for ticket in tickets if ticket is not None), default=0)

    def moved_at(self) -> float | None:
        """When the last of its streams moved; None while none flows."""
        flowing = (a.moved_at for a in self.attempts if a.delivering and not a.held_back)
        return max(flowing, default=None)

    def forget(self, now: float) -> None:
        """What left long ago is not this instance's death."""
        while self.left_lately and now - self.left_lately[0][0] > DEATH_MEMORY_S:
            self.left_lately.popleft()


class Fleet:
    """Owner of the scheduler and the links."""

    def __init__(
        self, proxy: Proxy, tally: Counters, on_idle: OnIdle, on_suspect: OnSuspect, pick: Pick
    ) -> None:
        self._connect_timeout_s = proxy.connect_timeout_s
        self._hung_timeout_s = proxy.hung_timeout_s
        self._prefill_per_1k_s = proxy.first_token_timeout_per_1k_s
        self._eject_s = proxy.eject_s
        self._tally = tally
        self._on_idle = on_idle
        self._on_suspect = on_suspect
        self._clock = asyncio.get_running_loop().time
        self._targets: dict[Key, Target] = {}
        self._waiting: dict[Ticket, Relay] = {}
        self._stored: OrderedDict[str, Key] = OrderedDict()
        self._seen: set[str] = set()  # models that had a ready instance
        self._pump_timer: asyncio.TimerHandle | None = None
        self.over: str | None = None  # why nothing is sent any more
        self.scheduler = Balancer(
            proxy.policy,
            pick,
            max_requests=proxy.queue_max_requests,
            max_bytes=proxy.queue_max_bytes,
            eject_failures=proxy.eject_failures,
            eject_s=proxy.eject_s,
        )
        self.table = self.scheduler.table

    # --- instances ---------------------------------------------------------------------------------

    def add(self, upstream: Upstream) -> None:
        """It may get requests."""
        known = self.scheduler.add(upstream)
        if known is None:
            return
        if known.key not in self._targets:
            link = ConnectionPool(Endpoint(known.address), self._connect_timeout_s)
            self._targets[known.key] = Target(known, link, self._clock())
        self._seen.add(known.model)
        self._tally.slot(known.slot, known.model)
        self.pump()

    def drain(self, slot: int, generation: int) -> None:
        """No new requests; on_idle comes from the event loop, never from this call."""
        upstream = self.scheduler.drain(slot, generation)
        if upstream is not None:
            asyncio.get_running_loop().call_soon(self._tell_if_idle, upstream)

    def remove(self, slot: int, generation: int, reason: str) -> None:
        """It is gone; what runs on it moves on, once what it had sent has been read."""
        upstream = self.scheduler.remove(slot, generation, reason)
        if upstream is None:
            return
        now, target = self._clock(), self._targets.pop(upstream.key)
        target.link.close()
        target.forget(now)
        for relay in {relay for _, relay in target.left_lately}:
            relay.deaths += 1
        for attempt, relay in tuple(target.attempts.items()):
            if relay.committed:
                asyncio.get_running_loop().call_later(GONE_GRACE_S, attempt.broken, reason)
            else:
                relay.deaths += 1
                attempt.broken(reason)

    def was_ready(self, model: str | None) -> bool:
        """Some instance of the model has been ready: it may come back."""
        return bool(self._seen) if model is None else model in self._seen

    def retry_after_s(self) -> int:
        """When a client may try again."""
        return self.scheduler.retry_after_s(self._clock())

    def keeper(self, response_id: str | None) -> Key | None:
        """The instance that keeps a stored response, as far as we know."""
        return None if response_id is None else self._stored.get(response_id)

    # --- requests ----------------------------------------------------------------------------------

    def submit(self, relay: Relay, ticket: Ticket, now: float) -> None:
        """Send it now, or let it wait. Raises FullError."""
        upstream = self.scheduler.offer(ticket, now)
        if upstream is None:
            self._waiting[ticket] = relay
            relay.queued(now)
            self._arm(now)
        else:
            self._send(relay, upstream, now)

    def withdraw(self, ticket: Ticket) -> None:
        """It waits no more."""
        if self._waiting.pop(ticket, None) is not None:
            self.scheduler.withdraw(ticket)

    def pump(self) -> None:
        """Send what can start now."""
        if not self._waiting:
            return
        now = self._clock()
        for ticket in self.scheduler.pump(now):
            relay = self._waiting.pop(ticket)
            if ticket.upstream is not None:
                self._send(relay, ticket.upstream, now)
        self._arm(now)

    def expired(self, now: float) -> list[Relay]:
        """Relays that have waited too long; they wait no more."""
        return [self._waiting.pop(ticket) for ticket in self.scheduler.expired(now)]

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def models_waited_for(self) -> set[str | None]:
        """The models that requests in the queue want; None: any."""
        return {ticket.demand.model for ticket in self._waiting}

    @property
    def queued(self) -> Iterable[Relay]:
        """The relays that wait."""
        return self._waiting.values()

    def _send(self, relay: Relay, upstream: Upstream, now: float) -> None:
        target = self._targets[upstream.key]
        self._tally.slot(upstream.slot, upstream.model).sent += 1
        attempt = Attempt(relay, target, now)
        target.attempts[attempt] = relay
        try:
            relay.send(attempt, target.link, now)
        except Exception:  # whoever made room for it has no part in that
            relay.fault()

    def left(
        self,
        attempt: Attempt,
        target: Target,
        ticket: Ticket,
        ending: Ending,
        *,
        broken: str | None,
        answered: int | None,
    ) -> None:
        """An attempt is over; `broken`: why its instance could not be used, `answered`: its own status."""
        now, upstream = self._clock(), target.upstream
        relay = target.attempts.pop(attempt)
        target.reads += attempt.reads
        self.scheduler.release(ticket, now, ending)
        if broken is not None:
            self._tally.slot(upstream.slot, upstream.model).broken += not relay.committed
            self._suspect(upstream, broken)
            if answered is None:
                self.blame(upstream, now)
                if attempt.reached:
                    target.left_lately.append((now, relay))
        self._tell_if_idle(upstream)
        self.pump()

    def blame(self, upstream: Upstream, now: float) -> None:
        """A failure was this instance's fault: after some in a row it gets no requests for a while.

        The last one that is not ejected stays: with none at all there would be nothing to fail on.
        """
        others = (u for u in self.table.ready(upstream.model) if u is not upstream)
        if upstream.draining or self.over is not None or all(u.outliers.ejected_until for u in others):
            return
        if _is_out(upstream, now):
            return  # it was asked before it was ejected
        if self.scheduler.failed(upstream, now):
            self._tally.slot(upstream.slot, upstream.model).ejected += 1

    def remember(self, response_id: str, key: Key) -> None:
        """The instance keeps this stored response."""
        self._stored[response_id] = key
        if len(self._stored) > STORED_RESPONSES:
            self._stored.popitem(last=False)

    # --- the clock ---------------------------------------------------------------------------------

    def reconcile(self, loads: Mapping[Key, EngineMetrics]) -> None:
        """What the instances say they work on: requests that are not ours take room there, too."""
        for key, load in loads.items():
            upstream = self.table.get(*key)
            if upstream is None:
                continue
            self.scheduler.reconcile(upstream.slot, load.running, load.waiting, load.kv_usage)
            if load.kv_tokens is not None and upstream.kv_tokens is None:
                self.scheduler.set_kv_tokens(upstream, load.kv_tokens)
        self.pump()

    def awaited(self, slot: int, generation: int) -> int:
        """Attempts that wait for the instance: it is read, because the client takes what comes."""
        target = self._targets.get((slot, generation))
        return 0 if target is None else sum(not attempt.held_back for attempt in target.attempts)

    def progress(self, slot: int, generation: int) -> int:
        """Reads relayed from an instance so far; it rises while any of its answers moves."""
        target = self._targets.get((slot, generation))
        return 0 if target is None else target.progress()

    def tick(self, now: float) -> None:
        """Called a few times a second."""
        for target in tuple(self._targets.values()):
            target.forget(now)
            target.link.sweep(now)
        for target in self._find_hung(now):
            self._give_up(target, now)
        for target in tuple(self._targets.values()):
            if target.silent_s(now) > self._hung_timeout_s and not target.made_room:
                self._on_silence(target, now)
        self.pump()
        for note in self.scheduler.notes():
            _LOG.warning("%s", note)

    def silent(self, slot: int, generation: int) -> bool:
        """Nothing has come of its requests for `hung_timeout_s`, and it has room: a token asked of it waits in no line."""
        target = self._targets.get((slot, generation))
        if target is None or not target.silence_told:
            return False
        return target.upstream.in_flight < target.upstream.max_num_seqs

    def _on_silence(self, target: Target, now: float) -> None:
        """Told once, and once more with room made. A whole answer may take long: the supervisor finds out if it hangs.

        Where siblings can take them, new requests go there for a while, and one that waits on a full instance makes
        room for the supervisor's question. An instance that runs one request at a time keeps it.
        """
        upstream, requests = target.upstream, len(target.attempts)
        allowed_s = self._hung_timeout_s + self._prefill_per_1k_s * target.largest_prompt() / 1000
        if (silent_s := target.silent_s(now)) <= allowed_s:
            return
        reason = f"nothing has come of its {requests} requests for {silent_s:.0f} s"
        others = (u for u in self.table.ready(upstream.model) if u is not upstream and not _is_out(u, now))
        spare = not upstream.draining and upstream.max_num_seqs > 1 and next(others, None) is not None
        if spare or not target.silence_told:
            self._suspect(upstream, reason)
        target.silence_told, target.made_room = True, spare
        if not spare:
            return
        self.scheduler.eject(upstream.key, now + self._eject_s)
        self._tally.slot(upstream.slot, upstream.model).ejected += 1
        waiting = [attempt for attempt, relay in target.attempts.items() if not relay.committed]
        if waiting and upstream.in_flight >= upstream.max_num_seqs:
            waiting[-1].broken(reason)

    def _find_hung(self, now: float) -> list[Target]:
        """Instances none of whose streams moved for the time set, while some other's did."""
        moved = {t: at for t in self._targets.values() if (at := t.moved_at()) is not None}
        if len(moved) < 2 or now - max(moved.values()) >= self._hung_timeout_s / 2:
            return []
        return [target for target, at in moved.items() if now - at > self._hung_timeout_s]

    def _give_up(self, target: Target, now: float) -> None:
        """It hangs: said once, and what is on it moves."""
        upstream = target.upstream
        reason = f"it hangs: none of its streams has moved for {self._hung_timeout_s:g} s"
        self._suspect(upstream, reason)
        self.scheduler.eject(upstream.key, now + self._eject_s)
        self._tally.slot(upstream.slot, upstream.model).ejected += 1
        _LOG.warning("slot %d: ejected for %g s", upstream.slot, self._eject_s, extra={"slot": upstream.slot})
        for attempt in tuple(target.attempts):
            attempt.broken(reason)

    def _arm(self, now: float) -> None:
        """Some waits end by time alone: the scheduler says when."""
        when = self.scheduler.next_pump(now)
        if self._pump_timer is not None:
            self._pump_timer.cancel()
            self._pump_timer = None
        if when is not None:
            self._pump_timer = asyncio.get_running_loop().call_later(max(0.001, when - now), self.pump)

    # --- ends --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close every connection."""
        if self._pump_timer is not None:
            self._pump_timer.cancel()
        for target in self._targets.values():
            target.link.close()

    def _tell_if_idle(self, upstream: Upstream) -> None:
        if self.table.became_idle(upstream):
            self._on_idle(upstream.slot, upstream.generation)

    def _suspect(self, upstream: Upstream, reason: str) -> None:
        """Once it is out, or drains (it may refuse then), a failure tells nothing new."""
        if not upstream.draining and self.over is None and not _is_out(upstream, self._clock()):
            self._on_suspect(upstream.slot, upstream.generation, reason)


def _is_out(upstream: Upstream, now: float) -> bool:
    """Ejected."""
    until = upstream.outliers.ejected_until
    return until is not None and now < until
