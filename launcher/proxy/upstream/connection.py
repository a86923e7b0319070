"""One connection to an upstream: HTTP/1.1 responses, one request at a time; bytes as they come.

A read that is usual events goes to the client's transport at once (FastPath). Any other one is posted through the sink,
which has it read by `read`. A large read of a chunked body or of an event stream is taken in pieces, one for each turn of
the event loop, so that thousands of events that come at once delay no other connection.

The sink hears, in this order and never after the end: `head_received` once, `body_received` for each read, then exactly
one of `completed`, `broken` and `faulted`; nothing at all after `abort`.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from launcher.proxy.http1.chunks import BadFraming, ChunkedDecoder
from launcher.proxy.http1.fields import MAX_HEAD_BYTES
from launcher.proxy.http1.responses import BadResponse, ResponseHead, parse_response
from launcher.proxy.sse.fast_path import FastPath

WRITE_HIGH_BYTES = 262_144
EVENT_STREAM = b"text/event-stream"
RESEND_S = 1.0  # a kept-alive connection that its upstream closed as we wrote ends sooner than this
# Bytes of a chunked body or an event stream per turn: at most 10 ms of CPU (the smallest chunks and events).
TURN_BYTES = 8_192
TURN_LINES = 1_024  # the same, of lines and chunks: events without data are the smallest
INTERIM_HEADS = 16  # 1xx before a response; servers send one, if any
_EVENT_END = b"\n\n\r\n"  # of an event and of its chunk
_FRAME_BYTES = 12  # of one chunk's framing: up to 8 digits and two line ends; of two it is more than that


class Sink(Protocol):
    """Gets a request's response."""

    # A read that `UpstreamConnection.read` is to be called with.
    def bytes_arrived(self, data: bytes) -> None: ...
    # Without 1xx.
    def head_received(self, head: ResponseHead) -> None: ...
    # `raw`: the same with its chunk framing where that is whole.
    def body_received(self, payload: bytes, raw: bytes | None) -> None: ...
    def completed(self) -> None: ...
    # `sent`: the upstream may have read of the request. `deterministic`: another instance would answer the same.
    def broken(self, reason: str, *, sent: bool, deterministic: bool = False) -> None: ...
    # The proxy's own code raised on the fast path.
    def faulted(self, error: Exception) -> None: ...


class Owner(Protocol):
    """The pool that a connection belongs to."""

    closed: bool
    resend: bool

    # Connect it; then its `connected` or `not_connected` is called.
    def connect(self, connection: UpstreamConnection) -> asyncio.Task[None]: ...
    # It is free again.
    def keep(self, connection: UpstreamConnection) -> None: ...
    def lost(self, connection: UpstreamConnection) -> None: ...


class UpstreamConnection(FastPath):
    """An asyncio.Protocol that outlives its transport: a request that a stale one did not take gets a new one."""

    __slots__ = (
        "_body", "_bytes_in", "_connecting", "_decoder", "_fresh", "_head", "_head_bytes", "_interim", "_left", "_method",
        "_pause", "_planned", "_pool", "_request_head", "_resent", "_sent_at", "_sink", "_transport", "_unread",
    )  # fmt: skip

    def __init__(self, pool: Owner) -> None:
        super().__init__()
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._sink: Sink | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._fresh = True  # the transport was made for the present request
        self._resent = False  # it went out on an older one, too
        self._sent_at = 0.0  # loop time
        self._method = ""
        self._request_head = b""
        self._body: bytes | bytearray | memoryview = b""  # both until the response begins
        self._pause = False
        self._unread = b""  # of a large read; the transport is not read meanwhile
        self._planned = False  # a turn is scheduled
        self._reset()

    def _reset(self) -> None:
        self._bytes_in = 0
        self._head: ResponseHead | None = None
        self._head_bytes = b""
        self._interim = 0  # heads of interim responses so far
        self._decoder: ChunkedDecoder | None = None
        self._left: int | None = None  # of a body with a length
        self._unread = b""

    def send(
        self, sink: Sink, method: str, head: bytes, body: bytes | bytearray | memoryview, now: float
    ) -> None:
        """Send a request, on a new transport where there is none; `head` is whole, with its blank line, and may be followed
        by the body's beginning."""
        self._sink = sink
        self._method = method
        self._request_head = head
        self._body = body
        self._resent = False
        self._sent_at = now
        self.events = self.bytes = 0
        transport = self._transport
        if transport is None:
            self._connect()
            return
        self._fresh = False
        self._bytes_in = self._interim = 0
        self._head = self._decoder = self._left = None
        self._send_request(transport)

    def _connect(self) -> None:
        self._fresh = True
        self._reset()
        self._connecting = self._pool.connect(self)

    def _send_request(self, transport: asyncio.Transport) -> None:
        if len(self._body) <= WRITE_HIGH_BYTES:
            transport.write(self._request_head + self._body)
        else:
            transport.write(self._request_head)
            transport.write(self._body)

    def connected(self) -> None:
        self._connecting = None
        if self._sink is None or self._pool.closed or self._transport is None:
            self.not_connected("the upstream was removed")
        else:
            self._send_request(self._transport)

    def not_connected(self, reason: str) -> None:
        self._connecting = None
        sink = self._sink
        self.abort()
        if sink is not None:
            sink.broken(reason, sent=self._resent)

    def abort(self) -> None:
        """Close at once; nothing is told to anybody."""
        self._sink = None
        self._unread = b""
        self.disarm()
        if self._transport is not None:
            self._transport.abort()
        elif self._connecting is not None:
            self._connecting.cancel()

    def pause(self) -> None:
        """Read nothing more for now: the upstream's own writes will wait."""
        if not self._pause and self._transport is not None and not self._transport.is_closing():
            self._pause = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._pause:
            self._pause = False
            self._read_on()

    def _read_on(self) -> None:
        """Take the rest of a large read, in turns, or read the transport again."""
        if self._unread:
            if not self._planned:
                self._planned = True
                asyncio.get_running_loop().call_soon(self._turn)
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _turn(self) -> None:
        self._planned = False
        if self._unread and not self._pause:
            self._take(self._piece())
            if not self._pause:
                self._read_on()

    def _piece(self) -> bytes:
        """The next bytes of the large read; up to the end of an event where there is one, so that the fast path may relay
        them."""
        data, size = self._unread, TURN_BYTES
        while _line_ends(data, size) > TURN_LINES:
            size //= 2
        cut = data.rfind(_EVENT_END, 0, size) + len(_EVENT_END)
        if cut < len(_EVENT_END):
            cut = size
        self._unread = data[cut:]
        return data[:cut]

    def _in_turns(self, data: bytes) -> bytes:
        """The first piece of a large read; the others come in turns."""
        self._unread = data
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        piece = self._piece()
        self._read_on()
        return piece

    @property
    def between_chunks(self) -> bool:
        """A chunked body is read up to the end of a chunk."""
        return self._decoder is not None and self._decoder.at_boundary

    # --- the event loop ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    def slow(self, data: bytes) -> bool:
        """A read that the fast path does not relay at once."""
        self._take(self._in_turns(data) if self._by_turns(data) else data)
        return True

    def _by_turns(self, data: bytes) -> bool:
        """Whether it is too much of a body for one turn: each chunk and each event costs."""
        head, size = self._head, len(data)
        if size <= TURN_LINES or head is None or not (head.chunked or head.content_type == EVENT_STREAM):
            return False
        return size > TURN_BYTES or _line_ends(data, size) > TURN_LINES

    def _take(self, data: bytes) -> None:
        if self._decoder is not None:  # else it is not armed
            if self.relay_more(data):
                return
            self.disarm()
        sink = self._sink
        if sink is None:
            self.abort()  # an idle connection on which somebody speaks, or a response that nobody wants
        else:
            sink.bytes_arrived(data)

    def pause_writing(self) -> None:
        """The upstream reads slowly; the request's body waits in this process."""

    def resume_writing(self) -> None:
        """It reads again."""

    def eof_received(self) -> bool:
        """The upstream sends no more."""
        if self._head is not None and self._head.until_close and self._sink is not None:
            self._sink.bytes_arrived(b"")
        return False  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: under a request, or while it was idle."""
        self._pool.lost(self)
        self._transport = None
        self._pause = False
        unread, self._unread = self._unread, b""
        if unread and self._sink is not None:
            self._sink.bytes_arrived(unread)
        self.disarm()
        sink = self._sink
        if sink is None:
            return
        if self._may_resend():
            self._resent = True
            self._connect()
            return
        self._sink = None
        if exc is not None and not isinstance(exc, OSError):
            sink.faulted(exc)
        else:
            sink.broken("it closed the connection" if exc is None else "the connection was reset", sent=True)

    def _may_resend(self) -> bool:
        """The upstream may have closed an idle connection as the request was written. Later than that the request itself
        may have killed it: such an attempt must fail, and count."""
        if self._fresh or self._bytes_in or not self._pool.resend or self._pool.closed:
            return False
        return asyncio.get_running_loop().time() - self._sent_at < RESEND_S

    # --- the response ------------------------------------------------------------------------------

    def read(self, data: bytes) -> None:
        """Tell the sink what one read says; b"" is the end of a response that ends with its connection."""
        sink = self._sink
        if sink is None:
            return
        try:
            if self._decoder is not None:
                self._read_chunked(sink, self._decoder, data)
            elif self._head is None:
                self._read_head(sink, data)
            else:
                self._read_counted(sink, data)
        except BadFraming as bad:
            self._break(sink, f"bad answer: {bad}")
        except BadResponse as error:  # not `bad` again: a compiled variable has one class
            self._break(sink, f"bad answer: {error}", deterministic=error.deterministic)

    def _read_head(self, sink: Sink, data: bytes) -> None:
        self._bytes_in += len(data)
        self._body = b""
        data = self._head_bytes + data if self._head_bytes else data
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                if len(data) > MAX_HEAD_BYTES:
                    raise BadResponse("its head is too large")
                self._head_bytes = data
                return
            head = parse_response(data[:end], self._method)
            data = data[end:]
            if head.status >= 200:
                break
            self._count_interim()
        self._head_bytes, self._interim = b"", 0
        self._head = head
        self._left = head.length
        if head.chunked:
            self._decoder = ChunkedDecoder()
        sink.head_received(head)
        if self._sink is not sink:
            return  # the sink wants no more
        if len(data) == head.length:  # most small responses are one read
            if data:
                sink.body_received(data, data)
            self._finish(sink, reusable=True)
        elif data:
            self.read(self._in_turns(data) if self._by_turns(data) else data)

    def _count_interim(self) -> None:
        self._interim += 1
        if self._interim > INTERIM_HEADS:
            raise BadResponse(f"more than {INTERIM_HEADS} interim responses (1xx)")

    def _read_chunked(self, sink: Sink, decoder: ChunkedDecoder, data: bytes) -> None:
        whole = decoder.at_boundary
        payload = decoder.feed(data)
        if decoder.ended:
            if payload:
                sink.body_received(payload, None)
            self._finish(sink, reusable=not decoder.rest and not self._unread)
        elif payload:
            # One chunk without extensions, which are for this hop only, may go on as it came.
            one = whole and decoder.at_boundary and len(data) - len(payload) <= _FRAME_BYTES
            sink.body_received(payload, data if one else None)

    def _read_counted(self, sink: Sink, data: bytes) -> None:
        if self._left is None:
            if data:
                sink.body_received(data, None)
            else:
                self._finish(sink, reusable=False)
            return
        payload = data[: self._left]
        self._left -= len(payload)
        if payload:
            sink.body_received(payload, payload)
        if self._left == 0:
            self._finish(sink, reusable=len(payload) == len(data) and not self._unread)

    def _finish(self, sink: Sink, *, reusable: bool) -> None:
        if self._sink is not sink:
            return  # it was cancelled while it heard the last piece
        self._sink = None
        self._unread = b""
        if self._decoder is not None:
            self.disarm()
        if self._pause:
            self.resume()
        transport, head = self._transport, self._head
        if transport is not None:
            if reusable and head is not None and head.keep_alive and not transport.get_write_buffer_size():
                self._pool.keep(self)
            else:
                transport.abort()
        sink.completed()

    def _break(self, sink: Sink, reason: str, *, deterministic: bool = False) -> None:
        self.abort()
        sink.broken(reason, sent=True, deterministic=deterministic)


def _line_ends(data: bytes, size: int) -> int:
    """In the first `size` bytes; CRLF counts twice."""
    return data.count(b"\n", 0, size) + data.count(b"\r", 0, size)
