"""The actions of one attempt: a request goes to an instance or to an overflow endpoint, is read, and leaves it."""

from __future__ import annotations

import logging

from launcher.accounts.ended_request import What
from launcher.base.api_errors import CLIENT_ERROR, SERVER_ERROR
from launcher.base.text import quoted
from launcher.keys.api_keys import KEY_FIELDS
from launcher.proxy.continuation.next_request import ASK_IDS
from launcher.proxy.dispatch.executor import Responder
from launcher.proxy.dispatch.instances import Instances
from launcher.proxy.dispatch.streaming import Streaming
from launcher.proxy.http1.requests import upstream_head
from launcher.proxy.observability.timelines import FIELDS, RequestTracing
from launcher.proxy.openai.forms import boundary_of
from launcher.proxy.openai.prompts import SaidUsage
from launcher.proxy.openai.stream_options import ASK_USAGE, UsageAsk, usage_field, with_usage
from launcher.proxy.request.actions import State
from launcher.proxy.request.events import AnswerReceived, AttemptFailed, BytesArrived, Diverged, Event
from launcher.proxy.request.record import Post, Request
from launcher.proxy.upstream.attempt import Attempt
from launcher.proxy.upstream.overflow import Overflow
from launcher.proxy.upstream.overflow_endpoint import MAX_REASON, Left, OverflowCall

Body = bytes | bytearray | memoryview

_LOG = logging.getLogger(__name__)


class Attempts:
    def __init__(
        self,
        instances: Instances,
        overflow: Overflow | None,
        streaming: Streaming,
        responder: Responder,
        tracing: RequestTracing | None,
        *,
        post: Post,
    ) -> None:
        self._instances = instances
        self._overflow = overflow
        self._streaming = streaming
        self._responder = responder
        self._tracing = tracing
        # Fields that stay here, without and with an API key, which was for the proxy.
        traced = () if tracing is None else FIELDS
        self._not_passed = (traced, traced + KEY_FIELDS)
        self._post = post

    def send(self, request: Request, _event: Event, now: float) -> None:
        ticket = request.ticket
        if ticket is None or ticket.upstream is None:
            raise AssertionError("only a bound request is sent")
        upstream = ticket.upstream
        request.attempt = attempt = Attempt(request, upstream, self._post, self._streaming, now)
        pool = self._instances.begin(attempt, request, upstream)
        request.slot, request.generation = upstream.slot, upstream.generation
        request.attempts += 1
        if request.bound is None:
            request.bound = now
        if request.failures is not None:
            request.failures.note_bound(now)
        if request.steps is not None:
            request.note(What.SENT, now, upstream=upstream)
        if ticket.demand.stream:
            self._responder.plan_comment(request, now)
        head = request.head
        begin, body = _body(request)
        method = "GET" if head.method == "HEAD" else head.method
        trace = b"" if self._tracing is None else self._tracing.lines(request)
        wire_head = upstream_head(
            head, request.request_id, len(begin) + len(body), host=b"localhost", method=method,
            but=self._not_passed[request.key is not None],
            extra=request.forwarded + trace,
        )  # fmt: skip
        attempt.send(pool, method, wire_head + begin, body, now)

    def send_overflow(self, request: Request, _event: Event, now: float) -> None:
        """Raises HttpError."""
        overflow = self._overflow
        if overflow is None or request.model is None:
            raise AssertionError("there is no overflow endpoint")
        endpoint = overflow.endpoint(request.overflow)
        begin, body = _asking(endpoint.body(request.body, request.model), request.usage_ask, ids=False)
        trace = None if self._tracing is None else self._tracing.lines_outside(request)
        head = endpoint.head(request.head, request.request_id, request.path, len(begin) + len(body), trace)
        call = overflow.begin(request)
        request.note(What.OVERFLOWED, now, endpoint=endpoint.name, why=request.overflow_reason)
        request.overflow_tried += (request.overflow,)
        request.usage = None
        request.attempt = attempt = Attempt(request, call, self._post, self._streaming, now)
        attempt.send(endpoint.pool, "POST", head + begin, body, now)

    def read(self, request: Request, event: BytesArrived, now: float) -> None:
        if request.client.paused:
            self._responder.pause(request, event, now)
        event.attempt.read(event.data)

    def leave(self, request: Request, event: Event, now: float) -> None:
        """Off its upstream, however the attempt ended; nothing where it has left already."""
        attempt = request.attempt
        if not isinstance(attempt, Attempt):
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
        if request.state is not State.DONE or _is_failure(event):
            endpoint = None if attempt.overflow is None else attempt.overflow.endpoint.name
            request.note(What.FAILED, now, upstream=upstream, endpoint=endpoint, why=_why(event))
        if event.__class__ is AnswerReceived and (
            upstream is None or event.answer.head.status < CLIENT_ERROR
        ):
            self._streaming.learn_whole(request, event.answer)
        if upstream is not None:
            self._instances.leave(request, attempt, upstream, event, now)
        elif self._overflow is not None and attempt.overflow is not None:
            self._leave_overflow(self._overflow, attempt.overflow, attempt, event, now)

    def _leave_overflow(
        self, overflow: Overflow, call: OverflowCall, attempt: Attempt, event: Event, now: float
    ) -> None:
        request, head = attempt.request, attempt.head
        left = Left(
            request.ending,
            None if head is None else head.status,
            attempt.reached,
            None if head is None else head.get(b"retry-after"),
            None if request.usage is None else SaidUsage(*request.usage[:2], request.usage[2] or 0),
        )
        picos, exact = overflow.end(call, left, now)
        request.picos += picos
        if not exact:
            request.usage = None
        if isinstance(event, AttemptFailed):
            what = "broke a response off" if request.committed else "failed"
            reason = quoted(event.reason, MAX_REASON)
            _LOG.warning(
                "overflow endpoint%s %s: %s", call.endpoint.label, what, reason,
                extra={"reason": reason, "endpoint": call.endpoint.name},
            )  # fmt: skip


def _is_failure(event: Event) -> bool:
    if event.__class__ is AnswerReceived:
        return bool(event.answer.head.status >= SERVER_ERROR)
    return event.__class__ is AttemptFailed


def _why(event: Event) -> str | None:
    """Why an attempt is left before its request's end."""
    if isinstance(event, AnswerReceived):
        return f"it answered {event.answer.head.status}"
    return event.reason if isinstance(event, AttemptFailed | Diverged) else None


def _body(request: Request) -> tuple[bytes, Body]:
    """What an instance is sent, in two parts: what its client does not get of the response is asked for in the first."""
    splice, transcript = request.splice, request.transcript
    if splice is not None:
        return _asking(splice.body, request.usage_ask, ids=False)
    if request.usage_ask is UsageAsk.FORM_FIELD:
        return usage_field(request.body, boundary_of(", ".join(request.head.all(b"content-type"))))
    ids = transcript is not None and transcript.asks_ids
    return _asking(request.body, request.usage_ask, ids=ids)


def _asking(body: bytes | bytearray, usage: UsageAsk, *, ids: bool) -> tuple[bytes, Body]:
    """A large body is not copied."""
    if usage is UsageAsk.CHANGED:
        body = with_usage(body)
    asked = (ASK_USAGE if usage is UsageAsk.ADDED else b"") + (ASK_IDS if ids else b"")
    if not asked:
        return b"", body
    return b"{" + asked, memoryview(body)[body.find(b"{") + 1 :]
