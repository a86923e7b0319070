"""An operator's tasks under load, in one virtual host with systemd, two sockets and four NUMA nodes.

Planned operations fail no request; failures end open streams of the failed instance only.

guest/oncall.py carries them out and records facts; these tests judge them. One boot: 500 s on two busy cores.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

SLOTS = {"0", "1", "2", "3"}
# One client can have one stream open.
CLIENTS = 6
# Each of them is a `systemctl restart`, too.
RESTARTS = ("upgrade", "rollback")
PLANNED = ("restart-0", *RESTARTS, "reload-bad", "reload-good", "cpu-offline", "cpu-online")
DAEMON_BREAKS = ("kill-daemon", "freeze-daemon")
INSTANCE_ENDS = {"kill-instance": "0", "oom-instance": "1", "stop-instance": "2"}
Facts = dict[str, Any]


def failed(record: Facts, step: Facts) -> list[Facts]:
    """Requests that failed in a step; a step begins when the one before ends."""
    return [one for one in record["load"] if not one["ok"] and step["from"] < one["ended"] <= step["to"]]


def test_the_contract_of_a_spawner_holds_for_units(record: Facts) -> None:
    """tests/instances/test_spawner_contract.py with systemd's units, while numa-launcher is installed."""
    done = record["contract"]
    assert done["status"] == 0, done["out"]
    assert " passed" in done["out"]
    assert "skipped" not in done["out"]


def test_install_as_documented(record: Facts) -> None:
    assert record["before"] == {"opt": False, "etc": False}, "--dry-run has done something"
    assert record["dry-run"]["status"] == 0, record["dry-run"]
    assert record["install"]["status"] == 0, record["install"]
    assert record["enable"]["status"] == 0, record["enable"]
    assert record["status"]["ready"] == len(SLOTS)


def test_the_daemon_is_hardened(record: Facts) -> None:
    """--threshold=25 is 2.5 of 10."""
    assert record["security"]["status"] == 0, record["security"]["out"][-500:]


def test_no_secret_is_readable(record: Facts) -> None:
    assert record["secrets"] == {
        "instance": True,
        "cmdline": False,
        "show": False,
        "units": False,
        "state": [],
    }


def test_the_journal_has_fields(record: Facts) -> None:
    of_units = [
        line for line in record["journal"] if str(line["_SYSTEMD_UNIT"]).startswith("numa-launcher-slot")
    ]
    assert {line["NUMA_LAUNCHER_SLOT"] for line in of_units} == SLOTS
    assert {line["NUMA_LAUNCHER_GENERATION"] for line in of_units} == {"1"}
    said = [line for line in record["journal"] if line["_SYSTEMD_UNIT"] == "numa-launcher.service"]
    ready = {line["NUMA_LAUNCHER_SLOT"] for line in said if line["MESSAGE"].endswith("starting -> ready")}
    assert ready == SLOTS


@pytest.mark.parametrize("name", [*PLANNED, *DAEMON_BREAKS, *INSTANCE_ENDS])
def test_every_step_ends_with_all_slots_ready(record: Facts, name: str) -> None:
    step = record[name]
    assert step["well"], step
    assert step["strays"] == [], "a process outside its unit"


@pytest.mark.parametrize("name", [*PLANNED, *DAEMON_BREAKS, *INSTANCE_ENDS])
def test_there_is_load_in_each_step(record: Facts, name: str) -> None:
    """Each client begins a request in it that succeeds; a step without load would prove nothing."""
    step = record[name]
    served = [one for one in record["load"] if one["ok"] and step["from"] <= one["began"] <= step["to"]]
    assert len(served) >= CLIENTS


@pytest.mark.parametrize("name", PLANNED)
def test_planned_steps_fail_no_request(record: Facts, name: str) -> None:
    assert not failed(record, record[name])


def test_no_request_fails_between_the_steps(record: Facts) -> None:
    """Nor while a bundle is made, and the load ends."""
    known = [one["n"] for name in (*DAEMON_BREAKS, *INSTANCE_ENDS) for one in failed(record, record[name])]
    assert sorted(known) == sorted(one["n"] for one in record["load"] if not one["ok"])


@pytest.mark.parametrize("name", [*DAEMON_BREAKS, *INSTANCE_ENDS])
def test_failures_end_open_streams_only(record: Facts, name: str) -> None:
    found = failed(record, record[name])
    assert len(found) <= CLIENTS
    for request in found:
        assert request["began"] <= record[name]["acted"], request
        if name in INSTANCE_ENDS:
            assert request["tokens"] > 0, "another instance can take what has got no token yet"
        assert request["why"] == "" or "503" not in request["why"], "it was open, and is cut, not refused"


@pytest.mark.parametrize("name", [*RESTARTS, *DAEMON_BREAKS])
def test_instances_outlive_the_daemon(record: Facts, name: str) -> None:
    step = record[name]
    assert step["before"]["pids"].keys() == SLOTS
    assert 0 not in step["before"]["pids"].values()
    assert step["after"]["pids"] == step["before"]["pids"]
    assert step["after"]["daemon"] != step["before"]["daemon"]


def test_each_release_is_run_from_its_own_folder(record: Facts) -> None:
    for name in ("upgrade", "rollback"):
        assert record[name]["done"]["done"]["status"] == 0, record[name]
        where = record[f"{name}-release"]
        assert where["daemon"].startswith(f"{where['current']}/venv/bin/"), where
    assert record["upgrade-release"]["current"] != record["rollback-release"]["current"]


@pytest.mark.parametrize(("name", "slot"), INSTANCE_ENDS.items())
def test_one_instance_is_replaced_and_no_other(record: Facts, name: str, slot: str) -> None:
    before, after = record[name]["before"], record[name]["after"]
    assert {key for key in SLOTS if before["pids"][key] != after["pids"][key]} == {slot}
    assert after["daemon"] == before["daemon"]


def test_why_names_the_cause(record: Facts) -> None:
    assert "killed" in record["kill-instance"]["done"]["out"]
    assert record["oom-instance"]["done"]["cause"]["name"] == "cgroup-oom"
    assert record["stop-instance"]["done"]["cause"]["name"] == "hung"


def test_an_invalid_configuration_changes_nothing(record: Facts) -> None:
    step = record["reload-bad"]
    assert step["done"]["status"] == 2
    assert "layuot" in step["done"]["error"]
    assert step["after"] == step["before"]
    step = record["reload-good"]
    assert step["done"]["status"] == 0, step["done"]
    assert not set(step["after"]["pids"].values()) & set(step["before"]["pids"].values())


def test_threads_and_pages_are_where_the_plan_says(record: Facts) -> None:
    assert record["verify"]["status"] == 0, record["verify"]
    for slot in record["verify"]["slots"]:
        assert (slot["verified"]["differences"], slot["verified"]["foreign"]) == ([], [])


def test_log_lines_keep_their_time(record: Facts) -> None:
    """The time when the instance printed them, not when a new daemon read them."""
    logs = record["logs"]
    assert logs["old"]["status"] == 0, logs["old"]
    assert [line["text"] for line in logs["lines"]] == ["loading"]
    assert logs["lines"][0]["generation"] == 2
    assert record["restart-0"]["from"] < logs["lines"][0]["time"] < record["restart-0"]["to"]
    assert (logs["recent"]["status"], logs["recent"]["out"]) == (0, "")


def test_a_bundle_has_the_journal(record: Facts) -> None:
    """Of the daemon and of all units, in UTC, naming no host and no secret."""
    bundle = record["bundle"]
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


def test_stop_is_final(record: Facts) -> None:
    """The sockets stop, too: a client does not start the daemon again."""
    assert record["stop"]["status"] == 0, record["stop"]
    stopped = record["stopped"]
    assert (stopped["units"], stopped["instances"], stopped["processes"]) == ("", [], "")
    assert stopped["port"] != 0


def test_the_audit_trail_is_whole(record: Facts) -> None:
    """In the folder that the unit makes, over restarts and two deaths of the daemon; each loses at most a second."""
    verify, kinds = record["audit"]["verify"], record["audit"]["kinds"]
    assert verify["status"] == 0, verify
    starts = 1 + len(RESTARTS) + len(DAEMON_BREAKS)
    assert (kinds.count("start"), kinds.count("stop")) == (starts, starts - len(DAEMON_BREAKS))
    served = [one for one in record["load"] if one["ok"]]
    assert kinds.count("request") >= len(served) - 2 * CLIENTS * len(DAEMON_BREAKS)
    assert "control" in kinds


def test_uninstall_removes_everything(record: Facts) -> None:
    assert record["uninstall"]["status"] == 0, record["uninstall"]
    assert record["left"] == []
