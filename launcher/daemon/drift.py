"""Whether the machine is still the one that was planned for: cpus on- and offline, the cgroup's cpuset, memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from launcher.cpuset import CpuSet
from launcher.plan import Plan
from launcher.topology import sysfs
from launcher.topology.model import Topology

# The kernel gives back and takes small pieces of MemTotal (crash kernels, hot-plugged blocks are far larger).
_MEMORY_SHARE = 0.02


# The kernel's NR_CPUS tops out here.
_EVERY_CPU: Final = CpuSet(range(8192))


@dataclass(frozen=True, slots=True)
class Sight:
    """The machine at one moment."""

    topology: Topology
    """As a process with the affinity of the planned one would see it."""
    room: CpuSet
    """Cpus that are online and in this cgroup's cpuset, whatever the affinity."""


def look(planned: Topology) -> Sight:
    """The machine now. Blocking. Raises LauncherError."""
    now = sysfs.read(affinity=_EVERY_CPU)
    return Sight(replace(now, allowed=now.allowed & (planned.allowed | planned.offline)), now.allowed)


def added(planned: Topology, first: Sight, now: Sight) -> CpuSet:
    """What the cgroup's cpuset has now and had not at the `first` look. What came online is another thing."""
    return now.room - first.room - planned.allowed - (now.topology.online - first.topology.online)


def drift(
    planned: Topology,
    now: Topology,
    plan: Plan,
    more: CpuSet = CpuSet(),  # noqa: B008  frozen
) -> tuple[str, ...]:
    """What has changed, one line each with the slots that it hurts; `numa-launcher reload` plans anew.

    Instances that run stay where they are: the kernel moves threads of an offlined cpu, and memory does not move.
    `more`: as `added` says.
    """
    lines = tuple(_lines(planned, now, plan))
    if more:
        lines += (
            f"cpus {more} were added to this cgroup's cpuset, and nothing runs there: a restart of the daemon plans anew",
        )
    return lines


def _lines(planned: Topology, now: Topology, plan: Plan) -> Iterator[str]:
    gone, come = planned.online - now.online, now.online - planned.online
    if gone:
        yield f"cpus {gone} went offline{_hurt(gone, plan)}"
    if come:
        yield f"cpus {come} came online, and nothing runs there: numa-launcher reload plans anew"
    lost = (planned.allowed & now.online) - now.allowed
    if lost:
        yield f"cpus {lost} were taken out of this cgroup's cpuset{_hurt(lost, plan)}"
    nodes = planned.allowed_nodes - now.allowed_nodes
    if nodes:
        yield f"memory nodes {nodes} were taken out of this cgroup's cpuset{_hurt_nodes(nodes, plan)}"
    before = {node.id: node.memory_bytes for node in planned.numa_nodes}
    for node in now.numa_nodes:
        had = before.get(node.id)
        if had is None:
            yield f"NUMA node {node.id} is new"
        elif abs(node.memory_bytes - had) > had * _MEMORY_SHARE:
            yield (
                f"node {node.id} has {node.memory_bytes / 2**30:.1f} GiB of memory, planned were {had / 2**30:.1f}"
                f"{_hurt_nodes(CpuSet((node.id,)), plan) if node.memory_bytes < had else ''}"
            )
    yield from (
        f"NUMA node {node} is gone" for node in sorted(before.keys() - {n.id for n in now.numa_nodes})
    )
    limit = now.memory_limit_bytes
    if limit is not None and limit < (planned.memory_limit_bytes or float("inf")):
        yield f"this cgroup's memory limit fell to {limit / 2**30:.1f} GiB"


def _hurt(cpus: CpuSet, plan: Plan) -> str:
    return _naming([slot.id for slot in plan.slots if slot.placement.cpus & cpus])


def _hurt_nodes(nodes: CpuSet, plan: Plan) -> str:
    return _naming([slot.id for slot in plan.slots if slot.placement.membind & nodes])


def _naming(slots: list[int]) -> str:
    if not slots:
        return ""
    names = ", ".join(map(str, slots))
    return (
        f": {'slot' if len(slots) == 1 else 'slots'} {names} planned there; numa-launcher reload plans anew"
    )
