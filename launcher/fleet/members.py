"""The hosts of a fleet, and what is known of them. The list is made by one director and kept by every ingress host: it
outlives Ray."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Final

import msgspec

from launcher.base.errors import LauncherError, reason
from launcher.base.files import read_own, replace_file

MEMBERS: Final = "members.json"
"""Its name in the folder `state` of fleet.toml."""
MOST_DECISIONS: Final = 1000


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


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's word on a host: `fleet forget`, or `fleet up` after that. The last one holds, whichever list has it."""

    host: str
    forgotten: bool
    epoch: int
    version: int
    """Those of the list that had it first."""

    @property
    def stamp(self) -> tuple[int, int]:
        return self.epoch, self.version


class MemberList(msgspec.Struct, frozen=True, kw_only=True):
    """All hosts, by name. Of two lists the one with the higher (epoch, version) is newer."""

    epoch: int = 0
    """Seconds since 1970 when the director that made it began: a new one is always newer."""
    version: int = 0
    members: tuple[Member, ...] = ()
    decisions: tuple[Decision, ...] = ()
    """Of hosts that were forgotten once, by name."""

    def has_forgotten(self, host: str) -> bool:
        """It stays out of the list, also when it answers again, until `fleet up`."""
        return any(it.forgotten for it in self.decisions if it.host == host)

    def newer_than(self, other: MemberList) -> bool:
        return (self.epoch, self.version) > (other.epoch, other.version)


def decided(*lists: Iterable[Decision]) -> tuple[Decision, ...]:
    """The last decision of each host, by name; of very many the latest."""
    last: dict[str, Decision] = {}
    for it in sorted((it for its in lists for it in its), key=lambda it: it.stamp):
        last[it.host] = it
    latest = sorted(last.values(), key=lambda it: it.stamp)[-MOST_DECISIONS:]
    return tuple(sorted(latest, key=lambda it: it.host))


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A live Ray node with the resource `numa_host`."""

    id: str
    host: str
    """`ray start --node-name`, by default its address."""
    address: str
    names: frozenset[str]
    """All that [ingress] hosts may call it: name, address, the system's host name."""
    namesakes: tuple[str, ...] = ()
    """Addresses of other hosts with the same name, which are not used."""


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
    """An empty list where there is no file. Raises LauncherError, also for a file that another user may have written."""
    try:
        return msgspec.json.decode(read_own(path), type=MemberList)
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
