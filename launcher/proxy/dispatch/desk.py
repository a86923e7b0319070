"""All requests: accepted, ticked, counted, logged. What becomes of one is decided at the three rooms it leads to:
intake (what it asks), moves (where it goes next), fleet (which instance, and when).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from launcher.config.schema import Model, Proxy
from launcher.printable import quoted
from launcher.proxy.balancing.demand import Ending
from launcher.proxy.balancing.policies import Pick
from launcher.proxy.dispatch.fleet import Fleet, OnIdle, OnSuspect, Target
from launcher.proxy.dispatch.intake import Intake
from launcher.proxy.dispatch.moves import Moves, setbacks_of
from launcher.proxy.downstream.slow_clients import SlowClients
from launcher.proxy.observability.access_log import AccessLog
from launcher.proxy.observability.exchange import Counters, Exchange, Outcome
from launcher.proxy.openai.models import ModelNames
from launcher.proxy.routes import GATHERED
from launcher.proxy.upstream import overflow
from launcher.telemetry.metrics import Timings

if TYPE_CHECKING:
    from launcher.proxy.auth.rate_limits import Grant
    from launcher.proxy.dispatch.relay import Relay
    from launcher.proxy.upstream.reader import Attempt

_LOG = logging.getLogger(__name__)
_ERROR = 400
_OVERFLOW_ENDINGS = {
    Ending.WHOLE: overflow.Ending.COMPLETED,
    Ending.REFUSED: overflow.Ending.COMPLETED,
    Ending.LEFT: overflow.Ending.CLIENT_ABORTED,
    Ending.BROKEN: overflow.Ending.FAILED,
}


class Desk:
    """Owner of the requests in flight and of the sums. One event loop, no other owner."""

    def __init__(
        self,
        proxy: Proxy,
        models: Sequence[Model],
        on_idle: OnIdle,
        on_suspect: OnSuspect,
        pick: Pick,
    ) -> None:
        self.now = asyncio.get_running_loop().time
        self.on_quiet: Callable[[], None] = lambda: None  # no request is in flight any more
        self.idle_timeout_s = proxy.idle_timeout_s
        self.comment_interval_s = proxy.keepalive_comment_s
        self.slow_clients = SlowClients(proxy, self.now)
        self.access_log = AccessLog(proxy.access_log, asyncio.get_running_loop().call_soon)
        names = tuple(dict.fromkeys(model.name for model in models))
        aliases = {alias: model.name for model in models for alias in model.aliases}
        self.names = ModelNames(names, aliases)
        self.adapters: dict[str, str] = {}  # models by the names of their LoRA adapters
        self.tally = Counters()
        self.timings = Timings()
        self.fleet = Fleet(proxy, self.tally, on_idle, on_suspect, pick)
        self.overflow = (
            None if proxy.overflow is None else overflow.Overflow(proxy.overflow, proxy.connect_timeout_s)
        )
        self.moves = Moves(proxy, self.fleet, self.tally, self.overflow)
        self.intake = Intake(proxy, self.names, self.adapters, self.fleet, self.moves)
        self._relays: set[Relay] = set()

    def know(self, adapters: Iterable[str], model: str) -> None:
        """Instances of the model serve these LoRA adapters; a model's own name and its aliases come first."""
        taken = {*self.names.names, *self.names.aliases}
        self.adapters.update((adapter, model) for adapter in adapters if adapter not in taken)

    # --- in ----------------------------------------------------------------------------------------

    def accept(self, relay: Relay) -> None:
        """A request on a route has begun."""
        self._relays.add(relay)
        if relay.found is not None and relay.found.route.kind not in GATHERED:
            self.tally.accept(relay.exchange)
            if relay.key is not None:
                relay.key.sums.accepted += 1

    def admit(self, relay: Relay) -> None:
        """It is whole. Raises HttpError."""
        if relay.found is None:
            raise AssertionError("only a request on a route is admitted")
        self.intake.admit(relay, relay.found)

    # --- on the way --------------------------------------------------------------------------------

    def first_token(self, relay: Relay) -> None:
        """Its prompt is computed: the instance may begin with another one."""
        if relay.ticket is not None:
            self.fleet.scheduler.first_token(relay.ticket, self.now())
            self.fleet.pump()

    def learn_usage(self, relay: Relay, prompt: int, completion: int, cached: int | None) -> None:
        """An instance says how many tokens the request took: estimates get better."""
        if relay.ticket is not None:
            self.fleet.scheduler.usage(relay.ticket, relay.prompt_bytes, prompt, completion, cached)

    def left(
        self,
        relay: Relay,
        attempt: Attempt,
        target: Target,
        ending: Ending,
        *,
        broken: str | None,
        answered: int | None,
    ) -> None:
        """The relay has left an instance; `broken`: why that could not be used, `answered`: its own status."""
        ticket = relay.ticket
        if ticket is None:
            raise AssertionError("no instance is asked without a ticket")
        ticket.tried.add(target.upstream.key)
        if broken is not None:
            setbacks = setbacks_of(relay)
            setbacks.reached |= attempt.reached
            setbacks.unreached += not attempt.reached
            if answered is not None:
                setbacks.blamed.append(target.upstream)
        if relay.exchange.stored is not None:
            self.fleet.remember(relay.exchange.stored, target.upstream.key)
        self.fleet.left(attempt, target, ticket, ending, broken=broken, answered=answered)

    def left_overflow(self, relay: Relay, ending: Ending, broken: str | None) -> None:
        """The relay has left the overflow endpoint; `broken`: why that could not be used."""
        if self.overflow is None:
            raise AssertionError("there is no overflow endpoint")
        self.overflow.end(relay.exchange.model or "", _OVERFLOW_ENDINGS[ending])
        if broken is not None and relay.committed:
            reason = quoted(broken, overflow.MAX_REASON)
            _LOG.warning("overflow endpoint broke a response off: %s", reason, extra={"reason": reason})

    # --- out ---------------------------------------------------------------------------------------

    def ended(self, relay: Relay, outcome: Outcome) -> None:
        """Count it, log it."""
        self._relays.discard(relay)
        exchange, now = relay.exchange, self.now()
        if relay.rest is not None:
            self.tally.cut["continued" if outcome is Outcome.COMPLETED else "failed"] += 1
        if relay.grant is not None:
            relay.grant.finish(_charged(relay, relay.grant, outcome), now)
        if exchange.counted:
            self._count(relay, exchange, outcome, now)
        else:
            exchange.outcome = outcome
        self.access_log.add(exchange, now)

    def _count(self, relay: Relay, exchange: Exchange, outcome: Outcome, now: float) -> None:
        self.tally.end(exchange, outcome)
        if relay.key is not None:
            relay.key.sums.ended[outcome] += 1
        if outcome is Outcome.COMPLETED and exchange.status < 500:
            self.moves.settle(relay, now)
        self.timings.duration.observe(now - exchange.started)
        if exchange.bound is not None:
            self.timings.queued.observe(exchange.bound - exchange.started)
        if exchange.first_byte is not None:
            self.timings.first_byte.observe(exchange.first_byte - exchange.started)
        if self.tally.in_flight == 0:
            self.on_quiet()

    def cut(self, reason: str) -> None:
        """End all that is left; nothing new starts."""
        self.fleet.over = reason
        self.moves.stop()
        for relay in tuple(self._relays):
            relay.fail(reason)

    # --- the clock ---------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Called a few times a second."""
        scheduler = self.fleet.scheduler
        for relay in tuple(self._relays):
            try:
                reads = relay.tick(now)
                if reads and relay.ticket is not None:
                    scheduler.progress(relay.ticket, reads)
            except Exception:  # the clock goes on for the others
                relay.fault()
        self.slow_clients.tick(now, self.fleet.models_waited_for)
        for relay in self.fleet.expired(now):
            self.moves.expired(relay, now)
        self.fleet.tick(now)
        if self.overflow is not None:
            self.overflow.pool.sweep(now)


def _charged(relay: Relay, grant: Grant, outcome: Outcome) -> int:
    """Tokens that its API key pays for: of what was served all, of what its client did not wait for the prompt."""
    exchange = relay.exchange
    if relay.committed or (outcome is Outcome.COMPLETED and exchange.status < _ERROR):
        return grant.charged if exchange.overflowed and relay.usage is None else relay.tokens
    if outcome is Outcome.CLIENT_ABORTED and exchange.bound is not None and relay.ticket is not None:
        return relay.ticket.demand.prompt_tokens
    return 0
