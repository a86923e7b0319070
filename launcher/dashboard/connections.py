"""How many connections the dashboard holds: one beyond them is answered 503 and closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

MAX_CONNECTIONS: Final = 256
"""A browser opens up to six for a page: about forty people. A quarter of the 1,024 files that a process may usually open."""
# For a rejected client to send its request and get the answer; so many of these are held besides.
REFUSAL_S: Final = 1.0
MAX_REFUSALS: Final = 64
_BODY: Final = b'{"error":{"message":"cannot show the page: too many connections are open","remedy":"close other pages"}}\n'
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


class Connections:
    """Counts the connections; makes a `Gate` for each."""

    def __init__(self, make: Callable[[], asyncio.Protocol], most: int = MAX_CONNECTIONS) -> None:
        """`make`: the server's protocol for a connection that may be there."""
        self._make = make
        self._most = most
        self.open = 0
        self.refused = 0  # now

    def gate(self) -> asyncio.Protocol:
        return Gate(self)

    def take(self) -> asyncio.Protocol | None:
        """The protocol for one more; None: there are enough."""
        if self.open >= self._most:
            return None
        self.open += 1
        return self._make()


class Gate(asyncio.Protocol):
    """Stands before a server's protocol and passes on all that happens to a connection that may be there."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._inner: asyncio.Protocol | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._inner = self._connections.take()
        if self._inner is not None:
            self._inner.connection_made(transport)
            return
        self._connections.refused += 1
        if self._connections.refused > MAX_REFUSALS:
            self._transport.abort()
        else:
            self._deadline = asyncio.get_running_loop().call_later(REFUSAL_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        """Answer a rejected client after its request: closed with the request unread, it would see a reset."""
        if self._inner is not None:
            self._inner.data_received(data)
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.write(_FULL)
            self._transport.close()

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._inner is not None:
            self._connections.open -= 1
            self._inner.connection_lost(exc)
            return
        self._connections.refused -= 1
        if self._deadline is not None:
            self._deadline.cancel()
