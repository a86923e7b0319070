"""The requests in flight: accepted, timed, counted."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.timeline import Timeline, timeline_of
from launcher.balancing.balancer import Balancer
from launcher.config.schema import Proxy
from launcher.proxy.ended import NO_TOKENS, Accounting, Tokens, ended_request, tells_cached, tokens_of
from launcher.proxy.observability.stats import Counters
from launcher.proxy.observability.timelines import Timelines
from launcher.proxy.request.actions import Outcome
from launcher.proxy.request.events import CommentDue, Event, ServerStopped
from launcher.proxy.request.record import Post, Request
from launcher.proxy.routes import OWN_PAGES
from launcher.proxy.upstream.attempt import Attempt
from launcher.telemetry.timings import Timings


class RequestRegistry:
    """Owner of the requests in flight."""

    def __init__(
        self,
        proxy: Proxy,
        counters: Counters,
        timings: Timings,
        balancer: Balancer,
        *,
        accounting: Accounting,
        timelines: Timelines,
        post: Post,
    ) -> None:
        self._idle_timeout_s = proxy.idle_timeout_s
        self._silence_timeout_s = proxy.answer_timeout_s
        self._comment_interval_s = proxy.keepalive_comment_s
        self._counters = counters
        self._timings = timings
        self._balancer = balancer
        self._accounting = accounting
        self._timelines = timelines
        self._post = post
        self._in_flight: set[Request] = set()
        self._tells_cached: set[str] = set()
        """Models whose instances told the cached tokens of a prompt."""
        self._idle = asyncio.Event()
        self._awaited = False

    def accept(self, request: Request) -> None:
        self._in_flight.add(request)
        if request.match is not None and request.match.route.kind not in OWN_PAGES:
            request.accepted = True
            self._counters.accept()
            if request.key is not None:
                request.key.sums.accepted += 1

    def count(self, request: Request, _event: Event, now: float) -> None:
        """It has ended: outcome, histograms, its key's charge, its record."""
        self._in_flight.discard(request)
        outcome = request.outcome
        if request.counted or outcome is None:
            return
        model = request.model or ""
        if tells_cached(request):
            self._tells_cached.add(model)
        tokens = tokens_of(request, cached_known=model in self._tells_cached)
        if request.grant is not None:
            request.grant.finish(tokens.prompt + tokens.output, now, output=tokens.output)
        if not request.accepted:
            request.counted = True
            request.ended = self._record(request, tokens, now)
            return
        self._counters.end(request, outcome)
        if request.model is not None:
            self._counters.count_tokens(request.model, tokens.prompt, tokens.cached, tokens.output)
        if request.continued or request.cut is not None:
            self._count_cut(request, outcome)
        if request.key is not None:
            request.key.sums.ended[outcome] += 1
        self._observe(request, now)
        self._tell(request, tokens, now)
        if self._awaited and not self._counters.in_flight:
            self._idle.set()

    def timeline(self, request_id: str) -> Timeline | None:
        """What became of a request so far, in flight or ended; of several with this id the latest."""
        now = asyncio.get_running_loop().time()
        running = [r for r in self._in_flight if r.accepted and r.request_id == request_id]
        ended = self._timelines.find(request_id)
        same_id = len(running) + len(ended) - 1
        if running:
            request = max(running, key=lambda r: r.started)
            return timeline_of(self._record(request, NO_TOKENS, now), same_id=same_id)
        return timeline_of(ended[0], same_id=same_id) if ended else None

    def _tell(self, request: Request, tokens: Tokens, now: float) -> None:
        """Make its record, and give it to all that take ended requests."""
        accounting = self._accounting
        tracing = accounting.tracing
        if tracing is not None:
            tracing.decide(request)
        request.ended = ended = self._record(request, tokens, now)
        accounting.record(ended)
        self._timelines.keep(ended, now)
        if tracing is not None:
            tracing.record(ended)

    def _record(self, request: Request, tokens: Tokens, now: float) -> EndedRequest:
        """The record of it as it is now."""
        return ended_request(request, tokens, self._accounting.prices, now, time.time())

    def _observe(self, request: Request, now: float) -> None:
        timings, started, outcome = self._timings, request.started, request.outcome
        if request.bound is not None:
            timings.queued.observe(request.bound - started)
        # As in the ledger's histograms (accounts/sums.py): an error comes at once.
        if outcome is Outcome.COMPLETED:
            timings.duration.observe(now - started)
        elif outcome is not Outcome.CLIENT_ABORTED:
            return
        if request.first_byte is not None:
            timings.first_byte.observe(request.first_byte - started)

    @property
    def complete_since(self) -> float | None:
        """Unix time from which on every request that ended is kept; None: none is missing yet."""
        return self._timelines.complete_since

    def _count_cut(self, request: Request, outcome: Outcome) -> None:
        if request.cut is not None:
            self._counters.cut[request.cut] += 1
        elif request.splice is not None:
            self._counters.cut["continued" if outcome is Outcome.COMPLETED else "failed"] += 1

    async def idle(self, timeout_s: float) -> bool:
        """True when no accepted request was left within the time."""
        if not self._counters.in_flight:
            return True
        self._awaited = True
        self._idle.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def stop(self, reason: str) -> None:
        for request in tuple(self._in_flight):
            self._post(request, ServerStopped(reason))

    def excuse(self, seconds: float, now: float) -> None:
        """No upstream could be read for so long."""
        for request in self._in_flight:
            if request.failures is not None:
                request.failures.excuse(seconds)
            attempt = request.attempt
            if isinstance(attempt, Attempt):
                attempt.excuse(seconds, now)

    def tick(self, now: float) -> None:
        """Called a few times a second: what took too long?"""
        for request in tuple(self._in_flight):
            if request.comment_at is not None:
                self._plan_comment(request, request.comment_at, now)
            attempt = request.attempt
            if isinstance(attempt, Attempt) and request.stalled_at is None:
                self._watch(request, attempt, now)

    def _plan_comment(self, request: Request, due: float, now: float) -> None:
        """A comment goes to the client when it has got nothing for the interval, before the first event and after it."""
        written = request.written
        if written != request.commented:
            request.commented, request.comment_at = written, now + self._comment_interval_s
        elif now >= due:
            self._post(request, CommentDue())

    def _watch(self, request: Request, attempt: Attempt, now: float) -> None:
        if (
            request.transcript is not None
            and request.transcript.too_long()
            and attempt.connection is not None
        ):
            attempt.connection.disarm()
        reads = attempt.watch(now, request.first_byte_left_s, self._idle_timeout_s, self._silence_timeout_s)
        if reads and request.ticket is not None and request.attempt is attempt:
            self._balancer.progress(request.ticket, reads)


# --- How often the proxy's clock looks for what is due. ---

TICK_MAX_S: Final = 0.25  # deadlines are held this exactly; shorter where one that is set is short
TICK_MIN_S: Final = 0.01


def tick_interval_s(proxy: Proxy) -> float:
    """A quarter of the shortest deadline, within the bounds."""
    shortest = min(
        proxy.header_timeout_s,
        proxy.body_timeout_s,
        proxy.idle_timeout_s,
        proxy.first_token_timeout_s,
        proxy.answer_timeout_s,
        proxy.queue_timeout_s,
        proxy.park_timeout_s,
        proxy.keepalive_comment_s,
        proxy.hung_timeout_s,
        proxy.client_stall_timeout_s,
        proxy.client_grace_s,
        proxy.client_keepalive_s,
    )
    return max(TICK_MIN_S, min(TICK_MAX_S, shortest / 4))
