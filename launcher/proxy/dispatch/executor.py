"""Performs what is decided. `post` is the one way in.

Connections, the clock and the balancer's owner post events; whoever posts while an event is handled only appends, so
nothing is re-entered. The guard in `post` is the one place that catches errors: an HttpError refuses its request, an
error of the proxy's own code ends its request honestly, and all others are untouched.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from launcher.base.api_errors import HttpError
from launcher.proxy.downstream import response
from launcher.proxy.downstream.slow_clients import SlowClients
from launcher.proxy.request.actions import Action
from launcher.proxy.request.decisions import INTERNAL_ERROR, Decisions, fault
from launcher.proxy.request.events import Due, Event, Faulted, Refused
from launcher.proxy.request.lifecycle import TABLE
from launcher.proxy.request.ports import own_head
from launcher.proxy.request.record import Request
from launcher.proxy.sse.tracker import EventTracker

Perform = Callable[[Request, Any, float], None]

_LOG = logging.getLogger(__name__)


class Executor:
    """Owner of the event inbox. One event loop, no other owner."""

    def __init__(self, decisions: Decisions, clock: Callable[[], float]) -> None:
        self._decisions = decisions
        self._clock = clock
        self._inbox: deque[tuple[Request, Event]] = deque()
        self._running = False
        self._do: list[Perform] = []

    def start(self, performed: Mapping[Action, Perform]) -> None:
        """Called once, before the first event: who performs an action may post, and is made after this."""
        performed = {**performed, Action.FAULT: self._fault_told}
        self._do = [performed[action] for action in Action]

    def post(self, request: Request, event: Any) -> None:
        inbox = self._inbox
        if self._running:
            inbox.append((request, event))
            return
        self._running = True
        now, do, decisions = self._clock(), self._do, self._decisions
        try:
            while True:
                try:
                    actions = TABLE[request.state].get(event.__class__)
                    if actions is not None and not (
                        event.of_attempt and event.attempt is not request.attempt
                    ):
                        if actions.__class__ is not tuple:
                            actions = actions(decisions, request, event, now)  # type: ignore[operator]
                        for action in actions:
                            do[action](request, event, now)
                except Exception as error:
                    if isinstance(error, HttpError) and Refused in TABLE[request.state]:
                        inbox.append((request, Refused(error)))
                    else:
                        self._fault(request, error)
                if not inbox:
                    return
                request, event = inbox.popleft()
        finally:
            self._running = False

    def _fault_told(self, request: Request, event: Faulted, _now: float) -> None:
        self._fault(request, event.error)

    def _fault(self, request: Request, error: BaseException) -> None:
        """The proxy itself failed on a request: it gets an honest end, each action of it an item of its own."""
        at_its_end = " at its end" if request.faulted else ""
        _LOG.error(
            "request %s: %s%s", request.request_id, INTERNAL_ERROR, at_its_end,
            exc_info=error, extra={"request_id": request.request_id},
        )  # fmt: skip
        if not request.faulted:
            self._inbox.extend((request, Due(action)) for action in fault(request))
        elif not request.finished:
            request.finished = True
            self._inbox.append((request, Due(Action.ABORT)))


# --- Actions at the client's side of a request before its response ends: comments, back-pressure. ---

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
        """An SSE comment, ignored by clients, for one that waits for an event; not within an event, nor behind the last."""
        request.comment_at = now + self._comment_interval_s
        if not request.head_sent:
            request.tracker = EventTracker()
            response.start(request, own_head(200, _EVENTS), now)
        tracker = request.tracker
        if tracker is None or tracker.done or tracker.inside_event:
            return
        if request.stalled_at is None and not request.client.paused:
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
