"""The hosts of a fleet, and what is known of them. The list is made by one director and kept by every ingress host: it
outlives Ray."""

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


class MemberList(msgspec.Struct, frozen=True, kw_only=True):
    """All hosts, by name. Of two lists the one with the higher (epoch, version) is newer."""

    epoch: int = 0
    """Seconds since 1970 when the director that made it began: a new one is always newer."""
    version: int = 0
    members: tuple[Member, ...] = ()

    def newer_than(self, other: MemberList) -> bool:
        return (self.epoch, self.version) > (other.epoch, other.version)


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A live Ray node with the resource `numa_host`."""

    id: str
    host: str
    """`ray start --node-name`, by default its address."""
    address: str
    names: frozenset[str]
    """All that [ingress] hosts may call it: name, address, the system's host name."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent says, or why there is none."""

    node: str = ""
    """Ray's id of its node; empty: the agent did not answer."""
    spec: str = ""
    """Version and configuration that it was made with."""
    address: str = ""
    """host:port of the daemon; empty while `problem` says why there is none."""
    absent: bool = False
    """No daemon answers on the host."""
    problem: str = ""
    remedy: str = ""
    kept: MemberList | None = None
    """The list in the file of an ingress host; None on other hosts."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What the director knows."""

    spec: str
    members: MemberList
    reports: dict[str, Report]
    heard: dict[str, float]
    """When each host's agent last answered, or this director first heard of it; seconds since 1970."""
    error: str


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
