"""Differences between the planned machine and the present one: online cpus, the cgroup's cpuset, memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from launcher.base.background import Failures, attempt
from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.base.text import GIB
from launcher.machine import sysfs
from launcher.machine.topology import Topology
from launcher.plan.plan import Plan

log = logging.getLogger("launcher.daemon")

# The kernel changes MemTotal by small amounts, and some containers' memory varies by a GiB. What an operator does to a
# machine (a module, a ballooned VM, a crash kernel on a large one) comes in memory blocks, the largest of which has 2 GiB
# on x86 (arch/x86/mm/init_64.c, probe_memory_block_size).
_MEMORY_SHARE: Final = 0.02
_MEMORY_BLOCK: Final = 2 * GIB
# The kernel's largest NR_CPUS.
_EVERY_CPU: Final = CpuSet(range(8192))


class MachineView(Struct, frozen=True):
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
        elif _matters(node.id, had, node.memory_bytes, plan):
            yield (
                f"node {node.id} has {node.memory_bytes / GIB:.1f} GiB of memory, planned with {had / GIB:.1f}"
                f"{_affected_nodes(CpuSet((node.id,)), plan) if node.memory_bytes < had else ''}"
            )
    yield from (
        f"NUMA node {node} is gone" for node in sorted(before.keys() - {n.id for n in now.numa_nodes})
    )
    limit = now.memory_limit_bytes
    if limit is not None and limit < (planned.memory_limit_bytes or float("inf")):
        yield f"this cgroup's memory limit fell to {limit / GIB:.1f} GiB"
    if now.cpu_quota is not None and now.cpu_quota < (planned.cpu_quota or len(planned.allowed)):
        yield (
            f"this cgroup's cpu time limit fell to {float(now.cpu_quota):g} cpus: numa-launcher reload plans again"
        )


def _matters(node: int, had: int, has: int, plan: Plan) -> bool:
    """Whether a node's other size is a finding: it has at least a memory block more or less, or the plan no longer fits.

    Neither below the share: a plan may use a node to the last byte."""
    change = abs(has - had)
    if change <= had * _MEMORY_SHARE:
        return False
    spare = min((row.left_bytes for row in plan.ledger if row.node in {node, None}), default=had)
    return change >= _MEMORY_BLOCK or had - has > spare


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


# --- Reads the machine periodically and logs how it differs from the plan. ---

# Between two readings of cpus, cpuset and memory; one takes milliseconds.
MACHINE_INTERVAL_S: Final = 15.0


class MachineWatch:
    """`planned` returns the machine and the plan in force; `read` reads the machine as it is."""

    def __init__(
        self,
        planned: Callable[[], tuple[Topology, Plan]],
        read: Callable[[Topology], MachineView] = read_machine,
    ) -> None:
        self._planned = planned
        self._read = read
        self._first: MachineView | None = None
        self.found: tuple[str, ...] = ()
        """The differences, one line each."""

    async def run(self) -> None:
        failures = Failures(log, "read the machine")
        while True:
            await asyncio.sleep(MACHINE_INTERVAL_S)
            await attempt(self.check, failures)

    async def check(self) -> None:
        """Read the machine once; log each new difference."""
        topology, plan = self._planned()
        try:
            now = await asyncio.to_thread(self._read, topology)
            self._first = self._first or now
            found = drift(topology, now.topology, plan, added(topology, self._first, now))
        except LauncherError as error:
            found = (error.message,)
        for line in found:
            if line not in self.found:
                log.warning("the machine has changed: %s", line, extra={"drift": line})
        if self.found and not found:
            log.info("the machine matches the plan again", extra={"drift": ""})
        self.found = found
