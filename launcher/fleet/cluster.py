"""What the fleet has of Ray: the actors, their names, and calls of them. Nothing else imports ray."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
import ray
from msgspec.structs import replace
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import launcher
from launcher.base.errors import LauncherError
from launcher.control.client import UnreachableError
from launcher.fleet.agent import Agent
from launcher.fleet.config import AUTO, FleetConfig
from launcher.fleet.director import TURN_S, Director, repeated
from launcher.fleet.hosts import AGENT, DIRECTOR, INTERVAL_S, Exchange, Hosts, spread
from launcher.fleet.members import MemberList, Node, Report

RESOURCE: Final = "numa_host"
ALIVE: Final = 0  # GcsNodeInfo.ALIVE
ANSWER_S: Final = 2.0
WRITE_S: Final = 5.0
CALL_S: Final = 15.0
START_S: Final = 60.0
AGAIN_S: Final = 10.0
"""Before an agent that ended is made again: one may be unable to start."""
OPEN_S: Final = 60.0
_ASK_OPENLY: Final = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import RayError
try:
    GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5)
    print("answers")
except RayError as error:
    why = str(error).strip()
    print("refuses" if "AuthToken" in why or "Unauthenticated" in why else why.splitlines()[-1])
"""
# `report` and `keep` wait for no other call of an agent.
_FIRST: Final = "report"


def namespace(config: FleetConfig) -> str:
    return f"numa-launcher-{config.name}"


def spec_of(config: FleetConfig) -> str:
    """Actors of another version or configuration are replaced."""
    return f"{launcher.__version__} {hashlib.sha256(msgspec.json.encode(config)).hexdigest()[:16]}"


def nodes_of(known: Iterable[Any]) -> list[Node]:
    """The live hosts of the fleet. `known`: GcsNodeInfo of Ray. A host whose power was away for a moment has two live nodes
    until Ray misses the old one (18 s): the one that started last counts. Of several hosts with one name the first."""
    found: dict[str, dict[str, Node]] = {}
    for node in sorted(known, key=lambda node: int(node.start_time_ms)):
        if node.state == ALIVE and node.resources_total.get(RESOURCE):
            address = node.node_manager_address
            name = node.node_name or address
            names = frozenset({name, address, node.node_manager_hostname})
            same = found.setdefault(name, {})
            same[address] = Node(id=node.node_id.hex(), host=name, address=address, names=names)
    return [
        replace(next(iter(same.values())), namesakes=tuple(same)[1:]) for _, same in sorted(found.items())
    ]


def refuse_open(address: str) -> None:
    """Raises LauncherError where Ray's head at `address` answers without a token, UnreachableError where that is not known.
    By a process of its own: Ray reads once whether it has a token."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_OPENLY, address], env={**environ, "RAY_AUTH_MODE": "disabled"}, check=False,
            capture_output=True, text=True, timeout=OPEN_S,
        )  # fmt: skip
        said = done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]
    except subprocess.TimeoutExpired:
        said = f"no answer within {OPEN_S:g} s"
    if said == "answers":
        raise LauncherError(
            f"cannot set up the fleet: Ray's head at '{address}' answers without a token, so whoever reaches its ports may "
            "run programs as its user",
            "give all hosts a token and RAY_AUTH_MODE=token, and restart Ray on all (docs/fleet.md, step 4); Ray >= 2.52",
        )
    if said != "refuses":
        raise UnreachableError(
            f"cannot tell whether Ray's head at '{address}' wants a token: {said}",
            f"see `ray status --address {address}` and Ray's logs there",
        )


def _why(error: RayError) -> str:
    """The last line: before it is what Ray did."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    return ([line.strip() for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__])[-1]


class RayHosts(Hosts):
    """By Ray, and what `fleet up` and `fleet down` do."""

    def __init__(self, config: FleetConfig) -> None:
        self._config, self._namespace = config, namespace(config)

    def refuse_open(self) -> None:
        """Raises LauncherError for a cluster that answers without a token."""
        refuse_open(ray.get_runtime_context().gcs_address)

    def nodes(self) -> list[Node]:
        # ray.nodes() does not say when a node started (Ray 2.60).
        return nodes_of(ray.get_runtime_context().worker.gcs_client.get_all_node_info(CALL_S).values())

    def up(self) -> None:
        """Have a director of this version and configuration. Raises LauncherError."""
        spec, deadline = spec_of(self._config), time.monotonic() + START_S
        while True:
            ray.remote(DirectorActor).options(
                name=DIRECTOR, namespace=self._namespace, get_if_exists=True, lifetime="detached",
                num_cpus=0, resources={RESOURCE: 0.1}, max_restarts=-1, max_concurrency=16,
            ).remote(self._config, spec)  # fmt: skip
            try:
                if self.view().spec == spec:
                    return
                self.end(DIRECTOR)
            except LauncherError as error:
                if time.monotonic() > deadline:
                    raise
                if not isinstance(error, UnreachableError):  # of a version that cannot answer
                    self.end(DIRECTOR)
            time.sleep(0.2)

    def down(self) -> list[str]:
        """Remove director and agents: the names of those that were there."""
        actors = ray.util.list_named_actors(all_namespaces=True)
        names = [str(actor["name"]) for actor in actors if actor["namespace"] == self._namespace]
        names.sort(key=lambda name: name != DIRECTOR)
        for name in names:
            self.end(name)
        return names

    def end(self, name: str) -> None:
        """Remove the actor of this name, if there is one."""
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, self._namespace))

    def call(self, name: str, method: str, *given: Any, timeout_s: float = 0.0) -> Any:
        return self.answer(name, method, *given, within_s=timeout_s + CALL_S)

    def answer(self, name: str, method: str, *given: Any, within_s: float, group: str | None = None) -> Any:
        """As `call`. `group`: of the actor's threads."""
        try:
            actor = ray.get_actor(name, self._namespace)
            asked = getattr(actor, method).options(concurrency_group=group).remote(*given)
            return ray.get(asked, timeout=within_s)
        except GetTimeoutError:
            why, remedy = f"no answer within {within_s:g} s", "numa-launcher fleet status"
        except RayTaskError as error:
            if isinstance(error.cause, LauncherError):
                raise error.cause from None
            raise LauncherError(
                f"cannot ask the {name}: {_why(error)}", "see Ray's logs on the host"
            ) from None
        except RayError as error:
            why, remedy = _why(error), "numa-launcher fleet status"
        except ValueError:  # after RayTaskError: an actor's own ValueError is both
            why, remedy = "there is none", "start it: numa-launcher fleet up"
        raise UnreachableError(f"cannot reach the {name}: {why}", remedy)


class RayCluster(RayHosts):
    """Nodes and agents, for the director."""

    def __init__(self, config: FleetConfig, spec: str) -> None:
        super().__init__(config)
        self._spec = spec
        self._made: dict[str, tuple[str, float]] = {}
        """By host: the node that an agent was made on, and when."""

    def report(self, node: Node) -> Report:
        name, (made_on, at) = AGENT + node.host, self._made.get(node.host, ("", 0.0))
        try:
            found: Report = self.answer(name, "report", within_s=ANSWER_S, group=_FIRST)
        except LauncherError as error:
            if made_on != node.id or time.monotonic() > at + AGAIN_S:
                # Of a node that is gone, or of another version; one that only does not answer may do so again.
                if made_on not in {"", node.id} or not isinstance(error, UnreachableError):
                    self.end(name)
                self._make(node)
            return Report(problem=error.message, remedy=f"wait, or see Ray's logs on {node.host}")
        if (found.node, found.spec) == (node.id, self._spec):
            return found
        self.end(name)
        self._make(node)
        return Report(problem="its agent is being replaced", remedy="wait")

    def keep(self, host: str, members: MemberList) -> None:
        self.answer(AGENT + host, "keep", members, within_s=WRITE_S, group=_FIRST)

    def _make(self, node: Node) -> None:
        self._made[node.host] = (node.id, time.monotonic())
        ray.remote(concurrency_groups={_FIRST: 1})(Agent).options(
            name=AGENT + node.host, namespace=self._namespace, get_if_exists=True, lifetime="detached",
            num_cpus=0, resources={RESOURCE: 0.6},  # two exceed what a node has
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            max_restarts=-1, max_concurrency=8,
        ).remote(self._config, self._spec, node)  # fmt: skip


class DirectorActor(Director):
    """The director in Ray: its turns begin again whenever Ray starts it again."""

    def __init__(self, config: FleetConfig, spec: str) -> None:
        hosts = RayCluster(config, spec)
        super().__init__(hosts, spec)
        spending = Exchange(hosts)

        def exchange() -> None:
            """What keys spent elsewhere, and the keys themselves: hosts that miss one exchange get the next."""
            spending.turn()
            spread(hosts)

        for work, pause_s in ((self.turn, TURN_S), (exchange, INTERVAL_S)):
            threading.Thread(target=repeated, args=(work, pause_s), daemon=True).start()


def connect(config: FleetConfig, own: str, head: str, init: Callable[..., object] = ray.init) -> RayHosts:
    """`own`: the address of this host's node; `head`: that of its head, for `ray = "auto"`. Ray itself would take it of any
    user's process that looks like a raylet, or of a file in /tmp. Raises LauncherError."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    address = head if config.ray == AUTO else config.ray
    try:
        # Ray adds the working directory to the places where agents and director look for modules first, on all hosts.
        with contextlib.chdir("/"):
            init(
                address=address, _node_ip_address=own, namespace=namespace(config), log_to_driver=False,
                configure_logging=False, logging_level=logging.ERROR,
            )  # fmt: skip
    except (ConnectionError, RuntimeError, OSError) as error:
        raise UnreachableError(
            f"cannot reach Ray at '{address}': {error}",
            "start it on this host, with the other hosts' token: docs/fleet.md",
        ) from None
    return RayHosts(config)
