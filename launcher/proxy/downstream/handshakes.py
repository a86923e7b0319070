"""TLS handshakes: connections are counted from the accept on, and handshakes are bounded in time.

`create_server(ssl=...)` reports a connection after its handshake; until then it could be neither counted nor refused.
So connections are accepted here, and each handshake is a task (`loop.connect_accepted_socket`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

from launcher.errors import OWN_SHORTAGE

ACCEPTS: Final = 8  # per turn of the loop; a handshake takes about a millisecond of CPU time
RETRY_S: Final = 1.0  # between two attempts to accept while the process lacks descriptors or memory
TLS_CLOSING_S: Final = 86_400.0  # longer than all deadlines of a client's connection

_LOG = logging.getLogger(__name__)


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
