"""Who may hold a connection to the control socket, and how many: decided before a byte is read."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import socket
import struct
from collections import Counter
from collections.abc import Callable
from typing import Final, cast

from msgspec import Struct

from launcher.base.background import InTurns
from launcher.base.errors import LauncherError

# --- The peer of a control connection, as the kernel reports it, and its rights. ---

# <asm-generic/socket.h>; Linux 4.13. Python's socket module has no name for it.
SO_PEERGROUPS: Final = 59
# What Python's getsockopt takes at most, as 32-bit group ids: 256 groups.
_GROUPS_BYTES: Final = 1024


class Peer(Struct, frozen=True):
    """A process, when it connected."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int] = frozenset()
    """Its supplementary groups."""

    @property
    def user(self) -> str:
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return str(self.uid)


def peer_of(transport: asyncio.BaseTransport | None) -> Peer | None:
    """Credentials and groups of a UNIX socket's peer (unix(7), SO_PEERCRED; SO_PEERGROUPS)."""
    raw = transport.get_extra_info("socket") if transport is not None else None
    if raw is None or raw.family != socket.AF_UNIX:
        return None
    size = struct.calcsize("3i")
    pid, uid, gid = struct.unpack("3i", raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return Peer(pid, uid, gid, _groups(raw, uid, gid))


def _groups(raw: socket.socket, uid: int, gid: int) -> frozenset[int]:
    try:
        packed = raw.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:  # an old kernel, or more groups than fit: what the user database says
        return _groups_by_name(uid, gid)
    return frozenset(struct.unpack(f"{len(packed) // 4}I", packed))


def _groups_by_name(uid: int, gid: int) -> frozenset[int]:
    try:
        return frozenset(os.getgrouplist(pwd.getpwuid(uid).pw_name, gid))
    except KeyError:
        return frozenset()


def group_id(name: str | None, key: str = "group") -> int | None:
    """The id of a configured group. Raises LauncherError when no such option."""
    if name is None:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise LauncherError(
            f"cannot use control.{key} = '{name}': no such group", f"run: groupadd --system {name}"
        ) from None


def may_use(peer: Peer, owner: int, group: int) -> bool:
    """Root, the daemon's own user, and members of the socket's group. The file's mode says the same."""
    return peer.uid in {0, owner} or peer.gid == group or group in peer.groups


class Bound(Struct, frozen=True):
    """How much users may hold who may change nothing: one of them, and all together. Root and operators have no bound."""

    of_user: int
    in_all: int


# Where everybody may connect (read_group) nobody takes all of the daemon's descriptors; `top`, some `logs -f` and a monitor
# are far below.
CONNECTIONS: Final = Bound(64, 512)
# For a rejected client to send its request and get the answer.
REFUSAL_S: Final = 1.0
_FULL: Final = b"""HTTP/1.1 503 Service Unavailable\r
Content-Type: application/json\r
Connection: close\r
\r
{"error":{"message":"cannot use the control socket: too many connections are open","remedy":"end one of them"}}
"""


class Shares:
    """What users hold of one kind, within its bound."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._of_user: Counter[int] = Counter()

    def take(self, uid: int) -> bool:
        """One more for this user; False: he, or all together, have enough."""
        if self._of_user[uid] >= self._bound.of_user or self._of_user.total() >= self._bound.in_all:
            return False
        self._of_user[uid] += 1
        return True

    def give(self, uid: int) -> None:
        self._of_user[uid] -= 1
        if not self._of_user[uid]:
            del self._of_user[uid]


class Gate(asyncio.Protocol):
    """Stands before a server's protocol and passes on all that happens to a connection that may be there."""

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        shares: Shares,
        stall_s: float,
        *,
        peer_of: Callable[[asyncio.BaseTransport], Peer | None],
        is_operator: Callable[[Peer], bool],
    ) -> None:
        """`stall_s`: a peer that takes nothing of what is written to it for so long is cut off."""
        self._make, self._shares, self._stall_s = make, shares, stall_s
        self._peer_of, self._is_operator = peer_of, is_operator
        self._stalled: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._inner: asyncio.Protocol | None = None
        self._shared_by: int | None = None  # the user whose share it is part of

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's is of no such class
        if not self._admits(self._peer_of(transport)):
            self._stalled = asyncio.get_running_loop().call_later(REFUSAL_S, transport.abort)
            return
        self._inner = InTurns(self._make())
        self._inner.connection_made(transport)

    def _admits(self, peer: Peer | None) -> bool:
        if peer is None:
            return False
        if not self._is_operator(peer):
            if not self._shares.take(peer.uid):
                return False
            self._shared_by = peer.uid
        return True

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
        if self._shared_by is not None:
            self._shares.give(self._shared_by)
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def _forget(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
