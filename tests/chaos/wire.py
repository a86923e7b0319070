"""A strict HTTP/1.1 client: checks the framing and reports exactly how a response ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator


class Unframed(Exception):  # noqa: N818 - a finding
    """The response violates HTTP framing."""


class Dropped(Exception):  # noqa: N818 - a finding
    """The connection ended before the response."""


class Answer:
    """A response's head and its payload stream."""

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    async def payload(self) -> AsyncIterator[bytes]:
        """The payload as received. Raises Dropped or Unframed."""
        try:
            if self.headers.get("transfer-encoding") == "chunked":
                async for piece in self._chunks():
                    yield piece
                return
            left = int(self.headers["content-length"])
            while left:
                piece = await self._reader.read(min(left, 65536))
                if not piece:
                    raise Dropped(f"{left} bytes of the body are missing")
                left -= len(piece)
                yield piece
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise Dropped(str(error) or type(error).__name__) from None

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            line = await self._reader.readuntil(b"\r\n")
            try:
                size = int(line[:-2], 16)
            except ValueError:
                raise Unframed(f"a chunk's size is {line!r}") from None
            data = await self._reader.readexactly(size + 2)
            if not data.endswith(b"\r\n"):
                raise Unframed("a chunk is longer than it said")
            if size == 0:
                return
            yield data[:-2]


class Wire:
    """One connection, reopened after it was closed."""

    def __init__(self, address: str) -> None:
        """`address`: path of a UNIX socket, or host:port."""
        self._address = address
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._over = False

    async def post(self, path: str, body: bytes, request_id: str) -> Answer:
        """Send one request. Raises Dropped when no answer comes."""
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: {request_id}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return await self._ask(head.encode() + body)

    async def get(self, path: str) -> bytes:
        """A whole page. Raises Dropped."""
        answer = await self._ask(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return b"".join([piece async for piece in answer.payload()])

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._address.startswith("/"):
            return await asyncio.open_unix_connection(self._address, limit=1 << 20)
        host, port = self._address.rsplit(":", 1)
        return await asyncio.open_connection(host, int(port), limit=1 << 20)

    async def _ask(self, request: bytes) -> Answer:
        if self._over or self._reader is None or self._reader.at_eof():
            self.close()
            self._reader, self._writer = await self._connect()
        assert self._writer is not None
        try:
            self._writer.write(request)
            raw = await self._reader.readuntil(b"\r\n\r\n")
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise Dropped(f"before the answer: {error or type(error).__name__}") from None
        first, *lines = raw.decode("latin-1").split("\r\n")[:-2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._over = headers.get("connection", "").lower() == "close"
        return Answer(int(first.split(" ")[1]), headers, self._reader)

    def close(self) -> None:
        """Disconnects, even in the middle of a response."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None
