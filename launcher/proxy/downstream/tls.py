"""TLS for the TCP listeners: certificate and key from files, read again when they change.

`ServerTls.context` is used for every handshake; its servername callback, which OpenSSL calls for clients that name no
server, too, puts the newest valid context in its place. `load_cert_chain` on the context in use would keep an RSA chain
beside the ECDSA chain that replaces it, and leave it half loaded when the new key does not fit.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import socket
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from launcher.base.errors import OWN_SHORTAGE, LauncherError, reason
from launcher.base.files import excess_mode
from launcher.base.watched_file import Validity, WatchedFile

_LOG = logging.getLogger(__name__)


# --- When certificates end (RFC 5280 section 4.1.2.5). Pure; ssl does not tell it of the certificates that a server
# sends.

_BLOCK: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
# Tags of X.690.
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_LONG: Final = 0x80
# Of a UTCTime's two digits: 50 and later are of the last century.
_CENTURY: Final = 50


def validity(pem: str) -> Validity | None:
    """When all certificates of a chain are valid; None where none can be read."""
    bounds = validities(pem)
    return (max(begin for begin, _ in bounds), min(end for _, end in bounds)) if bounds else None


def fingerprints(pem: str) -> set[str]:
    """SHA-1 of each certificate, as HAProxy names them."""
    return {
        hashlib.sha1(ssl.PEM_cert_to_DER_cert(block), usedforsecurity=False).hexdigest()
        for block in _BLOCK.findall(pem)
    }


def validities(pem: str) -> list[Validity]:
    """Begin and end of each certificate; none where one cannot be read."""
    try:
        return [_validity(ssl.PEM_cert_to_DER_cert(block)) for block in _BLOCK.findall(pem)]
    except (ValueError, IndexError):
        return []


def _validity(der: bytes) -> Validity:
    at, _ = _inside(der, 0)  # Certificate
    at, _ = _inside(der, at)  # TBSCertificate
    # version (optional), serialNumber, signature, issuer
    for _ in range(4 if der[at] == _VERSION else 3):
        at = sum(_inside(der, at))
    at, _ = _inside(der, at)  # Validity
    return _time(der, at), _time(der, sum(_inside(der, at)))


def _time(der: bytes, at: int) -> float:
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


ALPN: Final = ("http/1.1",)
KEY_MODE: Final = 0o770  # no access for others

_REMEDY: Final = "name a PEM chain in [proxy] tls_certificate and its PEM key in tls_key"


class ServerTls:
    """The certificate in force. A change of its files is looked for during handshakes, which do not wait for it."""

    def __init__(
        self,
        certificate: str,
        key: str | None = None,
        *,
        what: str = "TLS certificate",
        remedy: str = _REMEDY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`key` None: it is in the certificate's file. `what`: its use, in messages. Raises LauncherError for unusable
        files, with `remedy`."""
        self._clock = clock
        # A chain and its key seldom change at the same moment: files that do not fit together are refused until the
        # next change.
        load = partial(load_chain, certificate, key, remedy)
        self._newest = WatchedFile(
            what, load, certificate, key or certificate, validity=lambda loaded: loaded.validity
        )
        if mode := excess_mode(os.stat(key or certificate), KEY_MODE):  # noqa: PTH116
            text = "the TLS key %s has mode %s: other users can read it; chmod 600 %s"
            _LOG.warning(text, key or certificate, mode, key or certificate)
        self.files = (self._newest,)
        self.context = load().context  # for handshakes
        self.context.sni_callback = self._choose

    @property
    def end(self) -> float | None:
        """When the certificate in force ends, seconds since the epoch; None where that cannot be read."""
        bounds = self._newest.latest(self._clock()).validity
        return None if bounds is None else bounds[1]

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        """Called in each handshake, before a certificate is sent."""
        connection.context = self._newest.latest(self._clock()).context


class Chain(NamedTuple):
    """A chain with its key, read."""

    context: ssl.SSLContext
    validity: Validity | None
    pem: str
    """The file of the chain."""


def load_chain(certificate: str, key: str | None, remedy: str) -> Chain:
    """Raises LauncherError with `remedy`. TLS 1.2 or later, forward secrecy, no compression, HTTP/1.1."""
    for path in dict.fromkeys((certificate, key or certificate)):
        try:
            with open(path, "rb"):  # noqa: PTH123 - ssl says "No such file" and not of which
                pass
        except OSError as error:
            raise LauncherError(f"cannot read the TLS file '{path}': {reason(error)}", remedy) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(list(ALPN))
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except _EncryptedError:
        raise LauncherError(
            f"cannot use the TLS key '{key or certificate}': it is encrypted",
            "write it without a password (openssl pkey -in OLD -out NEW; chmod 600 NEW)",
        ) from None
    except (ssl.SSLError, OSError) as error:
        what = f"cannot use the TLS certificate '{certificate}'"
        raise LauncherError(f"{what}: {_why(error)}", remedy) from None
    try:
        chain = Path(certificate).read_text(encoding="ascii", errors="replace")
    except OSError:  # replaced since; the change is read next
        chain = ""
    return Chain(context, validity(chain), chain)


class _EncryptedError(Exception):
    pass


def _no_password() -> str:
    raise _EncryptedError


def _why(error: OSError) -> str:
    if "PEM lib" in str(error):  # OpenSSL's parser gives no reason
        return "it lacks a certificate or a key in PEM form"
    found = getattr(error, "reason", None)
    return {
        "KEY_VALUES_MISMATCH": "the key is not that of the certificate",
        "NO_CERTIFICATE_ASSIGNED": "the key is not that of the certificate",  # another type of key
        "NO_START_LINE": "no PEM block in it",
    }.get(str(found), str(found or error))


# --- TLS handshakes: connections are counted from the accept on, and handshakes are bounded in time. ---
#
# `create_server(ssl=...)` reports a connection after its handshake; until then it could be neither counted nor refused.
# So connections are accepted here, and each handshake is a task (`loop.connect_accepted_socket`).

ACCEPTS: Final = 8  # per turn of the loop; a handshake takes about a millisecond of CPU time
RETRY_S: Final = 1.0  # between two attempts to accept while the process lacks descriptors or memory
TLS_CLOSING_S: Final = 86_400.0  # longer than all deadlines of a client's connection


class Handshakes:
    """Owns the listening TLS sockets and the handshakes in progress; `close` ends both."""

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        timeout_s: float,
        below_limit: Callable[[], bool],
    ) -> None:
        """`make` is called for each accepted connection; its `connection_made` after the handshake."""
        self._make = make
        self._context = context
        self._timeout_s = timeout_s
        self._below_limit = below_limit
        self._loop = asyncio.get_running_loop()
        self._listening: list[socket.socket] = []
        self._in_progress: dict[asyncio.Protocol, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._in_progress)

    def ended(self, connection: asyncio.Protocol) -> None:
        self._in_progress.pop(connection, None)

    def listen(self, sock: socket.socket) -> None:
        self._listening.append(sock)
        self._loop.add_reader(sock.fileno(), self._accept, sock)

    def close(self) -> None:
        for sock in self._listening:
            self._loop.remove_reader(sock.fileno())
            sock.close()
        self._listening.clear()
        for task in self._in_progress.values():
            task.cancel()

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(ACCEPTS):
            try:
                accepted, _address = sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in OWN_SHORTAGE:
                    continue  # an error of that connection (accept(2))
                _LOG.warning("cannot accept a connection: %s; next attempt in %g s", error.strerror, RETRY_S)
                self._loop.remove_reader(sock.fileno())
                self._loop.call_later(RETRY_S, self._accept_again, sock)
                return
            if not self._below_limit():
                accepted.close()
                continue
            accepted.setblocking(False)
            connection = self._make()
            shaking = self._shake_hands(accepted, connection)
            self._in_progress[connection] = self._loop.create_task(shaking, name="TLS handshake")

    def _accept_again(self, sock: socket.socket) -> None:
        if sock in self._listening:
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    async def _shake_hands(self, accepted: socket.socket, connection: asyncio.Protocol) -> None:
        try:
            # The client left, timed out, or speaks no TLS; ssl.SSLError is an OSError.
            with contextlib.suppress(OSError):
                await self._loop.connect_accepted_socket(
                    lambda: connection, accepted, ssl=self._context,
                    ssl_handshake_timeout=self._timeout_s, ssl_shutdown_timeout=TLS_CLOSING_S,
                )  # fmt: skip
        finally:
            self.ended(connection)
