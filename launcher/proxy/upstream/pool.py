"""Kept-alive connections to one upstream: reused while they are fresh, made when none is idle."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import assert_never

from launcher.address import Address, TcpAddress, UnixAddress
from launcher.proxy.upstream.connection import Call, Sink, UpstreamConnection

REUSE_S = 2.0  # uvicorn closes a connection that was idle for 5 s; a younger one is alive but for a crash

Connect = Callable[[Callable[[], UpstreamConnection]], Awaitable[object]]


def connector(address: Address) -> Connect:
    """How to connect to an address."""
    loop = asyncio.get_running_loop()
    match address:
        case UnixAddress(path):
            return lambda make: loop.create_unix_connection(make, path)
        case TcpAddress(host, port):
            return lambda make: loop.create_connection(make, host, port)
    assert_never(address)


class ConnectionPool:
    """How to talk to one upstream; owner of its connections."""

    def __init__(self, connect: Connect, connect_timeout_s: float) -> None:
        self._connect = connect
        self._connect_timeout_s = connect_timeout_s
        self.closed = False
        self._clock = asyncio.get_running_loop().time
        self._idle: deque[tuple[float, UpstreamConnection]] = deque()  # the one that is idle longest first

    def ask(self, sink: Sink, method: str, head: bytes, body: bytes | bytearray) -> Call:
        """Send a request. `head` is whole, with its blank line; the sink may hear of it before this returns."""
        call = Call(sink, method, head, body)
        oldest = self._clock() - REUSE_S
        while self._idle:
            since, connection = self._idle.pop()
            if since >= oldest:
                connection.send(call)
                return call
            connection.abort()
        self.connect(call)
        return call

    def connect(self, call: Call) -> None:
        """Send the call on a new connection."""
        call.fresh, call.sent = True, False
        call.connecting = asyncio.get_running_loop().create_task(
            self._send_on_new(call), name="connect to an upstream"
        )

    async def _send_on_new(self, call: Call) -> None:
        made: list[UpstreamConnection] = []

        def make() -> UpstreamConnection:
            made.append(UpstreamConnection(self))
            return made[0]

        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._connect(make)
        except TimeoutError:
            call.broken(f"no connection within {self._connect_timeout_s:g} s")
        except OSError as error:
            call.broken(f"cannot connect: {error.strerror or error}")
        else:
            if call.sink is None or self.closed:
                made[0].abort()
                call.broken("the instance is gone")
            else:
                made[0].send(call)

    def sweep(self, now: float) -> None:
        """Close the connections that have been idle for longer than they are reused: each is a descriptor."""
        while self._idle and self._idle[0][0] < now - REUSE_S:
            _, connection = self._idle.popleft()
            connection.abort()

    def close(self) -> None:
        """Close the idle connections; those at work close when they are done."""
        self.closed = True
        for _, connection in self._idle:
            connection.abort()
        self._idle.clear()

    def keep(self, connection: UpstreamConnection) -> None:
        """A connection is free again."""
        if self.closed:
            connection.abort()
        else:
            self._idle.append((self._clock(), connection))

    def lost(self, connection: UpstreamConnection) -> None:
        """A connection is gone."""
        self._idle = deque(kept for kept in self._idle if kept[1] is not connection)
