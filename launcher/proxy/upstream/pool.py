"""Kept-alive connections to one upstream: reused while they are fresh, made when none is idle."""

from __future__ import annotations

import asyncio
from collections import deque

from launcher.proxy.upstream.connection import Call, Sink, UpstreamConnection
from launcher.proxy.upstream.endpoint import Endpoint

REUSE_S = 2.0  # uvicorn closes a connection that was idle for 5 s; a younger one is alive but for a crash


class ConnectionPool:
    """Owner of the connections to one upstream."""

    def __init__(self, endpoint: Endpoint, connect_timeout_s: float) -> None:
        self.endpoint = endpoint
        self.resend = endpoint.resend
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
            await self.endpoint.connect(make, self._connect_timeout_s)
        except TimeoutError:
            call.broken(f"no connection within {self._connect_timeout_s:g} s")
        except (OSError, UnicodeError) as error:  # UnicodeError: a host that is no domain name
            call.broken(f"cannot connect: {getattr(error, 'strerror', None) or error}")
        else:
            if call.sink is None or self.closed:
                made[0].abort()
                call.broken("the upstream was removed")
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
