"""What the fleet has of Ray: the actors, their names, and calls of them. Nothing else imports ray."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import launcher
from launcher.control.client import TIMEOUT_S, UnreachableError
from launcher.errors import LauncherError
from launcher.fleet import budgets, keys
from launcher.fleet.agent import Agent
from launcher.fleet.config import FleetConfig
from launcher.fleet.director import Director, Node, Report, View
from launcher.fleet.members import Member, MemberList

RESOURCE: Final = "numa_host"
ALIVE: Final = 0  # GcsNodeInfo.ALIVE
DIRECTOR: Final = "numa-director"
AGENT: Final = "numa-agent-"
ANSWER_S: Final = 2.0
WRITE_S: Final = 5.0
CALL_S: Final = 15.0
START_S: Final = 60.0
AGAIN_S: Final = 30.0
"""Until an agent that could not start is made again."""
# `report` and `keep` wait for no other call of an agent.
_FIRST: Final = "report"


def namespace(config: FleetConfig) -> str:
    return f"numa-launcher-{config.name}"


def spec_of(config: FleetConfig) -> str:
    """Actors of another version or configuration are replaced."""
    return f"{launcher.__version__} {hashlib.sha256(msgspec.json.encode(config)).hexdigest()[:16]}"


def nodes_of(known: Iterable[Any]) -> list[Node]:
    """The live hosts of the fleet. `known`: GcsNodeInfo of Ray. A host whose power was away for a moment has two live nodes
    until Ray misses the old one (18 s): the one that started last counts."""
    found: dict[str, Node] = {}
    for node in sorted(known, key=lambda node: int(node.start_time_ms)):
        if node.state == ALIVE and node.resources_total.get(RESOURCE):
            address = node.node_manager_address
            name = node.node_name or address
            names = frozenset({name, address, node.node_manager_hostname})
            found[name] = Node(id=node.node_id.hex(), host=name, address=address, names=names)
    return [found[name] for name in sorted(found)]


class RayCluster:
    """Nodes and agents, for the director."""

    def __init__(self, config: FleetConfig, spec: str) -> None:
        self._config, self._spec = config, spec
        self._agents: dict[str, tuple[str, Any]] = {}
        self._failed: dict[str, tuple[float, Report]] = {}

    def nodes(self) -> list[Node]:
        # ray.nodes() does not say when a node started (Ray 2.60).
        return nodes_of(ray.get_runtime_context().worker.gcs_client.get_all_node_info(CALL_S).values())

    def reports(self, nodes: Sequence[Node]) -> dict[str, Report]:
        now = time.monotonic()
        self._failed = {host: failed for host, failed in self._failed.items() if failed[0] > now}
        found = {host: report for host, (_, report) in self._failed.items()}
        asked = {
            node.host: self._agent(node).report.options(concurrency_group=_FIRST).remote()
            for node in nodes if node.host not in found
        }  # fmt: skip
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
        return found | {
            node.host: self._report(node, asked[node.host]) for node in nodes if node.host in asked
        }

    def keep(self, hosts: Iterable[str], members: MemberList) -> dict[str, str]:
        agents, failed = dict(self._agents), {}
        written = {
            host: agents[host][1].keep.options(concurrency_group=_FIRST).remote(members) if host in agents else None
            for host in hosts
        }  # fmt: skip
        if asked := [ref for ref in written.values() if ref is not None]:
            ray.wait(asked, num_returns=len(asked), timeout=WRITE_S)
        for host, ref in written.items():
            try:
                if ref is None:
                    failed[host] = "its agent has ended"
                else:
                    ray.get(ref, timeout=0)
            except RayError as error:
                failed[host] = _why(error)
        return failed

    def _agent(self, node: Node) -> Any:
        known = self._agents.get(node.host)
        if known is None or known[0] != node.id:
            if known is not None:  # of a node that is gone: its name is needed
                ray.kill(known[1])
            agent = ray.remote(concurrency_groups={_FIRST: 1})(Agent).options(
                name=AGENT + node.host, namespace=namespace(self._config), get_if_exists=True, lifetime="detached",
                num_cpus=0, resources={RESOURCE: 0.6},  # a second one has no room
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                max_restarts=-1, max_concurrency=8,
            ).remote(self._config, self._spec, node)  # fmt: skip
            known = self._agents[node.host] = (node.id, agent)
        return known[1]

    def _report(self, node: Node, ref: Any) -> Report:
        try:
            report: Report = ray.get(ref, timeout=0)
        except GetTimeoutError:
            return Report(
                problem="its agent has not answered yet",
                remedy=f"wait, or see `ray status` on {node.host}: another actor may use its resource {RESOURCE}",
            )
        except RayError as error:
            agent = self._agents.pop(node.host)[1]
            failed = Report(
                problem=f"cannot run its agent: {_why(error)}", remedy="see Ray's logs on the host"
            )
            if isinstance(error, RayTaskError):  # of another version, perhaps
                ray.kill(agent)
            if isinstance(error, RayTaskError) or "init" in str(error):
                self._failed[node.host] = (time.monotonic() + AGAIN_S, failed)
            return failed
        if (report.node, report.spec) != (node.id, self._spec):
            ray.kill(self._agents.pop(node.host)[1])
            return Report(problem="its agent is being replaced", remedy="wait")
        return report


def _why(error: RayError) -> str:
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, LauncherError):
        return cause.message
    return next(
        (line for line in reversed(str(cause).splitlines()) if line.strip()), type(cause).__name__
    ).strip()


class DirectorActor(Director):
    """The director in Ray: its turns begin again whenever Ray starts it again."""

    def __init__(self, config: FleetConfig, spec: str) -> None:
        super().__init__(RayCluster(config, spec), spec)
        for work in (self.run, lambda: self._exchange(RayHosts(config))):
            threading.Thread(target=work, daemon=True).start()

    @staticmethod
    def _exchange(hosts: RayHosts) -> None:
        """What keys spent elsewhere, and the keys themselves: hosts that miss one exchange get the next."""
        known: budgets.Known = {}
        while True:
            time.sleep(budgets.INTERVAL_S)
            try:
                budgets.exchange(hosts, known)
                keys.spread(hosts)
            except Exception:
                logging.getLogger(__name__).exception("fleet: the exchange of keys and budgets failed")


class RayHosts:
    """launcher.fleet.hosts.Hosts by Ray, and what `fleet up` and `fleet down` do."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config

    def members(self) -> Sequence[Member]:
        return self.view().members.members

    def ask(self, host: str, method: str, path: str, body: bytes = b"", timeout_s: float = TIMEOUT_S) -> Any:
        return self._agent(host, "ask", method, path, body, timeout_s, timeout_s=timeout_s)

    def run(self, host: str, words: Sequence[str], timeout_s: float) -> tuple[int, str]:
        found: tuple[int, str] = self._agent(host, "run", list(words), timeout_s, timeout_s=timeout_s)
        return found

    def hold(self, host: str, *, draining: bool) -> None:
        self._call(DIRECTOR, "hold", host, draining)

    def forget(self, host: str) -> None:
        self._call(DIRECTOR, "forget", host)

    def ingress(self, host: str) -> dict[str, Any]:
        """What the ingress process on a host knows; {} without one."""
        return dict(self._agent(host, "ingress"))

    def key_stamp(self, host: str) -> str:
        return str(self._agent(host, "key_stamp"))

    def key_file(self, host: str, text: str | None = None) -> str:
        return str(self._agent(host, "key_file", text))

    def view(self) -> View:
        found: View = self._call(DIRECTOR, "view")
        return found

    def nodes(self) -> list[Node]:
        return RayCluster(self._config, "").nodes()

    def up(self) -> None:
        """Have a director of this version and configuration. Raises LauncherError."""
        spec, deadline = spec_of(self._config), time.monotonic() + START_S
        while True:
            director = ray.remote(DirectorActor).options(
                name=DIRECTOR, namespace=namespace(self._config), get_if_exists=True, lifetime="detached",
                num_cpus=0, resources={RESOURCE: 0.1}, max_restarts=-1, max_concurrency=16,
            ).remote(self._config, spec)  # fmt: skip
            try:
                if self.view().spec == spec:
                    return
                ray.kill(director)
            except UnreachableError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    def down(self) -> list[str]:
        """Remove director and agents: the names of those that were there."""
        names = [
            str(actor["name"]) for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == namespace(self._config)
        ]  # fmt: skip
        for name in sorted(names, key=lambda name: name != DIRECTOR):
            try:
                ray.kill(ray.get_actor(name, namespace(self._config)))
            except ValueError:
                continue  # it ended by itself
        return names

    def _agent(self, host: str, method: str, *given: Any, timeout_s: float = 0.0) -> Any:
        return self._call(AGENT + host, method, *given, timeout_s=timeout_s)

    def _call(self, name: str, method: str, *given: Any, timeout_s: float = 0.0) -> Any:
        who = (
            name.removeprefix("numa-").replace("agent-", "the agent of ").replace("director", "the director")
        )
        try:
            actor = ray.get_actor(name, namespace(self._config))
            return ray.get(getattr(actor, method).remote(*given), timeout=timeout_s + CALL_S)
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, LauncherError):
                raise cause from None
            raise UnreachableError(
                f"cannot reach {who}: {_why(error)}", "numa-launcher fleet status"
            ) from None
        except ValueError:  # after RayError: an actor's own ValueError is both
            raise UnreachableError(
                f"cannot reach {who}: there is none", "start it: numa-launcher fleet up"
            ) from None


def connect(config: FleetConfig, own: str) -> RayHosts:
    """`own`: the address of this host's node. Raises LauncherError."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(
            address=config.ray, _node_ip_address=own, namespace=namespace(config), log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
        )  # fmt: skip
    except (ConnectionError, RuntimeError, OSError) as error:
        raise UnreachableError(
            f"cannot reach Ray at '{config.ray}': {error}",
            "start it on this host, with the other hosts' token: docs/fleet.md",
        ) from None
    return RayHosts(config)
