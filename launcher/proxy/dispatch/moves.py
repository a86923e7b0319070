"""Where a request goes: into the queue, to another instance when one could not serve it, out of the house, or
to an honest end; and how a cut stream goes on.

One instance's fault is told from the request's: what answered 5xx is to blame once another one has answered
well (`settle`). A request tries each ready instance once a round, and what may be killing instances is not
given to more than MAX_DEATHS of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, assert_never

from launcher.config.schema import Proxy
from launcher.proxy.balancing.demand import FullError
from launcher.proxy.balancing.ticket import Ticket
from launcher.proxy.continuation.plan import Complete, NotExact, Server
from launcher.proxy.continuation.splicer import Splicer, continue_stream
from launcher.proxy.errors import HttpError, too_many, unavailable
from launcher.proxy.observability.exchange import Counters, Outcome
from launcher.proxy.upstream.overflow import Overflow

if TYPE_CHECKING:
    from launcher.proxy.balancing.upstreams import Upstream
    from launcher.proxy.dispatch.fleet import Fleet
    from launcher.proxy.dispatch.relay import Relay
    from launcher.proxy.upstream.reader import Answer

MAX_ATTEMPTS = 16  # of one request; each instance has one try per round
MAX_ROUNDS = 3  # over instances that gave no answer at all
ROUND_PAUSE_S = 0.25  # for the supervisor to see which of them are gone
PARKED_PAUSE_S = 1.0  # the same once they can't be reached for longer
MAX_CONTINUED = 8  # times that one stream goes on elsewhere
MAX_REWRITTEN_BYTES = (
    8 << 20
)  # of a request that goes on elsewhere, or out: made anew in one go, in up to 40 ms
MAX_DEATHS = 3  # a request that was on so many instances when they died may be what kills them


class Setbacks:
    """What one request has met with before its first byte."""

    __slots__ = ("answer", "blamed", "parked_until", "reached", "rounds", "unreached")

    def __init__(self) -> None:
        self.rounds = 0  # every ready instance was tried so often, and one at least was reached
        self.reached = False  # one was, in this round
        self.unreached = 0  # connects that failed
        self.parked_until: float | None = None  # since no instance could be reached
        self.blamed: list[Upstream] = []  # they answered 5xx; theirs if another one answers well
        self.answer: Answer | None = None  # the last one that could have been delivered


class Moves:
    """What is decided between two attempts of a request."""

    def __init__(self, proxy: Proxy, fleet: Fleet, tally: Counters, overflow: Overflow | None) -> None:
        self._proxy = proxy
        self._fleet = fleet
        self._tally = tally
        self._loop = asyncio.get_running_loop()
        self._pauses: set[asyncio.TimerHandle] = set()
        self._overflow = overflow
        self.unfit_templates: set[str] = set()  # models whose cut chats go on at temperature 0 only
        self.tells_ids: set[str] = (
            set()
        )  # models whose engines are asked for token ids: an event may bring several
        self.ignores_ids: set[str] = set()  # those whose engines ignore ids that are given as a prompt
        self.sampling_defaults: dict[str, Mapping[str, float]] = {}  # of a model's instances

    def know(self, model: str, *, token_ids: bool, sampling_defaults: Mapping[str, float]) -> None:
        """What an instance of a model that has become ready is like; see ProxyServer.add_upstream."""
        self.sampling_defaults[model] = sampling_defaults
        self.ignores_ids.discard(model)  # it may be another version
        if token_ids:
            self.tells_ids.add(model)
        else:
            self.tells_ids.discard(model)

    # --- the queue ---------------------------------------------------------------------------------

    def enter(self, relay: Relay, ticket: Ticket) -> None:
        """Into the queue, or at once to an instance."""
        try:
            self._fleet.submit(relay, ticket, self._loop.time())
        except FullError as full:
            queue = self._fleet.scheduler.queue
            bound = "requests" if queue.count >= queue.max_requests else "bytes"
            self._tally.queue_rejected[bound] += 1
            self.turn_away(relay, too_many(full.reason, full.retry_after_s))

    def expired(self, relay: Relay, now: float) -> None:
        """It has waited as long as it may."""
        if self._fleet.table.ready(relay.exchange.model):
            self._tally.queue_rejected["deadline"] += 1
            waited = now - relay.exchange.started
            refusal = too_many(f"no instance was free for it in {waited:.1f} s", self._fleet.retry_after_s())
        else:
            model = relay.exchange.model or "any model"
            refusal = unavailable(f"no instance of {model} became ready in time", self._fleet.retry_after_s())
        self.turn_away(relay, refusal)

    def turn_away(self, relay: Relay, refusal: HttpError) -> None:
        """It can't wait here: the external endpoint takes it, or it ends with this."""
        if relay.committed:
            relay.fail(refusal.message, refusal.status)
        elif not self._overflows(relay):
            relay.refuse(refusal)

    def _overflows(self, relay: Relay) -> bool:
        """Send it out, where that is wanted and allowed."""
        local_only = relay.key is not None and not relay.key.may_overflow
        exchange = relay.exchange
        overflow, model = self._overflow, exchange.model
        if overflow is None or model is None or relay.delivery.started or exchange.adapter is not None:
            return False
        if len(relay.body) > MAX_REWRITTEN_BYTES:
            return False
        if not overflow.takes(exchange.path, model, local_only=local_only):
            return False
        try:
            body = overflow.body(relay.body, model)
        except HttpError as refusal:
            relay.refuse(refusal)
            return True
        relay.ticket = None
        exchange.overflowed = True
        relay.send_to_overflow(overflow, body, self._loop.time())
        return True

    # --- elsewhere ---------------------------------------------------------------------------------

    def elsewhere(self, relay: Relay, reason: str, answer: Answer | None, *, fault: bool) -> None:
        """One instance could not serve it, nothing was delivered: another one, or an honest end.

        `answer` is what will be delivered if no other one does better; `fault`: the instance's.
        """
        ticket = relay.ticket
        if ticket is None:
            relay.fail(reason)
            return
        if answer is not None:
            setbacks_of(relay).answer = answer
        last = None if relay.setbacks is None else relay.setbacks.answer
        if last is not None and not self._fleet.scheduler.possible(ticket):
            relay.exchange.reason = reason
            relay.answer(last, Outcome.FAILED if fault else Outcome.COMPLETED)
        else:
            self._tally.retried += fault
            self._next(relay, ticket, reason)

    def _next(self, relay: Relay, ticket: Ticket, reason: str) -> None:
        """Ask another instance; when all that are ready were asked, all again after a pause, or an end."""
        if self._fleet.over is not None:
            relay.fail(self._fleet.over)
        elif relay.deaths >= MAX_DEATHS:
            relay.fail(f"{relay.deaths} instances died while they worked on it")
        elif relay.exchange.attempts - (setbacks := setbacks_of(relay)).unreached >= MAX_ATTEMPTS:
            self._give_up(relay, reason)
        elif self._fleet.scheduler.possible(ticket):
            self._again(relay, ticket)
        elif setbacks.reached and setbacks.rounds < MAX_ROUNDS:
            setbacks.rounds += 1
            self._after_pause(relay, ticket, ROUND_PAUSE_S)
        elif not setbacks.reached and self._may_park(setbacks):
            late = setbacks.unreached >= MAX_ROUNDS * len(ticket.tried)
            self._after_pause(relay, ticket, PARKED_PAUSE_S if late else ROUND_PAUSE_S)
        else:
            self._give_up(relay, reason)

    def _may_park(self, setbacks: Setbacks) -> bool:
        """No instance takes connections: they end, or are about to, and whoever comes after them may serve it."""
        now = self._loop.time()
        if setbacks.parked_until is None:
            setbacks.parked_until = now + self._proxy.park_timeout_s
        return now < setbacks.parked_until

    def _after_pause(self, relay: Relay, ticket: Ticket, seconds: float) -> None:
        setbacks_of(relay).reached = False

        def next_round() -> None:
            self._pauses.discard(handle)
            if not relay.done:
                ticket.tried.clear()
                try:
                    self._again(relay, ticket)
                except Exception:
                    relay.fault()

        handle = self._loop.call_later(seconds, next_round)
        self._pauses.add(handle)

    def _again(self, relay: Relay, ticket: Ticket) -> None:
        """Back into the queue, at the place of its arrival; it may wait there as long as any other."""
        wait = self._proxy.queue_timeout_s
        if not self._fleet.table.ready(ticket.demand.model):
            wait = min(wait, self._proxy.park_timeout_s)
        ticket.deadline = self._loop.time() + wait
        self.enter(relay, ticket)

    def _give_up(self, relay: Relay, reason: str) -> None:
        last = None if relay.setbacks is None else relay.setbacks.answer
        if last is not None:
            relay.exchange.reason = reason
            relay.answer(last, Outcome.FAILED)
        else:
            relay.fail(reason)

    def settle(self, relay: Relay, now: float) -> None:
        """An instance has answered well: those that gave 5xx before it were at fault."""
        if relay.setbacks is not None:
            for upstream in relay.setbacks.blamed:
                self._fleet.blame(upstream, now)
            relay.setbacks.blamed.clear()
            relay.setbacks.answer = None

    # --- cut streams -------------------------------------------------------------------------------

    def resume(self, relay: Relay, reason: str, *, repeat: bool = False) -> bool:
        """A stream was cut: let it go on elsewhere, or from the beginning (`repeat`). False: it can't be."""
        transcript, exchange, ticket = relay.transcript, relay.exchange, relay.ticket
        if transcript is None or ticket is None or self._fleet.over is not None:
            return False
        if exchange.continued >= MAX_CONTINUED or len(relay.body) > MAX_REWRITTEN_BYTES:
            return False
        plan = continue_stream(
            exchange.path, bytes(relay.body), transcript, self._server(exchange.model), repeat=repeat
        )
        match plan:
            case NotExact():
                self._tally.cut["unfit"] += 1
                relay.rest = None  # counted, whatever went on before
                exchange.reason = f"{reason}; not continued: {plan.reason}"
                return False
            case Complete():
                self._tally.cut["continued"] += 1
                relay.rest = None
                exchange.continued += 1
                relay.finish(plan.tail)
                return True
            case Splicer():
                exchange.continued += 1
                relay.rest = plan
                self._next(relay, ticket, reason)
                return True
        assert_never(plan)

    def _server(self, model: str | None) -> Server:
        """What is known of the instances of a model."""
        return Server(
            template_fits=model not in self.unfit_templates,
            one_token_events=model not in self.tells_ids,
            takes_ids=model not in self.ignores_ids,
            sampling_defaults=self.sampling_defaults.get(model or "", {}),
        )

    # --- the end -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Nothing moves any more."""
        for handle in self._pauses:
            handle.cancel()
        self._pauses.clear()


def setbacks_of(relay: Relay) -> Setbacks:
    """They are noted from the first one on."""
    if relay.setbacks is None:
        relay.setbacks = Setbacks()
    return relay.setbacks
