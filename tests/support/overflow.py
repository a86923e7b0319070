"""Overflow endpoints, and a proxy with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from support.proxy_under_test import Build, ProxyUnderTest

from launcher.balancing.upstreams import Ending
from launcher.config import schema
from launcher.proxy.upstream.overflow_endpoint import Left

DONE = b"data: [DONE]\n\n"


class Outside:
    """An external endpoint: what it got, and the status that it answers with."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[dict[str, object]] = []
        self.status = 200

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"id":"outside"}\n\n' + DONE)
        return response


@pytest.fixture
async def outside(unused_tcp_port: int) -> AsyncIterator[Outside]:
    made = Outside(f"http://127.0.0.1:{unused_tcp_port}/v1")
    app = web.Application()
    app.router.add_post("/v1/chat/completions", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
    yield made
    await runner.cleanup()


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nSet-Cookie: a=b\r\nX-Secret: 1\r\n\r\n{}"


@dataclass
class Cloud:
    """An endpoint elsewhere that answers with the bytes of its script and keeps what it got."""

    url: str
    script: list[bytes] = field(default_factory=lambda: [OK])
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    """While clear, it answers up to the last piece."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    connections: int = 0
    before: Callable[[], object] = lambda: None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                top = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in top[1:])
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.got.append((top[0], headers, body))
                self.before()
                for piece in self.script[:-1]:
                    writer.write(piece)
                    await writer.drain()
                gone = asyncio.ensure_future(reader.read(1))
                held = asyncio.ensure_future(self.hold.wait())
                await asyncio.wait({gone, held}, return_when=asyncio.FIRST_COMPLETED)
                held.cancel()
                if gone.done():
                    break
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
                writer.write(self.script[-1])
                if b"Content-Length" not in self.script[0] and b"chunked" not in self.script[0]:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            self.left.set()
            writer.close()

    def settings(self, **more: object) -> schema.Overflow:
        return schema.Overflow(url=self.url, models={"m": "big-model"}, **more)  # type: ignore[arg-type]


@pytest.fixture
async def cloud() -> AsyncIterator[Cloud]:
    async with AsyncExitStack() as stack:
        made = Cloud("")
        server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
        await stack.enter_async_context(server)
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/"
        made.hold.set()
        yield made
        made.hold.set()


Make = Callable[..., Awaitable[ProxyUnderTest]]


@pytest.fixture
def proxy_with(build: Build, cloud: Cloud) -> Make:
    """A proxy without an instance: all that may overflow does."""

    async def make_proxy(*, proxy: dict[str, object] | None = None, **more: object) -> ProxyUnderTest:
        return await build(aliases={"m": ("gpt-4o",)}, overflow=(cloud.settings(**more),), **(proxy or {}))

    return make_proxy


def body(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "é"}], **fields}).encode()


def left(status: int | None = None, retry_after: str | None = None, ending: Ending = Ending.WHOLE) -> Left:
    return Left(ending, status, reached=True, retry_after=retry_after, usage=None)
