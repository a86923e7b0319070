"""What the kernel says of memory, read from files under a root."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import pytest

from launcher.base.log_lines import EventRing
from launcher.machine.load import cpu_pressure
from launcher.machine.oom import (
    KernelReport,
    NodeMemory,
    OomWatch,
    node_memory,
    process_ended,
    process_tree,
    victims,
)

MEMCG = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/x,task=sleep,pid=7,uid=0"
KILLED = "Memory cgroup out of memory: Killed process 7 (sleep) total-vm:100kB, anon-rss:90kB"
WORKER = "Out of memory: Killed process 99 (VLLM::Worker_TP) total-vm:100kB, anon-rss:90kB"


def put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "file", "text"),
    [
        ("0::/a/b\n", "sys/fs/cgroup/a/b/memory.events", "low 0\noom 4\noom_kill {}\n"),
        (
            "9:name=systemd:/\n4:memory:/c\n0::/\n",
            "sys/fs/cgroup/memory/c/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
        ),
    ],
    ids=["v2", "v1"],
)
def test_kills_of_a_cgroup_are_counted_from_now(tmp_path: Path, cgroup: str, file: str, text: str) -> None:
    put(tmp_path / "proc/7/cgroup", cgroup)
    put(tmp_path / file, text.format(3))
    watch = OomWatch(7, tmp_path)
    assert watch.report([7]).cgroup_kills == 0
    put(tmp_path / file, text.format(5))
    word = watch.report([7], (NodeMemory(0, 1, 2),))
    assert (word.cgroup_kills, word.cgroup_file) == (2, str(tmp_path / file))
    assert word.nodes == (NodeMemory(0, 1, 2),)
    (tmp_path / file).unlink()
    assert watch.report([7]).cgroup_kills == 0
    watch.close()


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    watch = OomWatch(7, tmp_path)
    assert watch.report([]) == KernelReport()
    watch.close()
    assert node_memory([0], tmp_path) == ()
    assert cpu_pressure(tmp_path) is None


def test_of_a_container_the_log_is_followed_and_no_cgroup(tmp_path: Path) -> None:
    put(tmp_path / "proc/None/cgroup", "0::/a\n")
    put(tmp_path / "sys/fs/cgroup/a/memory.events", "oom_kill 1\n")
    put(tmp_path / "dev/kmsg", "")
    watch = OomWatch(None, tmp_path)
    put(tmp_path / "sys/fs/cgroup/a/memory.events", "oom_kill 2\n")
    with (tmp_path / "dev/kmsg").open("a") as log:
        log.write(f"6,2,101,-;{MEMCG}\n")
    report = watch.report([7])
    assert (report.cgroup_kills, report.cgroup_file, report.oom_lines) == (0, "", (MEMCG,))
    watch.close()


def test_the_kernels_log_from_now_on(tmp_path: Path) -> None:
    put(tmp_path / "dev/kmsg", f"6,1,100,-;{KILLED}\n SUBSYSTEM=x\n")
    watch = OomWatch(7, tmp_path)
    assert watch.report([7]).readable
    with (tmp_path / "dev/kmsg").open("a") as log:
        log.write(f"6,2,101,-;{MEMCG}\n")
    assert watch.report([7]).oom_lines == (MEMCG,)
    watch.close()
    watch.close()


def test_the_real_kernel_log_can_be_followed_or_is_not_readable() -> None:
    watch = OomWatch(os.getpid())
    assert watch.report([os.getpid()]).oom_lines == ()
    watch.close()


def test_victims() -> None:
    lines = [MEMCG, KILLED, WORKER, "usb 1-1: new device"]
    assert list(victims(lines, frozenset({7}))) == [MEMCG, KILLED]
    assert list(victims(lines, frozenset({8}))) == [], "a sibling's"


def test_process_tree(tmp_path: Path) -> None:
    for pid, parent in ((7, 1), (8, 7), (9, 7), (10, 9), (11, 1)):
        put(tmp_path / f"proc/{pid}/stat", f"{pid} (a) b) S {parent} 0 0")
    put(tmp_path / "proc/12/stat", "gone")
    assert process_tree(7, tmp_path) == {7, 8, 9, 10}
    assert os.getpid() in process_tree(os.getpid())


def test_process_ended() -> None:
    assert not process_ended(os.getpid())
    child = subprocess.Popen(["sleep", "0"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_ended(child.pid), "a zombie"
    child.wait()
    assert process_ended(child.pid)


def test_node_memory(tmp_path: Path) -> None:
    put(
        tmp_path / "sys/devices/system/node/node1/meminfo",
        "Node 1 MemTotal:       1000 kB\nNode 1 MemFree:         100 kB\nNode 1 Inactive(file):   50 kB\n",
    )
    put(tmp_path / "proc/meminfo", "MemTotal: 2000 kB\nMemFree: 10 kB\nMemAvailable: 900 kB\n")
    assert node_memory([1, 5], tmp_path) == (NodeMemory(1, 150 * 1024, 1000 * 1024),)
    assert node_memory([], tmp_path) == (NodeMemory(None, 900 * 1024, 2000 * 1024),)


def test_pressure(tmp_path: Path) -> None:
    put(tmp_path / "proc/pressure/cpu", "some avg10=1.00 avg60=35.55 avg300=2.00 total=9\nfull avg10=0.00\n")
    assert cpu_pressure(tmp_path) == 35.55
    put(tmp_path / "proc/pressure/cpu", "nonsense\n")
    assert cpu_pressure(tmp_path) is None


def test_the_ring_keeps_the_last_events_with_their_fields() -> None:
    ring, log = EventRing(kept=3), logging.getLogger("launcher.ring-test")
    log.setLevel(logging.INFO)
    log.addHandler(ring)
    for n in range(5):
        log.info("event %d", n, extra={"slot": n})
    log.debug("not kept")
    log.removeHandler(ring)
    assert [event["message"] for event in ring.last(10)] == ["event 2", "event 3", "event 4"]
    assert [event["number"] for event in ring.last(10, after=4)] == [5]
    assert ring.last(1)[0]["fields"] == {"slot": 4}
    assert ring.last(0) == []
    ring.emit(logging.makeLogRecord({"name": "launcher.output", "msg": "x"}))
    assert len(ring.last(10)) == 3
