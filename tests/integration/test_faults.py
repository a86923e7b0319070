"""Instances recover from failures, and the endpoint answers throughout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from integration.load import Load
from support.daemon_process import DaemonProcess, eventually

pytestmark = pytest.mark.timeout(900)

Start = Callable[..., DaemonProcess]
QUICK = "[supervision]\nbackoff_initial_s = 0.2\nbackoff_max_s = 0.5\nprobe_interval_s = 0.3"


def test_restart_of_each_slot_under_load_fails_no_request(start: Start) -> None:
    daemon = start("--token-s", "0.03")
    daemon.wait_ready(2)
    with Load(daemon.url, "fake", workers=16) as load:
        for slot in ("0", "1", "0", "1"):
            done = daemon.cli("restart", slot)
            assert done.returncode == 0, done.stderr
        eventually(lambda: load.tally.completed > 50, what="answers")
    assert load.tally.failures == []
    assert [slot["generation"] for slot in daemon.status()["slots"]] == [3, 3]
    requests = daemon.status()["requests"]
    assert requests["accepted"] == requests["completed"] == load.tally.completed


@pytest.mark.parametrize(
    "fault", ["exit 3", *(pytest.param(fault, marks=pytest.mark.long) for fault in ("exit 0", "unhealthy"))]
)
def test_a_dead_instance_is_replaced(start: Start, fault: str) -> None:
    daemon = start("--token-s", "0.03", "--children", "2", more=QUICK)
    daemon.wait_ready(2)
    with Load(daemon.url, "fake", workers=8) as load:
        daemon.post(0, "/fault", {"kind": fault})
        eventually(
            lambda: (s := daemon.slot(0))["generation"] == 2 and s["state"] == "ready", what="slot 0 back"
        )
        eventually(lambda: load.tally.completed > 20, what="answers")
    # Only streams with delivered bytes may fail, each with an error event.
    assert len(load.tally.failures) == load.tally.honest <= 8, load.tally.failures
    assert daemon.slot(0)["last_cause"]["name"] == ("unhealthy" if fault == "unhealthy" else "unknown")
    requests = daemon.status()["requests"]
    assert requests["accepted"] == sum(
        requests[k] for k in ("completed", "refused", "client_aborted", "rejected", "failed")
    )


def test_a_crash_loop_ends_in_failed_with_the_cause(start: Start) -> None:
    daemon = start("--fail", "strange words", instances=1, more=QUICK)
    slot = eventually(
        lambda: daemon.status() and (s := daemon.slot(0))["state"] == "failed" and s, what="failed"
    )
    assert slot["restarts"] == 4
    assert slot["last_cause"]["evidence"] == ["strange words"]
    assert slot["last_cause"]["remedy"]
    done = daemon.cli("status")
    assert done.returncode == 1
    assert "strange words" in done.stdout


def test_an_instance_not_ready_in_time_is_restarted(start: Start) -> None:
    daemon = start("--startup-s", "600", instances=1, more=QUICK + "\nready_timeout_s = 1")
    slot = eventually(
        lambda: daemon.status() and (s := daemon.slot(0))["generation"] >= 2 and s, what="a second try"
    )
    assert slot["last_cause"]["name"] == "not-ready-in-time"


def test_an_engine_on_a_port(start: Start) -> None:
    daemon = start(where="--port")
    status = daemon.wait_ready(2)
    assert all(slot["address"].startswith("127.0.0.1:") for slot in status["slots"])
    with Load(daemon.url, "fake", workers=4) as load:
        eventually(lambda: load.tally.completed, what="an answer")
    assert load.tally.failures == []
