"""The client's side of one answer: where it is committed, how it is framed, and how it ends honestly.

Nothing has been delivered until the first call of `start` or `whole`; until then the request may move to
another instance. A `ResponseWriter` writes to a `Client`, which is the connection; it never waits: how much may
pile up is the relay's business (`full`).
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from launcher.proxy.downstream.slow_clients import SlowClient
from launcher.proxy.errors import HttpError
from launcher.proxy.http1 import RequestHead, ResponseHead, client_head
from launcher.proxy.observability.exchange import Exchange
from launcher.proxy.openai.answers import JSON, error_event
from launcher.proxy.sse.tracker import EventTracker

_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_NO_BODY = frozenset({204, 304})
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}


class Client(SlowClient, Protocol):
    """The connection as an answer sees it."""

    paused: bool  # its buffers are full

    @property
    def body_missing(self) -> bool:
        """The request's body is not all here."""

    @property
    def write(self) -> Callable[[bytes], None]:
        """Sends; never blocks."""

    def answered(self, *, keep: bool) -> None:
        """The answer is complete; `keep`: the connection may carry another request."""

    def abort(self) -> None:
        """Close without a clean end: the client sees that the answer is not whole."""


class ResponseWriter:
    """One answer on its way to the client."""

    __slots__ = (
        "_begin", "_chunked", "_client", "_exchange", "_head", "_keep", "done", "lines", "started", "tracker",
    )  # fmt: skip

    def __init__(self, client: Client, head: RequestHead, exchange: Exchange) -> None:
        self._client = client
        self._head = head
        self._exchange = exchange
        self._keep = head.keep_alive and not head.http_1_0
        self._chunked = False
        self._begin = b""  # the head until the body's first bytes go with it: one packet, one system call
        self.started = False  # bytes of the answer went to the client: no way back
        self.done = False
        self.tracker: EventTracker | None = None  # of an event stream: its last instance's
        self.lines = b""  # header lines that every answer to this request gets, each ended by CRLF

    @property
    def full(self) -> bool:
        """The client takes no more for now."""
        return self._client.paused

    @property
    def raw(self) -> bool:
        """Whole chunks of an instance may pass as they are."""
        return self._chunked

    def start(self, head: ResponseHead, now: float, *, length: int | None = None, extra: bytes = b"") -> None:
        """Commit: the answer's head, sent with what follows. Without `length` the body is chunked, or ends with
        the connection."""
        if self.started:
            raise AssertionError("an answer starts once")
        framing = b""
        if length is not None:
            framing = b"Content-Length: %d\r\n" % length
        elif self._head.http_1_0:
            self._keep = False
        elif head.status not in _NO_BODY:
            framing = _CHUNKED
            self._chunked = self._head.method != "HEAD"
        exchange = self._exchange
        exchange.status = head.status
        exchange.first_byte = now
        self._begin = client_head(
            head, exchange.request_id, framing=framing, keep_alive=self._keep, extra=extra + self.lines
        )
        self.started = True

    def _write(self, data: bytes) -> None:
        if self._begin:
            data, self._begin = self._begin + data, b""
        if data:
            self._client.write(data)

    def pass_on(self, raw: bytes) -> None:
        """Send whole chunks as the instance framed them."""
        self._exchange.bytes_out += len(raw)
        self._write(raw)

    def send(self, data: bytes) -> None:
        """Send a part of the body."""
        self._exchange.bytes_out += len(data)
        if self._head.method == "HEAD":
            data = b""
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self, last: bytes = b"") -> None:
        """The body is complete; `last` is its last part."""
        if self.done:
            return
        if last:
            self._exchange.bytes_out += len(last)
            last = b"%x\r\n%b\r\n" % (len(last), last) if self._chunked else last
        if self._chunked:
            last += _LAST_CHUNK
        self._write(b"" if self._head.method == "HEAD" else last)
        self.done = True
        self._client.answered(keep=self._keep)

    def whole(self, head: ResponseHead, body: bytes, now: float, *, extra: bytes = b"") -> None:
        """Send a whole answer with its length. Before the request's body is here it is the connection's last."""
        if self.started:
            raise AssertionError("an answer starts once")
        if self._client.body_missing:
            self._keep = False
        exchange = self._exchange
        exchange.status = head.status
        exchange.first_byte = now
        exchange.bytes_out += len(body)
        framing = b"" if head.status in _NO_BODY else b"Content-Length: %d\r\n" % len(body)
        data = client_head(
            head, exchange.request_id, framing=framing, keep_alive=self._keep, extra=extra + self.lines
        )
        if self._head.method != "HEAD" and head.status not in _NO_BODY:
            data += body
        self.started = True
        self._client.write(data)
        self.done = True
        self._client.answered(keep=self._keep)

    def refuse(self, refusal: HttpError, now: float, *, extra: bytes = b"") -> None:
        """Send an error of our own."""
        if refusal.close:
            self._keep = False
        lines = "".join(f"{name}: {value}\r\n" for name, value in refusal.headers.items()).encode()
        self.whole(own_head(refusal.status, JSON, lines), refusal.body(), now, extra=extra)

    def break_off(self, message: str, type_: str = "upstream_error", code: int = 502) -> None:
        """End an answer that broke after its first byte: an error event, or no clean end at all."""
        tracker = self.tracker
        if tracker is None:
            self.abort()
            return
        # What the engine itself said of its fault has been withheld until now.
        self.end(
            tracker.break_off() + (tracker.error or error_event(self._exchange.path, message, type_, code))
        )

    def abort(self) -> None:
        """Close the connection without a clean end."""
        self.done = True
        self._client.abort()


def own_head(status: int, content_type: str, lines: bytes = b"") -> ResponseHead:
    """The head of an answer of our own; `lines` are further fields, each ended by CRLF."""
    kind = content_type.encode()
    fields = b"\r\nContent-Type: %b\r\n%b" % (kind, lines)
    reason = _PHRASES.get(status, b"")
    return ResponseHead(
        status, reason, None, False, False, True, kind.partition(b";")[0], fields, fields.lower(), ()
    )
