"""`numa-launcher fleet`: several hosts behind one endpoint."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import psutil

from launcher.base.errors import LauncherError, reason
from launcher.base.text import counted, printable_lines
from launcher.cli import fleet_operations, fleet_status
from launcher.control.client import UnreachableError
from launcher.fleet.config import DEFAULT_CONFIG, FleetConfig, load_fleet
from launcher.fleet.hosts import AGENT, DIRECTOR, each
from launcher.fleet.ingress import endpoints, read_status
from launcher.fleet.members import Report

if TYPE_CHECKING:
    from launcher.fleet.cluster import RayHosts
    from launcher.fleet.members import Node, View

HEARD_S: Final = 60.0
"""Ray starts an agent in 2 s, on a busy host in 20 s."""
START_S: Final = 60.0
POLL_S: Final = 0.5
RAY_S: Final = 3.0
_FACTS: Final = ["name", "cmdline", "uids"]
STATUS_S: Final = 30.0
_AWAY: Final = Report(
    problem="its node of Ray is away",
    remedy="see `ray status --address HEAD:6379`, and start the command again",
)
_HELP: Final = {
    "up": "attach an agent to each host's daemon, and hand the list of hosts to the ingress",
    "status": "print the state of each host, of the ingress and of Ray",
    "down": "remove agents and director; daemons and ingress keep serving",
    "ingress": "choose hosts for HAProxy, on each ingress host; starts HAProxy if none runs",
    "forget": "remove a host that is gone for good from the list of hosts",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in _HELP.items():
        action = actions.add_parser(
            name, help=text, description=f"{text[:1].upper()}{text[1:]}.", allow_abbrev=False
        )
        action.add_argument(
            "-c", "--config", type=Path, metavar="FILE", default=DEFAULT_CONFIG,
            help=f"use this configuration of the fleet (default: {DEFAULT_CONFIG})",
        )  # fmt: skip
        if name == "forget":
            action.add_argument("host", metavar="HOST", help="the host, as `fleet status` names it")
        if name == "ingress":
            action.add_argument("--debug", action="store_true", help="log the choice for each request")
        if name == "status":
            action.add_argument("--json", action="store_true", help="print JSON")
    fleet_operations.add_actions(actions)


def run(args: argparse.Namespace) -> int:
    """Exit code 0: all is well. 1: a host or an ingress is not."""
    config = load_fleet(args.config)
    match args.action:
        case "up":
            return up(config)
        case "status":
            return status(config, as_json=args.json)
        case "down":
            return down(config)
        case "ingress":
            return ingress(config, "debug" if args.debug else "info")
        case "forget":
            connected(config).call(DIRECTOR, "forget", args.host)
            print(f"{args.host}: no longer in the fleet")
            return 0
        case action:
            return fleet_operations.run(action, args, connected(config), config)


def connected(config: FleetConfig) -> RayHosts:
    """Raises LauncherError; UnreachableError without Ray."""
    # Ray reads it when it is imported (2.60), and finds the token itself.
    if (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        from launcher.fleet.cluster import connect  # noqa: PLC0415  heavy, and of an extra
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise LauncherError(
            "cannot use fleet: ray is not installed",
            "run scripts/install --fleet, or pip install 'numa-launcher[fleet]'",
        ) from None
    host, _, port = config.ray.rpartition(":")
    if host and port.isdigit():
        try:  # ray.init tries a head that is gone for a long time
            socket.create_connection((host.strip("[]"), int(port)), RAY_S).close()
        except OSError as error:
            raise UnreachableError(
                f"cannot reach Ray's head at '{config.ray}': {reason(error)}",
                "start it there: docs/fleet.md",
            ) from None
    node = own_node()
    if node is None:
        raise UnreachableError(
            "cannot ask Ray: no node of Ray runs on this host",
            "start it (`ray start`, docs/fleet.md) as root or as this user, or ask on another host of the fleet",
        )
    return connect(config, node.address, os.environ.get("RAY_ADDRESS") or node.head)


class OwnNode(NamedTuple):
    """This host's node of Ray."""

    address: str
    head: str
    """host:port of the head that it has joined."""


def own_node(processes: Iterable[Mapping[str, Any]] | None = None) -> OwnNode | None:
    """This host's node; None: no raylet here takes connections. ray.init would take another host's node then, and also
    where the default route has another address; it aborts the process with that (Ray 2.60). Only a raylet of root or of the
    caller counts: any other user's could name a head that takes the token and answers with Python code.

    `processes`: of psutil, with _FACTS; by default all."""
    if processes is None:
        processes = (process.info for process in psutil.process_iter(_FACTS))
    trusted = {0, os.geteuid()}
    for facts in processes:
        if facts["name"] != "raylet" or not trusted.issuperset(facts["uids"] or {None}):
            continue
        parts = (str(word).partition("=") for word in facts["cmdline"] or ())
        words = {name: value for name, _, value in parts}
        address, head = words.get("--node_ip_address", ""), words.get("--gcs-address", "")
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(words.get("--raylet_socket_name", ""))
            if head and _is_own(address):
                return OwnNode(address, head)
    return None


def _is_own(address: str) -> bool:
    """Whether it is an address of this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as probe:
        probe.bind((address, 0))
        return bool(address)
    return False


def up(config: FleetConfig) -> int:
    """Attach to every host that is there; what is there already stays."""
    hosts = connected(config)
    hosts.refuse_open()
    nodes = hosts.nodes()
    if not nodes:
        raise LauncherError(
            "cannot set up the fleet: no node of Ray has the resource numa_host",
            """start Ray on each host: ray start --address HEAD:6379 --resources '{"numa_host": 1}'""",
        )
    hosts.up()
    _heard(hosts, nodes)
    hosts.call(DIRECTOR, "admit", [node.host for node in nodes])
    reports = hosts.view().reports
    well = True
    for node in nodes:
        report, started = _with_daemon(hosts, config, node, reports.get(node.host, _AWAY))
        well = well and not report.problem
        if report.problem:
            _say(f"{node.host}: {report.problem}")
            _say(f"  {report.remedy}")
        else:
            _say(f"{node.host}: attached to its daemon at {report.address}{started}")
            _say_untrusted(hosts, config, node.host)
    well = _with_ingress(hosts, config, nodes) and well
    view = hosts.view()
    _say(
        f"{counted(len(view.members.members), 'host')} in the fleet; `numa-launcher fleet status` shows them"
    )
    _say(f"endpoint: {' or '.join(endpoints(config))}")
    return 0 if well else 1


def _heard(hosts: RayHosts, nodes: list[Node]) -> dict[str, Report]:
    """The agents' reports; of those that do not answer in time, why."""
    return _waited(
        lambda: hosts.view().reports,
        lambda found: all(node.host in found and found[node.host].node for node in nodes),
        HEARD_S,
    )


def _waited(
    ask: Callable[[], dict[str, Report]], enough: Callable[[dict[str, Report]], bool], within_s: float
) -> dict[str, Report]:
    deadline = time.monotonic() + within_s
    found = ask()
    while not enough(found) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        found = ask()
    return found


def _with_daemon(hosts: RayHosts, config: FleetConfig, node: Node, report: Report) -> tuple[Report, str]:
    """Start the daemon of a host whose agent finds none, and what to say of it."""
    if not report.absent:
        return report, ""
    failed = _started(hosts, node.host, config.hosts.start)
    if failed:
        return msgspec.structs.replace(report, remedy=failed), ""
    found = _waited(
        lambda: hosts.view().reports, lambda found: not found.get(node.host, _AWAY).absent, START_S
    )
    return found.get(node.host, _AWAY), f", which was started: {' '.join(config.hosts.start)}"


def untrusted(config: FleetConfig, trusted: Iterable[str]) -> list[str]:
    """Ingress hosts of which a daemon with these [proxy] trusted_proxies takes no choice of an instance."""
    networks = [ip_network(entry) for entry in trusted if entry != "unix"]
    found = []
    for host in config.ingress.hosts:
        with contextlib.suppress(ValueError):  # a name
            address = ip_address(host)
            if not any(address in network for network in networks):
                found.append(host)
    return found


def _say_untrusted(hosts: RayHosts, config: FleetConfig, host: str) -> None:
    with contextlib.suppress(LauncherError):  # it is attached all the same
        ignored = untrusted(config, hosts.ask(host, "GET", "/config")["proxy"]["trusted_proxies"])
        if ignored:
            _say(f"  it ignores the instances that the ingress at {' and '.join(ignored)} chooses")
            _say(
                f"  set [proxy] trusted_proxies = {json.dumps(config.ingress.hosts)} in its configuration, and restart it"
            )


def _with_ingress(hosts: RayHosts, config: FleetConfig, nodes: list[Node]) -> bool:
    """Start the ingress where none answers. Result: whether all do."""
    well = True
    for address in config.ingress.hosts:
        host = next((node.host for node in nodes if address in node.names), None)
        if host is None:
            _say(f"ingress {address}: no host of the fleet has this address: nobody writes its member list")
            _say(
                "  correct [ingress] hosts of fleet.toml, or give the address to ray start --node-ip-address"
            )
            well = False
            continue
        why = fleet_status.unreached(address, config)
        said = "answers"
        if why:
            said = "started" if not (why := _started(hosts, host, config.ingress.start)) else why
            well = well and not why
        _say(f"ingress {address}: {said}")
    return well


def _started(hosts: RayHosts, host: str, words: tuple[str, ...]) -> str:
    """Why it could not be started; empty: it was."""
    try:
        code, output = hosts.run(host, words, START_S)
    except LauncherError as error:
        return f"cannot start it: {error.message}"
    # The first line says why; systemctl's last one says where to look.
    said = output.strip().partition("\n")[0] or f"exit code {code}"
    return f"cannot start it: `{' '.join(words)}`: {said}" if code else ""


def status(config: FleetConfig, *, as_json: bool) -> int:
    """A head that hangs or just begins may leave ray.init without an answer: then the list is this host's file."""
    pickers = [read_status(config)]
    asked: list[tuple[View, list[dict[str, Any]]]] = []
    failed: list[LauncherError] = []

    def ask() -> None:
        try:
            hosts = connected(config)
            view = hosts.view()
            ingress = [host for host, report in view.reports.items() if report.kept is not None]
            asked.append(
                (view, list(each(ingress, lambda host: hosts.call(AGENT + host, "ingress"))[0].values()))
            )
        except LauncherError as error:
            failed.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(STATUS_S)
    view, why = None, f"cannot reach Ray: no answer within {STATUS_S:g} s"
    if failed:
        if not isinstance(failed[0], UnreachableError):
            raise failed[0]
        why = failed[0].message
    elif asked:
        view, why = asked[0][0], ""
        pickers += asked[0][1]
    screen = fleet_status.gather(config, view, why, pickers)
    if as_json:
        print(json.dumps(msgspec.to_builtins(screen), indent=2))
    else:
        _say("\n".join(fleet_status.lines(screen)))
    return 0 if fleet_status.well(screen) else 1


def ingress(config: FleetConfig, level: str) -> int:
    """Serve until SIGTERM or Ctrl-C. HAProxy goes on."""
    import uvloop  # noqa: PLC0415  heavy

    from launcher.base import log_lines  # noqa: PLC0415  heavy
    from launcher.fleet.ingress import Ingress  # noqa: PLC0415  heavy

    async def serve() -> None:
        task = asyncio.current_task()
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await Ingress(config).run()

    log_lines.set_up(level, "auto")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())
    finally:
        log_lines.finish()
    return 0


def down(config: FleetConfig) -> int:
    removed = connected(config).down()
    _say(
        f"{counted(len(removed), 'actor')} removed: {', '.join(removed)}"
        if removed
        else "no agents were there"
    )
    _say("daemons and ingress keep serving, by the last member list; changes of hosts are not followed")
    _say(
        "to stop a host: systemctl stop numa-launcher; to stop the ingress: systemctl stop numa-launcher-ingress"
    )
    return 0


def _say(text: str) -> None:
    print(printable_lines(text), flush=True)
