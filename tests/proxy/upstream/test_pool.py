"""Which connection a request gets, and which are closed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.fakes import SOON_S
from support.recording_sink import HEAD, Peer, RecordingSink, Server

from launcher.base.address import TcpAddress
from launcher.proxy.upstream.pool import REUSE_S, ConnectionPool, Endpoint

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n"


class Numbered:
    """A pool of connections whose server answers with the connection's number, when it may."""

    def __init__(self, path: Path) -> None:
        self.server = Server(path, self._play)
        self.pool = ConnectionPool(Endpoint(self.server.address), SOON_S)
        self.go = asyncio.Event()
        self.go.set()
        self.asked = 0
        self.open = 0

    async def _play(self, peer: Peer) -> None:
        self.open += 1
        try:
            while True:
                await peer.request()
                self.asked += 1
                await self.go.wait()
                await peer.say(OK + b"%d" % peer.number)
        finally:
            self.open -= 1

    def send(self, now: float | None = None) -> RecordingSink:
        sink = RecordingSink()
        at = asyncio.get_running_loop().time() if now is None else now
        sink.connection = self.pool.send(sink, "POST", HEAD, b"{}", at)
        return sink

    async def several(self, count: int) -> None:
        """Have so many connections idle; the last one has been idle for the shortest time."""
        self.go.clear()
        sinks = [self.send() for _ in range(count)]
        await self.until_asked(count)
        self.go.set()
        for sink in sinks:
            assert await sink.end() == "completed"

    async def until_asked(self, count: int) -> None:
        async with asyncio.timeout(SOON_S):
            while self.asked < count:  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def until_open(self, count: int) -> None:
        async with asyncio.timeout(SOON_S):
            while self.open != count:  # noqa: ASYNC110
                await asyncio.sleep(0.002)


@pytest.fixture
async def numbered(tmp_path: Path) -> AsyncIterator[Numbered]:
    made = Numbered(tmp_path / "s")
    async with made.server:
        yield made
        made.pool.close()


async def test_each_request_at_once_has_a_connection(numbered: Numbered) -> None:
    await numbered.several(3)
    assert numbered.server.connections == 3


async def test_the_one_that_was_used_last_is_used_first(numbered: Numbered) -> None:
    await numbered.several(3)
    first = numbered.send()
    assert await first.end() == "completed"
    second = numbered.send()
    assert await second.end() == "completed"
    assert second.body == first.body
    assert numbered.server.connections == 3


async def test_one_that_was_idle_for_too_long_is_closed_not_used(numbered: Numbered) -> None:
    await numbered.several(2)
    sink = numbered.send(asyncio.get_running_loop().time() + REUSE_S + 1)
    assert await sink.end() == "completed"
    assert sink.body == b"2"
    await numbered.until_open(1)


async def test_a_sweep_closes_those_that_will_not_be_used(numbered: Numbered) -> None:
    await numbered.several(2)
    now = asyncio.get_running_loop().time()
    numbered.pool.sweep(now)
    await asyncio.sleep(0.02)
    assert numbered.open == 2
    numbered.pool.sweep(now + REUSE_S + 1)
    await numbered.until_open(0)
    assert await numbered.send().end() == "completed"


async def test_close_leaves_those_at_work_until_they_are_done(numbered: Numbered) -> None:
    await numbered.several(2)
    numbered.go.clear()
    busy = numbered.send()
    await numbered.until_asked(3)
    numbered.pool.close()
    await numbered.until_open(1)
    numbered.go.set()
    assert await busy.end() == "completed"
    await numbered.until_open(0)


async def test_a_connection_that_comes_after_the_close_sends_nothing(numbered: Numbered) -> None:
    sink = numbered.send()
    numbered.pool.close()
    assert await sink.end() == "the upstream was removed"
    assert sink.sent is False
    await asyncio.sleep(0.02)
    assert (numbered.asked, numbered.open) == (0, 0)


async def test_a_connection_that_the_upstream_closes_while_idle_is_forgotten(numbered: Numbered) -> None:
    await numbered.several(1)
    await numbered.server.drop()
    await asyncio.sleep(0.02)
    sink = numbered.send()
    assert await sink.end() == "completed"
    assert sink.body == b"1"


@pytest.mark.parametrize("name", ["x" * 64 + ".example", "nobody.invalid"])
async def test_a_name_without_addresses(name: str) -> None:
    pool = ConnectionPool(Endpoint(TcpAddress(name, 1), external=True), SOON_S)
    sink = RecordingSink()
    sink.connection = pool.send(sink, "POST", HEAD, b"{}", 0.0)
    assert (await sink.end()).startswith("cannot connect: ")
    assert sink.sent is False


async def test_a_peer_that_does_not_take_connections() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        fillers = [socket.socket() for _ in range(3)]  # the kernel answers no further connection
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        pool = ConnectionPool(Endpoint(TcpAddress(*deaf.getsockname())), 0.1)
        sink = RecordingSink()
        sink.connection = pool.send(sink, "POST", HEAD, b"{}", 0.0)
        assert await sink.end() == "no connection within 0.1 s"
        assert sink.sent is False
        for filler in fillers:
            filler.close()
