"""Rules on placement. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from launcher.plan.plan import Finding, Rule, Subject, violation, warning
from launcher.plan.zones import quota_cpus, threads_of, usable_cores


def duplicate_names(subject: Subject) -> Iterator[Finding]:
    """Clients choose models by name, which must be unique."""
    names = [model.name for model in subject.config.models]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield violation(
            "duplicate-model",
            f"cannot serve two models as {name!r}: the name is taken",
            "give each [[models]] entry its own name",
        )


def use_smt(subject: Subject) -> Iterator[Finding]:
    """SMT siblings share the core's vector units and L1 cache."""
    if subject.config.layout.use_smt and any(len(core.cpus) > 1 for core in subject.topology.cores):
        yield warning(
            "smt",
            "use_smt puts two worker threads on each core; token generation is bound by memory and rarely gains",
            "set layout.use_smt = false unless a measurement on this machine says otherwise",
        )


def no_numa(subject: Subject) -> Iterator[Finding]:
    """A kernel without NUMA cannot bind memory."""
    if not subject.topology.has_numa:
        yield warning(
            "no-numa",
            "the kernel has no NUMA support: cores are pinned, memory is not bound",
            "boot a kernel with CONFIG_NUMA on machines with more than one memory controller",
        )


def contradictory_firmware(subject: Subject) -> Iterator[Finding]:
    """The topology chosen may be wrong; actual placement would then differ from the plan."""
    for conflict in subject.topology.conflicts:
        yield warning(
            "firmware-contradicts",
            conflict,
            "update the firmware (BIOS) or the virtual machine's description of its cpus; compare with lstopo, and "
            "verify with numa-launcher verify",
        )


def narrow_cpuset(subject: Subject) -> Iterator[Finding]:
    """The plan is limited to this process's cpus: instances cannot widen a cgroup's cpuset."""
    topology = subject.topology
    if subject.config.layout.cpus is not None or not topology.allowed or not subject.plan.slots:
        return
    left_out = topology.online - topology.allowed
    if left_out:
        yield warning(
            "cpuset-narrow",
            f"cpus {left_out} of this machine are not allowed here (affinity, AllowedCPUs= or cpuset): the plan "
            f"leaves {len(left_out)} of {len(topology.online)} idle",
            "widen AllowedCPUs= of the service and of its instances' slice, or the container's --cpuset-cpus, or set "
            "layout.cpus if this is intended",
        )


def cpu_quota(subject: Subject) -> Iterator[Finding]:
    """A cgroup that has used its cpu time is stopped until the next period, with all its threads
    (Documentation/scheduler/sched-bwc.rst)."""
    quota, limit = subject.topology.cpu_quota, quota_cpus(subject.topology)
    used = sum(len(slot.placement.cpus) for slot in subject.plan.slots)
    if quota is None or limit is None or not used:
        return
    layout, allows = subject.config.layout, f"this process's cgroup allows the time of {float(quota):g} cpus"
    there = threads_of(usable_cores(subject.topology), layout)
    remedy = (
        "raise or remove the limit: cpu.max, CPUQuota= of the unit or slice, --cpus, or limits.cpu of the pod"
    )
    if used > quota:
        yield warning(
            "cpu-quota-exceeded",
            f"{allows}, but instances have {used}: OpenMP threads wait for each other in busy loops, so under load all "
            f"of them are stopped for {_stopped(used, quota)} % of the time",
            f"{remedy}; or lower layout.instances_per_socket, tensor_parallel_size or layout.cpus",
        )
    elif there > limit:
        yield warning(
            "cpu-quota",
            f"{allows}: instances get {used} of {there} usable cpus, as with more threads the kernel would stop all of "
            "them for a part of the time",
            remedy,
        )


def _stopped(used: int, quota: Fraction) -> int:
    return round(100 * (1 - quota / used))


PLACEMENT_RULES: Final[tuple[Rule, ...]] = (
    contradictory_firmware, duplicate_names, use_smt, no_numa, narrow_cpuset,
    cpu_quota,
)  # fmt: skip
