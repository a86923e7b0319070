"""The least that a proxy in Python can do: bytes from one connection to another, on uvloop, nothing looked at.

Each client's connection has one of its own to an engine, opened before its first byte is passed on. No HTTP, no
limits, no accounting: the lower bound for the proxy.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
from collections.abc import Iterator
from typing import cast

import uvloop


class Engine(asyncio.Protocol):
    """The side of the engine; what comes goes to the client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Both are there."""
        self.transport = cast("asyncio.Transport", transport)
        self._client.joined(self.transport)

    def data_received(self, data: bytes) -> None:
        """To the client."""
        self._client.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        """One ends, both end."""
        del error
        self._client.transport.close()


class Client(asyncio.Protocol):
    """The side of the client."""

    def __init__(self, upstreams: Iterator[str]) -> None:
        self._upstreams = upstreams
        self._engine: asyncio.Transport | None = None
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect to an engine."""
        self.transport = cast("asyncio.Transport", transport)
        self._task = asyncio.get_running_loop().create_task(self._connect(), name="connect")

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: Engine(self), next(self._upstreams))

    def joined(self, engine: asyncio.Transport) -> None:
        """The engine is there."""
        self._engine = engine
        if self._early:
            engine.write(self._early)

    def data_received(self, data: bytes) -> None:
        """To the engine, now or when it is there."""
        if self._engine is None:
            self._early += data
        else:
            self._engine.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        """One ends, both end."""
        del error
        if self._engine is not None:
            self._engine.close()


async def _serve(port: int, upstreams: list[str]) -> None:
    make = functools.partial(Client, itertools.cycle(upstreams))
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


def main() -> None:
    """Serve for ever."""
    parser = argparse.ArgumentParser(prog="python -m bench.bare", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("upstreams", nargs="+", help="/path of a UNIX socket")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(args.port, args.upstreams))


if __name__ == "__main__":
    main()
