"""Header fields in which a trusted proxy names its client, and the slot that it chose.

Forwarded (RFC 7239), X-Forwarded-* and X-Real-IP can be made up by any client, unless the direct peer is one of
`[proxy] trusted_proxies`. From other peers none of them passes to an instance (http1.requests removes them). X-Numa-Slot
is read from trusted peers only, and passes from nobody.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final

from launcher.proxy.http1.requests import FORWARDED_FIELDS, RequestHead, field_lines

SLOT_FIELD: Final = b"x-numa-slot"
_SLOT: Final = re.compile(r"[0-9]{1,6}")
UNIX: Final = "unix"  # the name of a peer on a UNIX socket


class TrustedProxies:
    def __init__(self, entries: Sequence[str]) -> None:
        """Each is an address, a CIDR or "unix". Raises ValueError."""
        self._unix = UNIX in entries
        self._networks = tuple(ip_network(entry) for entry in entries if entry != UNIX)

    def trusts(self, peer: str) -> bool:
        if peer == UNIX:
            return self._unix
        return any(ip_address(peer) in network for network in self._networks)


def peer_name(address: object) -> str:
    """A connection's direct peer, of its socket's address: an IP address, or "unix"."""
    if not isinstance(address, tuple) or not address:
        return UNIX
    found = ip_address(str(address[0]).partition("%")[0])  # without a scope such as %eth0
    return str((isinstance(found, IPv6Address) and found.ipv4_mapped) or found)


def appended(head: RequestHead, peer: str) -> bytes:
    """Field lines for an instance: those of a trusted peer, with its own address appended."""
    lines = {name: head.all(name) for name in (b"x-forwarded-for", b"forwarded")}
    if peer != UNIX:
        lines[b"x-forwarded-for"].append(peer)
        if lines[b"forwarded"]:
            lines[b"forwarded"].append(f'for="[{peer}]"' if ":" in peer else f"for={peer}")
    joined = b"".join(
        b"%b: %b\r\n" % (name, ", ".join(values).encode()) for name, values in lines.items() if values
    )
    return joined + field_lines(head, FORWARDED_FIELDS, but=tuple(lines))


def wished_slot(head: RequestHead) -> int | None:
    """The slot that a gateway chose for the request; None where it names none."""
    said = head.get(SLOT_FIELD)
    return int(said) if said is not None and _SLOT.fullmatch(said) else None
