"""A fleet of three hosts: real Ray nodes and real daemons, each host a network namespace. Needs root.

In CI the lane fleet runs the verbs, kills agents, directors and heads, and cuts hosts off.
"""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from fleet_hosts.fleet import DAEMON_PORT, INSTANCES, RAY_PORT, Fleet
from fleet_hosts.hosts import NETWORK, Host, own_network
from support.daemon_process import eventually

# Two directors, a new head, Ray's own time-outs.
pytestmark = [pytest.mark.release, pytest.mark.timeout(900)]
LONG_S = 240.0
# Starts nothing: the test starts the daemon, as systemd does on a real host.
START = ("sh", "-c", "touch /run/disk/wanted; echo not today; exit 1")


class Cluster:
    """host1 is Ray's head; host1 and host2 are ingress hosts; host3 has no daemon at first."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.a, self.b, self.c = self.hosts = fleet.hosts
        for host in self.hosts:
            host.power_on()
        for host in (self.a, self.b):
            fleet.start_daemon(host)
        for host in self.hosts:
            fleet.start_ray(host)

    def cli(self, verb: str) -> tuple[int, str]:
        return self.fleet.run(self.b, verb)

    def pids(self, word: str, *hosts: Host) -> list[int]:
        """Of processes on these hosts, on all unless told."""
        return [process.pid for host in hosts or self.hosts for process in host.processes_of(word)]

    def kill(self, word: str, *hosts: Host) -> None:
        for host in hosts or self.hosts:
            self.fleet.kill(*host.processes_of(word))

    def actors(self) -> set[int]:
        """Process ids of agents and director."""
        return {*self.pids("ray::Agent"), *self.pids("ray::DirectorActor")}

    def states(self) -> dict[str, str]:
        """Of the file of an ingress host."""
        return {member.host: member.state.value for member in self.fleet.members(self.b).members}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with own_network():
        fleet = Fleet(
            tmp_path_factory.mktemp("f"), 0.02, with_vllm=False, hosts=3, start=START, start_ingress=START
        )
        try:
            yield Cluster(fleet)
        finally:
            for host in fleet.hosts:
                host.power_off()


@pytest.fixture(autouse=True)
def _daemons_stay(cluster: Cluster) -> Iterator[None]:
    """Whatever becomes of Ray: no daemon and no instance ends."""
    before = {*cluster.pids("launcher serve"), *cluster.pids("--uds")}
    yield
    assert before <= set(psutil.pids())


def test_up_says_host_by_host_what_it_found(cluster: Cluster) -> None:
    eventually(lambda: "host3: " in cluster.cli("up")[1], LONG_S, "three nodes")
    code, said = cluster.cli("up")
    assert code == 1
    assert f"host1: attached to its daemon at {NETWORK}.1:{DAEMON_PORT}\n" in said
    assert f"host2: attached to its daemon at {NETWORK}.2:{DAEMON_PORT}\n" in said
    assert "host3: cannot reach numa-launcher on " in said
    assert said.endswith(f"endpoint: http://{NETWORK}.1:8000 or http://{NETWORK}.2:8000\n")
    assert "not today\n" in said
    assert "ignores" not in said  # their trusted_proxies are the ingress hosts
    assert (cluster.c.folder / "disk" / "wanted").exists()  # it ran what starts a daemon
    assert cluster.fleet.members(cluster.a) == cluster.fleet.members(cluster.b)
    assert cluster.states() == {"host1": "ready", "host2": "ready"}


@pytest.fixture(scope="module")
def _third_daemon(cluster: Cluster) -> None:
    """It outlives its first test."""
    cluster.fleet.start_daemon(cluster.c)


@pytest.mark.usefixtures("_third_daemon")
def test_a_host_joins_when_its_daemon_is_there(cluster: Cluster) -> None:
    eventually(lambda: cluster.states() == dict.fromkeys(("host1", "host2", "host3"), "ready"))
    eventually(lambda: cluster.cli("up")[0] == 0)
    eventually(lambda: cluster.cli("status")[0] == 0)
    assert f"host3  ready  {NETWORK}.3:{DAEMON_PORT}  {INSTANCES}/{INSTANCES}" in cluster.cli("status")[1]


def test_up_again_changes_nothing(cluster: Cluster) -> None:
    before = cluster.fleet.members(cluster.b), cluster.actors()
    assert cluster.cli("up")[0] == 0
    assert (cluster.fleet.members(cluster.b), cluster.actors()) == before


def test_a_killed_agent_is_replaced_and_nothing_else_changes(cluster: Cluster) -> None:
    before = cluster.fleet.members(cluster.b)
    cluster.kill("ray::Agent", cluster.c)
    eventually(lambda: cluster.pids("ray::Agent", cluster.c))
    eventually(lambda: cluster.cli("status")[0] == 0)
    assert cluster.fleet.members(cluster.b) == before


def test_a_killed_director_is_replaced_by_one_with_a_newer_list(cluster: Cluster) -> None:
    before, agents = cluster.fleet.members(cluster.b), cluster.pids("ray::Agent", cluster.c)
    cluster.kill("ray::DirectorActor")
    eventually(lambda: cluster.fleet.members(cluster.b).epoch > before.epoch)
    assert cluster.fleet.members(cluster.b).members == before.members
    assert cluster.pids("ray::Agent", cluster.c) == agents


def test_a_host_that_is_cut_off_is_lost_and_comes_back_by_itself(cluster: Cluster) -> None:
    daemon = cluster.pids("launcher serve", cluster.c)
    cluster.c.unplug()
    eventually(lambda: cluster.states()["host3"] == "lost", LONG_S)
    cluster.c.plug()
    eventually(lambda: cluster.states()["host3"] == "ready", LONG_S)
    assert cluster.pids("launcher serve", cluster.c) == daemon  # it was not started twice
    assert len(cluster.pids("ray::Agent", cluster.c)) == 1


def test_without_rays_head_the_hosts_are_known_and_a_new_head_takes_over(cluster: Cluster) -> None:
    before, agents = cluster.fleet.members(cluster.b), cluster.pids("ray::Agent", cluster.c)
    with cluster.fleet.stopped(cluster.a, "ray"):
        cluster.fleet.kill(*cluster.fleet.unit_of(cluster.a, "ray").children(recursive=True))
        code, said = cluster.cli("status")
        assert code == 1
        head = f"{NETWORK}.1:{RAY_PORT}"
        assert f"Ray: cannot reach Ray's head at '{head}': connection refused; requests are served" in said
        assert "3/3 hosts serving" in said
        assert cluster.fleet.members(cluster.b) == before
    eventually(lambda: cluster.cli("status")[0] == 0, LONG_S)
    assert {member.host for member in cluster.fleet.members(cluster.b).members} == {"host1", "host2", "host3"}
    eventually(lambda: cluster.pids("ray::Agent", cluster.a), LONG_S)
    # RAY_gcs_storage: the new head found the nodes and their actors.
    assert cluster.pids("ray::Agent", cluster.c) == agents


def test_down_leaves_daemons_and_list(cluster: Cluster) -> None:
    before = cluster.fleet.members(cluster.b)
    code, said = cluster.cli("down")
    assert code == 0
    assert "4 actors removed" in said
    assert "daemons and ingress keep serving" in said
    assert cluster.fleet.members(cluster.b) == before
    eventually(lambda: not cluster.actors())
    assert cluster.cli("down") == (0, said.replace(said.splitlines()[0], "no agents were there"))
