"""Whether the machine is well: level, first line, problems with remedies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.fake_operations import CAUSE, FakeOperations, slot_status

from launcher.control.verdict import (
    Host,
    Level,
    Problem,
    judge,
    judge_fleet,
    late_hosts,
    level,
    no_answer,
    summary,
)

NOW = 160.0
THREAD = {"thread": 7, "name": "VLLM", "cpus": "0-3", "planned": "1"}


def status(*slots: Any, **more: Any) -> dict[str, Any]:
    operations = FakeOperations(slots=dict(enumerate(slots)) or {0: slot_status(0)})
    found: dict[str, Any] = msgspec.to_builtins(operations.status())
    return found | {"warnings": []} | more


def test_a_configuration_file_that_is_not_applied_is_a_problem() -> None:
    text = "the configuration file is not applied: engine.args differs"
    found = judge(status(unapplied=text), NOW)
    assert (found.level, [problem.what for problem in found.problems]) == (Level.WARN, [text])
    assert found.line.startswith("OK 1/1 ready, 1 warning; ")
    assert "reload --dry-run" in found.problems[0].remedy


def test_an_instance_that_runs_other_files_is_a_problem() -> None:
    slot = msgspec.to_builtins(slot_status(0)) | {"outdated": "runs other files"}
    found = judge(status(slots=[slot]), NOW)
    assert [(problem.slot, problem.what, problem.level) for problem in found.problems] == [
        (0, "runs other files", Level.WARN)
    ]
    assert "numa-launcher reload" in found.problems[0].remedy


def test_a_daemon_that_listens_nowhere_is_down() -> None:
    found = judge(status(no_listener="cannot serve clients: why"), NOW)
    assert found.level is Level.BAD
    assert found.line.startswith("DOWN 1/1 ready; cannot serve clients: why; ")
    assert [problem.level for problem in found.problems] == [Level.BAD]
    assert "systemctl status numa-launcher.socket" in found.problems[0].remedy


HERE, LATE = "http://10.0.0.1:8000", "http://10.0.0.7:8000"


@pytest.mark.parametrize(
    ("endpoints", "words", "level_"),
    [((HERE, LATE), "DEGRADED 1/1 ready; ", Level.WARN), ((LATE,), "DOWN 1/1 ready; ", Level.BAD)],
)
def test_a_listener_whose_address_is_not_here_is_a_problem(
    endpoints: tuple[str, ...], words: str, level_: Level
) -> None:
    found = judge(status(endpoints=endpoints, absent_endpoints=(LATE,)), NOW)
    assert found.level is level_
    assert found.line.startswith(f"{words}no interface of this host has the address of {LATE}; ")
    assert [problem.level for problem in found.problems] == [level_]


def queue(requests: int, oldest_s: float | None, **bounds: int) -> dict[str, Any]:
    return {"requests": requests, "bytes": requests * 10, "oldest_s": oldest_s, **bounds}


def test_all_is_well() -> None:
    found = judge(status(queue=queue(3, 1.0, limit_requests=64, limit_bytes=1000)), NOW)
    assert (found.level, found.problems) == (Level.GOOD, ())
    assert found.line == "OK 1/1 ready; 1 in flight, 0 waiting"


def test_a_warning_of_the_plan_is_a_remark() -> None:
    found = judge(status(warnings=["mind the gap"]), NOW)
    assert (found.level, [problem.what for problem in found.problems]) == (Level.GOOD, ["mind the gap"])


@pytest.mark.parametrize(
    ("waiting", "level", "words"),
    [
        (queue(0, None), Level.GOOD, None),
        (queue(1, 12.0), Level.WARN, "queue slow: 1 request, oldest 12s"),
        (queue(52, 1.0, limit_requests=64), Level.WARN, "queue fills: 52 of 64 requests, oldest 1s"),
        (queue(64, 1.0, limit_requests=64), Level.WARN, "queue full: 64 of 64 requests, oldest 1s"),
        (queue(90, 1.0, limit_requests=4096, limit_bytes=1000), Level.WARN,
         "queue fills: 90 of 4096 requests, 90% of queue_max_bytes, oldest 1s"),
    ],
)  # fmt: skip
def test_the_queue_is_named_when_it_fills(waiting: dict[str, Any], level: Level, words: str | None) -> None:
    found = judge(status(queue=waiting), NOW)
    assert found.level is level
    assert [problem.what for problem in found.problems] == ([] if words is None else [words])
    assert words is None or words in found.line


@pytest.mark.parametrize(
    ("slot", "what", "remedy"),
    [
        (slot_status(state="failed", last_cause=CAUSE), "oom: it died", "buy memory"),
        (slot_status(state="stopped"), "stopped", "numa-launcher start 0"),
        (slot_status(state="draining", intent="drain"), "drained", "numa-launcher resume 0"),
        (slot_status(state="held", intent="hold"), "held", "numa-launcher release 0"),
        (slot_status(intent="quarantine", state="draining"), "quarantine", "numa-launcher release 0"),
        (slot_status(stalled_s=12.0), "has requests and has made no progress for 12 s",
            "numa-launcher logs 0; the daemon restarts an instance that hangs"),
        (slot_status(unwatched="no metrics"), "not watched, a hang would not be detected: no metrics",
            "numa-launcher logs 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_slot_has_a_remedy(slot: Any, what: str, remedy: str) -> None:
    (problem,) = judge(status(slot), NOW).problems
    assert (problem.what, problem.remedy, problem.slot) == (what, remedy, 0)


def file(state: str, why: str) -> dict[str, Any]:
    return {
        "what": "TLS certificate", "path": "/c", "state": state, "since": NOW - 7200, "why": why, "remedy": "renew it"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("state", "rank", "line"),
    [
        ("unusable", 0, "OK 1/1 ready, 1 warning; TLS certificate unusable"),
        ("expiring", 0, "OK 1/1 ready, 1 warning; TLS certificate expiring"),
        ("expired", 1, "DEGRADED 1/1 ready; TLS certificate expired"),
        ("not yet valid", 1, "DEGRADED 1/1 ready; TLS certificate not yet valid"),
    ],
)
def test_a_file_that_cannot_be_used_is_said(state: str, rank: int, line: str) -> None:
    """By the first line, its exit code, and a problem with its remedy."""
    now = status(files=[file("in use", ""), file(state, "it is bad")])
    found = judge(now, NOW)
    (problem,) = found.problems
    assert (problem.what, problem.remedy) == ("it is bad (for 2h00m)", "renew it")
    assert found.level is Level.WARN
    assert found.line.startswith(line)
    assert summary(now, NOW).startswith(line)
    assert level(now) == rank


def test_files_in_use_are_no_problem() -> None:
    assert judge(status(files=[file("in use", "")]), NOW).problems == judge(status(), NOW).problems


def test_zentorch_that_is_not_used() -> None:
    one = status()
    one["slots"][0]["zentorch"] = {"found": "5.2", "active": False}
    (problem,) = judge(one, NOW).problems
    assert problem.what == "does not use ZenTorch 5.2, which is installed"


def test_the_machine() -> None:
    machine = {
        "drift": ["cpu 3 is offline"],
        "slots": [
            {"slot": 1, "misplaced": [THREAD] * 2, "misplaced_threads": 20},
            {"slot": 0, "misplaced": [], "misplaced_threads": 0},
        ],
        "disks": [
            {"path": "/var", "free_bytes": 1, "total_bytes": 1000}, {"path": "/", "free_bytes": 500, "total_bytes": 1000},
        ],
    }  # fmt: skip
    found = judge(status(), NOW, machine)
    assert found.level is Level.WARN
    assert [(problem.slot, problem.what) for problem in found.problems] == [
        (None, "the machine has changed: cpu 3 is offline"),
        (1, "thread 7 (VLLM) may run on cpus 0-3, planned 1, and 19 more"),
        (None, "disk of '/var' is full: 0.1 % free"),
    ]
    assert all(problem.remedy for problem in found.problems)
    assert found.line.startswith("OK 1/1 ready, 3 warnings; 1 in flight")


def test_no_answer() -> None:
    assert no_answer("cannot reach it", "start it", None).line == "NO ANSWER: cannot reach it"
    found = no_answer("cannot reach it", "start it", 61.0)
    assert (found.level, found.line) == (Level.UNKNOWN, "NO ANSWER for 1m01s: cannot reach it")


def test_a_misplaced_thread_is_named_once() -> None:
    one = status()
    one["slots"][0]["verified"] = {"problems": ["vllm (pid 7): stray"], "foreign": []}
    machine = {"slots": [{"slot": 0, "misplaced": [THREAD], "misplaced_threads": 1}]}
    assert [problem.what for problem in judge(one, NOW, machine).problems] == [
        "not as planned: vllm (pid 7): stray"
    ]


def test_a_problem_that_the_daemon_says_too_is_given_once() -> None:
    both = "the machine has changed: cpu 3 is offline"
    found = judge(status() | {"warnings": [both, "old", "old"]}, NOW, {"drift": ["cpu 3 is offline"]})
    assert [(problem.what, problem.level) for problem in found.problems] == [
        (both, Level.WARN), ("old", Level.GOOD)
    ]  # fmt: skip
    assert found.problems[0].remedy


def test_a_change_of_the_machine_is_given_once_though_its_figure_changes_between_two_answers() -> None:
    said = "the machine has changed: node 0 has {} GiB of memory, planned with 8.0"
    machine = {"drift": [said.partition(": ")[2].format("12.1")]}
    found = judge(status() | {"warnings": [said.format("12.2")]}, NOW, machine)
    assert [problem.what for problem in found.problems] == [said.format("12.1")]
    found = judge(status() | {"warnings": [said.format("12.2")]}, NOW)
    assert [problem.what for problem in found.problems] == [said.format("12.2")]


def test_other_processes_on_the_cpus_are_a_remark() -> None:
    one = status()
    one["slots"][0]["verified"] = {
        "problems": [],
        "foreign": ["sh (pid 7) is pinned to cpus 0, of which 0 are this slot's"],
    }
    found = judge(one, NOW)
    assert (found.level, found.line) == (Level.GOOD, "OK 1/1 ready; 1 in flight, 0 waiting")
    assert [problem.what for problem in found.problems] == [
        "other processes on its cpus: sh (pid 7) is pinned to cpus 0"
    ]


# --- a fleet ------------------------------------------------------------------------------------


def host(name: str, state: str = "ready", **more: Any) -> Host:
    return Host(
        **{"name": name, "state": state, "ready": 2, "instances": 2, "running": 3, "waiting": 1} | more
    )


def test_a_fleet_that_is_well() -> None:
    found = judge_fleet([host("a"), host("b", "draining")])
    assert (found.level, found.problems) == (Level.GOOD, ())
    assert found.line == "OK 1/2 hosts serving; b draining; 4/4 instances ready; 6 running, 2 waiting"


def test_hosts_that_do_not_serve_are_counted_and_named() -> None:
    gone = [host(f"h{n}", "down", ready=0, instances=0, troubles=("refused",)) for n in range(5)]
    found = judge_fleet([host("a"), host("b", ready=0), *gone])
    assert found.level is Level.WARN
    assert found.line.startswith(
        "DEGRADED 1/7 hosts serving; h0, h1, h2 and 2 more down; b not ready; 2/4 instances ready; "
    )
    assert [(problem.host, problem.what) for problem in found.problems[:2]] == [
        ("b", "no instance is ready"),
        ("h0", "refused"),
    ]
    assert all(problem.remedy and problem.level is Level.BAD for problem in found.problems)


@pytest.mark.parametrize("hosts", [[], [host("a", "draining")], [host("a", ready=0)]])
def test_a_fleet_without_a_host_that_serves_is_down(hosts: list[Host]) -> None:
    found = judge_fleet(hosts)
    assert (found.level, found.line.partition(" ")[0]) == (Level.BAD, "DOWN")


def test_slow_and_lost_hosts_are_warnings() -> None:
    found = judge_fleet([host("a"), host("b", stragglers=(1, 3)), host("c", "lost")])
    assert found.level is Level.WARN
    assert found.line.startswith("OK 3/3 hosts serving, 2 warnings; b slow; 6/6 instances ready")
    assert [problem.what.partition(":")[0] for problem in found.problems] == [
        "slow", "its agent does not answer; it gets requests as long as its daemon does",
    ]  # fmt: skip


def test_what_else_is_wrong_with_a_fleet() -> None:
    others = [Problem(what="no news from Ray", level=Level.BAD), Problem(what="a hint", level=Level.GOOD)]
    found = judge_fleet([host("a")], others)
    assert found.line.startswith("DEGRADED 1/1 hosts serving; no news from Ray; 2/2 instances")
    assert found.problems == tuple(others)


@pytest.mark.parametrize(
    ("ttfts", "named"),
    [
        ((0.1, 0.1, 0.9), set()),  # under a second more
        ((1.0, 1.0, 2.5), {"c"}),
        ((5.0, 5.0, 9.0), set()),  # less than twice
        ((1.0, None, 5.0), {"c"}),
        ((None, None, 5.0), set()),  # nothing to compare with
    ],
)
def test_a_host_whose_first_tokens_come_late(ttfts: tuple[float | None, ...], named: set[str]) -> None:
    hosts = [host(name, predicted_ttft_s=ttft) for name, ttft in zip("abc", ttfts, strict=True)]
    assert late_hosts(hosts) == named
    assert ("c slow" in judge_fleet(hosts).line) is bool(named)
