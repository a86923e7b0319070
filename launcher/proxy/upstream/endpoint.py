"""Where an upstream is, how a connection to it is made, and which header fields pass."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from launcher.address import Address, TcpAddress, UnixAddress
from launcher.proxy.http1 import RequestHead, ResponseHead, lines_of, selected_head

MakeProtocol = Callable[[], asyncio.Protocol]


@dataclass(frozen=True, slots=True)
class HeaderPolicy:
    """What passes to and from an endpoint that somebody else runs. Names are in lower case."""

    request_fields: frozenset[bytes]
    response_fields: frozenset[bytes]
    added: bytes
    """Field lines that every response gets, each ended by CRLF."""
    refused: frozenset[int]
    """Statuses that say more of our credentials, or of the way there, than of the client's request."""

    def unusable(self, head: ResponseHead) -> str | None:
        """Why the client can't have this response; None: it can."""
        if head.status in self.refused:
            return f"it answered {head.status}"
        coding = head.get(b"content-encoding")
        if coding is not None and coding.lower() != "identity":  # not asked for; the client may not read it
            return f"it answered with Content-Encoding {coding}"
        return None

    def response(self, head: ResponseHead) -> ResponseHead:
        """The head that the client gets."""
        kept = b"".join(head.lines[start:end] for start, end in lines_of(head.lowered, self.response_fields))
        return head.with_lines(b"%b\r\n%b" % (kept, self.added))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An upstream's address and what it needs: an instance's is the address alone."""

    address: Address
    tls: ssl.SSLContext | None = None
    authority: bytes = b"localhost"
    base_path: bytes = b""
    policy: HeaderPolicy | None = None
    """None: all fields pass but those of one hop (RFC 9110 section 7.6.1)."""
    resend: bool = True
    """Send a request again whose kept-alive connection closed at once, without a byte. An instance may have read it."""

    def head(self, head: RequestHead, request_id: str, path: str, length: int, own_lines: bytes) -> bytes:
        """The request's head under this endpoint's header policy; `own_lines` are added, each ended by CRLF."""
        if self.policy is None:
            raise AssertionError("an instance gets the client's head: http1.upstream_head")
        target = self.base_path + path.encode()
        names = self.policy.request_fields
        return selected_head(
            head, request_id, length, target=target, host=self.authority, names=names, extra=own_lines
        )

    async def connect(self, make: MakeProtocol, timeout_s: float) -> None:
        """Connect within `timeout_s`, name look-up and all addresses included. Raises OSError and TimeoutError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            if isinstance(self.address, UnixAddress):
                await loop.create_unix_connection(make, self.address.path)
            elif self.policy is None:
                await loop.create_connection(make, self.address.host, self.address.port)
            else:
                await self._connect_to_name(make, self.address, loop.time() + timeout_s)

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
