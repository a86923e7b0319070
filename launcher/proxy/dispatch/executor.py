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

from launcher.proxy.errors import HttpError
from launcher.proxy.request.actions import Action
from launcher.proxy.request.decisions import INTERNAL_ERROR, Decisions, fault
from launcher.proxy.request.events import Due, Event, Faulted, Refused
from launcher.proxy.request.lifecycle import TABLE
from launcher.proxy.request.record import Request

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
