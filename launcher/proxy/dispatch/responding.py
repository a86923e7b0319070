"""What the executor does at the client's side of a request: comments, back-pressure, responses and their ends."""

from __future__ import annotations

from launcher.proxy.dispatch.streaming import timing
from launcher.proxy.downstream import response
from launcher.proxy.downstream.slow_clients import SlowClients
from launcher.proxy.errors import CLIENT_ERROR, SERVER_ERROR
from launcher.proxy.openai.answers import error_event_of, rewrite_detail
from launcher.proxy.request.answer import own_head
from launcher.proxy.request.events import Event
from launcher.proxy.request.record import Request
from launcher.proxy.sse.tracker import EventTracker

_EVENTS = "text/event-stream; charset=utf-8"
_COMMENT = b": waiting\n\n"


class Responder:
    def __init__(self, slow_clients: SlowClients, comment_interval_s: float) -> None:
        self._slow_clients = slow_clients
        self._comment_interval_s = comment_interval_s

    def plan_comment(self, request: Request, now: float) -> None:
        if request.comment_at is None and request.streamed:
            request.comment_at = now + self._comment_interval_s

    def comment(self, request: Request, _event: Event, now: float) -> None:
        """An SSE comment, ignored by clients, for one that waits for an event."""
        request.comment_at = now + self._comment_interval_s
        if not request.head_sent:
            request.tracker = EventTracker()
            response.start(request, own_head(200, _EVENTS), now)
        if not request.client.paused:
            response.send(request, _COMMENT)

    def pause(self, request: Request, _event: Event, now: float) -> None:
        """The rest is kept for the client, and where there is no memory for it its upstream waits."""
        if request.stalled_at is None:
            if self._slow_clients.accepts(request.client):
                return
            request.stalled_at = now
        if request.attempt is not None:
            request.attempt.pause()

    def resume(self, request: Request, _event: Event, now: float) -> None:
        if request.stalled_at is not None:
            request.stalled_at = None
            if request.attempt is not None:
                request.attempt.resume(now)

    def check_client(self, request: Request, _event: Event, now: float) -> None:
        request.client.tick(now)

    def deliver(self, request: Request, _event: Event, now: float) -> None:
        answer = request.answer
        if answer is None:
            raise AssertionError("there is nothing to deliver")
        head, body = answer.head, answer.body
        if CLIENT_ERROR <= head.status < SERVER_ERROR:
            body = rewrite_detail(head.status, body, request.method, request.path) or body
        if request.head_sent:  # comments went out while it waited
            request.status = head.status
            response.finish(request, error_event_of(request.path, body, head.status))
        else:
            response.deliver(request, head, body, now, timing(request, now))

    def finish(self, request: Request, _event: Event, _now: float) -> None:
        response.finish(request, request.tail)

    def refuse(self, request: Request, _event: Event, now: float) -> None:
        if request.error is not None:
            response.refuse(request, request.error, now)

    def break_off(self, request: Request, _event: Event, _now: float) -> None:
        if request.error is not None:
            response.break_off(request, request.error)

    def abort(self, request: Request, _event: Event, _now: float) -> None:
        response.abort(request)
