"""An engine that is a function of its connection: for what no HTTP server would send."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

from support.proxy_under_test import ProxyUnderTest
from support.scripted_engine import FakeEngine

from launcher.base.address import TcpAddress

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class RawEngine(FakeEngine):
    """What `serve` makes of a connection, over TCP or a UNIX socket."""

    def __init__(self, path: Path, serve: Serve, *, tcp: bool = False) -> None:
        super().__init__(path)
        self._serve = serve  # type: ignore[method-assign]
        self._tcp = tcp

    async def __aenter__(self) -> Self:
        if not self._tcp:
            return await super().__aenter__()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = TcpAddress("127.0.0.1", self._server.sockets[0].getsockname()[1])  # type: ignore[assignment]
        return self


async def raw_engine(proxy: ProxyUnderTest, serve: Serve, *, tcp: bool = False) -> None:
    """Slot 0."""
    engine = RawEngine(proxy.folder / "raw.sock", serve, tcp=tcp)
    await proxy.stack.enter_async_context(engine)
    proxy.server.add_upstream(0, 1, "m", engine.address, 8)
