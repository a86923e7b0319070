"""Where an upstream is, and how a connection to it is made."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from launcher.address import Address, TcpAddress, UnixAddress

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
