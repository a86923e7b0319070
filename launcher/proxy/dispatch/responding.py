"""Actions at the client's side of a request before its response ends: comments, back-pressure."""

from __future__ import annotations

from launcher.proxy.downstream import response
from launcher.proxy.downstream.slow_clients import SlowClients
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
