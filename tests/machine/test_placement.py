"""Threads, pages and libraries of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.base.cpuset import CpuSet
from launcher.machine.placement import ProcessFacts, _groups, bystanders, misplaced_threads, observe

MIB = 1 << 20
Facts = tuple[ProcessFacts, ...]
# Two threads bound to one cpu, one that may roam, 64 MiB of touched memory, and a child.
PROGRAM = """
import os, subprocess, sys, threading
taken = bytearray(b"x") * (64 << 20)
ready = threading.Barrier(3)
def bound():
    os.sched_setaffinity(threading.get_native_id(), {min(os.sched_getaffinity(0))})
    ready.wait()
    threading.Event().wait()
for _ in range(2):
    threading.Thread(target=bound, daemon=True).start()
child = subprocess.Popen(["sleep", "1000"])
ready.wait()
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.communicate()


def until(look: Callable[[], Facts], good: Callable[[Facts], bool]) -> Facts:
    deadline = time.monotonic() + 10
    while not good(seen := look()):
        assert time.monotonic() < deadline, seen
        time.sleep(0.02)
    return seen


def test_threads_outside_the_cpus_of_their_slot(program: subprocess.Popen[bytes]) -> None:
    """Both bound threads are inside; the main thread and the child may run anywhere."""
    everywhere = CpuSet(os.sched_getaffinity(0))
    first = CpuSet((everywhere.first,))
    (child,) = (process.pid for process in observe(program.pid) if process.pid != program.pid)
    pids = frozenset({program.pid, child})
    assert misplaced_threads(pids, everywhere) == ()
    expected = {program.pid, child} if everywhere != first else set()
    assert {found.thread for found in misplaced_threads(pids, first)} == expected
    found = misplaced_threads(pids, CpuSet.parse("8000"))
    assert (len(found), {str(thread.cpus) for thread in found}) == (4, {str(everywhere), str(first)})
    assert misplaced_threads({2**22 + 1}, first) == ()


def test_a_process_tree(program: subprocess.Popen[bytes]) -> None:
    parent, child = until(
        lambda: observe(program.pid), lambda seen: len(seen) == 2 and seen[1].name == "sleep"
    )
    allowed = CpuSet(os.sched_getaffinity(0))
    lowest = CpuSet([allowed.first])
    assert (parent.pid, parent.threads, parent.cpus) == (program.pid, 3, allowed)
    if len(allowed) > 1:
        assert [(group.cpus, group.threads) for group in parent.groups] == [(allowed, 1), (lowest, 2)] or [
            (group.cpus, group.threads) for group in parent.groups
        ] == [(lowest, 2), (allowed, 1)]
    assert 64 * MIB < sum(size for _, size in parent.node_bytes) < 128 * MIB
    assert parent.policies == {"default"}
    assert (child.name, child.threads, child.libraries) == ("sleep", 1, frozenset())
    assert sum(size for _, size in child.node_bytes) < MIB


def test_mapped_libraries() -> None:
    from ctypes.util import find_library  # noqa: PLC0415  only here

    assert find_library("tcmalloc_minimal"), "scripts/test installs libtcmalloc-minimal4"
    preload = {"LD_PRELOAD": "libtcmalloc_minimal.so.4"}
    with subprocess.Popen(["sleep", "1000"], env=os.environ | preload) as process:
        (facts,) = until(lambda: observe(process.pid), lambda seen: bool(seen and seen[0].libraries))
        process.kill()
    assert facts.libraries == {"libtcmalloc"}


def test_a_process_that_is_gone() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert observe(process.pid) == ()


def test_bystanders_are_neither_we_nor_the_kernel(program: subprocess.Popen[bytes]) -> None:
    found = {bystander.pid: bystander for bystander in bystanders()}
    assert not {os.getpid(), program.pid} & found.keys()
    assert os.getppid() in found
    assert found[os.getppid()].name == Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    assert all(group.cpus for bystander in found.values() for group in bystander.groups)
    assert not any(
        bystander.name.startswith(("kthreadd", "ksoftirqd", "migration/")) for bystander in found.values()
    )


def test_a_thread_that_ends_meanwhile_is_left_out(tmp_path: Path) -> None:
    """As /proc/PID/task of a process that is going: one entry without a status, one cut short."""
    for name, status in (("1", "Name:\tx\nCpus_allowed_list:\t0-3\n"), ("2", None), ("3", "Name:\tx\n")):
        (tmp_path / "task" / name).mkdir(parents=True)
        (tmp_path / "task" / name / "comm").write_text("worker\n")
        if status is not None:
            (tmp_path / "task" / name / "status").write_text(status)
    (group,) = _groups(tmp_path)
    assert (str(group.cpus), group.names) == ("0-3", (("worker", 1),))
