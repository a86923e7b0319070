"""What can happen to a request. msgspec's Structs: made without a call of Python's.

An upstream's event carries its attempt, and counts only while that is the request's present one.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from launcher.base.api_errors import HttpError
from launcher.proxy.request.actions import Action
from launcher.proxy.request.ports import Answer, UpstreamCall


class Event(msgspec.Struct, eq=False):
    of_attempt: ClassVar[bool] = False


# --- the client's side -------------------------------------------------------------------------------


class HeadReceived(Event):
    """The head of a request whose body is still to come."""


class RequestReceived(Event):
    """A whole request, as most come."""

    body: bytes


class BodyGrew(Event):
    """More of a large body came."""

    body: bytearray  # all of it so far


class BodyCompleted(Event):
    """The rest of a request whose head was received before."""

    body: bytes | bytearray


class ClientPaused(Event):
    """The client's write buffers are full."""


class ClientResumed(Event):
    """The client reads again, or there is memory for the rest of its response."""


class ClientLeft(Event):
    """The client closed its connection."""


class ClientStalled(Event):
    """The client reads too slowly."""

    reason: str


# --- the proxy itself --------------------------------------------------------------------------------


class Refused(Event):
    """The proxy answers with an error of its own."""

    error: HttpError


class NoCapacity(Refused):
    """No instance takes it: the queue is full, its deadline passed, or none is ready."""


class PredictedLate(Event):
    """Its first token is predicted to come later than an overflow endpoint would wait for; it is not queued."""


class Bound(Event):
    """The balancer has bound the request's ticket to an instance."""


class PageReady(Event):
    """A page of the proxy's own, or a whole answer of its own."""

    answer: Answer


class BackoffOver(Event):
    """All instances may be tried again."""


class CommentDue(Event):
    """A stream has been silent long enough for a comment that keeps its connection alive."""


class ConnectionDue(Event):
    """A deadline of the client's connection has passed, that of the request's body or one between requests."""


class InstanceDied(Event):
    """An instance died shortly after its connection broke under this request."""


class ServerStopped(Event):
    """The proxy shuts down, and the grace period is over."""

    reason: str


class Faulted(Event):
    """The proxy's own code raised outside of `post`."""

    error: BaseException


class Due(Event):
    """One of the last actions of a request on which the proxy itself failed."""

    action: Action


# --- the upstream's side -----------------------------------------------------------------------------


class UpstreamEvent(Event):
    """Something that an attempt's upstream did."""

    of_attempt: ClassVar[bool] = True
    attempt: UpstreamCall


class BytesArrived(UpstreamEvent):
    """One read from the upstream's connection that the fast path did not take."""

    data: bytes


class StreamStarted(UpstreamEvent):
    """The first bytes that may go to the client."""

    data: bytes
    raw: bytes | None  # the same as the upstream framed them, where that is whole chunks
    clean: bool = False  # they are all that was read


class PromptComputed(UpstreamEvent):
    """Output of the response has come."""


class AnswerReceived(UpstreamEvent):
    """A whole response that is fit for the client; nothing of it was delivered."""

    answer: Answer


class AnswerCompleted(UpstreamEvent):
    """A response that is being delivered is complete but for its last bytes."""

    last: bytes


class Diverged(UpstreamEvent):
    """The upstream does not continue the stream that was cut."""

    reason: str
    ids_ignored: bool


class AttemptFailed(UpstreamEvent):
    """The upstream could not be used."""

    reason: str
    answer: Answer | None = None  # what it said itself of that
    deterministic: bool = False  # another instance would answer the same (http1.BadResponse)
    died: bool = False  # its process is gone
