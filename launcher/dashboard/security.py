"""Which requests the dashboard answers, and the headers of every response. Pure.

A page of another origin must neither read the data nor embed the page: the token is in no cookie, no response has CORS
headers, and the Host header names this machine (against DNS rebinding).
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Final

HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    # Data is kept nowhere. Static files replace it with `no-cache`: kept, and compared by their ETag.
    "Cache-Control": "no-store",
}
DOCUMENT_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Of all but scripts and styles, which have no data: a view loads thirty of those."""
# Names under which a browser on this machine, or at the end of `ssh -L`, asks. The port may be ssh's.
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})


def is_own_host(host: str) -> bool:
    """Whether a Host header names this machine."""
    name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
    return name.lower() in _LOOPBACK and (not port or port.isdecimal())


def is_foreign(headers: Mapping[str, str]) -> bool:
    """Whether a page of another origin asks: another port of this machine is one, too."""
    site = headers.get("Sec-Fetch-Site")
    if site is not None:
        return site not in {"same-origin", "none"}
    origin = headers.get("Origin")
    return origin is not None and origin.partition("://")[2] != headers.get("Host")


def has_token(authorization: str, token: str) -> bool:
    """Whether the header Authorization is `Bearer TOKEN`, compared in constant time."""
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        given.strip().encode(errors="replace"), token.encode()
    )
