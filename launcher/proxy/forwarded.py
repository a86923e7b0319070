"""Whose request it is: the direct peer's, or the client's that a trusted proxy names.

Forwarded (RFC 7239), X-Forwarded-* and X-Real-IP are a client's own word unless the direct peer is one of
`[proxy] trusted_proxies`. Without that none of them goes on to an instance (http1.requests cuts them out).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final

from launcher.proxy.http1 import FORWARDED_FIELDS, RequestHead, field_lines

UNIX: Final = "unix"  # a peer on a UNIX socket, which has no address

_FOR: Final = re.compile(
    r'(?:^|;)[ \t]*for=(?:"([^"]*)"|([^;]*))', re.IGNORECASE
)  # of one element (RFC 7239 4)
_WITH_PORT: Final = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::[0-9]+)?|([0-9.]+):[0-9]+")


class TrustedProxies:
    """The peers whose word on their own client counts."""

    def __init__(self, entries: Sequence[str]) -> None:
        """Each is an address, a CIDR or "unix". Raises ValueError."""
        self._unix = UNIX in entries
        self._networks = tuple(ip_network(entry) for entry in entries if entry != UNIX)

    def trusts(self, peer: str) -> bool:
        """Whether this direct peer (`peer_name`) is one of them."""
        if peer == UNIX:
            return self._unix
        address = _address(peer)
        return address is not None and self._includes(address)

    def client_of(self, head: RequestHead, peer: str) -> str:
        """The client that a trusted peer's request comes from: the last address in the list that is no trusted
        proxy's. What a client wrote into it stands before the address that the first trusted proxy added."""
        client = peer
        for said in _said(head):
            address = _address(said)
            if address is None:
                break
            client = str(address)
            if not self._includes(address):
                break
        return client

    def _includes(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address in network for network in self._networks)


def peer_name(address: object) -> str:
    """A connection's direct peer, of its socket's address: an IP address, or "unix"."""
    if not isinstance(address, tuple) or not address:
        return UNIX
    found = _address(str(address[0]))
    return UNIX if found is None else str(found)


def appended(head: RequestHead, peer: str) -> bytes:
    """Field lines for an instance: what a trusted peer said of its client, and its own address behind it."""
    lines = {name: head.all(name) for name in (b"x-forwarded-for", b"forwarded")}
    if peer != UNIX:
        lines[b"x-forwarded-for"].append(peer)
        if lines[b"forwarded"]:
            lines[b"forwarded"].append(f'for="[{peer}]"' if ":" in peer else f"for={peer}")
    joined = b"".join(
        b"%b: %b\r\n" % (name, ", ".join(values).encode()) for name, values in lines.items() if values
    )
    return joined + field_lines(head, FORWARDED_FIELDS, but=tuple(lines))


def _said(head: RequestHead) -> Iterator[str]:
    """The addresses that a peer names, its direct client first, by the first of the fields that is there."""
    if listed := head.all(b"x-forwarded-for"):
        yield from _from_the_end(listed)
    elif listed := head.all(b"forwarded"):
        for element in _from_the_end(listed):
            found = _FOR.search(element)
            yield "" if found is None else (found[1] or found[2] or "").strip()
    elif real := head.get(b"x-real-ip"):
        yield real


def _from_the_end(values: Iterable[str]) -> Iterator[str]:
    """The elements of a comma-separated list."""
    return (element.strip() for element in reversed(",".join(values).split(",")))


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """An address, also with a port; None for anything else. One that was mapped into IPv6 is the IPv4 one."""
    with_port = _WITH_PORT.fullmatch(text)
    try:
        found = ip_address(text if with_port is None else with_port[1] or with_port[2])
    except ValueError:
        return None
    return (isinstance(found, IPv6Address) and found.ipv4_mapped) or found
