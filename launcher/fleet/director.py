"""The director: makes the member list from what the hosts' agents report. It decides; cluster.py does what Ray is for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NoReturn, Protocol

import msgspec

from launcher.errors import LauncherError, NotFoundError, RefusedError
from launcher.fleet.members import Member, MemberList, MemberState

_LOG = logging.getLogger(__name__)
TURN_S: Final = 2.0
LOST_S: Final = 10.0
"""Without an answer for so long an agent is lost. Ray restarts one in about 2 s."""


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


class Cluster(Protocol):
    """What the director needs of Ray."""

    def nodes(self) -> Sequence[Node]: ...

    def reports(self, nodes: Sequence[Node]) -> Mapping[str, Report]:
        """By host. Makes the agents that are not there, and makes those again that are on another node or of another
        spec."""

    def keep(self, hosts: Iterable[str], members: MemberList) -> Mapping[str, str]:
        """The agents of ingress hosts write the list. Result: why one did not, by host."""


def next_list(mine: MemberList, reports: Mapping[str, Report], silent: AbstractSet[str]) -> MemberList:
    """The list after a turn. `silent`: hosts whose agents are lost.

    Another director's list counts for hosts that this one has not heard of: at its start, and after a partition. The
    newer list counts where both have a host. A host leaves the list by `forget` only."""
    kept = [report.kept for report in reports.values() if report.kept is not None]
    others = [each for each in kept if each.epoch != mine.epoch or each.newer_than(mine)]
    lists = sorted([mine, *others], key=lambda known: (known.epoch, known.version))
    known = {member.host: member for each in lists for member in each.members}
    for host, report in reports.items():
        if report.address or (host in known and report.node):
            before = known.get(host) or Member(host=host, address=report.address)
            state = MemberState.READY if before.state is MemberState.LOST else before.state
            address = report.address or before.address
            known[host] = Member(host=host, address=address, state=state, node=report.node)
    for host in silent & known.keys():
        if known[host].state is MemberState.READY:
            known[host] = msgspec.structs.replace(known[host], state=MemberState.LOST)
    members = tuple(known[host] for host in sorted(known))
    epoch = mine.epoch if lists[-1] is mine else lists[-1].epoch + 1
    if (epoch, members) == (mine.epoch, mine.members):
        return mine
    return MemberList(epoch=epoch, version=mine.version + 1, members=members)


class Director:
    """Owner of the member list. Its methods may be called from several threads."""

    def __init__(self, cluster: Cluster, spec: str, clock: Callable[[], float] = time.time) -> None:
        self._cluster, self._spec, self._clock = cluster, spec, clock
        self._lock = threading.RLock()
        self._list = MemberList(epoch=int(clock()))
        self._reports: Mapping[str, Report] = {}
        self._heard: dict[str, float] = {}
        self._error = ""

    def run(self) -> NoReturn:
        """Turns for ever: Ray ends the process."""
        while True:
            try:
                self.turn()
                self._error = ""
            except Exception as error:  # Ray's and the network's: the next turn may succeed
                self._error = str(error) or type(error).__name__
                _LOG.exception("fleet: the director's turn failed")
            time.sleep(TURN_S)

    def turn(self) -> None:
        """Hear the agents, and hand a new list to the ingress hosts."""
        reports = self._cluster.reports(self._cluster.nodes())
        with self._lock:
            now = self._clock()
            self._reports = reports
            self._heard |= {host: now for host, report in reports.items() if report.node}
            silent = {host for host, heard in self._heard.items() if now - heard > LOST_S}
            self._list = next_list(self._list, reports, silent)
            for member in self._list.members:
                self._heard.setdefault(member.host, now)
            behind = [
                host for host, report in reports.items()
                if report.kept is not None and self._list.newer_than(report.kept)
            ]  # fmt: skip
            for host, why in self._cluster.keep(behind, self._list).items():
                _LOG.warning("fleet: ingress host %s has not written the member list: %s", host, why)

    def view(self) -> View:
        with self._lock:
            return View(
                spec=self._spec, members=self._list, reports=dict(self._reports), heard=dict(self._heard),
                error=self._error,
            )  # fmt: skip

    def hold(self, host: str, draining: bool) -> None:
        """No new requests for a host, or again. Returns once the ingress hosts have it. Raises LauncherError."""
        with self._lock:
            state = MemberState.DRAINING if draining else MemberState.READY
            self._change(host, (msgspec.structs.replace(self._member(host), state=state),))

    def forget(self, host: str) -> None:
        """Remove a host that is gone for good. Raises LauncherError."""
        with self._lock:
            self._member(host)
            if self._reports.get(host, Report()).node:
                raise RefusedError(
                    f"cannot forget {host}: its agent answers", f"run `ray stop` on {host} first"
                )
            self._heard.pop(host, None)
            self._change(host, ())

    def _member(self, host: str) -> Member:
        found = next((member for member in self._list.members if member.host == host), None)
        if found is None:
            raise NotFoundError(
                f"cannot find host '{host}' in the fleet", "`numa-launcher fleet status` lists the hosts"
            )
        return found

    def _change(self, host: str, now: tuple[Member, ...]) -> None:
        others = (member for member in self._list.members if member.host != host)
        members = tuple(sorted((*others, *now), key=lambda member: member.host))
        self._list = MemberList(epoch=self._list.epoch, version=self._list.version + 1, members=members)
        ingress = [where for where, report in self._reports.items() if report.kept is not None]
        failed = self._cluster.keep(ingress, self._list)
        if failed:
            where, why = next(iter(failed.items()))
            raise LauncherError(
                f"cannot tell ingress host {where} of {host}: {why}",
                "the director tries again every 2 s: see `fleet status`",
            )
