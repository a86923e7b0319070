"""Differences between the planned machine and the present one: online cpus, the cgroup's cpuset, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from launcher.cpuset import CpuSet
from launcher.plan import Plan
from launcher.topology import sysfs
from launcher.topology.model import Topology

# The kernel changes MemTotal by small amounts; crash kernels and hot-plugged blocks are far larger.
_MEMORY_SHARE = 0.02


# The kernel's largest NR_CPUS.
_EVERY_CPU: Final = CpuSet(range(8192))


@dataclass(frozen=True, slots=True)
class MachineView:
    topology: Topology
    """With the affinity of the planned one."""
    cpuset: CpuSet
    """Online cpus in this cgroup's cpuset, without regard to affinity."""


def read_machine(planned: Topology) -> MachineView:
    """The machine now. Blocking. Raises LauncherError."""
    now = sysfs.read(affinity=_EVERY_CPU)
    return MachineView(replace(now, allowed=now.allowed & (planned.allowed | planned.offline)), now.allowed)


def added(planned: Topology, first: MachineView, now: MachineView) -> CpuSet:
    """Cpus that were added to the cgroup's cpuset since `first`, without those that came online."""
    return now.cpuset - first.cpuset - planned.allowed - (now.topology.online - first.topology.online)


def drift(
    planned: Topology,
    now: Topology,
    plan: Plan,
    more: CpuSet = CpuSet(),  # noqa: B008  frozen
) -> tuple[str, ...]:
    """The differences, one line each, with the slots that they affect. `more`: the result of `added`.

    Running instances stay: the kernel moves the threads of an offline cpu, and memory is not moved."""
    lines = tuple(_lines(planned, now, plan))
    if more:
        lines += (
            f"cpus {more} were added to this cgroup's cpuset, but are unused: restart the daemon to plan again",
        )
    return lines


def _lines(planned: Topology, now: Topology, plan: Plan) -> Iterator[str]:
    gone, come = planned.online - now.online, now.online - planned.online
    if gone:
        yield f"cpus {gone} are offline{_affected(gone, plan)}"
    if come:
        yield f"cpus {come} are online now, but unused: numa-launcher reload plans again"
    lost = (planned.allowed & now.online) - now.allowed
    if lost:
        yield f"cpus {lost} were removed from this cgroup's cpuset{_affected(lost, plan)}"
    nodes = planned.allowed_nodes - now.allowed_nodes
    if nodes:
        yield f"memory nodes {nodes} were removed from this cgroup's cpuset{_affected_nodes(nodes, plan)}"
    before = {node.id: node.memory_bytes for node in planned.numa_nodes}
    for node in now.numa_nodes:
        had = before.get(node.id)
        if had is None:
            yield f"NUMA node {node.id} is new"
        elif abs(node.memory_bytes - had) > had * _MEMORY_SHARE:
            yield (
                f"node {node.id} has {node.memory_bytes / 2**30:.1f} GiB of memory, planned with {had / 2**30:.1f}"
                f"{_affected_nodes(CpuSet((node.id,)), plan) if node.memory_bytes < had else ''}"
            )
    yield from (
        f"NUMA node {node} is gone" for node in sorted(before.keys() - {n.id for n in now.numa_nodes})
    )
    limit = now.memory_limit_bytes
    if limit is not None and limit < (planned.memory_limit_bytes or float("inf")):
        yield f"this cgroup's memory limit fell to {limit / 2**30:.1f} GiB"


def _affected(cpus: CpuSet, plan: Plan) -> str:
    return _naming([slot.id for slot in plan.slots if slot.placement.cpus & cpus])


def _affected_nodes(nodes: CpuSet, plan: Plan) -> str:
    return _naming([slot.id for slot in plan.slots if slot.placement.membind & nodes])


def _naming(slots: list[int]) -> str:
    if not slots:
        return ""
    names = ", ".join(map(str, slots))
    return (
        f": {'slot' if len(slots) == 1 else 'slots'} {names} planned there; numa-launcher reload plans again"
    )
