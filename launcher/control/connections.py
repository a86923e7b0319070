"""Who may hold a connection to the control socket, and how many: decided before a byte is read."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final, cast

from launcher.control.peers import peer_of

# Of one user, root apart: where everybody may connect (read_group) nobody takes all of the daemon's descriptors, and
# `top`, some `logs -f` and a monitor are far below.
MAX_PER_USER: Final = 64
MAX_IN_ALL: Final = 512
# For a rejected client to send its request and get the answer.
REFUSAL_S: Final = 1.0
_FULL: Final = b"""HTTP/1.1 503 Service Unavailable\r
Content-Type: application/json\r
Connection: close\r
\r
{"error":{"message":"cannot use the control socket: too many connections are open","remedy":"end one of them"}}
"""


class Counts:
    def __init__(self) -> None:
        self._of_user: Counter[int] = Counter()

    def take(self, uid: int) -> bool:
        """One more of this user; False: he has enough. Root may always."""
        if uid and (self._of_user[uid] >= MAX_PER_USER or self._of_user.total() >= MAX_IN_ALL):
            return False
        self._of_user[uid] += 1
        return True

    def give(self, uid: int) -> None:
        self._of_user[uid] -= 1


class Gate(asyncio.Protocol):
    """Stands before a server's protocol and passes on all that happens to a connection that may be there."""

    def __init__(self, make: Callable[[], asyncio.Protocol], counts: Counts, stall_s: float) -> None:
        """`stall_s`: a peer that takes nothing of what is written to it for so long is cut off."""
        self._make, self._counts, self._stall_s = make, counts, stall_s
        self._stalled: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._inner: asyncio.Protocol | None = None
        self._uid = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's is of no such class
        peer = peer_of(transport)
        if peer is None or not self._counts.take(peer.uid):
            self._stalled = asyncio.get_running_loop().call_later(REFUSAL_S, transport.abort)
            return
        self._uid = peer.uid
        self._inner = self._make()
        self._inner.connection_made(transport)

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
        if self._inner is not None and self._transport is not None:
            self._stalled = asyncio.get_running_loop().call_later(self._stall_s, self._transport.abort)
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._forget()
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        if self._inner is not None:
            self._counts.give(self._uid)
            self._inner.connection_lost(exc)

    def _forget(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
