"""Groups cpus into physical cores, from the topology/ folder of each cpu, with rules for older kernels.

Source: Documentation/admin-guide/cputopology.rst.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from launcher.cpuset import CpuSet
from launcher.topology.conflicts import by_identity, disputed
from launcher.topology.files import Root
from launcher.topology.model import Core, CoreKey


@dataclass(frozen=True, slots=True)
class Cpu:
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
