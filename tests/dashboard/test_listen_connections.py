"""Beyond so many connections the dashboard says so, and serves those that it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop
from aiohttp import web
from support.budgets import partly_gated
from support.fake_operations import FakeOperations
from support.fakes import SOON_S, until
from support.flooding import WORST_S, Asker, least_wait, pipeline

from launcher.control.server import ControlServer
from launcher.dashboard import listen as module
from launcher.dashboard.api import ControlReader
from launcher.dashboard.listen import Connections
from launcher.dashboard.server import Dashboard

ASK = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Server:
    """Real aiohttp behind gates, on a UNIX socket."""

    def __init__(self, path: str, connections: Connections) -> None:
        self.path = path
        self.connections = connections
        self.clients: list[asyncio.StreamWriter] = []

    async def client(self) -> Client:
        reader, writer = await asyncio.open_unix_connection(self.path)
        self.clients.append(writer)
        return reader, writer

    async def ask(self, client: Client) -> bytes:
        reader, writer = client
        writer.write(ASK)
        async with asyncio.timeout(SOON_S):
            return await reader.readuntil(b"\r\n\r\n")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async def page(_request: web.Request) -> web.Response:
        return web.Response(text="page")

    app = web.Application()
    app.router.add_get("/", page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    assert runner.server is not None
    made = Server(str(tmp_path / "d.sock"), Connections(runner.server, most=3))
    listener = await asyncio.get_running_loop().create_unix_server(made.connections.gate, made.path)
    yield made
    for writer in made.clients:
        writer.close()
    listener.close()
    await runner.cleanup()


async def test_one_too_many_gets_an_honest_answer(server: Server) -> None:
    held = [await server.client() for _ in range(3)]
    for client in held:
        assert (await server.ask(client)).startswith(b"HTTP/1.1 200 ")
    reader, _writer = fourth = await server.client()
    head = await server.ask(fourth)
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 5" in head
    assert b"too many connections are open" in await reader.read()
    assert b"HTTP/1.1 200 " in await server.ask(held[0])
    held[1][1].close()
    await until(lambda: server.connections.open == 2 and server.connections.refused == 0)
    assert (await server.ask(await server.client())).startswith(b"HTTP/1.1 200 ")


async def test_a_silent_client_too_many_is_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFUSAL_S", 0.05)
    for _ in range(3):
        await server.ask(await server.client())
    reader, _writer = await server.client()
    async with asyncio.timeout(SOON_S):
        assert await reader.read() == b""
    await until(lambda: server.connections.refused == 0)


async def test_those_that_are_refused_are_bounded_too(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_REFUSALS", 2)
    for _ in range(3):
        await server.ask(await server.client())
    for _ in range(2):
        await server.client()
    await until(lambda: server.connections.refused == 2)
    reader, _writer = await server.client()
    async with asyncio.timeout(SOON_S):
        assert await reader.read() == b""
    assert server.connections.open == 3


def get(path: bytes, token: bytes = b"t0ken") -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n\r\n" % (path, token)


SHORT = b"GET /none HTTP/1.1\r\nHost: localhost\r\n\r\n"
# Bytes sent, count of answers, and their beginning. One read holds up to 256 KiB.
FLOODS = {
    "short requests": (SHORT * 6000, 6000, b"HTTP/1.1 404"),
    "a body of small chunks": (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100_000
        + b"0\r\n\r\n" + SHORT, 1, b"HTTP/1.1 404"
    ),
    "data": (get(b"/api/now") * 500, 500, b"HTTP/1.1 200"),
    "a wrong token": (get(b"/api/now", b"guess") * 500, 500, b"HTTP/1.1 401"),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", partly_gated([(kind,) for kind in FLOODS], [("short requests",), ("a body of small chunks",)])
)
@pytest.mark.bounded
def test_one_browser_holds_up_no_other(tmp_path: Path, kind: str) -> None:
    async def measure() -> float:
        daemon = ControlServer(str(tmp_path / "c.sock"), None, FakeOperations())
        await daemon.start()
        control = ControlReader(str(tmp_path / "c.sock"))
        runner = web.AppRunner(Dashboard(control, "t0ken").application(), access_log=None)
        await runner.setup()
        assert runner.server is not None
        gate = Connections(runner.server).gate
        listener = await asyncio.get_running_loop().create_server(gate, "127.0.0.1", 0)
        address = listener.sockets[0].getsockname()
        ask = Asker(address, get(b"/"))
        try:
            return await least_wait(ask, lambda: pipeline(address, *FLOODS[kind], may_close="body" in kind))
        finally:
            ask.close()
            listener.close()
            await runner.cleanup()
            await control.close()
            await daemon.stop()

    assert uvloop.run(measure()) <= WORST_S
