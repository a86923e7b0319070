"""Pages of instances, over both kinds of address, and what is left open."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.scripted_engine import Call, FakeEngine

from launcher.base.address import TcpAddress
from launcher.proxy.pages.renderer import Instance, fetch_pages


async def hello(call: Call) -> None:
    await call.json({"hello": call.target})


async def test_tcp() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        there = Instance(0, 1, "m", TcpAddress("127.0.0.1", port))
        assert await fetch_pages([there], "/x") == [b"hi"]
    assert await fetch_pages([there], "/x") == [None]


async def test_answers_come_in_order(tmp_path: Path) -> None:
    async with FakeEngine(tmp_path / "a", hello) as a, FakeEngine(tmp_path / "b", hello) as b:
        nobody = Instance(2, 1, "m", FakeEngine(tmp_path / "c").address)
        found = await fetch_pages(
            [Instance(0, 1, "m", a.address), nobody, Instance(1, 1, "m", b.address)], "/y"
        )
    assert found == [b'{"hello": "/y"}', None, b'{"hello": "/y"}']


async def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    async def elsewhere(call: Call) -> None:
        await call.json({}, 302, "Location: http://localhost/other")

    async with FakeEngine(tmp_path / "a", elsewhere) as engine:
        assert await fetch_pages([Instance(0, 1, "m", engine.address)], "/x") == [None]
        assert len(engine.calls) == 1


async def test_the_next_generation_at_the_same_address(tmp_path: Path) -> None:
    there = Instance(0, 1, "m", FakeEngine(tmp_path / "a").address)
    for _ in range(2):
        async with FakeEngine(tmp_path / "a", hello):
            assert await fetch_pages([there], "/x") == [b'{"hello": "/x"}']
        (tmp_path / "a").unlink(missing_ok=True)
        assert await fetch_pages([there], "/x") == [None]
