"""Groups cpus into physical cores, from the topology/ folder of each cpu, with rules for older kernels.

Source: Documentation/admin-guide/cputopology.rst.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from launcher.base.cpuset import CpuSet
from launcher.base.text import KIB
from launcher.machine.kernel_files import CPU_FOLDER, Root, decimal
from launcher.machine.numa_nodes import common
from launcher.machine.packages import by_identity, cutting, disputed, first_come
from launcher.machine.topology import Core, CoreKey, L3Domain, Socket


class Cpu(Struct, frozen=True):
    """One online cpu's topology folder; the kernel's -1 and a missing file are both None."""

    id: int
    socket: int
    die: int | None
    core_id: int
    siblings: CpuSet | None
    """Online cpus of the same core."""
    has_core_id: bool = True
    """False when the kernel has none; `core_id` is then the default."""


def read_cpu(files: Root, folder: str, cpu: int, online: CpuSet, socket: int) -> Cpu:
    """Read one cpu's topology folder. Raises LauncherError for an unreadable file.

    1. core_id missing or -1: the lowest of the core's cpus.
    2. die_id is missing before 5.2, and -1 where the architecture has no dies.
    3. The core's cpus: core_cpus (5.2+), else thread_siblings."""
    core_id = files.number(f"{folder}/core_id")
    siblings = files.cpus(f"{folder}/core_cpus", f"{folder}/core_cpus_list", online)
    if siblings is None:
        siblings = files.cpus(f"{folder}/thread_siblings", f"{folder}/thread_siblings_list", online)
    has_core_id = core_id is not None and core_id >= 0
    if siblings is None and not has_core_id:
        siblings = CpuSet((cpu,))
    die = files.number(f"{folder}/die_id")
    return Cpu(
        cpu,
        socket=socket,
        die=None if die is None or die < 0 else die,
        core_id=core_id if core_id is not None and core_id >= 0 else (siblings or CpuSet((cpu,))).first,
        siblings=siblings,
        has_core_id=has_core_id,
    )


def settle_cpus(
    files: Root, base: str, cpus: list[Cpu], node_of: Mapping[int, int], conflicts: list[str]
) -> list[Cpu]:
    """The cpus with consistent sibling maps, and one die per core.

    1. Where maps are not a partition, or join cpus of several sockets, socket, die and core_id decide.
    2. Where siblings have several dies, the lowest cpu's is used. hwloc, too, identifies a core by its siblings.

    Raises LauncherError where core_id is not conclusive; where one cpu has a core_id or a map and another has none;
    and for a core in two NUMA nodes, as either map may be wrong."""
    _check_alike(files, base, cpus)
    cpus = _settle_siblings(files, base, cpus, conflicts)
    by_id = {cpu.id: cpu for cpu in cpus}
    split: list[int] = []
    for cpu in cpus:
        first = by_id[cpu.siblings.first] if cpu.siblings else cpu
        if first.die != cpu.die:
            split.append(cpu.id)
        node, other = node_of.get(cpu.id), node_of.get(first.id)
        if node is not None and other is not None and node != other:
            raise files.broken(
                f"sys/devices/system/node/node{node}/cpumap",
                f"it contains cpu {cpu.id}, but cpu {first.id} of the same core is in node {other}",
            )
    if split:
        conflicts.append(
            f"die_id of cpus {CpuSet(split)} is not that of their core's lowest cpu: it is ignored"
        )
    return [
        replace(cpu, die=by_id[cpu.siblings.first].die) if cpu.id in split and cpu.siblings else cpu
        for cpu in cpus
    ]


def _check_alike(files: Root, base: str, cpus: list[Cpu]) -> None:
    """Raises LauncherError when only some cpus have core_id, or a sibling map."""
    for file, lacking in (
        ("core_id", [cpu for cpu in cpus if not cpu.has_core_id]),
        ("core_cpus", [cpu for cpu in cpus if cpu.siblings is None]),
    ):
        if lacking and len(lacking) < len(cpus):
            raise files.broken(
                f"{base}/cpu{lacking[0].id}/topology/{file}", "missing or -1, but other cpus have one"
            )


def _settle_siblings(files: Root, base: str, cpus: list[Cpu], conflicts: list[str]) -> list[Cpu]:
    maps = {cpu.id: cpu.siblings for cpu in cpus if cpu.siblings is not None}
    socket_of = {cpu.id: cpu.socket for cpu in cpus}
    across = (its for its in dict.fromkeys(maps.values()) if len({socket_of.get(cpu) for cpu in its}) > 1)
    odd = disputed(maps) | CpuSet(cpu for its in across for cpu in its)
    if not odd:
        return cpus
    identity = {cpu.id: (cpu.socket, cpu.die, cpu.core_id) for cpu in cpus}
    known = all(cpu.has_core_id for cpu in cpus)
    groups = by_identity(maps, odd, identity) if known else None
    if groups is None:
        folder = f"{base}/cpu{odd.first}/topology"
        raise files.broken(
            files.present(f"{folder}/core_cpus", f"{folder}/thread_siblings"),
            f"{maps[odd.first]} contradicts the map of one of cpus {odd}, and core_id does not distinguish them",
        )
    conflicts.append(
        f"the firmware's maps of SMT siblings (core_cpus) of cpus {odd} contradict each other: they are ignored, and "
        "core_id decides which cpus share a core"
    )
    return [replace(cpu, siblings=groups.get(cpu.id, cpu.siblings)) for cpu in cpus]


def group_cores(
    cpus: list[Cpu], node_of: Mapping[int, int], *, compute_units: bool, notes: list[str]
) -> tuple[Core, ...]:
    """Groups cpus into cores with keys that are unique on the machine.

    1. Cpus that list each other as siblings are one core; where no sibling file exists, those with
       the same (socket, die, core_id).
    2. With AMD compute units, siblings with different core_ids are separate cores.
    3. The key is (socket, die or 0, core_id). Old kernels repeat core_ids on each die of a socket and
       have no die_id: then the die is the rank of the core's NUMA node within the socket.
    4. If keys still repeat, core_id is the core's lowest cpu."""
    odd = CpuSet(cpu.id for cpu in cpus if not cpu.has_core_id)
    if odd:
        notes.append(f"core_id of cpus {odd} is missing or -1: the core's lowest cpu is used")
    groups: dict[tuple[object, ...], list[Cpu]] = defaultdict(list)
    for cpu in cpus:
        identity: tuple[object, ...] = (cpu.socket, cpu.die, cpu.core_id)
        if cpu.siblings is not None:
            identity = (cpu.siblings, cpu.core_id) if compute_units else (cpu.siblings,)
        groups[identity].append(cpu)
    members = sorted(groups.values(), key=lambda group: group[0].id)
    keys = [CoreKey(group[0].socket, group[0].die or 0, group[0].core_id) for group in members]
    if len(set(keys)) < len(keys):
        keys = _unique_keys(members, keys, node_of, notes)
    cores = [
        Core(key=key, cpus=CpuSet(cpu.id for cpu in group), node=_node(group, node_of))
        for key, group in zip(keys, members, strict=True)
    ]
    return tuple(sorted(cores, key=lambda core: core.key))


def _unique_keys(
    members: list[list[Cpu]], keys: list[CoreKey], node_of: Mapping[int, int], notes: list[str]
) -> list[CoreKey]:
    if all(group[0].die is None for group in members):
        nodes: dict[int, set[int]] = defaultdict(set)
        for group in members:
            nodes[group[0].socket].add(node_of.get(group[0].id, 0))
        rank = {socket: {node: i for i, node in enumerate(sorted(its))} for socket, its in nodes.items()}
        keys = [
            key._replace(die=rank[key.socket][node_of.get(group[0].id, 0)])
            for key, group in zip(keys, members, strict=True)
        ]
        notes.append(
            "core_id repeats within a socket and die_id is missing: the NUMA node is used as the die"
        )
    if len(set(keys)) < len(keys):
        keys = [CoreKey(key.socket, key.die, group[0].id) for key, group in zip(keys, members, strict=True)]
        notes.append("core_id is not unique within its die: the core's lowest cpu is used instead")
    return keys


def _node(group: list[Cpu], node_of: Mapping[int, int]) -> int | None:
    """The node of the core's cpus, which share it (`settle_cpus`)."""
    return next((node_of[cpu.id] for cpu in group if cpu.id in node_of), None)


# --- Kinds of cores. Sources: Documentation/ABI/testing/sysfs-devices-system-cpu (cpu_capacity, cpuinfo_max_freq),
# tools/perf/Documentation/intel-hybrid.txt (cpu_atom).

_ATOM_CPUS: Final = "sys/devices/cpu_atom/cpus"
_ATOM_SPEED: Final = 0.7
# Favoured cores of one kind reach a few per cent more (Turbo Boost Max, AMD's preferred cores), also in cpu_capacity.
_SAME_CAPACITY: Final = 0.85
_SAME_FREQUENCY: Final = 0.8


def with_speeds(files: Root, cores: tuple[Core, ...]) -> tuple[Core, ...]:
    """The cores with the speed of their kind: by cpu_capacity; else by the highest frequency, lower for Intel's
    efficient cores. All are alike where a file is missing or no value clearly differs."""
    speeds, same = _values(files, cores, "cpu_capacity"), _SAME_CAPACITY
    if speeds is None:
        frequencies = _values(files, cores, "cpufreq/cpuinfo_max_freq")
        atoms, same = files.cpulist(_ATOM_CPUS) or CpuSet(), _SAME_FREQUENCY
        speeds = [
            (frequencies[i] if frequencies else 1.0) * (_ATOM_SPEED if core.cpus <= atoms else 1.0)
            for i, core in enumerate(cores)
        ]
    kinds: list[float] = []
    for speed in sorted(set(speeds), reverse=True):
        if not kinds or speed < kinds[-1] * same:
            kinds.append(speed)
    if len(kinds) < 2:
        return cores
    of_kind = [next(kind for kind in kinds if speed >= kind * same) for speed in speeds]
    return tuple(
        replace(core, speed=round(kind / kinds[0], 3)) for core, kind in zip(cores, of_kind, strict=True)
    )


def _values(files: Root, cores: tuple[Core, ...], name: str) -> list[float] | None:
    """A positive number of the first cpu of each core; None where one has none."""
    found: list[float] = []
    for core in cores:
        value = decimal(files.text(f"{CPU_FOLDER}/cpu{core.cpus.first}/{name}") or "")
        if not value:
            return None
        found.append(float(value))
    return found


# --- L3 domains and sockets as sets of cores. Source: Documentation/ABI/testing/sysfs-devices-system-cpu.

_UNIFIED_L3: Final = 3
_SIZES: Final = {"K": KIB, "M": KIB**2, "G": KIB**3}


def sockets_of(cores: tuple[Core, ...]) -> tuple[Socket, ...]:
    members: dict[int, list[int]] = defaultdict(list)
    for core in cores:
        members[core.key.socket].extend(core.cpus)
    return tuple(Socket(id=socket, cpus=CpuSet(members[socket])) for socket in sorted(members))


def l3_domains_of(
    files: Root, cores: tuple[Core, ...], node_of: Mapping[int, int], notes: list[str], conflicts: list[str]
) -> tuple[L3Domain, ...]:
    """Sets of online cpus that share a level-3 cache; none for cpus that have no L3.

    An empty mask (ia64) means that the core shares the cache with no other, as in hwloc. Of overlapping masks the
    lowest cpu's is used and the other ignored, as in hwloc; a mask that splits a core or socket is ignored, too. Cpus
    that are only in ignored masks are in no L3 domain."""
    core_of = {cpu: core.cpus for core in cores for cpu in core.cpus}
    online = CpuSet(core_of)
    folders: dict[int, str] = {}
    maps: dict[int, CpuSet] = {}
    odd: list[int] = []
    for cpu in online:
        index = _l3_index(files, cpu)
        if index is None:
            continue
        mask, listed = files.twins(f"{index}/shared_cpu_map", f"{index}/shared_cpu_list", online)
        if mask is not None and listed is not None and mask != listed:
            odd.append(cpu)
        shared = listed if mask is None else mask
        if shared is None:
            raise files.broken(f"{index}/shared_cpu_map", "it and shared_cpu_list are missing")
        folders[cpu], maps[cpu] = index, shared or core_of[cpu]
    if odd:
        notes.append(
            f"shared_cpu_list of the L3 of cpus {CpuSet(odd)} differs from shared_cpu_map: the map is used"
        )
    socket_of = {cpu: socket.cpus for socket in sockets_of(cores) for cpu in socket.cpus}
    cut = cutting(maps.values(), core_of) | cutting(maps.values(), socket_of)
    taken, dropped = first_come({cpu: its for cpu, its in maps.items() if its not in cut})
    dropped |= CpuSet(cpu for cpu, its in maps.items() if its in cut)
    if dropped:
        without = CpuSet(maps) - CpuSet(taken)
        conflicts.append(
            f"the L3 maps (shared_cpu_map) of cpus {dropped} contradict those of other cpus, or split a core or a socket: "
            "they are ignored" + (f", and cpus {without} are in no L3 domain" if without else "")
        )
    domains = sorted(set(taken.values()), key=lambda cpus: cpus.first)
    nameless = CpuSet(cpu for cpus in domains for cpu in cpus if cpu not in folders)
    if nameless:
        notes.append(
            f"cpus {nameless} have no L3 folder of their own: the maps of other cpus put them into an L3 domain"
        )
    # Of the lowest cpu with that map: the domain's own first cpu may have no folder.
    described = {its: folders[cpu] for cpu, its in reversed(maps.items())}
    return tuple(
        L3Domain(
            cpus=cpus,
            size_bytes=_cache_size(files, f"{described[cpus]}/size"),
            node=common(node_of.get(cpu) for cpu in cpus),
        )
        for cpus in domains
    )


def _l3_index(files: Root, cpu: int) -> str | None:
    """The folder of the cpu's L3. index3 on most machines, so it is tried first."""
    base = f"{CPU_FOLDER}/cpu{cpu}/cache"
    if files.text(f"{base}/index3/level") == "3":
        return f"{base}/index3"
    for index in files.ids(base, "index") or ():
        folder = f"{base}/index{index}"
        if files.number(f"{folder}/level") == _UNIFIED_L3 and files.text(f"{folder}/type") != "Instruction":
            return folder
    return None


def _cache_size(files: Root, path: str) -> int | None:
    """Bytes in a cache's `size`, e.g. "32768K"; None where the firmware reports none."""
    text = files.text(path)
    if not text:
        return None
    digits, factor = (text[:-1], _SIZES[text[-1]]) if text[-1] in _SIZES else (text, 1)
    number = decimal(digits)
    if number is None:
        raise files.broken(path, f"{text[:40]!r} is not a cache size")
    return number * factor or None
