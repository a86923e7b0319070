"""Kept-alive connections to one upstream: reused while they are fresh, made when none is idle."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

from launcher.proxy.upstream.connection import Sink, UpstreamConnection
from launcher.proxy.upstream.endpoint import Endpoint

REUSE_S = 2.0  # uvicorn closes a connection that was idle for 5 s; a younger one is alive but for a crash


class ConnectionPool:
    """Owner of the connections to one upstream."""

    def __init__(self, endpoint: Endpoint, connect_timeout_s: float) -> None:
        self.endpoint = endpoint
        self.resend = not endpoint.external
        self._connect_timeout_s = connect_timeout_s
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._idle: deque[tuple[float, UpstreamConnection]] = deque()  # the one that is idle longest first

    def send(
        self, sink: Sink, method: str, head: bytes, body: bytes | bytearray | memoryview, now: float
    ) -> UpstreamConnection:
        """Send a request on an idle connection or a new one."""
        idle = self._idle
        if idle and idle[-1][0] < now - REUSE_S:
            self.sweep(now)  # the youngest is too old, and so are all
        connection = idle.pop()[1] if idle else UpstreamConnection(self)
        connection.send(sink, method, head, body, now)
        return connection

    def connect(self, connection: UpstreamConnection) -> asyncio.Task[None]:
        return self._loop.create_task(self._connect(connection), name="connect to an upstream")

    async def _connect(self, connection: UpstreamConnection) -> None:
        protocol = cast("asyncio.Protocol", connection)
        try:
            await self.endpoint.connect(lambda: protocol, self._connect_timeout_s)
        except TimeoutError:
            connection.not_connected(f"no connection within {self._connect_timeout_s:g} s")
        except (OSError, UnicodeError) as error:  # UnicodeError: a host that is no domain name
            connection.not_connected(f"cannot connect: {getattr(error, 'strerror', None) or error}")
        else:
            connection.connected()

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
        if self.closed:
            connection.abort()
        else:
            self._idle.append((self._loop.time(), connection))

    def lost(self, connection: UpstreamConnection) -> None:
        if self._idle:
            self._idle = deque(kept for kept in self._idle if kept[1] is not connection)
