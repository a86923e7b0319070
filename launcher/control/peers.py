"""The peer of a control connection, as the kernel reports it, and its rights."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import socket
import struct
from dataclasses import dataclass
from typing import Final

from launcher.errors import LauncherError

# <asm-generic/socket.h>; Linux 4.13. Python's socket module has no name for it.
SO_PEERGROUPS: Final = 59
# What Python's getsockopt takes at most, as 32-bit group ids: 256 groups.
_GROUPS_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class Peer:
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
