"""`numa-launcher fleet status`: one screen, by the daemons' own answers; Ray adds what it knows."""

from __future__ import annotations

import socket
import ssl
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from launcher.base.errors import reason
from launcher.base.text import printable_tree, table
from launcher.control.client import UnreachableError
from launcher.control.verdict import Host, IngressState, Level, Problem, Verdict, judge_fleet, of_ingress
from launcher.fleet.config import FleetConfig
from launcher.fleet.hosts import each
from launcher.fleet.ingress import endpoints
from launcher.fleet.loads import HostLoad, trust
from launcher.fleet.members import MEMBERS, Member, MemberList, read_members

if TYPE_CHECKING:
    from launcher.fleet.members import View

ANSWER_S: Final = 3.0
ANSWERS: Final = "answers"
FORGOTTEN: Final = "was removed by `fleet forget` and is back; `fleet up` takes it into the fleet again"


class Screen(msgspec.Struct, frozen=True, kw_only=True):
    """All that is shown."""

    endpoints: tuple[str, ...]
    members: MemberList
    loads: dict[str, HostLoad]
    silent: dict[str, str]
    """Why a daemon gave no load, by host."""
    agents: dict[str, str]
    """What a host's agent found wrong; empty text: nothing."""
    heard: dict[str, float]
    """Seconds since a host's agent answered."""
    ingress: dict[str, str]
    """Why an ingress does not answer, or ANSWERS, by address."""
    told: dict[str, IngressState] = {}
    """By the ingress processes that could be asked, by address."""
    stragglers: dict[str, tuple[int, ...]] = {}
    """Instances that are slower than their siblings and get fewer requests, by host."""
    ray: str
    """Why there is no news from Ray; empty: it answers."""


def gather(
    config: FleetConfig, view: View | None, ray: str, pickers: Sequence[Mapping[str, Any]] = ()
) -> Screen:
    """`view`: of the director; without it, `ray` says why, and the list is this host's file. `pickers`: what the ingress
    processes say that could be asked. Raises LauncherError."""
    members = view.members if view is not None else _kept(config, ray)
    context = trust(config.hosts.ca)
    by_name = {member.host: member for member in members.members}
    loads, failed = each(by_name, lambda host: load_of(by_name[host], context))
    reports = {} if view is None else view.reports
    return Screen(
        endpoints=endpoints(config),
        members=members,
        loads=loads,
        silent={host: error.message for host, error in failed.items()},
        agents={
            host: FORGOTTEN if members.has_forgotten(host) else report.problem
            for host, report in reports.items()
        },
        heard={} if view is None else {host: max(0.0, time.time() - at) for host, at in view.heard.items()},
        ingress={host: unreached(host, config) or ANSWERS for host in config.ingress.hosts},
        told=told(pickers),
        stragglers=stragglers(pickers),
        ray=ray
        or ("" if view is None or not view.error else f"the director's last turn failed: {view.error}"),
    )


def _kept(config: FleetConfig, ray: str) -> MemberList:
    path = Path(config.state) / MEMBERS
    if not path.exists():
        raise UnreachableError(
            f"cannot tell the fleet's hosts: {ray}; and this host has no member list",
            f"run it on an ingress host ({', '.join(config.ingress.hosts)}), or start Ray",
        )
    return read_members(path)


def load_of(member: Member, context: ssl.SSLContext | None) -> HostLoad:
    """What the host's daemon says now. Raises LauncherError."""
    url = f"{'https' if context else 'http'}://{member.address}/load"
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S, context=context) as reply:  # noqa: S310  http or https
            return msgspec.json.decode(reply.read(), type=HostLoad)
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", error)
        why = reason(cause) if isinstance(cause, OSError) else str(cause)
        raise UnreachableError(
            f"its daemon does not answer: {why}", f"see `systemctl status numa-launcher` on {member.host}"
        ) from None


def unreached(address: str, config: FleetConfig) -> str:
    """Why the ingress there does not answer; empty: it does."""
    try:
        socket.create_connection(
            (address, int(config.ingress.listen.rpartition(":")[2])), timeout=ANSWER_S
        ).close()
    except OSError as error:
        return f"does not answer: {reason(error)}"
    return ""


def stragglers(pickers: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """By the picker that decides: the other one sees no answers. One that was just started knows none."""
    hosts: Mapping[str, Any] = next((picker["hosts"] for picker in pickers if picker.get("decides")), {})
    return {host: tuple(its["stragglers"]) for host, its in hosts.items() if its["stragglers"]}


def told(pickers: Sequence[Mapping[str, Any]]) -> dict[str, IngressState]:
    """By address; an ingress from before an upgrade does not say it."""
    found = {", ".join(picker["addresses"]): picker for picker in pickers if "addresses" in picker}
    return msgspec.convert(printable_tree(found), dict[str, IngressState])


def verdict_of(screen: Screen) -> Verdict:
    """Of hosts, ingress and Ray."""
    others = [
        Problem(what=f"ingress {host} {word.partition(':')[0]}", level=Level.BAD)
        for host, word in screen.ingress.items()
        if word != ANSWERS
    ]
    for host, state in screen.told.items():
        others += of_ingress(host, state, time.time())
    if screen.ray:
        others.append(Problem(what="no news from Ray", level=Level.BAD))
    return judge_fleet([_host(name, screen) for name in _names(screen)], others)


def well(screen: Screen) -> bool:
    """Whether every host, every ingress and Ray answer."""
    return verdict_of(screen).line.startswith("OK")


def _names(screen: Screen) -> list[str]:
    return sorted({member.host for member in screen.members.members} | set(screen.agents))


def _host(name: str, screen: Screen) -> Host:
    member = next((member for member in screen.members.members if member.host == name), None)
    load = screen.loads.get(name)
    absent = "forgotten" if screen.members.has_forgotten(name) else "no daemon"
    state = absent if member is None else member.state.value if load is not None else "down"
    troubles = tuple(filter(None, (screen.silent.get(name), screen.agents.get(name))))
    if load is None:
        return Host(name=name, state=state, troubles=troubles or ("its daemon does not answer",))
    return Host(
        name=name, state=state, ready=sum(each.ready for each in load.instances), instances=len(load.instances),
        running=load.running, waiting=load.waiting, predicted_ttft_s=load.predicted_ttft_s,
        stragglers=screen.stragglers.get(name, ()), troubles=troubles,
    )  # fmt: skip


def lines(screen: Screen) -> list[str]:
    names = _names(screen)
    addresses = {member.host: member.address for member in screen.members.members}
    verdict = verdict_of(screen)
    rows: list[tuple[str, ...]] = [
        ("HOST", "STATE", "ADDRESS", "READY", "RUNNING", "WAITING", "TTFT", "AGENT")
    ]
    rows += [_row(_host(name, screen), addresses.get(name, "-"), screen.heard.get(name)) for name in names]
    notes = [f"  {problem.host}: {problem.what}" for problem in verdict.problems if problem.host]
    ingress = [f"ingress {host}: {word}" for host, word in screen.ingress.items()]
    ingress += [
        line
        for host, state in screen.told.items()
        for problem in of_ingress(host, state, time.time())
        for line in (problem.what, f"  {problem.remedy}")
    ]
    ray = ANSWERS if not screen.ray else screen.ray
    if screen.ray:
        ray += "; requests are served by the member list, changes wait"
    list_ = f"member list: {screen.members.epoch}.{screen.members.version}"
    endpoint = f"endpoint {' or '.join(screen.endpoints)}"
    return [verdict.line, endpoint, *table(rows), *notes, *ingress, f"Ray: {ray}", list_]


def _row(host: Host, address: str, heard: float | None) -> tuple[str, ...]:
    shown: Sequence[str] = ("-", "-", "-", "-")
    if host.state not in {"down", "no daemon", "forgotten"}:
        ttft = "-" if host.predicted_ttft_s is None else f"{host.predicted_ttft_s:.2f} s"
        shown = (f"{host.ready}/{host.instances}", str(host.running), str(host.waiting), ttft)
    return (host.name, host.state, address, *shown, "-" if heard is None else f"{heard:.0f} s ago")
