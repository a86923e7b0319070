"""The server's side of HTTP/1.1 for stub engines: strict, kept alive, one request at a time, and cheap."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Final, cast

_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
_CHUNKED: Final = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked[ \t]*\r\n", re.IGNORECASE)
_EXPECT: Final = re.compile(rb"\r\nexpect:[ \t]*100-continue[ \t]*\r\n", re.IGNORECASE)
_CLOSE: Final = re.compile(rb"\r\nconnection:[ \t]*close[ \t]*\r\n", re.IGNORECASE)

SSE_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ndate: Fri, 20 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
LAST: Final = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """A chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def answer(status: bytes, body: bytes, content_type: bytes = b"application/json") -> bytes:
    """A whole answer."""
    return (
        b"HTTP/1.1 %b\r\ndate: Fri, 20 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: %d\r\n"
        b"content-type: %b\r\n\r\n%b" % (status, len(body), content_type, body)
    )


NOT_FOUND: Final = answer(b"404 Not Found", b'{"detail":"Not Found"}')
BAD: Final = answer(b"400 Bad Request", b"Invalid HTTP request received.", b"text/plain; charset=utf-8")


class Connection(asyncio.Protocol):
    """One client's connection. Whoever inherits says what `asked` does; a request that it begins to answer and
    does not end at once sets `busy`, and calls `ended` when it has.
    """

    kept_bytes: int = 1 << 62  # of a body's start, and of its end

    def __init__(self) -> None:
        self.busy = False
        self._pending = b""
        self._head = b""
        self._left = -1  # bytes of the body still to come; -1 while in the head, -2 for a chunked body
        self._start: list[bytes] = []
        self._started = 0
        self._tail = b""
        self._close = False

    def asked(self, method: bytes, path: bytes, body: bytes) -> None:
        """A request is there; the path is without its query."""
        raise NotImplementedError

    def left(self) -> None:
        """The client has gone."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way to write."""
        self._transport = cast("asyncio.Transport", transport)
        self.write: Callable[[bytes], None] = self._transport.write

    def connection_lost(self, error: Exception | None) -> None:
        """Tell whoever inherits."""
        del error
        self.left()

    def ended(self) -> None:
        """The answer has been written; the next request, if one waits."""
        self.busy = False
        if self._close:
            self._transport.close()
            return
        self._go_on()

    def data_received(self, data: bytes) -> None:
        """Requests, one after the other; more than one at a time wait."""
        if self._left > 0 and not self._pending:
            self._take_body(data)
        else:
            self._pending = self._pending + data if self._pending else data
        self._go_on()

    def _go_on(self) -> None:
        while not self.busy and self._pending and self._advance():
            pass

    def _advance(self) -> bool:
        """One step on what is pending; False when more must come first."""
        if self._left == -1:
            return self._take_head()
        data, self._pending = self._pending, b""
        if self._left == -2:
            return self._take_chunks(data)
        self._take_body(data)
        return True

    def _take_head(self) -> bool:
        end = self._pending.find(b"\r\n\r\n") + 4
        if end < 4:
            return False
        head, self._pending = self._pending[:end], self._pending[end:]
        self._head, self._started, self._tail = head, 0, b""
        self._start.clear()
        self._close = _CLOSE.search(head) is not None
        if b" HTTP/1.1\r\n" not in head:
            self.write(BAD)
            self._transport.close()
            return False
        if _EXPECT.search(head):
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = _LENGTH.search(head)
        if _CHUNKED.search(head):
            self._left = -2
        elif length and int(length[1]):
            self._left = int(length[1])
        else:
            self._respond()
        return True

    def _take_body(self, data: bytes) -> None:
        if len(data) > self._left:
            data, self._pending = data[: self._left], data[self._left :]
        self._left -= len(data)
        self._keep(data)
        if not self._left:
            self._respond()

    def _keep(self, data: bytes) -> None:
        """Start and end of a body are enough, so that a large one costs nothing."""
        if self._started < self.kept_bytes:
            self._start.append(data)
            self._started += len(data)
        else:
            self._tail = data if len(data) > self.kept_bytes else (self._tail + data)[-self.kept_bytes :]

    def _take_chunks(self, data: bytes) -> bool:
        """A chunked body, as some routers send it; taken whole, for it is rare."""
        at, body = 0, []
        while True:
            line = data.find(b"\r\n", at)
            size = int(data[at:line].split(b";")[0], 16) if line > at else -1
            if line < 0 or len(data) < line + 2 + size + 2:
                self._pending = data
                return False
            if size == 0:
                break
            body.append(data[line + 2 : line + 2 + size])
            at = line + 2 + size + 2
        self._keep(b"".join(body))
        self._pending = data[line + 4 :]
        self._respond()
        return True

    def _respond(self) -> None:
        self._left = -1
        method, target = self._head.split(b" ", 2)[:2]
        self.asked(method, target.split(b"?", 1)[0], b"".join(self._start) + self._tail)
        if self._close and not self.busy:
            self._transport.close()
