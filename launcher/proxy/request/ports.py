"""What a request needs of the two connections that serve it."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from launcher.balancing.upstreams import Upstream
from launcher.proxy.http1.responses import ResponseHead
from launcher.proxy.openai.answers import JSON
from launcher.proxy.sse.tracker import EventTracker


class Answering(Protocol):
    """A request that is being answered."""

    @property
    def written(self) -> int: ...  # bytes of its answer that its connection was given
    @property
    def holds(
        self,
    ) -> str | None: ...  # the model of the instance that waits for the client; None: no instance waits


class SlowClient(Protocol):
    """A client's connection, as far as its pace is watched."""

    @property
    def answering(self) -> Answering | None: ...  # None once the whole answer was written
    @property
    def buffered(self) -> int: ...  # bytes that wait in this process
    @property
    def unsent(self) -> int: ...  # the same, and bytes in the kernel
    def pause_answer(self) -> None: ...
    def resume_answer(self) -> None: ...

    def drop(self, why: str) -> None:
        """Close it; the rest of its answer is lost. `why` is logged."""


class Downstream(SlowClient, Protocol):
    """The client's connection."""

    paused: bool  # its write buffers are full

    @property
    def body_missing(self) -> bool: ...  # the request's body has not been read to its end
    @property
    def write(self) -> Callable[[bytes], None]: ...  # never blocks

    def answered(self, *, keep: bool) -> None:
        """The response is complete; `keep`: the connection may carry another request."""

    def abort(self) -> None:
        """Close without a clean end: the client sees that the response is not whole."""

    def tick(self, now: float) -> None:
        """Close or refuse what took too long."""


class UpstreamCall(Protocol):
    """One attempt: a request on one upstream."""

    @property
    def upstream(self) -> Upstream | None: ...  # None is the overflow endpoint
    @property
    def tracker(self) -> EventTracker | None: ...  # of an event stream
    @property
    def reached(self) -> bool: ...  # the upstream may have begun with the request: no connect that failed
    @property
    def delivering(self) -> bool: ...  # bytes of its response went to the client
    @property
    def asked_at(self) -> float: ...  # loop time
    @property
    def fast_bytes(self) -> int: ...  # that the fast path passed to the client

    def read(self, data: bytes) -> None:
        """Read on; what it says is posted."""

    def pause(self) -> None: ...
    def resume(self, now: float) -> None: ...
    def cancel(self) -> None: ...


class Cancellable(Protocol):
    """A timer or a task."""

    def cancel(self) -> object: ...


# --- A whole response, of an upstream or of the proxy's own. ---

_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}


class Answer:
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
