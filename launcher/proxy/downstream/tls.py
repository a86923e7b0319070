"""TLS for the TCP listeners: certificate and key from files, read again when they change.

`ServerTls.context` is used for every handshake; its servername callback, which OpenSSL calls for clients that name no
server, too, puts the newest valid context in its place. `load_cert_chain` on the context in use would keep an RSA chain
beside the ECDSA chain that replaces it, and leave it half loaded when the new key does not fit.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from launcher.errors import LauncherError, reason
from launcher.proxy.downstream.certificate import earliest_end
from launcher.proxy.watched_file import WatchedFile, excess_mode

ALPN: Final = ("http/1.1",)
KEY_MODE: Final = 0o770  # no access for others

_LOG = logging.getLogger(__name__)
_REMEDY: Final = "name a PEM chain in [proxy] tls_certificate and its PEM key in tls_key"


class ServerTls:
    """The certificate in force. Its files are checked during handshakes, at most once a second."""

    def __init__(
        self, certificate: str, key: str | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`key` None: it is in the certificate's file. Raises LauncherError for unusable files."""
        self._clock = clock
        # A chain and its key seldom change at the same moment: files that do not fit together are refused until the
        # next change.
        load = partial(_load, certificate, key)
        self._newest = WatchedFile("TLS certificate", load, certificate, key or certificate)
        if mode := excess_mode(os.stat(key or certificate), KEY_MODE):  # noqa: PTH116
            text = "the TLS key %s has mode %s: other users can read it; chmod 600 %s"
            _LOG.warning(text, key or certificate, mode, key or certificate)
        self.context = _load(certificate, key).context  # for handshakes
        self.context.sni_callback = self._choose

    @property
    def end(self) -> float | None:
        """When the certificate in force ends, seconds since the epoch; None where that cannot be read."""
        return self._newest.latest(self._clock()).end

    def reload(self) -> bool:
        """Read the files now. False: they cannot be used, and the certificate stays."""
        return self._newest.reload()

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        """Called in each handshake, before a certificate is sent."""
        connection.context = self._newest.latest(self._clock()).context


class _Loaded(NamedTuple):
    context: ssl.SSLContext
    end: float | None


def _load(certificate: str, key: str | None) -> _Loaded:
    """TLS 1.2 or later, forward secrecy, no compression, HTTP/1.1."""
    for path in dict.fromkeys((certificate, key or certificate)):
        try:
            with open(path, "rb"):  # noqa: PTH123 - ssl says "No such file" and not of which
                pass
        except OSError as error:
            raise LauncherError(f"cannot read the TLS file '{path}': {reason(error)}", _REMEDY) from None
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
        raise LauncherError(f"{what}: {_why(error)}", _REMEDY) from None
    try:
        chain = Path(certificate).read_text(encoding="ascii", errors="replace")
    except OSError:  # replaced since; the change is read next
        chain = ""
    return _Loaded(context, earliest_end(chain))


class _EncryptedError(Exception):
    pass


def _no_password() -> str:
    raise _EncryptedError


def _why(error: OSError) -> str:
    found = getattr(error, "reason", None)
    return {
        "KEY_VALUES_MISMATCH": "the key is not that of the certificate",
        "NO_CERTIFICATE_ASSIGNED": "the key is not that of the certificate",  # another type of key
        "NO_START_LINE": "no PEM block in it",
    }.get(str(found), str(found or error))
