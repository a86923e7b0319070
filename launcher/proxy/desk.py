"""What becomes of a request: admitted, sent, moved to another instance, continued, ended, counted.

Relays turn to it; it turns to the fleet. One event loop, no other owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, assert_never

from launcher.config.schema import Model, Proxy
from launcher.proxy import report
from launcher.proxy.continuation import CHAT, COMPLETIONS, Complete, Continuation, NotExact, plan_continuation
from launcher.proxy.exchange import Exchange, Outcome, Tally
from launcher.proxy.fleet import Fleet, OnIdle, OnSuspect
from launcher.proxy.links import Link
from launcher.proxy.openai import Names, Peek, Refusal, peek_form, peek_json
from launcher.proxy.relay import Answer, Relay
from launcher.proxy.rewriter import ContinuationRewriter
from launcher.proxy.routes import GATHERED, Kind
from launcher.proxy.scheduling.demand import Demand, FullError, Ticket
from launcher.proxy.scheduling.policies import Pick
from launcher.proxy.scheduling.prefixes import fingerprint
from launcher.proxy.transcript import Transcript
from launcher.telemetry.metrics import Timings

if TYPE_CHECKING:
    from launcher.proxy.application import Application
    from launcher.proxy.keys import KeyEntry

MAX_ATTEMPTS = 16  # of one request; each instance has one try per round
MAX_ROUNDS = 3  # over instances that gave no answer at all
ROUND_PAUSE_S = 0.25  # for the supervisor to see which of them are gone
MAX_CONTINUED = 8  # times that one stream goes on elsewhere
MAX_DEATHS = 3  # a request that was on so many instances when they died may be what kills them
OWN_TIMEOUT_S = 30.0  # for a page of our own

_ACCESS = logging.getLogger("launcher.access")
_PROMPTS = logging.getLogger("launcher.prompts")
_LOG = logging.getLogger(__name__)
_QUIET = frozenset({"/health", "/metrics"})  # polled by machines: their access lines are DEBUG


class Desk:
    """Admission and ends of all requests."""

    def __init__(
        self,
        proxy: Proxy,
        models: Sequence[Model],
        on_idle: OnIdle,
        on_suspect: OnSuspect,
        pick: Pick,
    ) -> None:
        self._proxy = proxy
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time
        self.on_quiet: Callable[[], None] = lambda: None  # no request is in flight any more
        self._session_header = proxy.session_header.lower().encode()
        self.idle_timeout_s = proxy.idle_timeout_s
        self.comment_interval_s = proxy.keepalive_comment_s
        self.client_stall_timeout_s = proxy.client_stall_timeout_s
        names = tuple(dict.fromkeys(model.name for model in models))
        aliases = {alias: model.name for model in models for alias in model.aliases}
        self.names = Names(names, aliases)
        self.tally = Tally()
        self.timings = Timings()
        self.fleet = Fleet(proxy, self.tally, on_idle, on_suspect, pick)
        self.relays: set[Relay] = set()
        self.own: Link | None = None  # to the application
        self.application: Application | None = None  # pages of our own, and the way out
        self._later: set[asyncio.TimerHandle] = set()

    # --- in ----------------------------------------------------------------------------------------

    def accept(self, relay: Relay) -> None:
        """A request on a route has begun."""
        self.relays.add(relay)
        if relay.found is not None and relay.found.route.kind not in GATHERED:
            self.tally.accept(relay.exchange)
            if relay.key is not None:
                relay.key.sums.accepted += 1

    def admit(self, relay: Relay) -> None:
        """It is whole: find out what is asked, and queue it. Raises Refusal."""
        found, exchange, now = relay.found, relay.exchange, self.now()
        if found is None:
            raise AssertionError("only a request on a route is admitted")
        kind = found.route.kind
        if relay.body and relay.head.method in {"GET", "HEAD"}:
            raise Refusal(400, f"{relay.head.method} takes no body here", close=True)
        if kind in GATHERED:
            self._answer_inside(relay, now)
            return
        peek = self._peek(kind, relay)
        if kind in {Kind.JSON, Kind.FORM}:
            exchange.model = self.names.resolve(peek.model)
        relay.streamed = peek.stream and found.route.ends_in_done
        if relay.key is not None:
            self._grant(relay, relay.key, peek)
        demand = self._demand(relay, peek, found.item if kind is Kind.STORED else peek.previous_response_id)
        relay.first_byte_timeout_s = self._first_byte_timeout_s(relay, demand)
        wait = self._proxy.queue_timeout_s
        if not self.fleet.table.ready(exchange.model):
            if not self.fleet.was_ready(exchange.model):
                refusal = self.unavailable(f"no instance of {exchange.model or 'any model'} is ready")
                self._expire(relay, refusal)
                return
            wait = min(wait, self._proxy.park_timeout_s)
        relay.ticket = Ticket(demand, exchange.started, now + wait)
        if relay.streamed and exchange.path in {CHAT, COMPLETIONS}:
            relay.transcript = Transcript()
        try:
            self.fleet.submit(relay, relay.ticket, now)
        except FullError as full:
            self._no_room(relay, full)

    def _no_room(self, relay: Relay, full: FullError) -> None:
        queue = self.fleet.scheduler.queue
        self.tally.queue_rejected["requests" if queue.count >= queue.max_requests else "bytes"] += 1
        self._expire(relay, self._too_many(full.reason, full.retry_after_s))

    def _answer_inside(self, relay: Relay, now: float) -> None:
        if self.own is None:
            raise self.unavailable("the server is starting")
        relay.first_byte_timeout_s = OWN_TIMEOUT_S
        relay.send(None, self.own, now)

    def _grant(self, relay: Relay, key: KeyEntry, peek: Peek) -> None:
        """Take it from what the API key may have. Raises Refusal."""
        scheduler, model = self.fleet.scheduler, relay.exchange.model
        tokens = scheduler.prompt_tokens(len(peek.prompt) or len(relay.body))
        tokens += scheduler.output_tokens(peek.max_tokens, peek.n)
        names = () if model is None else self.names.all_of(model)
        relay.grant = key.limits.admit(names, self.now(), tokens)

    def _first_byte_timeout_s(self, relay: Relay, demand: Demand) -> float:
        """An answer that is not streamed comes whole, so it takes as long as all of it."""
        if not relay.streamed:
            return self._proxy.answer_timeout_s
        more = self._proxy.first_token_timeout_per_1k_s * demand.prompt_tokens / 1000
        return self._proxy.first_token_timeout_s + more

    def _peek(self, kind: Kind, relay: Relay) -> Peek:
        if self._proxy.log_prompts and relay.body:
            request_id = relay.exchange.request_id
            text = bytes(relay.body).decode("utf-8", "backslashreplace")
            _PROMPTS.debug("%s %s", request_id, text, extra={"request_id": request_id})
        if kind is Kind.JSON:
            return peek_json(relay.body)
        if kind is Kind.FORM:
            return peek_form(relay.body, relay.head.get(b"content-type") or "")
        return Peek()

    def _demand(self, relay: Relay, peek: Peek, stored: str | None) -> Demand:
        scheduler = self.fleet.scheduler
        prompt = memoryview(peek.prompt)
        tools = bytes(peek.tools)
        relay.prompt_bytes = len(prompt) + len(tools)
        return Demand(
            model=relay.exchange.model,
            prompt_tokens=scheduler.prompt_tokens(relay.prompt_bytes) if prompt else 0,
            output_tokens=scheduler.output_tokens(peek.max_tokens, peek.n),
            max_tokens=peek.max_tokens,
            prefix=fingerprint(prompt, hash(tools) if tools else 0) if prompt else (),
            body_bytes=len(relay.body),
            session=relay.head.get(self._session_header) or peek.cache_key,
            key=relay.exchange.key,
            priority=peek.priority,
            pinned=self.fleet.keeper(stored),
            stream=relay.streamed,
        )

    # --- on the way --------------------------------------------------------------------------------

    def left(self, relay: Relay, *, broken: str | None, answered: int | None) -> None:
        """The relay has left its upstream."""
        ticket, upstream = relay.ticket, relay.upstream
        if ticket is None or upstream is None:
            raise AssertionError("it was on none")
        ticket.tried.add(upstream.key)
        if broken is not None and answered is not None:
            relay.blamed.append(upstream)
        if relay.exchange.stored is not None:
            self.fleet.remember(relay.exchange.stored, upstream.key)
        self.fleet.left(relay, ticket, upstream, broken, answered)

    def moved(self, relay: Relay, reason: str, answer: Answer | None, *, fault: bool) -> None:
        """One instance could not serve it, nothing was delivered: another one, or an honest end."""
        if relay.ticket is None:
            relay.fail(reason)
            return
        if answer is not None:
            relay.last_answer = answer
        if relay.last_answer is not None and not self.fleet.scheduler.possible(relay.ticket):
            relay.exchange.reason = reason
            relay.answer(relay.last_answer, Outcome.FAILED if fault else Outcome.COMPLETED)
        else:
            self.tally.retried += fault
            self._elsewhere(relay, reason)

    def _elsewhere(self, relay: Relay, reason: str) -> None:
        """Ask another instance; when all that are ready were asked, all again after a pause, or an end."""
        if relay.ticket is None:
            raise AssertionError("it has a ticket")
        if self.fleet.over is not None:
            relay.fail(self.fleet.over)
        elif relay.deaths >= MAX_DEATHS:
            relay.fail(f"{relay.deaths} instances died while they worked on it")
        elif relay.exchange.attempts >= MAX_ATTEMPTS:
            self._give_up(relay, reason)
        elif self.fleet.scheduler.possible(relay.ticket):
            self._again(relay)
        elif relay.rounds < MAX_ROUNDS:
            relay.rounds += 1
            self._after(ROUND_PAUSE_S, lambda: self._next_round(relay))
        else:
            self._give_up(relay, reason)

    def _next_round(self, relay: Relay) -> None:
        if relay.done or relay.ticket is None:
            return
        relay.ticket.tried.clear()
        if self.fleet.over is not None:
            relay.fail(self.fleet.over)
        else:
            self._again(relay)

    def _give_up(self, relay: Relay, reason: str) -> None:
        if relay.last_answer is not None:
            relay.exchange.reason = reason
            relay.answer(relay.last_answer, Outcome.FAILED)
        else:
            relay.fail(reason)

    def _again(self, relay: Relay) -> None:
        """Back into the queue, at the place of its arrival; it keeps its deadline, or the time to park."""
        ticket, now = relay.ticket, self.now()
        if ticket is None:
            raise AssertionError("it has a ticket")
        if not self.fleet.table.ready(ticket.demand.model):
            ticket.deadline = min(ticket.deadline, now + self._proxy.park_timeout_s)
        try:
            self.fleet.submit(relay, ticket, now)
        except FullError as full:
            self._no_room(relay, full)

    def resume(self, relay: Relay, reason: str, *, repeat: bool = False) -> bool:
        """A stream was cut: let it go on elsewhere. False: it can't be continued."""
        transcript, exchange = relay.transcript, relay.exchange
        if transcript is None or relay.ticket is None or self.fleet.over is not None:
            return False
        if exchange.continued >= MAX_CONTINUED:
            return False
        plan = plan_continuation(exchange.path, bytes(relay.body), transcript, repeat=repeat)
        match plan:
            case NotExact():
                self.tally.cut["unfit"] += 1
                exchange.reason = f"{reason}; not continued: {plan.reason}"
                return False
            case Complete():
                self.tally.cut["continued"] += 1
                exchange.continued += 1
                relay.finish_stream(plan.tail)
                return True
            case Continuation():
                exchange.continued += 1
                relay.rest_body = plan.body
                relay.rewriter = ContinuationRewriter(plan, transcript)
                relay.ticket.deadline = self.now() + self._proxy.queue_timeout_s
                self._elsewhere(relay, reason)
                return True
        assert_never(plan)

    def retry_after_s(self) -> int:
        """When a client may try again."""
        return self.fleet.scheduler.retry_after_s(self.now())

    def delivering(self, relay: Relay) -> None:
        """The first byte of an instance went to the client: those that failed it before were at fault."""
        self._settle(relay, self.now())

    def first_token(self, relay: Relay) -> None:
        """Its prompt is computed: the instance may begin with another one."""
        if relay.ticket is not None:
            self.fleet.scheduler.first_token(relay.ticket, self.now())
            self.fleet.pump()

    def _settle(self, relay: Relay, now: float) -> None:
        for upstream in relay.blamed:
            self.fleet.blame(upstream, now)
        relay.blamed.clear()

    def usage(self, relay: Relay, prompt: int, completion: int, cached: int | None) -> None:
        """An instance says how many tokens the request took: estimates get better."""
        if relay.ticket is not None:
            self.fleet.scheduler.usage(relay.ticket, relay.prompt_bytes, prompt, completion, cached)

    def withdraw(self, relay: Relay) -> None:
        """It waits no more."""
        if relay.ticket is not None:
            self.fleet.withdraw(relay.ticket)

    # --- out ---------------------------------------------------------------------------------------

    def ended(self, relay: Relay, outcome: Outcome) -> None:
        """Count it, log it."""
        self.relays.discard(relay)
        exchange, now = relay.exchange, self.now()
        if relay.rewriter is not None:  # of a stream that was cut and asked for elsewhere
            self.tally.cut["continued" if outcome is Outcome.COMPLETED else "failed"] += 1
        if relay.grant is not None:
            served = relay.committed or (outcome is Outcome.COMPLETED and exchange.status < 400)
            relay.grant.finish(relay.tokens if served else 0, now)
        if exchange.counted:
            self.tally.end(exchange, outcome)
            if relay.key is not None:
                relay.key.sums.ended[outcome] += 1
            if outcome is Outcome.COMPLETED and relay.blamed and exchange.status < 500:
                self._settle(relay, now)
            self.timings.duration.observe(now - exchange.started)
            if exchange.bound is not None:
                self.timings.queued.observe(exchange.bound - exchange.started)
            if exchange.first_byte is not None:
                self.timings.first_byte.observe(exchange.first_byte - exchange.started)
            if self.tally.in_flight == 0:
                self.on_quiet()
        else:
            exchange.outcome = outcome
        self._log(exchange, outcome, now)

    def _log(self, exchange: Exchange, outcome: Outcome, now: float) -> None:
        wanted = self._proxy.access_log
        if wanted == "off" or (wanted == "errors" and outcome is Outcome.COMPLETED and exchange.status < 400):
            return
        level = logging.DEBUG if exchange.path in _QUIET else logging.INFO
        if _ACCESS.isEnabledFor(level):
            report.log_access(_ACCESS, level, exchange, now)

    # --- the clock ---------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Called a few times a second."""
        scheduler = self.fleet.scheduler
        for relay in tuple(self.relays):
            relay.tick(now)
            if relay.ticket is not None and (events := relay.taken + relay.reads) > relay.told:
                scheduler.progress(relay.ticket, events - relay.told)
                relay.told = events
        for relay in self.fleet.expired(now):
            if self.fleet.table.ready(relay.exchange.model):
                self.tally.queue_rejected["deadline"] += 1
                waited = now - relay.exchange.started
                refusal = self._too_many(
                    f"no instance was free for it in {waited:.1f} s", self.retry_after_s()
                )
            else:
                model = relay.exchange.model or "any model"
                refusal = self.unavailable(f"no instance of {model} became ready in time")
            self._expire(relay, refusal)
        for upstream, relays in self.fleet.find_hung(now):
            reason = f"it hangs: none of its streams has moved for {self._proxy.hung_timeout_s:g} s"
            for relay in relays:
                relay.instance_gone(reason)
            self.fleet.scheduler.eject(upstream.key, now + self._proxy.eject_s)
        self.fleet.pump()
        self.fleet.say()

    def _expire(self, relay: Relay, refusal: Refusal) -> None:
        """It can't wait any longer: elsewhere, or an end that says so."""
        if relay.committed:
            relay.fail(refusal.message, refusal.status)
        elif not self._overflows(relay):
            relay.refuse(refusal)

    def _overflows(self, relay: Relay) -> bool:
        """Send what has no room here to the external endpoint, where that is wanted and allowed."""
        overflow = None if self.application is None else self.application.overflow
        local_only = relay.key is not None and not relay.key.may_overflow
        model = relay.exchange.model
        if overflow is None or self.own is None or relay.delivery.started:
            return False
        if not overflow.takes(relay.exchange.path, model, local_only=local_only):
            return False
        relay.ticket = None
        relay.exchange.overflowed = True
        relay.send(None, self.own, self.now())
        return True

    def cut(self, reason: str) -> None:
        """End all that is left; nothing new starts."""
        self.fleet.over = reason
        for handle in self._later:
            handle.cancel()
        self._later.clear()
        for relay in tuple(self.relays):
            relay.fail(reason)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        def run() -> None:
            self._later.discard(handle)
            act()

        handle = self._loop.call_later(seconds, run)
        self._later.add(handle)

    # --- refusals ----------------------------------------------------------------------------------

    def unavailable(self, message: str, *, close: bool = False) -> Refusal:
        """503."""
        retry = self.fleet.scheduler.retry_after_s(self.now())
        return Refusal(
            503,
            message,
            type_="service_unavailable",
            code="no_instance_ready",
            headers={"Retry-After": str(retry)},
            close=close,
        )

    def _too_many(self, reason: str, retry_after_s: int) -> Refusal:
        return Refusal(
            429,
            f"the server is at its limit: {reason}",
            type_="rate_limit_error",
            code="queue_full",
            headers={"Retry-After": str(retry_after_s)},
        )
