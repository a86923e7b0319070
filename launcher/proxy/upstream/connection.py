"""One connection to an upstream: HTTP/1.1 calls, one at a time; bytes are passed on as they come.

A `Call` is one request on its way. Its sink hears, in this order and never after the end: `on_head` once,
`on_body` for each read, then exactly one of `on_end` and `on_broken`; nothing at all after `Call.cancel`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

from launcher.proxy.http1 import (
    MAX_HEAD_BYTES,
    BadFraming,
    BadResponse,
    ChunkedDecoder,
    ResponseHead,
    parse_response,
)

WRITE_HIGH_BYTES = 262_144
_FRAME_BYTES = 12  # of one chunk's framing: up to 8 digits and two line ends; of two it is more than that


class Sink(Protocol):
    """Who hears what comes back."""

    quick: Callable[[bytes], bool] | None
    """Offered each read that begins a chunk, as it came; True: taken, it was exactly one chunk."""

    def on_head(self, head: ResponseHead) -> None:
        """The answer's head; 1xx are left out."""

    def on_body(self, payload: bytes, raw: bytes | None) -> None:
        """A piece of the body; `raw` is the same with its chunk framing when that is whole, else None."""

    def on_end(self) -> None:
        """The answer is complete."""

    def on_broken(self, reason: str, *, meant: bool = False) -> None:
        """It will never be complete. `meant`: another instance would answer the same (BadResponse)."""

    def on_fault(self) -> None:
        """The sink itself raised, in any of the above; it is told within the `except`, and then nothing more."""


class Owner(Protocol):
    """The pool that a connection belongs to."""

    closed: bool
    resend: bool

    def connect(self, call: Call) -> None:
        """Send the call on a new connection."""

    def keep(self, connection: UpstreamConnection) -> None:
        """The connection is free for another call."""

    def lost(self, connection: UpstreamConnection) -> None:
        """The connection is closed."""


class Call:
    """One request that was sent, or is about to be."""

    __slots__ = ("_paused", "body", "connecting", "connection", "fresh", "head", "method", "sent", "sink")

    def __init__(self, sink: Sink, method: str, head: bytes, body: bytes | bytearray) -> None:
        self.sink: Sink | None = sink
        self.method = method
        self.head = head
        self.body = body
        self.connection: UpstreamConnection | None = None
        self.fresh = False  # on a connection made for it
        self.sent = False  # an instance may have read of it
        self.connecting: asyncio.Task[None] | None = None
        self._paused = False

    def cancel(self) -> None:
        """Nothing more is wanted: the instance sees its client leave."""
        self.sink = None
        if self.connection is not None:
            self.connection.abort()
        elif self.connecting is not None:
            self.connecting.cancel()

    def pause(self) -> None:
        """Read nothing more for now: the instance's own writes will wait."""
        if not self._paused and self.connection is not None and not self.connection.transport.is_closing():
            self._paused = True
            self.connection.transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._paused and self.connection is not None:
            self._paused = False
            if not self.connection.transport.is_closing():
                self.connection.transport.resume_reading()

    def broken(self, reason: str, *, meant: bool = False) -> None:
        """Tell the sink, once."""
        sink, self.sink = self.sink, None
        if sink is not None:
            try:
                sink.on_broken(reason, meant=meant)
            except Exception:
                sink.on_fault()


class UpstreamConnection(asyncio.Protocol):
    """One connection to an instance; one call at a time."""

    __slots__ = (
        "_bytes_in", "_call", "_decoder", "_head", "_head_bytes", "_left", "_pool", "_quick", "transport",
    )  # fmt: skip

    def __init__(self, pool: Owner) -> None:
        self._pool = pool
        self.transport: asyncio.Transport
        self._call: Call | None = None
        self._reset()

    def _reset(self) -> None:
        self._bytes_in = 0
        self._quick: Callable[[bytes], bool] | None = None
        self._head: ResponseHead | None = None
        self._head_bytes = b""
        self._decoder: ChunkedDecoder | None = None
        self._left: int | None = None  # of a body with a length

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    def send(self, call: Call) -> None:
        """Send a call's request; what comes back is its answer."""
        self._reset()
        self._call = call
        call.connection, call.sent = self, True
        if len(call.body) <= WRITE_HIGH_BYTES:
            self.transport.write(call.head + call.body)
        else:
            self.transport.write(call.head)
            self.transport.write(call.body)

    def abort(self) -> None:
        """Close at once; nothing is told to anybody."""
        self._call = self._quick = None
        self.transport.abort()

    # --- what comes back -------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Hand it on."""
        quick = self._quick
        try:
            if quick is not None and quick(data):  # nearly always: nothing else is looked at before it
                return
        except Exception:
            self._fault(self._call)
            return
        call = self._call
        sink = None if call is None else call.sink
        if call is None or sink is None:
            self.abort()  # an idle connection on which somebody speaks, or an answer that nobody wants
            return
        try:
            if self._decoder is not None:
                self._read_chunked(call, sink, self._decoder, data)
            elif self._head is None:
                self._read_head(call, data)
            else:
                self._read_counted(call, data)
        except BadFraming as error:
            self._break(f"bad answer: {error}")
        except BadResponse as error:
            self._break(f"bad answer: {error}", meant=error.deterministic)
        except Exception:
            call.sink = sink  # whatever became of it: it is owed an end
            self._fault(call)

    def _fault(self, call: Call | None) -> None:
        """The sink of a call raised: called within the `except`."""
        sink = None
        if call is not None:
            sink, call.sink = call.sink, None
        self.abort()
        if sink is not None:
            sink.on_fault()

    def _read_head(self, call: Call, data: bytes) -> None:
        self._bytes_in += len(data)
        data = self._head_bytes + data if self._head_bytes else data
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                if len(data) > MAX_HEAD_BYTES:
                    raise BadResponse("its head is too large")
                self._head_bytes = data
                return
            head = parse_response(data[:end], call.method)
            data = data[end:]
            if head.status >= 200:
                break
        self._head_bytes = b""
        self._begin(call, head)
        if self._call is not call:
            return  # the sink wants no more
        if data:
            self.data_received(data)
        elif self._left == 0:
            self._finish(reusable=True)

    def _begin(self, call: Call, head: ResponseHead) -> None:
        self._head = head
        if head.chunked:
            self._decoder = ChunkedDecoder()
        elif not head.until_close:
            self._left = head.length or 0
        if call.sink is not None:
            call.sink.on_head(head)

    def _read_chunked(self, call: Call, sink: Sink, decoder: ChunkedDecoder, data: bytes) -> None:
        whole = decoder.at_boundary
        payload = decoder.feed(data)
        if decoder.ended:
            if payload:
                sink.on_body(payload, None)
            self._finish(reusable=not decoder.rest)
        elif payload:
            # One chunk without extensions, which are for this hop only, may go on as it came.
            one = whole and decoder.at_boundary and len(data) - len(payload) <= _FRAME_BYTES
            sink.on_body(payload, data if one else None)
        self._quick = sink.quick if self._call is call and decoder.at_boundary else None

    def _read_counted(self, call: Call, data: bytes) -> None:
        if self._left is None:
            if call.sink is not None:
                call.sink.on_body(data, None)
            return
        payload = data[: self._left]
        self._left -= len(payload)
        if payload and call.sink is not None:
            call.sink.on_body(payload, payload)
        if self._left == 0 and self._call is call:
            self._finish(reusable=len(payload) == len(data))

    def _finish(self, *, reusable: bool) -> None:
        call, self._call, self._quick = self._call, None, None
        if call is None:
            return  # cancelled while it heard the last piece
        sink, call.sink = call.sink, None
        call.resume()
        call.connection = None
        head = self._head
        if reusable and head is not None and head.keep_alive and not self.transport.get_write_buffer_size():
            self._pool.keep(self)
        else:
            self.transport.abort()
        if sink is not None:
            try:
                sink.on_end()
            except Exception:
                sink.on_fault()

    def _break(self, reason: str, *, meant: bool = False) -> None:
        call, self._call, self._quick = self._call, None, None
        self.transport.abort()
        if call is not None:
            call.broken(reason, meant=meant)

    def eof_received(self) -> bool:
        """The instance sends no more."""
        if self._head is not None and self._head.until_close and self._call is not None:
            self._finish(reusable=False)
        return False  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone: under a call, or while it was idle."""
        self._pool.lost(self)
        call, self._call = self._call, None
        if call is None:
            return
        call.connection = None
        stale = not call.fresh and self._bytes_in == 0
        if stale and self._pool.resend and call.sink is not None and not self._pool.closed:
            self._pool.connect(call)  # it closed an idle connection as we wrote: it has read nothing
            return
        call.broken("the connection was reset" if exc is not None else "it closed the connection")
