"""Groups cpus into sockets (packages) with ids.

Source: Documentation/admin-guide/cputopology.rst. hwloc and lscpu tell packages apart by the same maps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import Final

from launcher.base.cpuset import CpuSet
from launcher.machine.kernel_files import Root

# --- Contradictory cpu maps: the cpus concerned, and their grouping by another source. ---
#
# Firmware (ACPI's SRAT and PPTT, a hypervisor's CPUID leaves) can describe sets of cpus that overlap; the kernel prints
# them unchanged. hwloc keeps the first set and drops one that intersects it (hwloc/topology.c,
# hwloc___insert_object_by_cpuset; for NUMA nodes hwloc/topology-linux.c). Here a second source
# decides; without one nothing is guessed.


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


_CPU: Final = "sys/devices/system/cpu"
_ID: Final = "physical_package_id"
_MAPS: Final = ("package_cpus", "core_siblings")


def read_sockets(files: Root, online: CpuSet, notes: list[str], conflicts: list[str]) -> dict[int, int]:
    """The socket id of each online cpu.

    1. A socket has the cpus of package_cpus (5.2+), else of core_siblings, the kernel's own map; without
       these files, the cpus with the same physical_package_id.
    2. Its id is physical_package_id.
    3. Where every cpu's id is -1 (unknown to the firmware) or missing (kernels before 2.6.16, some
       architectures): sockets are numbered by lowest cpu. If only some have none, that is an error.
    4. The same applies where ids repeat: on s390 they count within a book, on some ia64 within a node.
    5. Where a map and its list twin differ, the map is used, as in hwloc.
    6. Where maps contradict each other, physical_package_id decides; where a map has two ids, its lowest
       cpu's id is used, as in hwloc.

    Rules 3 to 5 add to `notes`, rule 6 to `conflicts`. Raises LauncherError for maps that the ids do not distinguish.
    """
    ids = {cpu: _known(files.number(_file(cpu, _ID))) for cpu in online}
    without = CpuSet(cpu for cpu, its in ids.items() if its is None)
    if without and len(without) < len(online):
        raise files.broken(_file(without.first, _ID), "missing or -1, but other cpus have one")
    groups = sorted(_groups(files, online, ids, notes, conflicts), key=lambda group: group.first)
    found = [_id_of(group, ids, conflicts) for group in groups]
    if without:
        named = "socket 0 is used" if len(groups) == 1 else "sockets are numbered by their lowest cpu"
        notes.append(f"{_ID} of cpus {without} is missing or -1: {named}")
    elif len(set(found)) < len(found):
        notes.append(f"{_ID} is the same in several package_cpus: sockets are numbered by their lowest cpu")
    else:
        return {
            cpu: socket
            for socket, group in zip(found, groups, strict=True)
            for cpu in group
            if socket is not None
        }
    return {cpu: i for i, group in enumerate(groups) for cpu in group}


def _groups(
    files: Root, online: CpuSet, ids: dict[int, int | None], notes: list[str], conflicts: list[str]
) -> list[CpuSet]:
    odd: list[int] = []
    maps = {cpu: _package(files, cpu, online, odd) for cpu in online}
    if odd:
        notes.append(f"package_cpus_list of cpus {CpuSet(odd)} differs from package_cpus: the map is used")
    missing = CpuSet(cpu for cpu, its in maps.items() if its is None)
    if missing and len(missing) < len(online):
        raise files.broken(_file(missing.first, _MAPS[0]), "missing, but other cpus have one")
    told = {cpu: its for cpu, its in maps.items() if its is not None}
    maps |= _settled(files, told, ids, conflicts)
    members: dict[object, list[int]] = defaultdict(list)
    for cpu, its in maps.items():
        members[ids[cpu] if its is None else its].append(cpu)
    return [CpuSet(cpus) for cpus in members.values()]


def _settled(
    files: Root, told: dict[int, CpuSet], ids: dict[int, int | None], conflicts: list[str]
) -> dict[int, CpuSet]:
    odd = disputed(told)
    if not odd:
        return {}
    groups = None if any(ids[cpu] is None for cpu in odd) else by_identity(told, odd, ids)
    if groups is None:
        cpu = next(cpu for cpu in odd if cpu in told)
        raise files.broken(
            files.present(*(_file(cpu, name) for name in _MAPS)),
            f"{told[cpu]} contradicts the map of one of those cpus, and {_ID} does not distinguish them",
        )
    conflicts.append(
        f"the firmware's package maps (package_cpus) of cpus {odd} contradict each other: they are ignored, and {_ID} "
        "decides which cpus share a socket"
    )
    return groups


def _package(files: Root, cpu: int, online: CpuSet, odd: list[int]) -> CpuSet | None:
    for name in _MAPS:
        its, listed = files.twins(_file(cpu, name), _file(cpu, f"{name}_list"), online)
        if its is not None and listed is not None and its != listed:
            odd.append(cpu)
        if its is not None or listed is not None:
            return listed if its is None else its
    return None


def _id_of(group: CpuSet, ids: dict[int, int | None], conflicts: list[str]) -> int | None:
    found = ids[group.first]
    others = CpuSet(cpu for cpu in group if ids[cpu] != found)
    if others:
        conflicts.append(
            f"{_ID} of cpus {others} differs from that of cpu {group.first} of the same package_cpus: {found} is used"
        )
    return found


def _known(number: int | None) -> int | None:
    return None if number is None or number < 0 else number


def _file(cpu: int, name: str) -> str:
    return f"{_CPU}/cpu{cpu}/topology/{name}"
