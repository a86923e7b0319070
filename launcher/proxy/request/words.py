"""The words of a request's lifecycle: states, events, actions, outcomes."""

from __future__ import annotations

from enum import IntEnum, StrEnum, auto
from http import HTTPStatus
from typing import ClassVar, final

from launcher.proxy.balancing.upstreams import Upstream
from launcher.proxy.errors import HttpError
from launcher.proxy.http1 import ResponseHead
from launcher.proxy.openai.answers import JSON
from launcher.proxy.request.ports import UpstreamCall

_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}


class Outcome(StrEnum):
    """How an accepted request ended; exactly one of these."""

    COMPLETED = "completed"  # a whole response of an instance was delivered, its 4xx included
    CLIENT_ABORTED = "client_aborted"  # the client left first
    REJECTED = "rejected"  # the proxy's own refusal: limits, no such model, no ready instance
    FAILED = "failed"  # a 5xx, or a response that broke after its first byte


class State(IntEnum):
    """Where a request is. An IntEnum indexes the transition table without a call."""

    RECEIVING = 0  # its body comes
    QUEUED = 1
    BACKOFF = 2  # every instance was tried
    SENT = 3  # an upstream works on it and has delivered nothing
    ANSWERING = 4  # bytes of the upstream's response went to the client
    DONE = 5


class Action(IntEnum):
    """What the executor does."""

    AUTHORIZE = 0  # route, API key, CORS
    LOOK = auto()  # read the next step of a large body
    ADMIT = auto()  # classify, then enqueue
    RENDER_PAGE = auto()
    ENQUEUE = auto()  # again, at the place of its arrival
    SET_TIMER = auto()  # for BackoffOver
    COUNT_RETRY = auto()
    SEND = auto()
    SEND_OVERFLOW = auto()
    READ = auto()
    START = auto()  # commit: the head, where none went out, and the first bytes
    FIRST_TOKEN = auto()
    SETTLE = auto()  # blame the instances that failed before another one succeeded
    COMMENT = auto()
    CHECK_CLIENT = auto()  # the deadlines of its connection
    PAUSE = auto()
    RESUME = auto()
    DELIVER = auto()  # a whole response
    FINISH = auto()  # the end of a stream
    REFUSE = auto()  # an error of the proxy's own, as a whole response
    BREAK_OFF = auto()  # the same after a head went out: an error event, or no clean end
    ABORT = auto()  # close the client's connection without a clean end
    WITHDRAW = auto()  # out of the queue; no timer, no page
    LEAVE = auto()  # off the upstream
    FAULT = auto()  # log the proxy's own error, then end the request (decisions.fault)
    COUNT = auto()  # outcome, histograms, the key's charge
    LOG = auto()  # the access log's line


class Answer:
    """A whole response of an upstream."""

    __slots__ = ("body", "head")

    def __init__(self, head: ResponseHead, body: bytes) -> None:
        self.head = head
        self.body = body


def own_head(status: int, content_type: str = JSON, lines: bytes = b"") -> ResponseHead:
    """The head of a response of the proxy's own; `lines` are further fields, each ended by CRLF."""
    kind = content_type.encode()
    fields = b"\r\nContent-Type: %b\r\n%b" % (kind, lines)
    reason = _PHRASES.get(status, b"")
    return ResponseHead(
        status, reason, None, False, False, True, kind.partition(b";")[0], fields, fields.lower(), ()
    )


def own_answer(status: int, body: bytes, content_type: str = JSON) -> Answer:
    """A whole response of the proxy's own."""
    return Answer(own_head(status, content_type), body)


class Event:
    """Something that happened to a request."""

    __slots__ = ()
    of_attempt: ClassVar[bool] = False  # it has an `attempt`, and counts only while that is the present one


class HeadReceived(Event):
    """The client's request head was read."""


class BodyGrew(Event):
    """More of a large body came: `body` is all of it so far."""

    __slots__ = ("body",)

    def __init__(self, body: bytearray) -> None:
        self.body = body


class BodyCompleted(Event):
    """The request is whole."""

    __slots__ = ("body",)

    def __init__(self, body: bytes | bytearray) -> None:
        self.body = body


class Refused(Event):
    """The proxy answers with an error of its own."""

    __slots__ = ("error",)

    def __init__(self, error: HttpError) -> None:
        self.error = error


class NoCapacity(Refused):
    """No instance takes it: the queue is full, its deadline passed, or none is ready."""

    __slots__ = ()


class Bound(Event):
    """The balancer has chosen an instance."""

    __slots__ = ("upstream",)

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream


class BackoffOver(Event):
    """All instances may be tried again."""


class CommentDue(Event):
    """A stream has waited long enough for a comment that keeps its connection alive."""


class ClientPaused(Event):
    """The client's write buffers are full."""


class ClientResumed(Event):
    """The client reads again, or there is memory for the rest of its response."""


class ClientLeft(Event):
    """The client closed its connection."""


class ClientStalled(Event):
    """The client reads too slowly."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


class ServerStopped(Event):
    """The proxy shuts down, and the grace period is over."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


class InstanceDied(Event):
    """An instance died shortly after its connection broke under this request."""


class PageReady(Event):
    """A page of the proxy's own, or a whole answer of its own."""

    __slots__ = ("answer",)

    def __init__(self, answer: Answer) -> None:
        self.answer = answer


class Faulted(Event):
    """The proxy's own code raised outside of `post`."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class ConnectionDue(Event):
    """A deadline of the client's connection has passed, that of the request's body or one between requests."""


class Due(Event):
    """One of the last actions of a request on which the proxy itself failed."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action = action


class UpstreamEvent(Event):
    """Something that an attempt's upstream did."""

    __slots__ = ("attempt",)
    of_attempt = True

    def __init__(self, attempt: UpstreamCall) -> None:
        self.attempt = attempt


class BytesArrived(UpstreamEvent):
    """One read from the upstream's connection that the hot path did not take."""

    __slots__ = ("data",)

    def __init__(self, attempt: UpstreamCall, data: bytes) -> None:
        self.attempt = attempt
        self.data = data


class StreamStarted(UpstreamEvent):
    """The first bytes that may go to the client.

    `raw`: the same as the upstream framed them, where that is whole chunks. `clean`: they are all that was read.
    """

    __slots__ = ("clean", "data", "raw")

    def __init__(self, attempt: UpstreamCall, data: bytes, raw: bytes | None, *, clean: bool = False) -> None:
        self.attempt = attempt
        self.data = data
        self.raw = raw
        self.clean = clean


class PromptComputed(UpstreamEvent):
    """Words of the response have come."""

    __slots__ = ()


class AnswerReceived(UpstreamEvent):
    """A whole response that is fit for the client; nothing of it was delivered."""

    __slots__ = ("answer",)

    def __init__(self, attempt: UpstreamCall, answer: Answer) -> None:
        self.attempt = attempt
        self.answer = answer


class AnswerCompleted(UpstreamEvent):
    """A response that is being delivered is complete but for its last bytes."""

    __slots__ = ("last",)

    def __init__(self, attempt: UpstreamCall, last: bytes) -> None:
        self.attempt = attempt
        self.last = last


class Diverged(UpstreamEvent):
    """The upstream does not continue the stream that was cut."""

    __slots__ = ("ids_ignored", "reason")

    def __init__(self, attempt: UpstreamCall, reason: str, *, ids_ignored: bool) -> None:
        self.attempt = attempt
        self.reason = reason
        self.ids_ignored = ids_ignored


@final
class AttemptFailed(UpstreamEvent):
    """The upstream could not be used.

    `answer`: what it said itself of that. `deterministic`: another instance would answer the same (http1.BadResponse).
    `died`: its process is gone.
    """

    __slots__ = ("answer", "deterministic", "died", "reason")

    def __init__(
        self,
        attempt: UpstreamCall,
        reason: str,
        answer: Answer | None = None,
        *,
        deterministic: bool = False,
        died: bool = False,
    ) -> None:
        self.attempt = attempt
        self.reason = reason
        self.answer = answer
        self.deterministic = deterministic
        self.died = died


HEAD_RECEIVED = HeadReceived()
BACKOFF_OVER = BackoffOver()
COMMENT_DUE = CommentDue()
CLIENT_PAUSED = ClientPaused()
CLIENT_RESUMED = ClientResumed()
CLIENT_LEFT = ClientLeft()
INSTANCE_DIED = InstanceDied()
CONNECTION_DUE = ConnectionDue()
