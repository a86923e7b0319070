"""TLS connections before their first request: counted from the accept on, their handshakes bounded in time.

`create_server(ssl=...)` tells of a connection when its handshake is done; until then its descriptor would be held
and counted by nobody. So a connection is accepted plain, and TLS begins on it here (`loop.start_tls`).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Final, cast

# Beyond all deadlines of a client's connection, which know whether it still takes its answer.
TLS_CLOSING_S: Final = 86_400.0

_Steps = Generator[Any, None, asyncio.Transport | None]


class Handshakes:
    """Owner of the handshakes under way. `close` ends them."""

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        timeout_s: float,
        has_room: Callable[[], bool],
    ) -> None:
        """`make` is called for a connection whose handshake is done; `has_room`: may another one be accepted?"""
        self._make = make
        self._context = context
        self._timeout_s = timeout_s
        self._has_room = has_room
        self._waited_for: set[asyncio.Future[None]] = set()

    def accepted(self) -> asyncio.Protocol:
        """For a connection that has just been accepted."""
        return _Plain(self)

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._waited_for)

    def close(self) -> None:
        """Give all of them up."""
        for waiter in self._waited_for:
            waiter.cancel()

    def begin(self, plain: asyncio.Transport) -> None:
        """A connection was made: the client speaks next.

        `start_tls` takes its first step within this call, without a task: uvloop begins to read once
        `connection_made` returns, also where it was told to pause (handles/basetransport.pyx, 0.23), and the first
        bytes are for TLS.
        """
        if not self._has_room():
            plain.abort()
            return
        early = _Early()
        loop = asyncio.get_running_loop()
        start = loop.start_tls(
            plain, early, self._context, server_side=True,
            ssl_handshake_timeout=self._timeout_s, ssl_shutdown_timeout=TLS_CLOSING_S,
        )  # fmt: skip
        steps = cast("_Steps", start.__await__())
        waiter: asyncio.Future[None] = next(steps)  # it has one `await`, for the end of the handshake
        self._waited_for.add(waiter)
        waiter.add_done_callback(partial(self._ended, plain, early, steps))

    def _ended(
        self, plain: asyncio.Transport, early: _Early, steps: _Steps, waiter: asyncio.Future[None]
    ) -> None:
        self._waited_for.discard(waiter)
        secured: asyncio.Transport | None = None
        try:
            next(steps)
        except StopIteration as end:
            secured = end.value
        except (OSError, asyncio.CancelledError):
            pass  # it left, took too long, or speaks no TLS; or we close
        if secured is None or secured.is_closing() or early.lost:
            plain.abort()
            return
        client = self._make()
        secured.set_protocol(client)
        client.connection_made(secured)
        if early.data and not secured.is_closing():
            client.data_received(early.data)


class _Plain(asyncio.Protocol):
    """A connection that was accepted, and nothing else."""

    __slots__ = ("_owner",)

    def __init__(self, owner: Handshakes) -> None:
        self._owner = owner

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._owner.begin(cast("asyncio.Transport", transport))


class _Early(asyncio.Protocol):
    """What a client sends with the last bytes of its handshake, until its own protocol is there."""

    __slots__ = ("data", "lost")

    def __init__(self) -> None:
        self.data = b""
        self.lost = False

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, _: Exception | None) -> None:
        self.lost = True
