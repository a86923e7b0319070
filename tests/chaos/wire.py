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

    def __init__(self, path: str) -> None:
        self._path = path
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._over = False

    async def post(self, path: str, body: bytes) -> Answer:
        """Send one request. Raises Dropped when no answer comes."""
        if self._over or self._reader is None or self._reader.at_eof():
            self.close()
            self._reader, self._writer = await asyncio.open_unix_connection(self._path, limit=1 << 20)
        assert self._writer is not None
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        try:
            self._writer.write(head.encode() + b"\r\n\r\n" + body)
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
