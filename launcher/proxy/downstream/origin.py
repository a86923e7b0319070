"""Cross-origin requests from pages in browsers, for the origins that `[proxy] cors_origins` names.

The Fetch standard's protocol (https://fetch.spec.whatwg.org/#http-cors-protocol): a preflight is answered
here and never reaches an instance; every other response to an allowed origin gets a few header lines. Cookies are not
used (`Access-Control-Allow-Credentials` is not sent): keys come in `Authorization`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final

from launcher.proxy.http1.requests import FORWARDED_FIELDS, RequestHead, field_lines

MAX_AGE_S: Final = 7200  # Chrome's upper bound; Firefox takes a day
METHODS: Final = "GET, HEAD, POST"
EXPOSED: Final = "X-Request-Id, Retry-After, Server-Timing, X-Served-By"
"""Header fields that a page's script may read, besides those that it always may."""

ANY: Final = "*"
_TOKENS: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[\x21-\x2b\x2d-\x7e]+|null")
MAX_ASKED: Final = 2048  # characters of Access-Control-Request-Headers


@dataclass(frozen=True)
class Cors:
    """The origins that may call, as browsers write them ("https://chat.example.org"), or "*" for all."""

    origins: tuple[str, ...] = ()

    @cached_property
    def _allowed(self) -> frozenset[str]:
        return frozenset(origin.rstrip("/").lower() for origin in self.origins)

    def allows(self, origin: str) -> bool:
        return ANY in self._allowed or origin.lower() in self._allowed

    def lines(self, origin: str | None) -> bytes:
        """Header lines, each ended by CRLF, of every response to a request with this `Origin`.

        Where origins are named, `Vary` tells caches that the response depends on it, also when it is refused.
        """
        if not self.origins:
            return b""
        if ANY in self._allowed:
            return _ALLOW_ANY if origin is not None else b""
        if origin is None or not self.allows(origin) or _ORIGIN.fullmatch(origin.lower()) is None:
            return b"Vary: Origin\r\n"
        return b"Access-Control-Allow-Origin: %s\r\n%sVary: Origin\r\n" % (origin.encode(), _EXPOSE)

    def preflight(
        self, origin: str | None, method: str | None, headers: str | None
    ) -> tuple[int, bytes] | None:
        """Status and header lines of the response to an OPTIONS request; its body is empty.

        `method` and `headers` are its Access-Control-Request-Method and -Headers. None: it is no preflight
        (no Origin, no method), or no origin may call; then OPTIONS is an unsupported method.
        """
        if not self.origins or origin is None or method is None:
            return None
        if not self.allows(origin):
            return 403, self.lines(origin)
        asked = headers if headers and len(headers) <= MAX_ASKED and _TOKENS.fullmatch(headers) else ""
        # All that are asked for: `Authorization` is not covered by "*" (Fetch, CORS-unsafe request-headers).
        allow = f"Access-Control-Allow-Headers: {asked}\r\n" if asked else ""
        return 204, self.lines(origin) + (
            f"Access-Control-Allow-Methods: {METHODS}\r\n{allow}Access-Control-Max-Age: {MAX_AGE_S}\r\n"
            "Vary: Access-Control-Request-Method, Access-Control-Request-Headers\r\n"
        ).encode("ascii")


_EXPOSE: Final = b"Access-Control-Expose-Headers: %s\r\n" % EXPOSED.encode()
_ALLOW_ANY: Final = b"Access-Control-Allow-Origin: *\r\n" + _EXPOSE


# --- Header fields in which a trusted proxy names its client, and the slot that it chose. ---
#
# Forwarded (RFC 7239), X-Forwarded-* and X-Real-IP can be made up by any client, unless the direct peer is one of
# `[proxy] trusted_proxies`. From other peers none of them passes to an instance (http1.requests removes them). X-Numa-Slot
# is read from trusted peers only, and passes from nobody.

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
