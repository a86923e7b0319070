"""`numa-launcher fleet` without a cluster; tests/integration/test_fleet_cluster.py has one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.cli.fleet import untrusted
from launcher.fleet.config import FleetConfig, Ingress

WITHOUT_RAY = (
    "import sys; sys.modules['ray'] = None; from launcher.cli import main; sys.exit(main(sys.argv[1:]))"
)


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


@pytest.mark.parametrize("action", ["up", "down", "status"])
def test_a_head_that_is_gone_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    assert main(["fleet", action, "-c", fleet_toml(tmp_path, 'ray = "127.0.0.1:1"')]) == 2
    assert "cannot reach Ray's head at '127.0.0.1:1': connection refused" in capsys.readouterr().err
