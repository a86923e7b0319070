"""A night on call, in one virtual host with systemd, two sockets and four NUMA nodes.

What is done to it under load loses nothing that it need not lose.

guest/oncall.py does it and writes down what it saw; here it is judged. One boot, 500 s on two cores that others use as well.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

SLOTS = {"0", "1", "2", "3"}
# One client can have one stream open.
CLIENTS = 6
RESTARTS = ("systemctl-restart", "upgrade", "rollback")
PLANNED = ("restart-0", "restart-1", "restart-2", "restart-3", *RESTARTS, "reload-bad", "reload-good",
           "cpu-offline", "cpu-online")  # fmt: skip
DAEMON_BREAKS = ("kill-daemon", "freeze-daemon")
INSTANCE_ENDS = {"kill-instance": "0", "oom-instance": "1", "stop-instance": "2"}
Facts = dict[str, Any]


def failed(night: Facts, step: Facts) -> list[Facts]:
    """Requests that failed in a step; one begins when the one before ends."""
    return [one for one in night["load"] if not one["ok"] and step["from"] < one["ended"] <= step["to"]]


def test_the_contract_of_a_spawner_holds_for_units(night: Facts) -> None:
    """tests/instances/test_spawner_contract.py with systemd's units, while numa-launcher is installed."""
    done = night["contract"]
    assert done["status"] == 0, done["out"]
    assert " passed" in done["out"]
    assert "skipped" not in done["out"]


def test_install_as_documented(night: Facts) -> None:
    assert night["before"] == {"opt": False, "etc": False}, "--dry-run has done something"
    assert night["dry-run"]["status"] == 0, night["dry-run"]
    assert night["install"]["status"] == 0, night["install"]
    assert night["enable"]["status"] == 0, night["enable"]
    assert night["status"]["ready"] == len(SLOTS)


def test_the_daemon_is_locked_up(night: Facts) -> None:
    """--threshold=25 is 2.5 of 10."""
    assert night["security"]["status"] == 0, night["security"]["out"][-500:]


def test_no_secret_is_to_be_seen(night: Facts) -> None:
    assert night["secrets"] == {
        "instance": True,
        "cmdline": False,
        "show": False,
        "units": False,
        "state": [],
    }


def test_the_journal_has_fields(night: Facts) -> None:
    of_units = [
        line for line in night["journal"] if str(line["_SYSTEMD_UNIT"]).startswith("numa-launcher-slot")
    ]
    assert {line["NUMA_LAUNCHER_SLOT"] for line in of_units} == SLOTS
    assert {line["NUMA_LAUNCHER_GENERATION"] for line in of_units} == {"1"}
    said = [line for line in night["journal"] if line["_SYSTEMD_UNIT"] == "numa-launcher.service"]
    ready = {line["NUMA_LAUNCHER_SLOT"] for line in said if line["MESSAGE"].endswith("starting -> ready")}
    assert ready == SLOTS


@pytest.mark.parametrize("name", [*PLANNED, *DAEMON_BREAKS, *INSTANCE_ENDS])
def test_all_is_well_again(night: Facts, name: str) -> None:
    step = night[name]
    assert step["well"], step
    assert step["strays"] == [], "a process outside its unit"


@pytest.mark.parametrize("name", [*PLANNED, *DAEMON_BREAKS, *INSTANCE_ENDS])
def test_there_is_load_in_each_step(night: Facts, name: str) -> None:
    """All clients begin a request in it that goes well: a step without load would prove nothing."""
    step = night[name]
    served = [one for one in night["load"] if one["ok"] and step["from"] <= one["began"] <= step["to"]]
    assert len(served) >= CLIENTS


@pytest.mark.parametrize("name", PLANNED)
def test_what_is_planned_fails_no_request(night: Facts, name: str) -> None:
    assert not failed(night, night[name])


def test_no_request_fails_between_the_steps(night: Facts) -> None:
    """Nor while a bundle is made, and the load ends."""
    known = [one["n"] for name in (*DAEMON_BREAKS, *INSTANCE_ENDS) for one in failed(night, night[name])]
    assert sorted(known) == sorted(one["n"] for one in night["load"] if not one["ok"])


@pytest.mark.parametrize("name", [*DAEMON_BREAKS, *INSTANCE_ENDS])
def test_what_is_not_planned_fails_open_streams_only(night: Facts, name: str) -> None:
    found = failed(night, night[name])
    assert len(found) <= CLIENTS
    for request in found:
        assert request["began"] <= night[name]["acted"], request
        if name in INSTANCE_ENDS:
            assert request["tokens"] > 0, "another instance can take what has got no token yet"
        assert request["why"] == "" or "503" not in request["why"], "it was open, and is cut, not refused"


@pytest.mark.parametrize("name", [*RESTARTS, *DAEMON_BREAKS])
def test_instances_outlive_the_daemon(night: Facts, name: str) -> None:
    step = night[name]
    assert step["before"]["pids"].keys() == SLOTS
    assert 0 not in step["before"]["pids"].values()
    assert step["after"]["pids"] == step["before"]["pids"]
    assert step["after"]["daemon"] != step["before"]["daemon"]


def test_each_release_is_run_from_its_own_folder(night: Facts) -> None:
    for name in ("upgrade", "rollback"):
        assert night[name]["done"]["done"]["status"] == 0, night[name]
        where = night[f"{name}-release"]
        assert where["daemon"].startswith(f"{where['current']}/venv/bin/"), where
    assert night["upgrade-release"]["current"] != night["rollback-release"]["current"]


@pytest.mark.parametrize(("name", "slot"), INSTANCE_ENDS.items())
def test_one_instance_is_replaced_and_no_other(night: Facts, name: str, slot: str) -> None:
    before, after = night[name]["before"], night[name]["after"]
    assert {key for key in SLOTS if before["pids"][key] != after["pids"][key]} == {slot}
    assert after["daemon"] == before["daemon"]


def test_why_says_what_it_was(night: Facts) -> None:
    assert "killed" in night["kill-instance"]["done"]["out"]
    assert night["oom-instance"]["done"]["cause"]["name"] == "cgroup-oom"
    assert night["stop-instance"]["done"]["cause"]["name"] == "hung"


def test_a_bad_configuration_changes_nothing(night: Facts) -> None:
    step = night["reload-bad"]
    assert step["done"]["status"] == 2
    assert "layuot" in step["done"]["error"]
    assert step["after"] == step["before"]
    step = night["reload-good"]
    assert step["done"]["status"] == 0, step["done"]
    assert not set(step["after"]["pids"].values()) & set(step["before"]["pids"].values())


def test_threads_and_pages_are_where_the_plan_says(night: Facts) -> None:
    assert night["verify"]["status"] == 0, night["verify"]
    for slot in night["verify"]["slots"]:
        assert (slot["verified"]["differences"], slot["verified"]["foreign"]) == ([], [])


def test_logs_know_when_they_were_printed(night: Facts) -> None:
    """By the instance, and not when a new daemon read them."""
    logs = night["logs"]
    assert logs["old"]["status"] == 0, logs["old"]
    assert [line["text"] for line in logs["lines"]] == ["loading"]
    assert logs["lines"][0]["generation"] == 2
    assert night["restart-0"]["from"] < logs["lines"][0]["time"] < night["restart-0"]["to"]
    assert (logs["recent"]["status"], logs["recent"]["out"]) == (0, "")


def test_a_bundle_has_the_journal(night: Facts) -> None:
    """Of the daemon and of all units, in UTC, naming no host and no secret."""
    bundle = night["bundle"]
    assert bundle["made"]["status"] == 0, bundle["made"]
    assert bundle["secret"] == []
    assert {"README.txt", "status.json", "journal.txt", *(f"logs/slot-{slot}.txt" for slot in SLOTS)} <= {
        *bundle["parts"]
    }
    lines = bundle["journal"].splitlines()
    entry = re.compile(r"(?P<at>\S+)\+00:?00 (?P<who>\w[\w-]*)\[(?P<pid>\d+)\]: (?P<text>.*)")
    found = [match for line in lines if (match := entry.fullmatch(line))]
    assert len(found) > 0.9 * len(lines)
    said = {(match["who"], match["text"]) for match in found}
    assert {slot for slot in SLOTS if ("numa-launcher", f"slot {slot}: starting -> ready") in said} == SLOTS
    for slot in SLOTS:
        unit = f"numa-launcher-slot{slot}"
        assert (unit, "loading") in said
        assert any(who == "systemd" and text.startswith(f"Started {unit}.service") for who, text in said)
    assert "virtual-host" not in bundle["journal"]


def test_stop_is_the_end(night: Facts) -> None:
    """Sockets too: a client does not start it again."""
    assert night["stop"]["status"] == 0, night["stop"]
    stopped = night["stopped"]
    assert (stopped["units"], stopped["instances"], stopped["processes"]) == ("", [], "")
    assert stopped["port"] != 0


def test_uninstall_takes_all_away(night: Facts) -> None:
    assert night["uninstall"]["status"] == 0, night["uninstall"]
    assert night["left"] == []
