"""Contradictory cpu maps: the cpus concerned, and their grouping by another source.

Firmware (ACPI's SRAT and PPTT, a hypervisor's CPUID leaves) can describe sets of cpus that overlap; the kernel prints
them unchanged. hwloc keeps the first set and drops one that intersects it (hwloc/topology.c,
hwloc___insert_object_by_cpuset; for NUMA nodes hwloc/topology-linux.c). Here a second source
decides; without one nothing is guessed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping

from launcher.cpuset import CpuSet


def disputed(maps: Mapping[int, CpuSet]) -> CpuSet:
    """The cpus of all sets that do not form a partition. `maps`: each cpu's set, as that cpu reports it.

    A set is disputed when it overlaps another one, and when a cpu in it reports another set. A cpu outside of its own
    set is disputed, too."""
    owner: dict[int, CpuSet] = {}
    bad: set[CpuSet] = set()
    for told in dict.fromkeys(maps.values()):
        for cpu in told:
            if owner.setdefault(cpu, told) is not told:
                bad |= {owner[cpu], told}
    alone: list[int] = []
    for cpu, told in maps.items():
        if cpu not in told:
            alone.append(cpu)
            bad |= {told, owner.get(cpu, told)}
    return CpuSet([*alone, *(cpu for told in bad for cpu in told)])


def by_identity(
    maps: Mapping[int, CpuSet], cpus: CpuSet, identity: Mapping[int, Hashable]
) -> dict[int, CpuSet] | None:
    """Each of the disputed `cpus` with those that share its identity; None if that is not conclusive:

    1. an undisputed cpu has the same identity,
    2. no map contains such a group: repeated identities could join separate cores."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for cpu in cpus:
        groups[identity[cpu]].append(cpu)
    others = {identity[cpu] for cpu in maps if cpu not in cpus}
    result: dict[int, CpuSet] = {}
    for key, members in groups.items():
        group = CpuSet(members)
        if key in others or not (len(group) == 1 or any(group <= maps[cpu] for cpu in group if cpu in maps)):
            return None
        result.update(dict.fromkeys(group, group))
    return result


def first_come(maps: Mapping[int, CpuSet]) -> tuple[dict[int, CpuSet], CpuSet]:
    """A partition of the cpus of `maps`, and the cpus whose own set is not in it.

    As in hwloc: in the order of the cpus, a set is kept unless it overlaps one kept before."""
    taken: dict[int, CpuSet] = {}
    dropped: list[int] = []
    for cpu, told in maps.items():
        if taken.get(cpu) is told or taken.get(cpu) == told:
            continue
        if cpu in told and not any(member in taken for member in told):
            taken.update(dict.fromkeys(told, told))
        else:
            dropped.append(cpu)
    return taken, CpuSet(dropped)


def cutting(sets: Iterable[CpuSet], group_of: Mapping[int, CpuSet]) -> frozenset[CpuSet]:
    """Those of `sets` that intersect a group without containing it or being contained in it."""
    return frozenset(
        its
        for its in dict.fromkeys(sets)
        for touched in [dict.fromkeys(group_of[cpu] for cpu in its)]
        if not (len(touched) == 1 and its <= next(iter(touched))) and sum(map(len, touched)) != len(its)
    )
