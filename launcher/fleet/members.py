"""The hosts of a fleet. The list is made by one director and kept by every ingress host: it outlives Ray."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Final

import msgspec

from launcher.errors import LauncherError, reason
from launcher.host.replace_file import replace_file

MEMBERS: Final = "members.json"
"""Its name in the folder `state` of fleet.toml."""


class MemberState(Enum):
    READY = "ready"
    DRAINING = "draining"  # gets no new requests
    LOST = "lost"  # its agent does not answer; the ingress sees for itself whether its daemon does


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One host."""

    host: str
    """Its name: unique, and the same after a restart."""
    address: str
    """host:port of its daemon's TCP listener."""
    state: MemberState = MemberState.READY
    node: str = ""
    """Ray's id of the node that its agent runs on."""


class MemberList(msgspec.Struct, frozen=True, kw_only=True):
    """All hosts, by name. Of two lists the one with the higher (epoch, version) is newer."""

    epoch: int = 0
    """Seconds since 1970 when the director that made it began: a new one is always newer."""
    version: int = 0
    members: tuple[Member, ...] = ()

    def newer_than(self, other: MemberList) -> bool:
        return (self.epoch, self.version) > (other.epoch, other.version)


def read_members(path: Path) -> MemberList:
    """An empty list where there is no file. Raises LauncherError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=MemberList)
    except FileNotFoundError:
        return MemberList()
    except (OSError, msgspec.DecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise LauncherError(
            f"cannot read {path}: {why}", "remove the file: the fleet writes it again"
        ) from None


def write_members(path: Path, members: MemberList) -> None:
    """Whole, or not at all. Raises OSError."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(members), indent=1))
