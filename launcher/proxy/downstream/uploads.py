"""One request's body while it is received: its framing, its pace, the memory it takes, the turns of the loop it takes.

Small bodies come in one or two reads and are handed on as they are. Of a large or chunked one each turn of the event
loop takes one piece and no more, and a large one is shown to its request as it grows (`Request.received`), which
looks at a step of it per turn: what a body holds costs others no more than a step.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from launcher.proxy.downstream.upload_memory import FREE_BYTES, MAX_WAITING, Share, UploadMemory
from launcher.proxy.errors import HttpError
from launcher.proxy.http1 import BadFraming, ChunkedDecoder, RequestHead
from launcher.proxy.http1.chunks import MIN_MEAN_CHUNK_BYTES

# A larger body is looked at as it comes, a smaller one when it is whole: 30 ms for the worst.
LARGE_BYTES = 1 << 20
READ_BYTES = 262_144  # what one read may bring (uvloop)
CHUNKED_BYTES = 32_768  # of a chunked body in one turn: 10 ms for the smallest chunks
RETRY_AFTER_S = 5  # when there is no memory for a body


class Limits(Protocol):
    """What holds for all bodies."""

    body_timeout_s: float
    body_min_bytes_per_s: int
    upload_wait_s: float
    max_body_bytes: int
    upload_memory: UploadMemory


class Request(Protocol):
    """Whose body it is."""

    done: bool

    def received(self, body: bytearray) -> bool:
        """All that has come so far of a large body. True: it has looked at all of that; else it is to be asked again."""

    def start(self, body: bytes | bytearray) -> None:
        """The body is whole."""

    def refuse(self, refusal: HttpError) -> None:
        """It never will be."""

    def fault(self) -> None:
        """One of these raised: called within the `except`."""


class Connection(Protocol):
    """Where it comes from."""

    def pause_reading(self) -> None:
        """Read nothing more."""

    def resume_reading(self) -> None:
        """Read on."""

    def body_ended(self, rest: bytes) -> None:
        """The body is whole; `rest` was read after it."""


class Upload:
    """A body that is being received."""

    __slots__ = (
        "_body", "_connection", "_decoder", "_left", "_limits", "_looked", "_loop", "_over", "_paid", "_planned",
        "_read_at", "_request", "_share", "_unread", "_waits_since", "_whole", "deadline",
    )  # fmt: skip

    def __init__(self, connection: Connection, request: Request, head: RequestHead, limits: Limits) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._request = request
        self._limits = limits
        self._body = bytearray()
        self._left = head.length or 0  # of a body with a length
        self._decoder = ChunkedDecoder(MIN_MEAN_CHUNK_BYTES) if head.chunked else None
        self._unread = b""  # what came and is not decoded, or what came after the body
        self._whole = False
        self._looked = True  # the request has looked at all of `_body` that it wants to see
        self._planned = False  # a later turn goes on
        self._over = False
        self._read_at = 0.0  # when its last piece came
        self._paid = self._loop.time()  # up to when its bytes suffice for the least rate
        self._share: Share | None = None
        self._waits_since: float | None = None  # for memory
        self.deadline = self._paid + limits.body_timeout_s

    def begin(self, data: bytes) -> None:
        """What came with the head."""
        if data:
            self.take(data)
        elif not self._reserve():
            self._connection.pause_reading()

    def take(self, data: bytes) -> None:
        """What the client sent."""
        now = self._loop.time()
        # Each byte pays for its share of a second, and for none in advance: neither drops nor a large beginning keep a
        # connection for ever.
        self._read_at = now
        self._paid = min(now, self._paid + len(data) / self._limits.body_min_bytes_per_s)
        self.deadline = self._paid + self._limits.body_timeout_s
        self._unread = self._unread + data if self._unread else data
        if not self._planned:
            self._turn()

    def drop(self) -> None:
        """Nobody wants it any more."""
        self._over = True
        self._body = bytearray()
        self._unread = b""
        if self._share is not None:
            self._share.give_back()

    def late(self, now: float) -> HttpError:
        """Why it is given up: called when its deadline has passed."""
        limits = self._limits
        if self._waits_since is not None:
            limits.upload_memory.refused += 1
            return _no_memory(f"for {now - self._waits_since:.0f} s")
        why = f"no byte of the body came for {limits.body_timeout_s:g} s"
        if self._paid != self._read_at:
            rate = limits.body_min_bytes_per_s
            why = f"fewer than {rate} a second of the body came for {limits.body_timeout_s:g} s"
        return HttpError(408, why, code="timeout", close=True)

    def _turn(self) -> None:
        """What one turn of the event loop takes of it."""
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
            self._looked = self._show()
            if self._request.done:
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
        elif later:  # libuv reads up to 32 times from one socket before it looks at others
            self._later()

    def _later(self) -> None:
        self._planned = True
        self._connection.pause_reading()
        self._loop.call_soon(self._turn)

    def _decode(self) -> bool:
        """Bytes become body. False: they don't, and the request is refused."""
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
            self._request.refuse(
                HttpError(400, f"cannot read the body: {error}", code="bad_framing", close=True)
            )
            return False
        self._whole = decoder.ended
        self._unread = decoder.rest + data[CHUNKED_BYTES:]
        if len(self._body) > self._limits.max_body_bytes:
            self._request.refuse(too_large(self._limits.max_body_bytes))
            return False
        return True

    def _show(self) -> bool:
        try:
            return self._request.received(self._body)
        except Exception:
            self._request.fault()
            return False

    def _end(self) -> None:
        body, rest = self._body, self._unread
        self.drop()
        self._connection.body_ended(rest)
        start(self._request, body)

    # --- memory ------------------------------------------------------------------------------------

    def _reserve(self) -> bool:
        """Before more of it is read. False: it waits for memory, or is refused."""
        have = FREE_BYTES + (0 if self._share is None else self._share.granted)
        size = len(self._body)
        if have >= (size if self._decoder is not None else size + min(self._left, READ_BYTES)):
            return True
        memory = self._limits.upload_memory
        if self._share is None:
            if memory.waiting >= MAX_WAITING:
                memory.refused += 1
                self._request.refuse(_no_memory(f"and {MAX_WAITING} bodies wait for it"))
                return False
            self._share = memory.share(self._granted)
        if self._share.ask():
            return True
        self._waits_since = self._loop.time()
        self.deadline = self._waits_since + self._limits.upload_wait_s
        return False

    def _granted(self) -> None:
        if self._waits_since is not None:
            now = self._loop.time()
            self._paid += now - self._waits_since
            self._waits_since = None
            self.deadline = self._paid + self._limits.body_timeout_s
            self._later()


def start(request: Request, body: bytes | bytearray) -> None:
    """Hand a whole body on."""
    try:
        request.start(body)
    except Exception:
        request.fault()


def too_large(limit: int) -> HttpError:
    """413."""
    return HttpError(413, f"the request body is larger than {limit} bytes", code="too_large", close=True)


def _no_memory(why: str) -> HttpError:
    return HttpError(
        503,
        f"the server has no memory for the request's body {why}; try again in {RETRY_AFTER_S} s",
        type_="service_unavailable",
        code="upload_memory",
        headers={"Retry-After": str(RETRY_AFTER_S)},
        close=True,
    )
