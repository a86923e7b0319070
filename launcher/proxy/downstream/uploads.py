"""One request's body while it is received: framing, least rate, memory, share of the event loop.

Small bodies come in one or two reads and are passed on at once. Of a large or chunked body each turn of the event loop
takes one piece; a large one is shown to its request as it grows (BodyGrew), which reads a step of it per turn.
So no body delays other requests by more than one step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from launcher.base.api_errors import HttpError
from launcher.proxy.downstream.slow_clients import Pace
from launcher.proxy.http1.chunks import MIN_MEAN_CHUNK_BYTES, BadFraming, ChunkedDecoder
from launcher.proxy.http1.requests import RequestHead
from launcher.proxy.request.actions import State
from launcher.proxy.request.events import BodyCompleted, BodyGrew, Event, Refused
from launcher.proxy.request.record import Request

# --- Memory for the request bodies that are being received, over all clients: bounded, without deadlock. ---
#
# A body takes memory in steps, before it is read. The first FREE_BYTES of each are not counted. A step comes from the
# pool (the total less `largest`) unless an earlier body waits. When the pool is used up, bodies wait unread, and one at
# a time, the earliest, takes what it needs from the reserve of `largest` bytes. The reserve holds any body, so that one
# never waits again: it completes or is refused, and its memory goes to the next. So one body can always proceed.

FREE_BYTES = 65536  # of each body; most requests are smaller
STEP_BYTES = 1 << 20
MAX_WAITING = 256  # each holds what was read with its head, 256 KiB at most


class UploadMemory:
    def __init__(self, total: int, largest: int) -> None:
        """`total` bytes, of which `largest`, the size of the largest body, are the reserve."""
        self._pool = max(0, total - largest)
        self._pooled = 0  # taken from the pool
        self._waiting: dict[Share, None] = {}
        self._favoured: Share | None = None
        self._number = 0
        self.used = 0  # bytes
        self.refused = 0  # bodies

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def share(self, on_granted: Callable[[], None]) -> Share:
        """A body's share; `on_granted` is called when it has waited and may be read again."""
        self._number += 1
        return Share(self._number, on_granted)

    def ask(self, share: Share) -> bool:
        """Take one step. False: wait for `on_granted`."""
        if not self._may_go_on(share):
            self._waiting[share] = None
            return False
        self._grant(share)
        return True

    def _may_go_on(self, share: Share) -> bool:
        if share is self._favoured:
            return True
        if any(other.number < share.number for other in self._waiting):
            return False
        if self._pooled + STEP_BYTES <= self._pool:
            return True
        if self._favoured is None:
            self._favoured = share
            return True
        return False

    def _grant(self, share: Share) -> None:
        share.granted += STEP_BYTES
        self.used += STEP_BYTES
        if share is not self._favoured:
            share.pooled += STEP_BYTES
            self._pooled += STEP_BYTES

    def give_back(self, share: Share) -> None:
        """Free it; bodies that wait take it. A second call does nothing."""
        self._waiting.pop(share, None)
        self.used -= share.granted
        self._pooled -= share.pooled
        share.granted = share.pooled = 0
        if share is self._favoured:
            self._favoured = None
        while self._waiting:
            first = min(self._waiting, key=lambda waiting: waiting.number)
            if not self._may_go_on(first):
                break
            del self._waiting[first]
            self._grant(first)
            first.on_granted()


class Share(Struct, eq=False):
    """One body's memory, in bytes."""

    number: int  # in order of arrival
    on_granted: Callable[[], None]  # called when it has waited and may be read again
    granted: int = 0
    pooled: int = 0  # of `granted`, from the pool


# Larger bodies are read as they come, smaller ones when they are complete: at most 35 ms of CPU for the worst of them.
LARGE_BYTES = 768 << 10
READ_BYTES = 262_144  # the largest read (uvloop)
CHUNKED_BYTES = 8_192  # of a chunked body per turn: at most 4 ms of CPU (the smallest chunks with extensions)
RETRY_AFTER_S = 5  # without memory for a body
WITHOUT_BODY = frozenset(
    {"GET", "HEAD"}
)  # RFC 9110 9.3.1: content may be refused; a chunked body may be empty


class Limits(Protocol):
    body_timeout_s: float
    body_min_bytes_per_s: int
    upload_wait_s: float
    max_body_bytes: int
    upload_memory: UploadMemory

    def post(self, request: Request, event: Event) -> None: ...


class Connection(Protocol):
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def body_ended(self, rest: bytes) -> None: ...


class Upload:
    __slots__ = (
        "_body", "_connection", "_decoder", "_left", "_limits", "_looked", "_loop", "_over", "_pace", "_planned",
        "_read_at", "_request", "_share", "_unread", "_waited_s", "_waits_since", "_whole", "deadline",
    )  # fmt: skip

    def __init__(self, connection: Connection, request: Request, head: RequestHead, limits: Limits) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._request = request
        self._limits = limits
        self._body = bytearray()
        self._left = head.length or 0  # of a body with a length
        self._decoder = ChunkedDecoder(MIN_MEAN_CHUNK_BYTES) if head.chunked else None
        self._unread = b""  # not decoded yet, or after the body
        self._whole = False
        self._looked = True  # the request has read all of `_body`
        self._planned = False  # a turn is scheduled
        self._over = False
        self._read_at = 0.0  # time of the last piece
        now = self._loop.time()
        self._pace = Pace(limits.body_min_bytes_per_s, now)
        self._share: Share | None = None
        self._waits_since: float | None = None  # for memory
        self._waited_s = 0.0  # for memory, before: `upload_wait_s` bounds all waits of a body together
        self.deadline = now + limits.body_timeout_s

    def begin(self, data: bytes) -> None:
        if data:
            self.take(data)
        elif not self._reserve():
            self._connection.pause_reading()

    def take(self, data: bytes) -> None:
        now = self._loop.time()
        self._read_at = now
        self.deadline = now - self._pace.behind_s(now, len(data)) + self._limits.body_timeout_s
        self._unread = self._unread + data if self._unread else data
        if not self._planned:
            self._turn()

    def drop(self) -> None:
        self._over = True
        self._body = bytearray()
        self._unread = b""
        if self._share is not None:
            self._limits.upload_memory.give_back(self._share)

    def excuse(self, seconds: float) -> None:
        """This process could not read it for so long."""
        self.deadline += seconds
        if self._waits_since is not None:
            self._waits_since += seconds
        else:
            self._pace.excuse(seconds)

    def late(self, now: float) -> HttpError:
        limits = self._limits
        if self._waits_since is not None:
            limits.upload_memory.refused += 1
            return _no_memory(f"for {self._waited_s + now - self._waits_since:.0f} s")
        why = f"no byte of the body came for {limits.body_timeout_s:g} s"
        if self._pace.paid_until != self._read_at:
            rate = limits.body_min_bytes_per_s
            why = f"fewer than {rate} a second of the body came for {limits.body_timeout_s:g} s"
        return HttpError(408, why, code="timeout", close=True)

    def _turn(self) -> None:
        self._planned = False
        if self._over:
            return
        if self._looked and not self._whole:
            if not self._unread:
                self._connection.resume_reading()
                return
            if not self._decode():
                return
        large = len(self._body) > LARGE_BYTES
        if large:
            self._limits.post(self._request, BodyGrew(self._body))
            self._looked = self._request.looked
            if self._request.state is State.DONE:
                return
        if self._whole and self._looked:
            self._end()
        elif not self._looked or (self._unread and not self._whole):
            self._later()
        else:
            self._read_on(large or self._decoder is not None)

    def _read_on(self, later: bool) -> None:
        if not self._reserve():
            self._connection.pause_reading()
        elif later:  # libuv reads up to 32 times from one socket before others
            self._later()

    def _later(self) -> None:
        self._planned = True
        self._connection.pause_reading()
        self._loop.call_soon(self._turn)

    def _decode(self) -> bool:
        """Decode. False: the request was refused."""
        data, decoder = self._unread, self._decoder
        if decoder is None:
            self._unread = data[self._left :]
            self._body += data[: self._left] if self._unread else data
            self._left -= len(data) - len(self._unread)
            self._whole = self._left == 0
            return True
        try:
            self._body += decoder.feed(data[:CHUNKED_BYTES])
        except BadFraming as error:
            self._refuse(HttpError(400, f"cannot read the body: {error}", code="bad_framing", close=True))
            return False
        self._whole = decoder.ended
        self._unread = decoder.rest + data[CHUNKED_BYTES:]
        if self._body and self._request.method in WITHOUT_BODY:
            self._refuse(takes_no_body(self._request.method))
            return False
        if len(self._body) > self._limits.max_body_bytes:
            self._refuse(too_large(self._limits.max_body_bytes))
            return False
        return True

    def _refuse(self, error: HttpError) -> None:
        self._limits.post(self._request, Refused(error))

    def _end(self) -> None:
        body, rest = self._body, self._unread
        self.drop()
        self._connection.body_ended(rest)
        self._limits.post(self._request, BodyCompleted(body))

    def _reserve(self) -> bool:
        """Take memory before more is read. False: wait for it, or the request was refused."""
        have = FREE_BYTES + (0 if self._share is None else self._share.granted)
        size = len(self._body)
        if have >= (size if self._decoder is not None else size + min(self._left, READ_BYTES)):
            return True
        memory = self._limits.upload_memory
        if self._share is None:
            if memory.waiting >= MAX_WAITING:
                memory.refused += 1
                self._refuse(_no_memory(f"and {MAX_WAITING} bodies wait for it"))
                return False
            self._share = memory.share(self._granted)
        if memory.ask(self._share):
            return True
        self._waits_since = self._loop.time()
        self.deadline = self._waits_since + max(0.0, self._limits.upload_wait_s - self._waited_s)
        return False

    def _granted(self) -> None:
        if self._waits_since is not None:
            waited_s = self._loop.time() - self._waits_since
            self._waited_s += waited_s
            self._pace.excuse(waited_s)
            self._waits_since = None
            self.deadline = self._pace.paid_until + self._limits.body_timeout_s
            self._later()


def takes_no_body(method: str) -> HttpError:
    return HttpError(
        400, f"{method} takes no body here: send it without content", code="bad_content", close=True
    )


def too_large(limit: int) -> HttpError:
    return HttpError(413, f"the request body is larger than {limit} bytes", code="too_large", close=True)


def _no_memory(why: str) -> HttpError:
    message = f"the server has no memory for the request's body {why}; try again in {RETRY_AFTER_S} s"
    type_, headers = "service_unavailable", {"Retry-After": str(RETRY_AFTER_S)}
    return HttpError(503, message, type_=type_, code="upload_memory", headers=headers, close=True)
