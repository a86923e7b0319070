"""When certificates end (RFC 5280 section 4.1.2.5). Pure; ssl does not tell it of the certificates that a server sends."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from typing import Final

_BLOCK: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
# Tags of X.690.
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_LONG: Final = 0x80
# Of a UTCTime's two digits: 50 and later are of the last century.
_CENTURY: Final = 50


def earliest_end(pem: str) -> float | None:
    """Seconds since the epoch at which the first certificate of a chain ends; None where none can be read."""
    try:
        return min((_end(ssl.PEM_cert_to_DER_cert(block)) for block in _BLOCK.findall(pem)), default=None)
    except (ValueError, IndexError):
        return None


def _end(der: bytes) -> float:
    at, _ = _inside(der, 0)  # Certificate
    at, _ = _inside(der, at)  # TBSCertificate
    # version (optional), serialNumber, signature, issuer
    for _ in range(4 if der[at] == _VERSION else 3):
        at = sum(_inside(der, at))
    at, _ = _inside(der, at)  # Validity
    at = sum(_inside(der, at))  # notBefore
    begin, size = _inside(der, at)
    text = der[begin : begin + size].decode("ascii")
    if der[at] == _UTC_TIME:
        text = ("19" if int(text[:2]) >= _CENTURY else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _inside(der: bytes, at: int) -> tuple[int, int]:
    """Begin and size of a value's contents."""
    size, at = der[at + 1], at + 2
    if size < _LONG:
        return at, size
    digits = size - _LONG
    return at + digits, int.from_bytes(der[at : at + digits], "big")
