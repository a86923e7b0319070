"""The director: makes the member list from what the hosts' agents report. It decides; cluster.py does what Ray is for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NoReturn, Protocol

from msgspec.structs import replace

from launcher.base.clock import boot_time
from launcher.base.errors import LauncherError, NotFoundError, RefusedError
from launcher.fleet.hosts import each
from launcher.fleet.members import Decision, Member, MemberList, MemberState, Node, Report, View, decided

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
    newer list counts where both have a host. A host leaves the list by `forget` only, and is back by `admit` only: another
    director may have a list from before."""
    kept = [report.kept for report in reports.values() if report.kept is not None]
    others = [its for its in kept if its.epoch != mine.epoch or its.newer_than(mine)]
    lists = sorted([mine, *others], key=lambda known: (known.epoch, known.version))
    decisions = decided(mine.decisions, *(its.decisions for its in kept))
    forgotten = {it.host for it in decisions if it.forgotten}
    known = {member.host: member for its in lists for member in its.members if member.host not in forgotten}
    for host, report in reports.items():
        if host in forgotten:
            continue
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
    # The next decision is later than all that are known.
    last = max((it.stamp for it in decisions), default=(0, 0))
    epoch = epoch if (epoch, mine.version) >= last else last[0] + 1
    if (epoch, members, decisions) == (mine.epoch, mine.members, mine.decisions):
        return mine
    return MemberList(epoch=epoch, version=mine.version + 1, members=members, decisions=decisions)


def _named(node: Node, report: Report) -> Report:
    """The report of its agent; with a problem where other hosts have its name."""
    if not node.namesakes:
        return report
    return replace(
        report,
        problem=f"several hosts have this name: {node.address} is used, {', '.join(node.namesakes)} not",
        remedy="give each host a NODE_NAME of its own in /etc/numa-launcher/ray.env, and restart numa-launcher-ray there",
    )


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

    def __init__(
        self,
        cluster: Cluster,
        spec: str,
        clock: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = boot_time,
    ) -> None:
        """`elapsed`: seconds of a clock that nobody sets."""
        self._cluster, self._clock, self._elapsed = cluster, clock, elapsed
        self._answered: dict[str, float] = {}
        """As `heard` of the view, by `elapsed`."""
        self._lock = threading.RLock()
        self._view = View(spec=spec, members=MemberList(epoch=int(clock())), reports={}, heard={}, error="")

    def view(self) -> View:
        return self._view

    def turn(self) -> None:
        """Hear the agents, and hand a new list to the ingress hosts."""
        try:
            nodes = {node.host: node for node in self._cluster.nodes()}
            reports, _ = each(nodes, lambda host: _named(nodes[host], self._cluster.report(nodes[host])))
        except Exception as error:
            with self._lock:
                self._view = replace(self._view, error=str(error) or type(error).__name__)
            raise
        with self._lock:
            now, elapsed = self._clock(), self._elapsed()
            answer = [host for host, report in reports.items() if report.node]
            self._answered |= dict.fromkeys(answer, elapsed)
            silent = {host for host, at in self._answered.items() if elapsed - at > LOST_S}
            members = next_list(self._view.members, reports, silent)
            new = [member.host for member in members.members]
            self._answered = dict.fromkeys(new, elapsed) | self._answered
            heard = dict.fromkeys(new, now) | self._view.heard | dict.fromkeys(answer, now)
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
            self._answered.pop(host, None)
            heard = {other: at for other, at in self._view.heard.items() if other != host}
            self._view = replace(self._view, heard=heard)
            self._change(host, (), forgotten=True)

    def admit(self, hosts: Sequence[str]) -> None:
        """Take back those of these hosts that were forgotten. Raises LauncherError."""
        with self._lock:
            for host in filter(self._view.members.has_forgotten, hosts):
                address = self._view.reports.get(host, Report()).address
                self._change(host, (Member(host=host, address=address),) if address else (), forgotten=False)

    def _member(self, host: str) -> Member:
        found = next((member for member in self._view.members.members if member.host == host), None)
        if found is None:
            raise NotFoundError(
                f"cannot find host '{host}' in the fleet", "`numa-launcher fleet status` lists the hosts"
            )
        return found

    def _change(self, host: str, now: tuple[Member, ...], *, forgotten: bool | None = None) -> None:
        """`forgotten`: what an operator has decided on it."""
        known = self._view.members
        others = (member for member in known.members if member.host != host)
        members = tuple(sorted((*others, *now), key=lambda member: member.host))
        epoch, version, decisions = known.epoch, known.version + 1, known.decisions
        if forgotten is not None:
            last = Decision(host=host, forgotten=forgotten, epoch=epoch, version=version)
            decisions = decided(decisions, [last])
        changed = MemberList(epoch=epoch, version=version, members=members, decisions=decisions)
        self._view = replace(self._view, members=changed)
        for where, error in self._keep().items():
            raise LauncherError(
                f"cannot tell ingress host {where} of {host}: {error.message}",
                "the director tries again every 2 s: see `fleet status`",
            )
