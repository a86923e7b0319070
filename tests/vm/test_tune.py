"""`tune --stop-service` in a virtual host with systemd: killed, terminated, resumed; guest/tune.py records the facts.

In CI tests/integration kills and resumes tune, and tests/measure/tune/test_service.py has the commands to systemd.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

Facts = dict[str, Any]
pytestmark = pytest.mark.release
STOPPED = {
    "numa-launcher.socket": "inactive",
    "numa-launcher-control.socket": "inactive",
    "numa-launcher.service": "inactive",
}
RUNNING = dict.fromkeys(STOPPED, "active")


def test_a_running_service_is_refused_and_left_alone(tuned: Facts) -> None:
    assert tuned["ready"]
    assert tuned["before"]["units"] == RUNNING
    assert tuned["refused"]["status"] == 2, tuned["refused"]
    assert "numa-launcher.service" in tuned["refused"]["error"]
    assert "--stop-service" in tuned["refused"]["error"]
    assert tuned["after-refused"] == tuned["before"]


@pytest.mark.parametrize("name", ["stopped", "stopped-again"])
def test_nothing_runs_or_listens_during_the_run(tuned: Facts, name: str) -> None:
    """A client that connects must not start the service."""
    assert (tuned[name]["units"], tuned[name]["slots"]) == (STOPPED, 0)
    assert not tuned["stopped"]["connects"]
    assert tuned["stopped"]["after"] == STOPPED


@pytest.mark.parametrize(("name", "status"), [("killed", -9), ("terminated", 130)])
def test_the_service_is_as_before_however_tune_ends(tuned: Facts, name: str, status: int) -> None:
    assert tuned[name]["status"] == status, tuned[name]
    assert tuned[name]["back"], tuned[name]
    assert tuned[name]["host"] == tuned["before"]
    assert tuned[name]["measures"] == [], "the command survived"


def test_the_resumed_run_ends_with_nothing_measured_twice(tuned: Facts) -> None:
    assert tuned["resumed"]["status"] == 0, tuned["resumed"]
    found = json.loads(tuned["resumed"]["out"])
    assert not found["different"]
    repeats = [record for record in tuned["journal"] if record["event"] == "repeat-ended"]
    # One call each was in progress at SIGKILL and at SIGTERM.
    assert tuned["calls"] == len(repeats) + 2
    assert tuned["back"]
    assert tuned["after"] == tuned["before"]
    assert tuned["guards"] == ""
