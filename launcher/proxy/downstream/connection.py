"""One client's connection: HTTP/1.1 requests in, one after the other, answers out.

Requests are read strictly (http1); a second one on the connection waits until the first is answered, and for the next
turn of the event loop: pipelined requests take one turn each, so that they delay no other connection. Each wait has a
deadline: for a whole head, between two pieces of a body, for the next request. The server's clock calls `tick`; there
are no other timers.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import select
import sys
import termios
from collections.abc import Callable
from enum import Enum
from typing import Protocol, cast

from launcher.base.api_errors import HttpError
from launcher.proxy.downstream import uploads
from launcher.proxy.downstream.origin import peer_name
from launcher.proxy.downstream.slow_clients import Pace
from launcher.proxy.downstream.uploads import Upload
from launcher.proxy.http1.fields import head_end
from launcher.proxy.http1.requests import REPEATED_BYTES, RequestHead, parse_request, sent_target
from launcher.proxy.request.actions import State
from launcher.proxy.request.events import (
    ClientLeft,
    ClientPaused,
    ClientResumed,
    ClientStalled,
    Event,
    Faulted,
    Refused,
)
from launcher.proxy.request.record import Request

LINGER_S = 2.0  # for the rest of a refused body, after the client's side received the whole answer
WRITE_HIGH_BYTES = 65536  # unsent bytes from which a client counts as slow
AHEAD_BYTES = 65536  # of pipelined requests that are read before the present one is answered

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LOG = logging.getLogger(__name__)


class Owner(uploads.Limits, Protocol):
    """All clients' connections, and what holds for each of them."""

    header_timeout_s: float
    keepalive_s: float
    stall_timeout_s: float  # for a client that takes fewer than `min_bytes_per_s` of its answer
    min_bytes_per_s: int
    closing: bool

    def opened(self, client: DownstreamConnection) -> bool:
        """A client connected; False: there are too many."""

    def closed(self, client: DownstreamConnection) -> None: ...
    def fell_behind(self, client: DownstreamConnection) -> None: ...
    def caught_up(self, client: DownstreamConnection) -> None: ...
    def post(self, request: Request, event: Event) -> None: ...

    def begin(self, client: DownstreamConnection, head: RequestHead, body: bytes | None) -> Request:
        """A request's head has come, and its `body` unless that is None; it may be answered before this returns."""

    def turn_away(self, client: DownstreamConnection, refusal: HttpError, target: str | None) -> None:
        """Answer a request that could not be read, and close. `target`: of its request line, where that can be read."""


class _State(Enum):
    HEAD = "waiting for a request's head"
    BODY = "receiving its body"
    BUSY = "answering"
    NEXT = "answered: the next turn of the event loop looks for another request"
    LINGER = "closing: input is discarded"


class DownstreamConnection(asyncio.Protocol):
    __slots__ = (
        "_at", "_buffer", "_deadline", "_last_head", "_loop", "_owner", "_pace", "_paused_reading", "_request", "_scanned",
        "_served", "_state", "_transport", "_unsent", "_upload", "paused", "write",
    )  # fmt: skip

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self.write: Callable[[bytes], None]
        self._state = _State.HEAD
        self._deadline: float | None = None
        self._buffer = b""
        self._at = 0  # in `_buffer`: where the next request begins
        self._scanned = 0
        self._request: Request | None = None
        self._upload: Upload | None = None  # the present request's body, while it comes
        self._paused_reading = False
        self._last_head: RequestHead | None = None
        self._served = "-"  # id of the latest request
        self._unsent = 0  # bytes of the answer that the client had not taken at the last deadline
        self._pace: Pace | None = None  # of those bytes
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.write = self._transport.write  # without a call of ours between
        if not self._owner.opened(self):
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._deadline = self._loop.time() + self._owner.header_timeout_s

    @property
    def peer(self) -> str:
        return peer_name(self._transport.get_extra_info("peername"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._state = _State.LINGER
        self._clear()
        self._owner.closed(self)
        self._drop_upload()
        request, self._request = self._request, None
        if request is not None:
            # The event loop closes a connection whose protocol raised.
            ours = exc is not None and not isinstance(exc, OSError)
            self._owner.post(request, Faulted(exc) if exc is not None and ours else ClientLeft())

    def eof_received(self) -> bool:
        """The client closed its side: it has left, as nginx and uvicorn see it."""
        return False

    # --- requests ---------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        state = self._state
        if state is _State.HEAD and not self.paused:
            if self._buffer:
                self._append(data)
            else:
                self._buffer = data
                self._deadline = None
            self._read()
        elif state is _State.BODY:
            if self._upload is not None:
                self._upload.take(data)
        elif state is not _State.LINGER:  # the next request waits for the present one
            self._append(data)
            if len(self._buffer) > AHEAD_BYTES:
                self.pause_reading()

    def _append(self, data: bytes) -> None:
        self._buffer = self._buffer[self._at :] + data
        self._at = 0

    def _clear(self) -> None:
        self._buffer, self._at = b"", 0

    def _read(self) -> None:
        """Take one request out of the buffer, where a whole head is there."""
        buffer, at = self._buffer, self._at
        try:
            end = head_end(buffer, self._scanned, at)
            if end < 0:
                self._scanned = len(buffer) - at
                if self._deadline is None:
                    self._deadline = self._loop.time() + self._owner.header_timeout_s
                return
            head = parse_request(buffer[at:end], self._last_head)
        except HttpError as refusal:
            self._turn_away(refusal)
            return
        self._scanned = 0
        self._last_head = head if end - at <= REPEATED_BYTES else None
        self._begin(head, end)

    def _turn_away(self, refusal: HttpError) -> None:
        target = sent_target(self._buffer, self._at)
        self._clear()
        self._owner.turn_away(self, refusal, target)

    def _begin(self, head: RequestHead, end: int) -> None:
        """`end`: of the head, in the buffer."""
        buffer, body, rest = self._buffer, None, b""
        stop = end + (head.length or 0)
        if head.chunked or stop > len(buffer):
            self._state = _State.BODY
            rest = buffer[end:]
            self._clear()
            self.resume_reading()
        else:
            self._state = _State.BUSY
            body = buffer[end:stop]
            if stop == len(buffer):
                self._buffer, self._at = b"", 0
            else:
                self._at = stop
        self._deadline = None
        self._unsent = 0
        request = self._owner.begin(self, head, body)
        self._served = request.request_id
        if request.state is State.DONE:
            return
        self._request = request
        if body is not None:
            return
        self._upload = Upload(self, request, head, self._owner)
        if head.expect_continue and not rest:
            self._transport.write(_CONTINUE)
        self._upload.begin(rest)

    def body_ended(self, rest: bytes) -> None:
        self._upload = None
        self._state = _State.BUSY
        self._buffer, self._at = rest, 0
        if len(rest) <= AHEAD_BYTES:
            self.resume_reading()

    def _drop_upload(self) -> None:
        if self._upload is not None:
            self._upload.drop()
            self._upload = None

    def pause_reading(self) -> None:
        if not self._paused_reading and not self._transport.is_closing():
            self._paused_reading = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused_reading:
            self._paused_reading = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    # --- answers ------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        self.paused = True
        self._owner.fell_behind(self)
        if self._request is not None:
            self._owner.post(self._request, ClientPaused())

    def resume_writing(self) -> None:
        self.paused = False
        self._owner.caught_up(self)
        if self._request is not None:
            self._owner.post(self._request, ClientResumed())
        elif self._state is _State.HEAD and (self._buffer or self._paused_reading):
            self._plan_next()

    @property
    def body_missing(self) -> bool:
        """Whether the present request's body is incomplete, so that what comes next is not another request."""
        return self._state is _State.BODY

    def pause_answer(self) -> None:
        if self._request is not None:
            self._owner.post(self._request, ClientPaused())

    def resume_answer(self) -> None:
        if self._request is not None:
            self._owner.post(self._request, ClientResumed())

    def answered(self, *, keep: bool) -> None:
        """The present request is answered. `keep`: the connection may carry another one."""
        self._request = None
        if not keep or self._state is _State.BODY or self._owner.closing:
            self._finish(linger=self._state is _State.BODY or not keep)
            return
        self._state = _State.HEAD
        self._deadline = self._loop.time() + self._owner.keepalive_s
        if (self._buffer or self._paused_reading) and not self.paused:
            self._plan_next()

    def _plan_next(self) -> None:
        self._state = _State.NEXT
        self._loop.call_soon(self._next)

    def _next(self) -> None:
        if self._state is not _State.NEXT:
            return  # it was closed meanwhile
        self._state = _State.HEAD
        if self.paused:
            return
        if len(self._buffer) - self._at <= AHEAD_BYTES:
            self.resume_reading()
        if self._buffer:
            self._deadline = None
            self._read()

    def _finish(self, *, linger: bool) -> None:
        """Take no further request. Unread input would reset the connection under the answer: `linger` discards it."""
        self._state = _State.LINGER
        self._clear()
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
        except OSError:  # asyncio's own loop, where the client had left already
            self._transport.abort()

    def abort(self) -> None:
        """Close without a clean end."""
        if self.paused:
            self._owner.caught_up(self)
        self._request = None
        self._state = _State.LINGER
        self._drop_upload()
        self._transport.abort()

    @property
    def answering(self) -> Request | None:
        """The present request; None once the whole answer was written."""
        return self._request

    @property
    def buffered(self) -> int:
        """Bytes that wait in this process."""
        return self._transport.get_write_buffer_size()

    def drop(self, why: str) -> None:
        """Close at once; `why` is logged."""
        if self._request is None:
            self.give_up(why)
        else:
            self._owner.post(self._request, ClientStalled(why))

    @property
    def unsent(self) -> int:
        """Bytes that the client's side has not taken: the transport's, and the kernel's.

        The kernel's (SIOCOUTQ, tcp(7); of a UNIX socket what its peer has not read, overhead included) show progress
        while the transport's buffer does not shrink, and include what asyncio's TLS has written.
        """
        size = self._transport.get_write_buffer_size()
        sock = self._transport.get_extra_info("socket")
        if sock is None:  # it is closed: uvloop's TLS forgets it then
            return size
        try:
            return size + int.from_bytes(
                fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder
            )
        except (OSError, ValueError):  # it is closed
            return size

    def give_up(self, why: str = "the connection is closed") -> None:
        """Close at once. The answer counts as delivered; bytes that the client has not taken are lost and logged."""
        if unsent := self.unsent:
            _LOG.info(
                "request %s: client did not take the last %d bytes of its answer; %s",
                self._served, unsent, why, extra={"request_id": self._served, "unsent": unsent},
            )  # fmt: skip
        self.abort()

    @property
    def unused(self) -> bool:
        """No request has begun on it."""
        return self._state is _State.HEAD and self._served == "-"

    def close_if_idle(self) -> None:
        if self._state is _State.HEAD or self._state is _State.NEXT:
            self._finish(linger=False)

    # --- deadlines ---------------------------------------------------------------------------------

    def due(self, now: float) -> bool:
        if self._paused_reading and self._hung_up():
            return True
        deadline = self._deadline if self._upload is None else self._upload.deadline
        return deadline is not None and now >= deadline

    def _hung_up(self) -> bool:
        """Whether the client has closed its side, seen past unread bytes: a transport that does not read hears of no end."""
        sock = self._transport.get_extra_info("socket")
        if sock is None or (number := sock.fileno()) < 0:  # it is closed
            return False
        poll = select.poll()
        poll.register(number, select.POLLRDHUP)
        return bool(poll.poll(0))

    def tick(self, now: float) -> None:
        if self._paused_reading and self._hung_up():
            self._transport.abort()  # `connection_lost` tells of it
            return
        if self._upload is not None:
            if now >= self._upload.deadline and self._request is not None:
                self._owner.post(self._request, Refused(self._upload.late(now)))
            return
        if self._deadline is None or now < self._deadline:
            return
        self._deadline = None
        if self._state is _State.HEAD and self._buffer and not self.paused:
            self._turn_away(
                HttpError(408, "the request's head did not arrive in time", code="timeout", close=True)
            )
        else:
            self._out_of_time(now)

    def excuse(self, seconds: float) -> None:
        """Its deadlines do not count so many seconds."""
        if self._deadline is not None:
            self._deadline += seconds
        if self._upload is not None:
            self._upload.excuse(seconds)
        if self._pace is not None:
            self._pace.excuse(seconds)

    def _out_of_time(self, now: float) -> None:
        """Close, unless the client still takes its answer fast enough."""
        if self.paused:  # slow_clients decides
            self._deadline = now
            return
        unsent, before = self.unsent, self._unsent
        self._unsent = unsent
        self._deadline = now  # look again at the next tick
        if not unsent and not before:
            self.give_up()
        elif not unsent:
            self._deadline += LINGER_S if self._state is _State.LINGER else self._owner.keepalive_s
        elif not before or self._pace is None:
            self._pace = Pace(self._owner.min_bytes_per_s, now)
        elif self._pace.behind_s(now, before - unsent) > self._owner.stall_timeout_s:
            self.give_up()
