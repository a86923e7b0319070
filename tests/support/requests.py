"""Requests without connections, and an executor for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.balancing.upstreams import Demand, Ticket, Upstream
from launcher.base.address import UnixAddress
from launcher.proxy.continuation.transcript import Transcript
from launcher.proxy.dispatch.executor import Executor, Perform
from launcher.proxy.http1.requests import parse_request
from launcher.proxy.openai.models import ModelNames, ModelTraits
from launcher.proxy.request.actions import Action, OverflowReason, State
from launcher.proxy.request.decisions import Decisions
from launcher.proxy.request.record import Request
from launcher.proxy.request.retry_policy import RetryPolicy
from launcher.proxy.routes import Match, match
from launcher.proxy.sse.tracker import EventTracker

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}],"stream":true,"temperature":0}'
NEXT_INSTANCE = UnixAddress("/x")


class Client:
    """A connection that takes everything."""

    paused = False
    body_missing = False
    buffered = unsent = 0

    def write(self, _data: bytes) -> None: ...

    def answered(self, *, keep: bool) -> None: ...

    def abort(self) -> None: ...

    def drop(self, why: str) -> None: ...


@dataclass(eq=False)
class Call:
    """An attempt."""

    upstream: Upstream | None
    tracker: EventTracker | None = None
    reached: bool = True
    delivering: bool = False
    asked_at: float = 0.0
    events: int = 0
    bytes: int = 0


@dataclass
class World:
    """What decisions know beside the request."""

    left: bool = True  # an instance that it has not tried
    overflow: bool = False

    def possible(self, _ticket: Ticket) -> bool:
        return self.left

    def retry_after_s(self, _now: float) -> int:
        return 1

    def takes(self, request: Request, _reason: OverflowReason, _now: float) -> str | None:
        """Two endpoints, one after the other."""
        left = [name for name in ("first", "second") if name not in request.overflow_tried]
        return left[0] if self.overflow and left else None


def executor_of(world: World, performed: Mapping[Action, Perform]) -> Executor:
    decisions = Decisions(RetryPolicy(1.0), world, ModelTraits(ModelNames(("m",))), world)
    executor = Executor(decisions, lambda: 0.0)
    executor.start(performed)
    return executor


def request_of(path: str = CHAT, state: State = State.RECEIVING, *, stream: bool = True) -> Request:
    """A request in a state, with what it has there."""
    method = (
        "GET"
        if path in {"/health", "/metrics", "/metrics/host", "/load"} or path.startswith("/v1/models")
        else "POST"
    )
    head = parse_request(b"%b %b HTTP/1.1\r\nHost: h\r\n\r\n" % (method.encode(), path.encode()))
    found = match(method, path)
    assert isinstance(found, Match)
    request = Request(Client(), head, found, path=path, request_id="r", started=0.0)
    request.state = state
    request.model = "m"
    if state is not State.RECEIVING:
        request.body = BODY
        request.ticket = Ticket(Demand("m", stream=stream), 0.0, 1.0)
        request.transcript = Transcript()
    if state in {State.SENT, State.ANSWERING}:
        request.attempt = Call(Upstream(0, 1, "m", NEXT_INSTANCE, 4), EventTracker())
        request.attempts = 1
    if state is State.ANSWERING:
        begin(request)
    return request


def begin(request: Request) -> None:
    """What START does to the record."""
    assert request.attempt is not None
    request.committed = request.head_sent = True
    request.tracker = request.attempt.tracker
