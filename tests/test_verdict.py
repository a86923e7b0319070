"""Whether the machine is well: level, first line, problems with remedies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fake_operations import CAUSE, FakeOperations, slot_status

from launcher.verdict import Level, judge, no_answer

NOW = 160.0
THREAD = {"thread": 7, "name": "VLLM", "cpus": "0-3", "planned": "1"}


def status(*slots: Any, **more: Any) -> dict[str, Any]:
    operations = FakeOperations(slots=dict(enumerate(slots)) or {0: slot_status(0)})
    found: dict[str, Any] = msgspec.to_builtins(operations.status())
    return found | {"warnings": []} | more


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
