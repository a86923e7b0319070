"""Drills do not meet each other, and leave nothing behind however they end."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest
from support.daemon_process import eventually
from support.processes import still_running

from fleet_hosts.hosts import BRIDGE

DRILL = Path(__file__).resolve().parents[2] / "scripts" / "fleet-drill"
NOTHING = ("--without-ray", "--without-vllm", "--rows", "", "--clients", "8")


def start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(DRILL), *NOTHING], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


def links() -> set[str]:
    done = subprocess.run(["ip", "-br", "link"], check=True, capture_output=True, text=True)
    return {line.split()[0] for line in done.stdout.splitlines()}


@pytest.mark.timeout(300)
def test_of_two_drills_the_killed_one_leaves_nothing_and_the_other_goes_on() -> None:
    killed, other = start(), start()
    for drill in (killed, other):
        assert drill.stdout is not None
        assert drill.stderr is not None
        assert drill.stdout.readline().startswith("fleet of 4 hosts started"), drill.stderr.read()
    processes = psutil.Process(killed.pid).children(recursive=True)
    # Daemons, instances, ingresses, and what starts them.
    assert len(processes) > 4 * 4
    killed.kill()
    killed.communicate()
    eventually(lambda: not still_running(processes), what="the killed drill's processes end")
    told, errors = other.communicate(timeout=120)
    assert other.returncode == 0, told + errors
    assert "dishonest: 0" in told
    assert not {name for name in links() if name == BRIDGE or name.startswith("port")}
