"""`numa-launcher fleet` without a cluster; tests/integration/test_fleet_cluster.py has one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.cli import main
from launcher.cli.fleet import OwnNode, _started, own_node, untrusted
from launcher.fleet.config import FleetConfig, Ingress

WITHOUT_RAY = (
    "import sys; sys.modules['ray'] = None; from launcher.cli import main; sys.exit(main(sys.argv[1:]))"
)

# Has Ray's name and a socket that takes connections.
RAYLET = """
import socket, sys
socket_name = sys.argv[1].partition("=")[2]
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(socket_name)
    listener.listen()
    open("/proc/self/comm", "w").write("raylet")
    print("listens", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The name, command line and users, as psutil reads them, of a process that looks like a Ray daemon."""
    words = {
        "raylet_socket_name": tmp_path / "raylet", "node_ip_address": "127.0.0.1", "gcs-address": "10.0.0.9:6379",
    }  # fmt: skip
    line = [sys.executable, "-c", RAYLET, *(f"--{name}={value}" for name, value in words.items())]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        yield psutil.Process(process.pid).as_dict(["name", "cmdline", "uids"])
        process.kill()


def fleet_toml(folder: Path, more: str = "") -> str:
    path = folder / "fleet.toml"
    path.write_text(f'{more}\nstate = "{folder}"\n[ingress]\nhosts = ["127.0.0.1"]\n')
    return str(path)


@pytest.mark.parametrize("action", ["up", "down", "status", "forget"])
def test_without_the_extra_it_is_said_what_to_install(tmp_path: Path, action: str) -> None:
    words = [action, *["h1"] * (action == "forget")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, "fleet", *words, "-c", fleet_toml(tmp_path)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "cannot use fleet: ray is not installed",
        "run scripts/install --fleet, or pip install 'numa-launcher[fleet]'",
    ]


def test_without_a_configuration_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "up", "-c", str(tmp_path / "none.toml")]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("trusted", "ignored"),
    [
        ([], ["10.0.0.1", "10.0.0.2"]),
        (["unix", "10.0.0.1"], ["10.0.0.2"]),
        (["10.0.0.0/8"], []),
        (["fd00::/8", "10.0.0.0/31"], ["10.0.0.2"]),
    ],
)
def test_ingress_hosts_that_a_daemon_does_not_trust(trusted: list[str], ignored: list[str]) -> None:
    config = FleetConfig(ingress=Ingress(hosts=("10.0.0.1", "10.0.0.2")))
    assert untrusted(config, trusted) == ignored
    assert untrusted(FleetConfig(ingress=Ingress(hosts=("a-name",))), trusted) == []


class Failing:
    def run(self, _host: str, _words: tuple[str, ...], _timeout_s: float) -> tuple[int, str]:
        return 1, (
            "Job for numa-launcher.service failed because the control process exited with error code.\n"
            'See "systemctl status numa-launcher.service" and "journalctl -xeu numa-launcher.service" for details.\n'
        )


def test_why_a_daemon_did_not_start_is_systemctls_first_line() -> None:
    said = _started(Failing(), "a", ("systemctl", "start", "numa-launcher"))
    assert said == (
        "cannot start it: `systemctl start numa-launcher`: Job for numa-launcher.service failed because the control process "
        "exited with error code."
    )


@pytest.mark.parametrize("action", ["up", "down", "status"])
def test_a_head_that_is_gone_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    assert main(["fleet", action, "-c", fleet_toml(tmp_path, 'ray = "127.0.0.1:1"')]) == 2
    assert "cannot reach Ray's head at '127.0.0.1:1': connection refused" in capsys.readouterr().err


def test_this_hosts_node_is_that_of_a_user_who_may_start_it(raylet: dict[str, Any]) -> None:
    """The instances' user, too, may call a process raylet; who asks that one for the head would send it the token."""
    other = {**raylet, "uids": (os.geteuid() + 1,) * 3}
    assert own_node([other, {**raylet, "uids": None}, {**raylet, "name": "python"}]) is None
    assert own_node([other, raylet]) == OwnNode("127.0.0.1", "10.0.0.9:6379")
    assert own_node([{**raylet, "uids": (0, 0, 0)}]) is not None
    assert own_node([{**raylet, "cmdline": raylet["cmdline"][:-1]}]) is None  # no head
    own_node()  # of all processes here: it raises for none
