"""One client's connection: HTTP/1.1 requests in, one after the other, answers out.

Requests are read strictly (http1); a second one on the connection waits until the first is answered. Every
wait has a deadline: for a whole head, between two pieces of a body, for the next request. `tick` holds
them; nothing here runs a timer of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Protocol, cast

from launcher.proxy.http1 import BadFraming, ChunkedDecoder, RequestHead, head_end, parse_request
from launcher.proxy.openai import Refusal

LINGER_S = 2.0  # for the rest of a body that was refused, so that the client reads why
WRITE_HIGH_BYTES = 65536  # what may wait for a slow client before its instance is paused
AHEAD_BYTES = 65536  # of requests sent before the present one is answered

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Request(Protocol):
    """One request's life, as its connection sees it."""

    done: bool  # answered, or given up

    def start(self, body: bytes | bytearray) -> None:
        """The request is whole."""

    def refuse(self, refusal: Refusal) -> None:
        """It never will be."""

    def client_gone(self) -> None:
        """Nobody waits for the answer any more."""

    def client_paused(self) -> None:
        """The client's buffers are full."""

    def client_resumed(self) -> None:
        """They are not any more."""


class Door(Protocol):
    """Where requests go."""

    header_timeout_s: float
    body_timeout_s: float
    keepalive_s: float
    max_body_bytes: int
    closing: bool

    def opened(self, client: ClientConnection) -> bool:
        """A client connected; False: there are too many."""

    def closed(self, client: ClientConnection) -> None:
        """A client has gone."""

    def begin(self, client: ClientConnection, head: RequestHead, *, body_here: bool) -> Request:
        """A request has begun; it may be answered at once."""

    def turn_away(self, client: ClientConnection, refusal: Refusal) -> None:
        """A request that could not be read: answer it and close."""


class _State(Enum):
    HEAD = "a request's head comes, or none"
    BODY = "its body comes"
    BUSY = "it is being answered"
    LINGER = "nothing is read any more"


class ClientConnection(asyncio.Protocol):
    """A client's connection."""

    __slots__ = (
        "_body", "_buffer", "_deadline", "_decoder", "_door", "_left", "_loop", "_paused_reading", "_request",
        "_scanned", "_state", "_transport", "paused", "write",
    )  # fmt: skip

    def __init__(self, door: Door) -> None:
        self._door = door
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self.write: Callable[[bytes], None]
        self._state = _State.HEAD
        self._deadline: float | None = None
        self._buffer = b""
        self._scanned = 0
        self._request: Request | None = None
        self._body = bytearray()
        self._left = 0  # of a body with a length
        self._decoder: ChunkedDecoder | None = None
        self._paused_reading = False
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self._transport = cast("asyncio.Transport", transport)
        self.write = self._transport.write  # no method of ours on the hot path
        if not self._door.opened(self):
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._deadline = self._loop.time() + self._door.header_timeout_s

    def connection_lost(self, _: Exception | None) -> None:
        """The client has gone."""
        self._state = _State.LINGER
        self._buffer = b""
        self._door.closed(self)
        request, self._request = self._request, None
        if request is not None and not request.done:
            request.client_gone()

    def eof_received(self) -> bool:
        """The client sends no more: it has gone, as nginx and uvicorn see it."""
        return False

    # --- what the client sends ---------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Read on."""
        state = self._state
        if state is _State.HEAD:
            if self._buffer:
                self._buffer += data
            else:
                self._buffer = data
                self._deadline = None
            self._read()
        elif state is _State.BODY:
            self._take(data)
        elif state is _State.BUSY:
            self._buffer += data
            if len(self._buffer) > AHEAD_BYTES and not self._paused_reading:
                self._paused_reading = True
                self._transport.pause_reading()

    def _read(self) -> None:
        """Requests out of the buffer, as far as they are whole and nothing is being answered."""
        while self._state is _State.HEAD and self._buffer:
            try:
                end = head_end(self._buffer, 0, self._scanned)
                if end < 0:
                    self._scanned = len(self._buffer)
                    if self._deadline is None:
                        self._deadline = self._loop.time() + self._door.header_timeout_s
                    return
                head = parse_request(self._buffer[:end])
            except Refusal as refusal:
                self._buffer = b""
                self._door.turn_away(self, refusal)
                return
            rest = self._buffer[end:]
            self._scanned = 0
            self._begin(head, rest)

    def _begin(self, head: RequestHead, rest: bytes) -> None:
        length = head.length or 0
        here = not head.chunked and len(rest) >= length
        self._state = _State.BUSY
        self._deadline = None
        self._buffer = rest[length:] if here else b""
        request = self._door.begin(self, head, body_here=here)
        if request.done:
            return
        self._request = request
        if here:
            request.start(rest[:length] if length != len(rest) else rest)
            return
        self._state = _State.BODY
        self._body = bytearray()
        self._left = length
        self._decoder = ChunkedDecoder() if head.chunked else None
        if head.expect_continue and not rest:
            self._transport.write(_CONTINUE)
        self._take(rest)

    def _take(self, data: bytes) -> None:
        """A piece of a body."""
        self._deadline = self._loop.time() + self._door.body_timeout_s
        request = self._request
        if request is None:
            return
        decoder = self._decoder
        if decoder is None:
            rest = data[self._left :]
            self._body += data[: self._left] if rest else data
            self._left -= len(data) - len(rest)
            whole = self._left == 0
        else:
            try:
                self._body += decoder.feed(data)
            except BadFraming as error:
                request.refuse(Refusal(400, f"cannot read the body: {error}", code="bad_framing", close=True))
                return
            rest, whole = decoder.rest, decoder.ended
            if len(self._body) > self._door.max_body_bytes:
                request.refuse(too_large(self._door.max_body_bytes))
                return
        if whole:
            body, self._body = self._body, bytearray()
            self._decoder = None
            self._state = _State.BUSY
            self._deadline = None
            self._buffer = rest
            request.start(body)

    # --- what it gets ------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Its buffers are full."""
        self.paused = True
        if self._request is not None:
            self._request.client_paused()

    def resume_writing(self) -> None:
        """There is room again."""
        self.paused = False
        if self._request is not None:
            self._request.client_resumed()

    def answered(self, *, keep: bool) -> None:
        """The present request is answered."""
        body_missing = self._state is _State.BODY
        self._request = None
        if not keep or body_missing or self._door.closing:
            self._finish(linger=body_missing or not keep)
            return
        self._state = _State.HEAD
        self._deadline = self._loop.time() + self._door.keepalive_s
        if self._buffer or self._paused_reading:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        if self._paused_reading and not self._transport.is_closing():
            self._paused_reading = False
            self._transport.resume_reading()
        if self._state is _State.HEAD and self._buffer:
            self._deadline = None
            self._read()

    def _finish(self, *, linger: bool) -> None:
        """No further request. Unread input would reset the connection under the answer: linger takes it."""
        self._state = _State.LINGER
        self._buffer = b""
        self._body = bytearray()
        if not linger:
            self._transport.close()
            return
        self._deadline = self._loop.time() + LINGER_S
        if self._paused_reading:
            self._paused_reading = False
            self._transport.resume_reading()
        if not self._transport.can_write_eof():
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:  # asyncio's own loop: the client had left, and the answer met a closed socket
            self._transport.abort()

    def abort(self) -> None:
        """Close without a clean end."""
        self._request = None
        self._state = _State.LINGER
        self._transport.abort()

    def close_if_idle(self) -> None:
        """The front door closes: no further request."""
        if self._state is _State.HEAD:
            self._finish(linger=False)

    # --- deadlines ---------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Give up what took too long."""
        if self._deadline is None or now < self._deadline:
            return
        self._deadline = None
        if self._state is _State.HEAD and self._buffer:
            self._buffer = b""
            self._door.turn_away(
                self, Refusal(408, "the request's head did not come in time", code="timeout", close=True)
            )
        elif self._state is _State.BODY and self._request is not None:
            silence = self._door.body_timeout_s
            self._request.refuse(
                Refusal(408, f"no byte of the body came for {silence:g} s", code="timeout", close=True)
            )
        else:
            self.abort()


def too_large(limit: int) -> Refusal:
    """413."""
    return Refusal(413, f"the request body is larger than {limit} bytes", code="too_large", close=True)
