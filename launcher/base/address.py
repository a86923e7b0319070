"""Where an instance listens: a UNIX socket, or a loopback port for engines that have no other way; hosts in URLs."""

from __future__ import annotations

from msgspec import Struct


class UnixAddress(Struct, frozen=True):
    """An instance that listens on a UNIX socket."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


class TcpAddress(Struct, frozen=True):
    """An instance that listens on a loopback port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


Address = UnixAddress | TcpAddress


def in_url(host: str) -> str:
    """A name or an IP address as it stands before a port: IPv6 in brackets (RFC 3986, 3.2.2)."""
    return f"[{host}]" if ":" in host else host
