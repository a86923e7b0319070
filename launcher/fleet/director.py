"""The director: makes the member list from what the hosts' agents report. It decides; cluster.py does what Ray is for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NoReturn, Protocol

from msgspec.structs import replace

from launcher.errors import LauncherError, NotFoundError, RefusedError
from launcher.fleet.hosts import each
from launcher.fleet.members import Member, MemberList, MemberState, Node, Report, View

_LOG = logging.getLogger(__name__)
TURN_S: Final = 2.0
LOST_S: Final = 10.0
"""Without an answer for so long an agent is lost. Ray restarts one in about 2 s."""


class Cluster(Protocol):
    """What the director needs of Ray."""

    def nodes(self) -> Sequence[Node]: ...

    def report(self, node: Node) -> Report:
        """Of its agent; one that is not there is made, one that is on another node or of another spec is made again."""

    def keep(self, host: str, members: MemberList) -> None:
        """The agent of an ingress host writes the list. Raises LauncherError."""


def next_list(mine: MemberList, reports: Mapping[str, Report], silent: AbstractSet[str]) -> MemberList:
    """The list after a turn. `silent`: hosts whose agents are lost.

    Another director's list counts for hosts that this one has not heard of: at its start, and after a partition. The
    newer list counts where both have a host. A host leaves the list by `forget` only."""
    kept = [report.kept for report in reports.values() if report.kept is not None]
    others = [its for its in kept if its.epoch != mine.epoch or its.newer_than(mine)]
    lists = sorted([mine, *others], key=lambda known: (known.epoch, known.version))
    known = {member.host: member for its in lists for member in its.members}
    for host, report in reports.items():
        if report.address or (host in known and report.node):
            before = known.get(host) or Member(host=host, address=report.address)
            state = MemberState.READY if before.state is MemberState.LOST else before.state
            address = report.address or before.address
            known[host] = Member(host=host, address=address, state=state)
    for host in silent & known.keys():
        if known[host].state is MemberState.READY:
            known[host] = replace(known[host], state=MemberState.LOST)
    members = tuple(known[host] for host in sorted(known))
    epoch = mine.epoch if lists[-1] is mine else lists[-1].epoch + 1
    if (epoch, members) == (mine.epoch, mine.members):
        return mine
    return MemberList(epoch=epoch, version=mine.version + 1, members=members)


def repeated(work: Callable[[], None], pause_s: float) -> NoReturn:
    """For ever: Ray ends the process."""
    while True:
        try:
            work()
        except Exception:  # Ray's and the network's: the next turn may succeed
            _LOG.exception("fleet: the director failed, again in %g s", pause_s)
        time.sleep(pause_s)


class Director:
    """Owner of the member list. Its methods may be called from several threads."""

    def __init__(self, cluster: Cluster, spec: str, clock: Callable[[], float] = time.time) -> None:
        self._cluster, self._clock = cluster, clock
        self._lock = threading.RLock()
        self._view = View(spec=spec, members=MemberList(epoch=int(clock())), reports={}, heard={}, error="")

    def view(self) -> View:
        return self._view

    def turn(self) -> None:
        """Hear the agents, and hand a new list to the ingress hosts."""
        try:
            nodes = {node.host: node for node in self._cluster.nodes()}
            reports, _ = each(nodes, lambda host: self._cluster.report(nodes[host]))
        except Exception as error:
            with self._lock:
                self._view = replace(self._view, error=str(error) or type(error).__name__)
            raise
        with self._lock:
            now = self._clock()
            heard = self._view.heard | {host: now for host, report in reports.items() if report.node}
            silent = {host for host, at in heard.items() if now - at > LOST_S}
            members = next_list(self._view.members, reports, silent)
            heard = {member.host: now for member in members.members} | heard
            self._view = View(spec=self._view.spec, members=members, reports=reports, heard=heard, error="")
            for host, why in self._keep().items():
                _LOG.warning("fleet: ingress host %s: %s", host, why.message)

    def _keep(self) -> dict[str, LauncherError]:
        """Hand the list to the ingress hosts that lack it. Returns why one has it not."""
        kept = {host: its.kept for host, its in self._view.reports.items() if its.kept is not None}
        members = self._view.members
        behind = [host for host, its in kept.items() if members.newer_than(its)]
        return each(behind, lambda host: self._cluster.keep(host, members))[1]

    def hold(self, host: str, draining: bool) -> None:
        """No new requests for a host, or again. Returns once the ingress hosts have it. Raises LauncherError."""
        state = MemberState.DRAINING if draining else MemberState.READY
        with self._lock:
            self._change(host, (replace(self._member(host), state=state),))

    def forget(self, host: str) -> None:
        """Remove a host that is gone for good. Raises LauncherError."""
        with self._lock:
            self._member(host)
            if self._view.reports.get(host, Report()).node:
                raise RefusedError(
                    f"cannot forget {host}: its agent answers", f"run `ray stop` on {host} first"
                )
            heard = {other: at for other, at in self._view.heard.items() if other != host}
            self._view = replace(self._view, heard=heard)
            self._change(host, ())

    def _member(self, host: str) -> Member:
        found = next((member for member in self._view.members.members if member.host == host), None)
        if found is None:
            raise NotFoundError(
                f"cannot find host '{host}' in the fleet", "`numa-launcher fleet status` lists the hosts"
            )
        return found

    def _change(self, host: str, now: tuple[Member, ...]) -> None:
        known = self._view.members
        others = (member for member in known.members if member.host != host)
        members = tuple(sorted((*others, *now), key=lambda member: member.host))
        changed = MemberList(epoch=known.epoch, version=known.version + 1, members=members)
        self._view = replace(self._view, members=changed)
        for where, error in self._keep().items():
            raise LauncherError(
                f"cannot tell ingress host {where} of {host}: {error.message}",
                "the director tries again every 2 s: see `fleet status`",
            )
