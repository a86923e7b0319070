"""The instances behind the front door: scheduler, links, and which relay is on which instance.

Each attempt enters and leaves the scheduler exactly once, whichever way it ends, on the very upstream (slot
and generation) that it was bound to.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping

from launcher.config.schema import Proxy
from launcher.proxy.exchange import Tally
from launcher.proxy.links import Link, connector
from launcher.proxy.relay import Phase, Relay
from launcher.proxy.scheduling.demand import Key, Ticket
from launcher.proxy.scheduling.policies import Pick
from launcher.proxy.scheduling.scheduler import Scheduler
from launcher.proxy.scheduling.upstreams import Upstream
from launcher.telemetry.engine_load import EngineLoad

STORED_RESPONSES = 65536  # ids of stored responses whose instance is remembered; the oldest are forgotten
GONE_GRACE_S = 0.2  # what a dead instance had sent already may still be read
DEATH_MEMORY_S = 2.0  # from a connection's break to the supervisor's word that the process is gone

OnIdle = Callable[[int, int], None]
OnSuspect = Callable[[int, int, str], None]

_LOG = logging.getLogger(__name__)


class Fleet:
    """Owner of the scheduler and the links."""

    def __init__(
        self, proxy: Proxy, tally: Tally, on_idle: OnIdle, on_suspect: OnSuspect, pick: Pick
    ) -> None:
        self._connect_timeout_s = proxy.connect_timeout_s
        self._hung_timeout_s = proxy.hung_timeout_s
        self._slow_start_s = proxy.slow_start_s
        self._tally = tally
        self._on_idle = on_idle
        self._on_suspect = on_suspect
        self._clock = asyncio.get_running_loop().time
        self._links: dict[Key, Link] = {}
        self._relays: dict[Key, set[Relay]] = {}
        self._waiting: dict[Ticket, Relay] = {}
        self._stored: OrderedDict[str, Key] = OrderedDict()
        self._broken_on: deque[tuple[float, Key, Relay]] = deque()
        self._relayed: dict[Key, int] = {}  # reads by relays that have left
        self._seen: set[str] = set()  # models that had a ready instance
        self._pump_timer: asyncio.TimerHandle | None = None
        self.over: str | None = None  # why nothing is sent any more
        self.scheduler = Scheduler(
            proxy.policy,
            pick,
            max_requests=proxy.queue_max_requests,
            max_bytes=proxy.queue_max_bytes,
            eject_failures=proxy.eject_failures,
            eject_s=proxy.eject_s,
            slow_start_s=proxy.slow_start_s,
        )
        self.table = self.scheduler.table

    # --- instances ---------------------------------------------------------------------------------

    def add(self, upstream: Upstream) -> None:
        """It may get requests."""
        known = self.scheduler.add(upstream, self._clock())
        if known is None:
            return
        if known.key not in self._links:
            self._links[known.key] = Link(connector(known.address), self._connect_timeout_s)
            self._relays[known.key] = set()
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
        now = self._clock()
        key = upstream.key
        for when, broken, relay in self._broken_on:
            if broken == key and now - when < DEATH_MEMORY_S:
                relay.deaths += 1
        link = self._links.pop(key, None)
        if link is not None:
            link.close()
        for relay in tuple(self._relays.get(key, ())):
            if relay.committed:
                asyncio.get_running_loop().call_later(GONE_GRACE_S, _gone, relay, upstream, reason)
            else:
                relay.deaths += 1
                relay.instance_gone(reason)
        self._forget_if_idle(upstream)

    def was_ready(self, model: str | None) -> bool:
        """Some instance of the model has been ready: it may come back."""
        return bool(self._seen) if model is None else model in self._seen

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

    @property
    def queued(self) -> Iterable[Relay]:
        """The relays that wait."""
        return self._waiting.values()

    def _send(self, relay: Relay, upstream: Upstream, now: float) -> None:
        self._tally.slot(upstream.slot, upstream.model).sent += 1
        self._relays[upstream.key].add(relay)
        relay.send(upstream, self._links[upstream.key], now)

    def left(
        self, relay: Relay, ticket: Ticket, upstream: Upstream, broken: str | None, answered: int | None
    ) -> None:
        """A relay has left its upstream; `broken` says why that could not be used."""
        now = self._clock()
        self._relays.get(upstream.key, set()).discard(relay)
        moved = relay.taken + relay.reads - relay.before
        self._relayed[upstream.key] = self._relayed.get(upstream.key, 0) + moved
        self.scheduler.release(ticket, now, good=broken is None)
        if broken is not None:
            self._tally.slot(upstream.slot, upstream.model).broken += not relay.committed
            if answered is None:
                self.blame(upstream, now)
                self._broken_on.append((now, upstream.key, relay))
                while self._broken_on and now - self._broken_on[0][0] > DEATH_MEMORY_S:
                    self._broken_on.popleft()
            self._suspect(upstream, broken)
        self._tell_if_idle(upstream)
        self._forget_if_idle(upstream)
        self.pump()

    def blame(self, upstream: Upstream, now: float) -> None:
        """A failure was this instance's fault: after some in a row it gets no requests for a while.

        The last one that is not ejected stays: with none at all there would be nothing to fail on.
        """
        others = (u for u in self.table.ready(upstream.model) if u is not upstream)
        if upstream.draining or self.over is not None or all(u.health.ejected_until for u in others):
            return
        if self.scheduler.failed(upstream, now):
            self._tally.slot(upstream.slot, upstream.model).ejected += 1

    def say(self) -> None:
        """Log what the scheduler has found out of instances."""
        for note in self.scheduler.notes():
            _LOG.warning("%s", note)

    def weight(self, upstream: Upstream, now: float) -> float:
        """Its share of a sibling's load: less than 1 for a straggler or a fresh one."""
        health = upstream.health
        slowness = max(1.0, health.slowness.value) if health.straggler else 1.0
        return health.share(now, self._slow_start_s) / slowness

    def remember(self, response_id: str, key: Key) -> None:
        """The instance keeps this stored response."""
        self._stored[response_id] = key
        if len(self._stored) > STORED_RESPONSES:
            self._stored.popitem(last=False)

    # --- the clock ---------------------------------------------------------------------------------

    def reconcile(self, loads: Mapping[Key, EngineLoad]) -> None:
        """What the instances say they work on: requests that are not ours take room there, too."""
        for key, load in loads.items():
            upstream = self.table.get(*key)
            if upstream is None:
                continue
            self.scheduler.reconcile(upstream.slot, load.running, load.waiting, load.kv_usage)
            if load.kv_tokens is not None and upstream.kv_tokens is None:
                self.scheduler.holds(upstream, load.kv_tokens)
        self.pump()

    def progress(self, key: Key) -> int:
        """Reads relayed from an instance so far; it rises while any of its answers moves."""
        running = sum(relay.taken + relay.reads - relay.before for relay in self._relays.get(key, ()))
        return self._relayed.get(key, 0) + running

    def find_hung(self, now: float) -> list[tuple[Upstream, list[Relay]]]:
        """Instances none of whose streams moved for the time set, while some other's did."""
        latest: dict[Key, float] = {}
        for key, relays in self._relays.items():
            moves = [
                relay.moved_at for relay in relays if relay.phase is Phase.DELIVERING and not relay.held_back
            ]
            if moves:
                latest[key] = max(moves)
        if len(latest) < 2 or now - min(latest.values()) <= self._hung_timeout_s:
            return []
        alive = now - max(latest.values()) < self._hung_timeout_s / 2
        found = []
        for key, moved in latest.items():
            upstream = self.table.get(*key)
            if alive and upstream is not None and now - moved > self._hung_timeout_s:
                found.append((upstream, list(self._relays[key])))
        return found

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
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _tell_if_idle(self, upstream: Upstream) -> None:
        if self.table.became_idle(upstream):
            self._on_idle(upstream.slot, upstream.generation)

    def _forget_if_idle(self, upstream: Upstream) -> None:
        if upstream.gone is not None and not self._relays.get(upstream.key):
            self._relays.pop(upstream.key, None)
            self._relayed.pop(upstream.key, None)

    def _suspect(self, upstream: Upstream, reason: str) -> None:
        if not upstream.draining and self.over is None:  # a draining instance may refuse
            self._on_suspect(upstream.slot, upstream.generation, reason)


def _gone(relay: Relay, upstream: Upstream, reason: str) -> None:
    if relay.upstream is upstream:
        relay.instance_gone(reason)
