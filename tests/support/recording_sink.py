"""A sink that keeps what a connection tells it, and a server that answers byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from support.fakes import SOON_S

from launcher.base.address import UnixAddress
from launcher.proxy.http1.responses import ResponseHead
from launcher.proxy.upstream.connection import WRITE_HIGH_BYTES, UpstreamConnection

HEAD = b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n"


class RecordingSink:
    """Reads each read at once, as the executor does, and keeps what it says."""

    def __init__(self, connection: UpstreamConnection | None = None) -> None:
        self.connection = connection
        self.reads = 0
        self.heads: list[ResponseHead] = []
        self.parts: list[tuple[bytes, bytes | None]] = []
        self.ends: list[str] = []
        self.sent: bool | None = None
        self.deterministic = False
        self.error: Exception | None = None
        self.over = asyncio.Event()
        self.at_head: Callable[[], None] = lambda: None
        self.at_part: Callable[[], None] = lambda: None

    @property
    def body(self) -> bytes:
        return b"".join(payload for payload, _ in self.parts)

    def bytes_arrived(self, data: bytes) -> None:
        assert not self.ends
        self.reads += 1
        assert self.connection is not None
        self.connection.read(data)

    def head_received(self, head: ResponseHead) -> None:
        assert not self.ends
        self.heads.append(head)
        self.at_head()

    def body_received(self, payload: bytes, raw: bytes | None) -> None:
        assert not self.ends
        assert payload
        self.parts.append((payload, raw))
        self.at_part()

    def _end(self, how: str) -> None:
        self.ends.append(how)
        self.over.set()

    def completed(self) -> None:
        self._end("completed")

    def broken(self, reason: str, *, sent: bool, deterministic: bool = False) -> None:
        self.sent, self.deterministic = sent, deterministic
        self._end(reason)

    def faulted(self, error: Exception) -> None:
        self.error = error
        self._end("faulted")

    async def end(self) -> str:
        """How it ended, once."""
        async with asyncio.timeout(SOON_S):
            await self.over.wait()
        await asyncio.sleep(0.01)  # for a second end, which there must not be
        (how,) = self.ends
        return how


class Peer:
    """One connection as the server sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        self.reader = reader
        self.writer = writer
        self.number = number
        """Which connection it is, from 0."""

    async def request(self) -> bytes:
        """The next request's body; its head is dropped."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        return await self.reader.readexactly(length)

    async def say(self, data: bytes) -> None:
        """Write it; a read of its own for the other side, as far as that can be had."""
        self.writer.write(data)
        await self.writer.drain()
        await asyncio.sleep(0.002)

    async def until_left(self) -> None:
        """Until the other side has closed the connection."""
        with suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


Play = Callable[[Peer], Awaitable[None]]


class Server:
    """Plays a script on each connection, and closes it then."""

    def __init__(self, path: Path, play: Play) -> None:
        self.address = UnixAddress(str(path))
        self.connections = 0
        self._play = play
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._accept, self.address.path)
        return self

    async def __aexit__(self, *raised: object) -> None:
        assert self._server is not None
        self._server.close()
        await self.drop()

    def unlink(self) -> None:
        """Nobody can connect any more."""
        Path(self.address.path).unlink()

    async def drop(self) -> None:
        """Close every connection."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        peer = Peer(reader, writer, self.connections)
        self.connections += 1
        try:
            await self._play(peer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()


class NoPool:
    """The pool of a connection without sockets."""

    closed = False
    resend = True

    def __init__(self) -> None:
        self.kept: list[UpstreamConnection] = []

    def connect(self, connection: UpstreamConnection) -> asyncio.Task[None]:
        return asyncio.create_task(asyncio.sleep(0))

    def keep(self, connection: UpstreamConnection) -> None:
        self.kept.append(connection)

    def lost(self, connection: UpstreamConnection) -> None:
        pass


class NoTransport(asyncio.Transport):
    """Takes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == WRITE_HIGH_BYTES

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True
