"""A machine that differs from the planned one."""

from __future__ import annotations

from fractions import Fraction

import pytest
from msgspec.structs import replace
from support.planned_machine import PLAN, PLANNED

from launcher.base.cpuset import CpuSet
from launcher.base.text import GIB
from launcher.daemon.drift import MachineView, added, drift, read_machine
from launcher.machine import sysfs
from launcher.machine.topology import Topology
from launcher.plan.plan import LedgerRow

REMEDY = " planned there; numa-launcher reload plans again"


def smaller(node: int, gib: float) -> Topology:
    nodes = [replace(n, memory_bytes=int(gib * GIB)) if n.id == node else n for n in PLANNED.numa_nodes]
    return replace(PLANNED, numa_nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("now", "lines"),
    [
        (PLANNED, []),
        (
            replace(PLANNED, online=CpuSet.parse("0-5"), allowed=CpuSet.parse("0-5")),
            ["cpus 6-7 are offline: slot 1 planned there; numa-launcher reload plans again"],
        ),
        (
            replace(PLANNED, online=CpuSet.parse("0-9"), allowed=CpuSet.parse("0-9")),
            ["cpus 8-9 are online now, but unused: numa-launcher reload plans again"],
        ),
        (
            replace(PLANNED, allowed=CpuSet.parse("2-5")),
            ["cpus 0-1,6-7 were removed from this cgroup's cpuset: slots 0, 1" + REMEDY],
        ),
        (
            replace(PLANNED, allowed_nodes=CpuSet.parse("0")),
            ["memory nodes 1 were removed from this cgroup's cpuset: slot 1" + REMEDY],
        ),
        (
            smaller(0, 32),
            [
                "node 0 has 32.0 GiB of memory, planned with 64.0: slot 0 planned there; numa-launcher reload plans again"
            ],
        ),
        (smaller(0, 96), ["node 0 has 96.0 GiB of memory, planned with 64.0"]),
        (smaller(0, 63.5), []),
        (smaller(0, 62.5), []),
        (smaller(0, 65.5), []),
        (replace(PLANNED, numa_nodes=PLANNED.numa_nodes[:1]), ["NUMA node 1 is gone"]),
        (
            replace(PLANNED, online=CpuSet.parse("0-6"), allowed=CpuSet.parse("0-6")),
            ["cpus 7 are offline: slot 1" + REMEDY],
        ),
        (replace(PLANNED, memory_limit_bytes=GIB), ["this cgroup's memory limit fell to 1.0 GiB"]),
        (
            replace(PLANNED, cpu_quota=Fraction(3, 2)),
            ["this cgroup's cpu time limit fell to 1.5 cpus: numa-launcher reload plans again"],
        ),
        (replace(PLANNED, cpu_quota=Fraction(64)), []),
    ],
)
def test_drift(now: Topology, lines: list[str]) -> None:
    assert list(drift(PLANNED, now, PLAN)) == lines


@pytest.mark.parametrize(("left_gib", "lines"), [(1.6, 0), (1.4, 1)])
def test_a_little_less_memory_matters_where_the_plan_no_longer_fits(left_gib: float, lines: int) -> None:
    planned = int((64 - left_gib) * GIB)
    row = LedgerRow(0, 64 * GIB, 64 * GIB, 0, planned, 0, 0, slots=(0,))
    assert len(drift(PLANNED, smaller(0, 62.5), replace(PLAN, ledger=(row,)))) == lines
    assert drift(PLANNED, smaller(0, 65.5), replace(PLAN, ledger=(row,))) == ()
    # The kernel's own small changes are none, however full the node.
    assert drift(PLANNED, smaller(0, 63), replace(PLAN, ledger=(row,))) == ()


def test_cpus_without_a_slot() -> None:
    now = replace(PLANNED, online=CpuSet.parse("0-6"), allowed=CpuSet.parse("0-6"))
    assert drift(PLANNED, now, replace(PLAN, slots=PLAN.slots[:1])) == ("cpus 7 are offline",)


def test_a_new_node() -> None:
    assert drift(replace(PLANNED, numa_nodes=PLANNED.numa_nodes[:1]), PLANNED, PLAN) == (
        "NUMA node 1 is new",
    )


def test_this_machine_has_not_drifted() -> None:
    here = sysfs.read()
    now = read_machine(here)
    assert drift(here, now.topology, PLAN, added(here, now, now)) == ()
    assert here.allowed <= now.cpuset


def test_a_cpuset_that_grows() -> None:
    narrow = replace(PLANNED, allowed=CpuSet.parse("0-3"))
    first = MachineView(narrow, CpuSet.parse("0-3"))
    assert added(narrow, first, first) == CpuSet()
    grown = MachineView(narrow, CpuSet.parse("0-7"))
    assert drift(narrow, narrow, PLAN, added(narrow, first, grown)) == (
        "cpus 4-7 were added to this cgroup's cpuset, but are unused: restart the daemon to plan again",
    )
    # A daemon under taskset had these cpus from the start; a cpu that comes online is reported as such.
    assert added(narrow, grown, grown) == CpuSet()
    nine = MachineView(replace(narrow, online=CpuSet.parse("0-8")), CpuSet.parse("0-3,8"))
    assert added(narrow, first, nine) == CpuSet()
