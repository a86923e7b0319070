"""One client's connection: HTTP/1.1 requests in, one after the other, answers out.

Requests are read strictly (http1); a second one on the connection waits until the first is answered. Every
wait has a deadline: for a whole head, between two pieces of a body, for the next request. `tick` holds
them; nothing here runs a timer of its own.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sys
import termios
from collections.abc import Callable
from enum import Enum
from typing import Protocol, cast

from launcher.proxy.downstream import uploads
from launcher.proxy.downstream.forwarded import peer_name
from launcher.proxy.downstream.slow_clients import Answering, Pace
from launcher.proxy.downstream.uploads import Upload, start
from launcher.proxy.errors import HttpError
from launcher.proxy.http1 import RequestHead, head_end, parse_request
from launcher.proxy.observability.exchange import Exchange

LINGER_S = 2.0  # for the rest of a body that was refused, once the client's side has all of the answer
WRITE_HIGH_BYTES = 65536  # what may wait for a slow client before its instance is paused
AHEAD_BYTES = 65536  # of requests sent before the present one is answered

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LOG = logging.getLogger(__name__)


class Request(uploads.Request, Answering, Protocol):
    """One request's life, as its connection sees it."""

    exchange: Exchange

    def client_gone(self) -> None:
        """Nobody waits for the answer any more."""

    def give_up(self, why: str) -> None:
        """Its client is too slow: it gets no more."""


class Door(uploads.Limits, Protocol):
    """Where requests go."""

    header_timeout_s: float
    keepalive_s: float
    stall_timeout_s: float  # for a client that takes its answer more slowly than
    min_bytes_per_s: int
    closing: bool

    def opened(self, client: DownstreamConnection) -> bool:
        """A client connected; False: there are too many."""

    def closed(self, client: DownstreamConnection) -> None:
        """A client has gone."""

    def fell_behind(self, client: DownstreamConnection) -> None:
        """Its buffers are full."""

    def caught_up(self, client: DownstreamConnection) -> None:
        """They are not any more."""

    def begin(self, client: DownstreamConnection, head: RequestHead) -> Request:
        """A request has begun; it may be answered at once."""

    def turn_away(self, client: DownstreamConnection, refusal: HttpError) -> None:
        """A request that could not be read: answer it and close."""


class _State(Enum):
    HEAD = "a request's head comes, or none"
    BODY = "its body comes"
    BUSY = "it is being answered"
    LINGER = "nothing is read any more"


class DownstreamConnection(asyncio.Protocol):
    """A client's connection."""

    __slots__ = (
        "_buffer", "_deadline", "_door", "_loop", "_pace", "_paused_reading", "_request", "_scanned", "_served",
        "_state", "_transport", "_unsent", "_upload", "paused", "write",
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
        self._upload: Upload | None = None  # the present request's body, while it comes
        self._paused_reading = False
        self._served = "-"  # id of the latest request
        self._unsent = 0  # bytes of its answer that the client had not taken when time was up, and
        self._pace: Pace | None = None  # how fast it takes them
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

    @property
    def peer(self) -> str:
        """The address of the other side."""
        return peer_name(self._transport.get_extra_info("peername"))

    def connection_lost(self, _: Exception | None) -> None:
        """The client has gone."""
        self._state = _State.LINGER
        self._buffer = b""
        self._door.closed(self)
        self._drop_upload()
        request, self._request = self._request, None
        if request is not None and not request.done:
            try:
                request.client_gone()
            except Exception:
                request.fault()

    def eof_received(self) -> bool:
        """The client sends no more: it has gone, as nginx and uvicorn see it."""
        return False

    # --- what the client sends ---------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Read on."""
        state = self._state
        if state is _State.HEAD and not self.paused:
            if self._buffer:
                self._buffer += data
            else:
                self._buffer = data
                self._deadline = None
            self._read()
        elif state is _State.BODY:
            if self._upload is not None:
                self._upload.take(data)
        elif state is not _State.LINGER:  # no further request before the answer to the last one was taken
            self._buffer += data
            if len(self._buffer) > AHEAD_BYTES:
                self.pause_reading()

    def _read(self) -> None:
        """Requests out of the buffer, as far as they are whole and nothing is being answered."""
        while self._state is _State.HEAD and self._buffer and not self.paused:
            try:
                end = head_end(self._buffer, 0, self._scanned)
                if end < 0:
                    self._scanned = len(self._buffer)
                    if self._deadline is None:
                        self._deadline = self._loop.time() + self._door.header_timeout_s
                    return
                head = parse_request(self._buffer[:end])
            except HttpError as refusal:
                self._buffer = b""
                self._door.turn_away(self, refusal)
                return
            rest = self._buffer[end:]
            self._scanned = 0
            self._begin(head, rest)

    def _begin(self, head: RequestHead, rest: bytes) -> None:
        length = head.length or 0
        here = not head.chunked and len(rest) >= length
        self._state = _State.BUSY if here else _State.BODY
        self._deadline = None
        self._buffer = rest[length:] if here else b""
        self._unsent = 0
        request = self._door.begin(self, head)
        self._served = request.exchange.request_id
        if request.done:
            return
        self._request = request
        if here:
            start(request, rest[:length] if length != len(rest) else rest)
            return
        self._upload = Upload(self, request, head, self._door)
        if head.expect_continue and not rest:
            self._transport.write(_CONTINUE)
        self._upload.begin(rest)

    def body_ended(self, rest: bytes) -> None:
        """The present request's body is whole."""
        self._upload = None
        self._state = _State.BUSY
        self._buffer = rest
        if len(rest) <= AHEAD_BYTES:
            self.resume_reading()  # else its client could not be seen to leave

    def _drop_upload(self) -> None:
        if self._upload is not None:
            self._upload.drop()
            self._upload = None

    def pause_reading(self) -> None:
        """Read nothing more for now."""
        if not self._paused_reading and not self._transport.is_closing():
            self._paused_reading = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self._paused_reading:
            self._paused_reading = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    # --- what it gets ------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Its buffers are full."""
        self.paused = True
        self._door.fell_behind(self)
        if self._request is not None:
            self._request.client_paused()

    def resume_writing(self) -> None:
        """There is room again."""
        self.paused = False
        self._door.caught_up(self)
        if self._request is not None:
            self._request.client_resumed()
        elif self._state is _State.HEAD and (self._buffer or self._paused_reading):
            self._loop.call_soon(self._next)

    @property
    def body_missing(self) -> bool:
        """The present request's body is not all here: what comes next on the connection is no other request."""
        return self._state is _State.BODY

    def answered(self, *, keep: bool) -> None:
        """The present request is answered."""
        self._request = None
        if not keep or self.body_missing or self._door.closing:
            self._finish(linger=self.body_missing or not keep)
            return
        self._state = _State.HEAD
        self._deadline = self._loop.time() + self._door.keepalive_s
        if (self._buffer or self._paused_reading) and not self.paused:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        if self.paused:
            return
        self.resume_reading()
        if self._state is _State.HEAD and self._buffer:
            self._deadline = None
            self._read()

    def _finish(self, *, linger: bool) -> None:
        """No further request. Unread input would reset the connection under the answer: linger takes it."""
        self._state = _State.LINGER
        self._buffer = b""
        self._drop_upload()
        if not linger:
            self._transport.close()
            return
        self._deadline = self._loop.time() + LINGER_S
        self.resume_reading()
        if not self._transport.can_write_eof():
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:  # asyncio's own loop: the client had left, and the answer met a closed socket
            self._transport.abort()

    def abort(self) -> None:
        """Close without a clean end."""
        if self.paused:
            self._door.caught_up(self)
        self._request = None
        self._state = _State.LINGER
        self._drop_upload()
        self._transport.abort()

    @property
    def answering(self) -> Request | None:
        """The present request; None when all of the answer was written."""
        return self._request

    @property
    def buffered(self) -> int:
        """Bytes that were written and wait in this process."""
        return self._transport.get_write_buffer_size()

    def drop(self, why: str) -> None:
        """Close at once; the log and the request's record say why."""
        request = self._request
        if request is None:
            self.give_up(why)
            return
        try:
            request.give_up(why)
        except Exception:
            request.fault()

    def fault(self) -> None:
        """The connection itself raised; called within the `except`. Its request ends honestly, and so does it."""
        if self._request is not None:
            self._request.fault()
        else:
            _LOG.exception("a client's connection failed; it is closed")
            self.abort()

    @property
    def unsent(self) -> int:
        """Bytes that were written and the client's side has not taken: the transport's, and the kernel's.

        The kernel's (SIOCOUTQ, tcp(7); of a UNIX socket what its peer has not read, overhead included) tell of
        progress while the transport's buffer stands still, and stand for what asyncio's TLS has written below.
        """
        size = self._transport.get_write_buffer_size()
        try:
            sock = self._transport.get_extra_info("socket").fileno()
            return size + int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        except (OSError, ValueError):  # it is closed
            return size

    def give_up(self, why: str = "the connection is closed") -> None:
        """Close at once. What the client has not taken is lost, which the log tells: its answer counts as given."""
        if unsent := self.unsent:
            _LOG.info(
                "request %s: its client has not taken the last %d bytes of the answer; %s",
                self._served, unsent, why, extra={"request_id": self._served, "unsent": unsent},
            )  # fmt: skip
        self.abort()

    def close_if_idle(self) -> None:
        """The front door closes: no further request."""
        if self._state is _State.HEAD:
            self._finish(linger=False)

    # --- deadlines ---------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Give up what took too long."""
        if self._upload is not None:
            if now >= self._upload.deadline and self._request is not None:
                self._request.refuse(self._upload.late(now))
            return
        if self._deadline is None or now < self._deadline:
            return
        self._deadline = None
        if self._state is _State.HEAD and self._buffer and not self.paused:
            self._buffer = b""
            self._door.turn_away(
                self, HttpError(408, "the request's head did not come in time", code="timeout", close=True)
            )
        else:
            self._out_of_time(now)

    def _out_of_time(self, now: float) -> None:
        """Nothing more is awaited of the client; but while it takes its answer fast enough, it gets all of it."""
        if self.paused:  # it is behind: slow_clients judges that
            self._deadline = now
            return
        unsent, before = self.unsent, self._unsent
        self._unsent = unsent
        self._deadline = now  # look again at the next tick
        if not unsent and not before:
            self.give_up()
        elif not unsent:
            self._deadline += LINGER_S if self._state is _State.LINGER else self._door.keepalive_s
        elif not before or self._pace is None:
            self._pace = Pace(self._door.min_bytes_per_s, now)
        elif self._pace.late_s(now, before - unsent) > self._door.stall_timeout_s:
            self.give_up()
