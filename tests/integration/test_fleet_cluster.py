"""A fleet of three hosts: real Ray nodes and real daemons, each host a network namespace. Needs root.

In CI the lane fleet kills agents, directors and heads, and cuts hosts off.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from integration.conftest import eventually
from integration.ray_hosts import NET, PORT, Network

# Two directors, a new head, Ray's own time-outs.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LONG_S = 240.0


class Fleet:
    """h1 is Ray's head; h1 and h2 are ingress hosts; h3 has no daemon at first."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.config = str(network.folder / "fleet.toml")
        self.a, self.b, self.c = (network.host(name) for name in ("h1", "h2", "h3"))
        # Starts nothing: the test starts the daemon, as systemd does on a real host.
        start = f'start = ["sh", "-c", "touch {network.shared}/wanted; echo not today; exit 1"]'
        Path(self.config).write_text(
            f'ray = "{NET}.1:6379"\nstate = "{network.shared}/fleet"\n'
            f'[ingress]\nhosts = ["{NET}.1", "{NET}.2"]\n{start}\n'
            f'[hosts]\ncontrol = "{network.shared}/c.sock"\nkeys = "{network.shared}/keys"\n{start}\n'
        )
        for host in (self.a, self.b):
            host.daemon()
        for host in (self.a, self.b, self.c):
            host.ray(self.a)

    def cli(self, action: str) -> tuple[int, str]:
        done = self.b.cli("fleet", action, "-c", self.config)
        return done.returncode, done.stdout + done.stderr

    def actors(self) -> list[int]:
        """Process ids of agents and director."""
        hosts = (self.a, self.b, self.c)
        return [pid for host in hosts for pid in host.pids("ray::Agent") + host.pids("ray::DirectorActor")]

    def states(self) -> dict[str, str]:
        """Of the file of ingress host h2."""
        return {member["host"]: member["state"] for member in self.b.members().get("members", [])}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    network = Network(tmp_path_factory.mktemp("f"))
    try:
        yield Fleet(network)
    finally:
        network.close()


@pytest.fixture(autouse=True)
def _daemons_stay(fleet: Fleet) -> Iterator[None]:
    """Whatever becomes of Ray: no daemon and no instance ends."""
    hosts = (fleet.a, fleet.b, fleet.c)
    before = {pid for host in hosts for pid in host.pids("launcher serve") + host.pids("--uds")}
    yield
    assert before <= set(psutil.pids())


def test_up_says_host_by_host_what_it_found(fleet: Fleet) -> None:
    eventually(lambda: "h3: " in fleet.cli("up")[1], LONG_S, "three nodes")
    code, said = fleet.cli("up")
    assert code == 1
    assert f"h1: attached to its daemon at {NET}.1:{PORT}\n" in said
    assert f"h2: attached to its daemon at {NET}.2:{PORT}\n" in said
    assert "h3: cannot reach numa-launcher on " in said
    assert said.endswith(f"endpoint: http://{NET}.1:8000 or http://{NET}.2:8000\n")
    assert "not today\n" in said
    assert (fleet.c.folder / "wanted").exists()  # it ran what starts a daemon
    assert fleet.a.members() == fleet.b.members()
    assert fleet.states() == {"h1": "ready", "h2": "ready"}


def test_a_host_joins_when_its_daemon_is_there(fleet: Fleet) -> None:
    fleet.c.daemon()
    eventually(lambda: fleet.states() == dict.fromkeys(("h1", "h2", "h3"), "ready"))
    eventually(lambda: fleet.cli("up")[0] == 0)
    code, said = fleet.cli("status")
    assert code == 0, said
    assert f"h3    ready  {NET}.3:{PORT}  1/1" in said


def test_up_again_changes_nothing(fleet: Fleet) -> None:
    before = fleet.b.members(), fleet.actors()
    assert fleet.cli("up")[0] == 0
    assert (fleet.b.members(), fleet.actors()) == before


@pytest.mark.release
def test_a_killed_agent_is_replaced_and_nothing_else_changes(fleet: Fleet) -> None:
    before = fleet.b.members()
    fleet.c.kill("ray::Agent")
    eventually(lambda: fleet.c.pids("ray::Agent"))
    eventually(lambda: fleet.cli("status")[0] == 0)
    assert fleet.b.members() == before


@pytest.mark.release
def test_a_killed_director_is_replaced_by_one_with_a_newer_list(fleet: Fleet) -> None:
    before, agents = fleet.b.members(), fleet.c.pids("ray::Agent")
    for host in (fleet.a, fleet.b, fleet.c):
        host.kill("ray::DirectorActor")
    eventually(lambda: fleet.b.members()["epoch"] > before["epoch"])
    assert fleet.b.members()["members"] == before["members"]
    assert fleet.c.pids("ray::Agent") == agents


@pytest.mark.release
def test_a_host_that_is_cut_off_is_lost_and_comes_back_by_itself(fleet: Fleet) -> None:
    daemon = fleet.c.pids("launcher serve")
    fleet.c.cut()
    eventually(lambda: fleet.states()["h3"] == "lost", LONG_S)
    fleet.c.join()
    eventually(lambda: fleet.states()["h3"] == "ready", LONG_S)
    assert fleet.c.pids("launcher serve") == daemon  # it was not started twice
    assert len(fleet.c.pids("ray::Agent")) == 1


@pytest.mark.release
def test_without_rays_head_the_hosts_are_known_and_a_new_head_takes_over(fleet: Fleet) -> None:
    before, agents = fleet.b.members(), fleet.c.pids("ray::Agent")
    fleet.a.stop_ray()
    code, said = fleet.cli("status")
    assert code == 1
    assert f"Ray: cannot reach Ray's head at '{NET}.1:6379': connection refused; requests are served" in said
    assert "3/3 hosts serving" in said
    assert fleet.b.members() == before
    fleet.a.ray(fleet.a)
    eventually(lambda: fleet.cli("status")[0] == 0, LONG_S)
    assert {member["host"] for member in fleet.b.members()["members"]} == {"h1", "h2", "h3"}
    eventually(lambda: fleet.a.pids("ray::Agent"), LONG_S)
    # RAY_gcs_storage: the new head found the nodes and their actors.
    assert fleet.c.pids("ray::Agent") == agents


def test_down_leaves_daemons_and_list(fleet: Fleet) -> None:
    before = fleet.b.members()
    code, said = fleet.cli("down")
    assert code == 0
    assert "4 actors removed" in said
    assert "daemons and ingress keep serving" in said
    assert fleet.b.members() == before
    eventually(lambda: not fleet.actors())
    assert fleet.cli("down") == (0, said.replace(said.splitlines()[0], "no agents were there"))
