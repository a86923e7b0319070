"""Performs what `lifecycle.advance` decides. `post` is the one way in.

Connections, the clock and the balancer's owner post events; whoever posts while an event is handled only appends, so
nothing is re-entered. The guard in `post` is the one place that catches the proxy's own errors: the request on which
one happens gets an honest end, and all others are untouched.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from launcher.config.schema import Proxy
from launcher.printable import quoted
from launcher.proxy.auth.api_keys import ApiKeys
from launcher.proxy.balancing.balancer import Balancer
from launcher.proxy.balancing.ticket import Ticket
from launcher.proxy.continuation.eligibility import ASK_IDS
from launcher.proxy.continuation.plan import EngineTraits
from launcher.proxy.dispatch.authorize import Authorizer
from launcher.proxy.dispatch.classify import Classifier
from launcher.proxy.dispatch.instances import Instances, OnIdle, OnSuspect
from launcher.proxy.dispatch.registry import RequestRegistry
from launcher.proxy.dispatch.responding import Responder
from launcher.proxy.dispatch.streaming import Streaming
from launcher.proxy.downstream.cors import Cors
from launcher.proxy.downstream.slow_clients import SlowClients
from launcher.proxy.errors import CLIENT_ERROR, HttpError, unavailable
from launcher.proxy.http1.requests import upstream_head
from launcher.proxy.observability.access_log import AccessLog
from launcher.proxy.observability.counters import Counters
from launcher.proxy.pages.renderer import Page, PageRenderer
from launcher.proxy.request.actions import Action
from launcher.proxy.request.answer import own_answer
from launcher.proxy.request.decisions import INTERNAL_ERROR, fault
from launcher.proxy.request.events import (
    AnswerCompleted,
    AnswerReceived,
    AttemptFailed,
    BackoffOver,
    BodyGrew,
    BytesArrived,
    Due,
    Event,
    Faulted,
    NoCapacity,
    PageReady,
    Refused,
    StreamStarted,
)
from launcher.proxy.request.lifecycle import TABLE, Lifecycle
from launcher.proxy.request.model_traits import ModelTraits
from launcher.proxy.request.record import Request
from launcher.proxy.request.retry_policy import RetryPolicy
from launcher.proxy.upstream import overflow as overflow_endpoint
from launcher.proxy.upstream.overflow import Overflow
from launcher.proxy.upstream.reader import Attempt
from launcher.telemetry.metrics import Timings

Perform = Callable[[Request, Any, float], None]

_LOG = logging.getLogger(__name__)


class Executor:
    """Owner of the event inbox. One event loop, no other owner."""

    def __init__(
        self,
        proxy: Proxy,
        *,
        traits: ModelTraits,
        keys: ApiKeys,
        balancer: Balancer,
        pages: PageRenderer,
        overflow: Overflow | None,
        counters: Counters,
        timings: Timings,
        slow_clients: SlowClients,
        on_idle: OnIdle,
        on_suspect: OnSuspect,
    ) -> None:
        self._proxy = proxy
        self._traits = traits
        self._balancer = balancer
        self._overflow = overflow
        self._counters = counters
        self._slow_clients = slow_clients
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._access_log = AccessLog(proxy.access_log, self._loop.call_soon)
        self._streaming = Streaming(balancer, traits, timings, self.post)
        self.instances = Instances(
            proxy, balancer, counters, self.post, on_idle=on_idle, on_suspect=on_suspect
        )
        self._classifier = Classifier(proxy, traits, balancer, self.instances)
        self.registry = RequestRegistry(proxy, counters, timings, balancer, self.post)
        self.authorizer = Authorizer(
            keys, Cors(proxy.cors_origins), self.registry, proxy.max_body_bytes, self.instances.retry_after_s
        )
        self._pages = pages
        self._lifecycle = Lifecycle(RetryPolicy(proxy.park_timeout_s), self)
        self._inbox: deque[tuple[Request, Event]] = deque()
        self._running = False
        self._responder = responder = Responder(slow_clients, proxy.keepalive_comment_s)
        performed: dict[Action, Perform] = {
            Action.AUTHORIZE: self._authorize,
            Action.LOOK: self._look,
            Action.ADMIT: self._admit,
            Action.RENDER_PAGE: self._render_page,
            Action.ENQUEUE: self._enqueue,
            Action.SET_TIMER: self._set_timer,
            Action.COUNT_RETRY: self._count_retry,
            Action.SEND: self._send,
            Action.SEND_OVERFLOW: self._send_overflow,
            Action.READ: self._read,
            Action.START: self._start,
            Action.FIRST_TOKEN: self._first_token,
            Action.SETTLE: self._settle,
            Action.WITHDRAW: self._withdraw,
            Action.LEAVE: self._leave,
            Action.COMMENT: responder.comment,
            Action.CHECK_CLIENT: responder.check_client,
            Action.PAUSE: responder.pause,
            Action.RESUME: responder.resume,
            Action.DELIVER: responder.deliver,
            Action.FINISH: responder.finish,
            Action.REFUSE: responder.refuse,
            Action.BREAK_OFF: responder.break_off,
            Action.ABORT: responder.abort,
            Action.FAULT: self._fault_told,
            Action.COUNT: self.registry.count,
            Action.LOG: self._log,
        }
        self._do = [performed[action] for action in Action]

    def post(self, request: Request, event: Any) -> None:
        inbox = self._inbox
        inbox.append((request, event))
        if self._running:
            return
        self._running = True
        now, do, lifecycle = self._clock(), self._do, self._lifecycle
        try:
            while inbox:
                request, event = inbox.popleft()
                try:
                    # As Lifecycle.advance, without its frame (test_executor.py compares them).
                    actions = TABLE[request.state].get(event.__class__)
                    if actions is None or (event.of_attempt and event.attempt is not request.attempt):
                        continue
                    if actions.__class__ is not tuple:
                        actions = actions(lifecycle, request, event, now)  # type: ignore[operator]
                    for action in actions:
                        do[action](request, event, now)
                except Exception as error:
                    self._fault(request, error)
        finally:
            self._running = False

    def _fault_told(self, request: Request, event: Faulted, _now: float) -> None:
        self._fault(request, event.error)

    def _fault(self, request: Request, error: BaseException) -> None:
        """The proxy itself failed on a request: it gets an honest end, each action of it an item of its own."""
        note = {"request_id": request.request_id}
        if not request.faulted:
            _LOG.error("request %s: %s", request.request_id, INTERNAL_ERROR, exc_info=error, extra=note)
            self._inbox.extend((request, Due(action)) for action in fault(request))
            return
        _LOG.error(
            "request %s: %s at its end", request.request_id, INTERNAL_ERROR, exc_info=error, extra=note
        )
        if not request.finished:
            request.finished = True
            self._inbox.append((request, Due(Action.ABORT)))

    # --- facts for decisions ------------------------------------------------------------------------

    def possible(self, ticket: Ticket) -> bool:
        return self._balancer.possible(ticket)

    def retry_after_s(self) -> int:
        return self.instances.retry_after_s()

    def engine(self, model: str | None) -> EngineTraits:
        return self._traits.engine(model)

    def overflow_takes(self, path: str, model: str | None, *, local_only: bool) -> bool:
        return self._overflow is not None and self._overflow.takes(path, model, local_only=local_only)

    # --- before an upstream is asked ---------------------------------------------------------------

    def _authorize(self, request: Request, _event: Event, now: float) -> None:
        try:
            answer = self.authorizer.authorize(request, now)
        except HttpError as error:
            self.post(request, Refused(error))
        else:
            if answer is not None:
                self.post(request, PageReady(answer))

    def _look(self, request: Request, event: BodyGrew, _now: float) -> None:
        try:
            if request.body_reader is None:
                request.body_reader = self._classifier.reader(request)
            request.looked = request.body_reader.feed(event.body)
        except HttpError as error:
            self.post(request, Refused(error.closing()))

    def _admit(self, request: Request, _event: Event, now: float) -> None:
        try:
            ticket = self._classifier.admit(request, now)
        except HttpError as error:
            self.post(request, Refused(error))
            return
        if ticket is None:
            message = f"no instance of {request.model or 'any model'} is ready"
            self.post(request, NoCapacity(unavailable(message, self.retry_after_s())))
        elif not self.instances.enqueue(request, ticket, now):
            self._responder.plan_comment(request, now)

    def _enqueue(self, request: Request, _event: Event, now: float) -> None:
        """Again, at the place of its arrival; it may wait there as long as any other."""
        ticket = _ticket_of(request)
        wait_s = self._proxy.queue_timeout_s
        if not self._balancer.table.of(ticket.demand.model):
            wait_s = min(wait_s, self._proxy.park_timeout_s)
        ticket.deadline = now + wait_s
        if not self.instances.enqueue(request, ticket, now):
            self._responder.plan_comment(request, now)

    def _count_retry(self, _request: Request, _event: Event, _now: float) -> None:
        self._counters.retry()

    def _set_timer(self, request: Request, _event: Event, _now: float) -> None:
        pause_s = 0.0 if request.failures is None else request.failures.pause_s
        request.pending = self._loop.call_later(pause_s, self.post, request, BackoffOver())

    def _render_page(self, request: Request, _event: Event, _now: float) -> None:
        def deliver(page: Page | BaseException) -> None:
            if isinstance(page, HttpError):
                self.post(request, Refused(page))
            elif isinstance(page, BaseException):
                self.post(request, Faulted(page))
            else:
                self.post(request, PageReady(own_answer(200, page.body, page.content_type)))

        if request.match is not None:
            request.pending = self._pages.begin(request.match, request.key, deliver)

    def _withdraw(self, request: Request, _event: Event, now: float) -> None:
        """Out of the queue; no timer, no page."""
        if request.pending is not None:
            request.pending.cancel()
        if request.ticket is not None and request.attempt is None:
            self.instances.withdraw(request.ticket, now)

    # --- an attempt --------------------------------------------------------------------------------

    def _send(self, request: Request, _event: Event, now: float) -> None:
        ticket = _ticket_of(request)
        upstream = ticket.upstream
        if upstream is None:
            raise AssertionError("only a bound request is sent")
        request.attempt = attempt = Attempt(request, upstream, self.post, self._streaming, now)
        pool = self.instances.begin(attempt, request, upstream)
        request.slot = upstream.slot
        request.attempts += 1
        if request.bound is None:
            request.bound = now
        if ticket.demand.stream:
            self._responder.plan_comment(request, now)
        splice, transcript, head = request.splice, request.transcript, request.head
        body = request.body
        if splice is not None:
            body = splice.body
        elif transcript is not None and transcript.asks_ids:  # its client does not get them
            body = ASK_IDS + body[body.find(b"{") + 1 :]
        method = "GET" if head.method == "HEAD" else head.method
        wire_head = upstream_head(
            head, request.request_id, len(body), host=b"localhost", method=method,
            keys=request.key is None,  # else the client's key was for the proxy
            extra=request.forwarded,
        )  # fmt: skip
        attempt.send(pool, method, wire_head, body, now)

    def _send_overflow(self, request: Request, _event: Event, now: float) -> None:
        overflow = self._overflow
        if overflow is None or request.model is None:
            raise AssertionError("there is no overflow endpoint")
        try:
            body = overflow.body(request.body, request.model)
        except HttpError as error:
            self.post(request, Refused(error))
            return
        request.attempt = attempt = Attempt(request, None, self.post, self._streaming, now)
        overflow.begin(request.model)
        head = overflow.head(request.head, request.request_id, request.path, len(body))
        attempt.send(overflow.pool, "POST", head, body, now)

    def _read(self, request: Request, event: BytesArrived, now: float) -> None:
        if request.client.paused:
            self._responder.pause(request, event, now)
        event.attempt.read(event.data)

    def _start(self, request: Request, event: StreamStarted | AnswerCompleted, now: float) -> None:
        attempt = event.attempt
        if isinstance(attempt, Attempt):
            self._streaming.start(request, attempt, now)
            if isinstance(event, StreamStarted):
                self._streaming.write(request, attempt, event.data, event.raw, clean=event.clean)

    def _first_token(self, request: Request, _event: Event, now: float) -> None:
        if request.ticket is not None:
            self._balancer.first_token(request.ticket, now)
            self.instances.pump(now)

    def _settle(self, request: Request, _event: Event, now: float) -> None:
        failures = request.failures
        if failures is not None:
            for upstream in failures.blamed:
                self.instances.blame(upstream, now)
            failures.blamed.clear()
            failures.answer = None

    def _leave(self, request: Request, event: Event, now: float) -> None:
        attempt = request.attempt
        if not isinstance(attempt, Attempt):  # it has left already
            return
        request.attempt = None
        if attempt.connection is not None:
            attempt.cancel()
        if attempt.delivering:
            request.bytes_out += attempt.fast_bytes
            request.events += attempt.events
        if attempt.tracker is not None and request.tracker is not None:
            request.tracker = attempt.tracker  # what its engine said of its fault is told at the end
        upstream = attempt.upstream
        if isinstance(event, AnswerReceived) and (
            upstream is None or event.answer.head.status < CLIENT_ERROR
        ):
            self._streaming.learn_whole(request, event.answer.body)
        if upstream is not None:
            self.instances.leave(request, attempt, upstream, event, now)
        elif self._overflow is not None:
            self._overflow.end(request.model or "", request.ending)
            if isinstance(event, AttemptFailed):
                what = "broke a response off" if request.committed else "failed"
                reason = quoted(event.reason, overflow_endpoint.MAX_REASON)
                _LOG.warning("overflow endpoint %s: %s", what, reason, extra={"reason": reason})

    def _log(self, request: Request, _event: Event, now: float) -> None:
        self._access_log.add(request, now)

    # --- the clock ---------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        self.registry.tick(now)
        self._slow_clients.tick(now, self.instances.models_waited_for)
        for request, event in self.instances.expired(now):
            self.post(request, event)
        self.instances.tick(now)
        if self._overflow is not None:
            self._overflow.pool.sweep(now)

    def stop(self, reason: str) -> None:
        self.instances.stop()
        self.registry.stop(reason)

    def close(self) -> None:
        """Close every connection; write the rest of the access log."""
        self._access_log.flush()
        self.instances.close()
        if self._overflow is not None:
            self._overflow.pool.close()


def _ticket_of(request: Request) -> Ticket:
    if request.ticket is None:
        raise AssertionError("no instance is asked without a ticket")
    return request.ticket
