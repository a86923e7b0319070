"""What is read of Ray's nodes."""

from __future__ import annotations

import base64
import importlib
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.ports import free_port

from launcher.base.errors import LauncherError
from launcher.fleet.config import FleetConfig, Ingress


@pytest.fixture(scope="module")
def cluster() -> ModuleType:
    """Imports Ray: a second, which processes that only collect these tests do without."""
    return importlib.import_module("launcher.fleet.cluster")


def node(id_: str, name: str = "h1", started_ms: int = 1, **fields: Any) -> Any:
    """A GcsNodeInfo of Ray, by default of a live host of the fleet."""
    from ray.core.generated.gcs_pb2 import GcsNodeInfo  # noqa: PLC0415  heavy

    return GcsNodeInfo(
        node_id=bytes.fromhex(id_), node_name=name, start_time_ms=started_ms, node_manager_hostname="host-1",
        **{"resources_total": {"numa_host": 1.0}, "node_manager_address": "10.0.0.1", **fields},
    )  # fmt: skip


def test_a_host_is_named_by_its_node_and_known_by_all_its_names(cluster: ModuleType) -> None:
    (found,) = cluster.nodes_of([node("0a")])
    assert (found.id, found.host, found.address) == ("0a", "h1", "10.0.0.1")
    assert found.names == {"h1", "10.0.0.1", "host-1"}


@pytest.mark.parametrize("new", ["0a", "0f"])
def test_of_two_live_nodes_of_a_host_the_one_that_started_last_counts(cluster: ModuleType, new: str) -> None:
    """Power was away for less time than Ray takes to miss the old node; whatever the ids are."""
    old = node("0c", started_ms=1_000)
    for known in ([old, node(new, started_ms=2_000)], [node(new, started_ms=2_000), old]):
        assert [one.id for one in cluster.nodes_of(known)] == [new]


def test_nodes_that_are_dead_or_no_host_of_the_fleet_do_not_count(cluster: ModuleType) -> None:
    dead = node("0b", "h2", started_ms=9, state="DEAD")
    other = node("0d", "h3", resources_total={"CPU": 4.0})
    assert [one.host for one in cluster.nodes_of([dead, other, node("0a", "h4"), node("0e", "")])] == [
        "10.0.0.1",
        "h4",
    ]


def test_of_two_hosts_with_one_name_the_first_counts_and_the_other_is_named(cluster: ModuleType) -> None:
    one, other = node("0a", started_ms=1_000), node("0b", started_ms=2_000, node_manager_address="10.0.0.2")
    again = node("0c", started_ms=3_000)
    (found,) = cluster.nodes_of([again, other, one, node("0d", "h2", state="DEAD")])
    assert (found.id, found.address, found.namesakes) == ("0c", "10.0.0.1", ("10.0.0.2",))
    assert cluster.nodes_of([one])[0].namesakes == ()


@pytest.fixture
def head(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """What answers first on Ray's head, alone. Its parameter: RAY_AUTH_MODE."""
    import ray  # noqa: PLC0415  heavy

    port = free_port()
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    (tmp_path / "logs").mkdir()
    program = Path(ray.__file__).with_name("core") / "src/ray/gcs/gcs_server"
    words = {
        "log_dir": tmp_path / "logs", "config_list": base64.b64encode(b"{}").decode(), "gcs_server_port": port,
        "metrics-agent-port": 1, "node-ip-address": "127.0.0.1", "session-name": "s", "ray-commit": ray.__commit__,
        "session-dir": tmp_path, "node-id": "0a" * 28,
    }  # fmt: skip
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "RAY_AUTH_MODE": request.param}
    quiet = subprocess.DEVNULL
    line = [program, *(f"--{name}={value}" for name, value in words.items())]
    with subprocess.Popen(line, env=environ, stdout=quiet, stderr=quiet) as server:
        yield f"127.0.0.1:{port}"
        server.kill()


@pytest.mark.parametrize("head", ["disabled"], indirect=True)
def test_a_head_that_answers_without_a_token_is_refused(
    cluster: ModuleType, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where this host has a token, and where the working directory has a module of Ray's name."""
    (tmp_path / "ray.py").write_text("print('refuses')\nraise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x" * 64)
    with pytest.raises(LauncherError, match=f"Ray's head at '{head}' answers without a token") as error:
        cluster.refuse_open(head)
    assert "RAY_AUTH_MODE=token" in error.value.remedy


@pytest.mark.parametrize("head", ["token"], indirect=True)
def test_a_head_that_wants_a_token_is_taken(cluster: ModuleType, head: str) -> None:
    cluster.refuse_open(head)


@pytest.mark.parametrize(("configured", "address"), [("auto", "10.0.0.1:6379"), ("h1:6379", "h1:6379")])
def test_ray_is_told_which_head_and_no_folder_of_others(
    cluster: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: str, address: str
) -> None:
    """Told "auto", Ray asks whatever head a process of any user names. Agents, which are root's, look for modules in the
    working directory of whoever made them (Ray 2.60)."""
    monkeypatch.chdir(tmp_path)
    asked: list[tuple[str, str, str]] = []

    def init(**given: Any) -> None:
        asked.append((given["address"], given["_node_ip_address"], str(Path.cwd())))

    cluster.connect(
        FleetConfig(ray=configured, ingress=Ingress(hosts=("h1",))), "10.0.0.2", "10.0.0.1:6379", init
    )
    assert asked == [(address, "10.0.0.2", "/")]
    assert Path.cwd() == tmp_path
