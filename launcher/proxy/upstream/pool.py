"""Kept-alive connections to one upstream: reused while they are fresh, made when none is idle."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from launcher.base.address import Address, TcpAddress, UnixAddress
from launcher.proxy.upstream.connection import Sink, UpstreamConnection

# --- Where an upstream is, and how a connection to it is made. ---

MakeProtocol = Callable[[], asyncio.Protocol]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An upstream's address, and how connections to it are made."""

    address: Address
    external: bool = False
    """Somebody else's API, found by name. It may have read a request whose connection closed: none is sent again."""
    tls: ssl.SSLContext | None = None

    async def connect(self, make: MakeProtocol, timeout_s: float) -> None:
        """Connect within `timeout_s`, name look-up and all addresses included. Raises OSError and TimeoutError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            if isinstance(self.address, UnixAddress):
                await loop.create_unix_connection(make, self.address.path)
            elif self.external:
                await self._connect_to_name(make, self.address, loop.time() + timeout_s)
            else:
                await loop.create_connection(make, self.address.host, self.address.port)

    async def _connect_to_name(self, make: MakeProtocol, address: TcpAddress, deadline: float) -> None:
        """Try the name's addresses in turn, each for an equal share of the time that is left: one that drops packets
        leaves some for the next."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        hosts = [str(entry[4][0]) for entry in found]
        name = None if self.tls is None else address.host
        for left, host in zip(range(len(hosts), 0, -1), hosts, strict=True):
            try:
                async with asyncio.timeout((deadline - loop.time()) / left):
                    await loop.create_connection(make, host, address.port, ssl=self.tls, server_hostname=name)
            except (OSError, TimeoutError):
                if left == 1:
                    raise
            else:
                return


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
