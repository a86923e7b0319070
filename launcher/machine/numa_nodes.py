"""NUMA nodes: cpus, memory, distances. Source: Documentation/ABI/stable/sysfs-devices-node."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from launcher.base.cpuset import CpuSet
from launcher.base.text import KIB, format_size
from launcher.machine.kernel_files import CPU_FOLDER, NODE_FOLDER, Root, decimal
from launcher.machine.topology import NumaNode

_NVIDIA: Final = "proc/driver/nvidia/gpus"
_MEMINFO: Final = "proc/meminfo"
_SAME_MEMORY: Final = 0.1
_POOL: Final = re.compile(r"hugepages-(?P<kib>[0-9]{1,12})kB")


def node_cpus_of(
    files: Root, online: CpuSet, notes: list[str], conflicts: list[str], emulated: list[CpuSet]
) -> dict[int, CpuSet]:
    """Online cpus of each online NUMA node; empty without NUMA. Adds groups of emulated nodes to `emulated`.

    A cpu listed by several nodes belongs to the one of its cpuN/nodeM link. Raises LauncherError without such a link:
    hwloc would drop the later node, and with it memory that instances are bound to."""
    folders = files.ids(NODE_FOLDER, "node") or CpuSet()
    listed = files.cpulist(f"{NODE_FOLDER}/online")
    if listed is not None and not listed <= folders and folders:
        raise files.broken(
            f"{NODE_FOLDER}/node{(listed - folders).first}", "the folder is missing, but node/online lists it"
        )
    result: dict[int, CpuSet] = {}
    claims: dict[int, list[int]] = defaultdict(list)
    for node in folders if listed is None else folders & listed:
        cpus = files.cpus(f"{NODE_FOLDER}/node{node}/cpumap", f"{NODE_FOLDER}/node{node}/cpulist", online)
        if cpus is None:
            raise files.broken(f"{NODE_FOLDER}/node{node}/cpumap", "it and cpulist are missing")
        result[node] = cpus
        for cpu in cpus:
            claims[cpu].append(node)
    if not result:
        notes.append("no node folder (kernel without NUMA): the whole machine is node 0")
        return {0: online}
    clash = CpuSet(cpu for cpu, nodes in claims.items() if len(nodes) > 1)
    if clash:
        emulated.extend(emulated_groups(files, result))
        alike = CpuSet(node for group in emulated for node in group)
        node_of = {
            cpu: min(claims[cpu])  # as lscpu(1), and with it vLLM
            if CpuSet(claims[cpu]) <= alike
            else _linked_node(files, cpu, claims[cpu])
            for cpu in clash
        }
        result = {
            node: CpuSet(cpu for cpu in its if node_of.get(cpu, node) == node) for node, its in result.items()
        }
        notes.extend(
            f"nodes {group} are one: the kernel emulates them (numa=fake on its command line)"
            for group in emulated
        )
        clash = CpuSet(cpu for cpu in clash if not CpuSet(claims[cpu]) <= alike)
    if clash:
        conflicts.append(
            f"several NUMA nodes list cpus {clash}: each belongs to the node of its own link, cpuN/nodeM "
            f"({', '.join(f'node {node}: {its & clash}' for node, its in result.items() if its & clash)})"
        )
    without = online - CpuSet(claims)
    if without:
        notes.append(f"cpus {without} are in no NUMA node: nothing is placed on them")
    return result


_LOCAL: Final = 10
"""Distance of a node to itself (ACPI, SLIT)."""


def emulated_groups(files: Root, cpus_of: Mapping[int, CpuSet]) -> tuple[CpuSet, ...]:
    """Nodes that the kernel made of one, by `numa=fake` (Documentation/admin-guide/kernel-parameters.txt): they list the
    same cpus, and are as near to each other as each is to itself. `cpus_of`: as the nodes list them.

    The command line is not asked: a kernel may be built with it, and a container may not read it."""
    by_cpus: dict[CpuSet, list[int]] = defaultdict(list)
    for node, cpus in cpus_of.items():
        if cpus:
            by_cpus[cpus].append(node)
    ids = sorted(cpus_of)
    groups = []
    for nodes in by_cpus.values():
        far = {node: _distances(files, node, ids) for node in nodes}
        near = all(far[node].get(other) == _LOCAL for node in nodes for other in nodes)
        if len(nodes) > 1 and near:
            groups.append(CpuSet(nodes))
    return tuple(sorted(groups, key=lambda group: group.first))


def _linked_node(files: Root, cpu: int, claims: list[int]) -> int:
    """Of the nodes that list a cpu, the one that its folder links to (Documentation/ABI/testing/sysfs-devices-system-cpu).

    Raises LauncherError for no link or several.
    """
    linked = [node for node in files.ids(f"{CPU_FOLDER}/cpu{cpu}", "node") or () if node in claims]
    if len(linked) != 1:
        raise files.broken(
            f"{NODE_FOLDER}/node{claims[1]}/cpumap",
            f"cpu {cpu} is also in node {claims[0]}, and {CPU_FOLDER}/cpu{cpu} has "
            + ("no link to either" if not linked else "links to both"),
        )
    return linked[0]


def _gpu_nodes(files: Root) -> CpuSet:
    """Nodes that NVIDIA's driver makes of GPU memory (POWER9, Grace), which are not for programs.

    Its file reads "Node:  255", -1 without one; hwloc leaves them out too (topology-linux.c, numa_status)."""
    found: list[int] = []
    for name in files.names(_NVIDIA):
        for line in (files.text(f"{_NVIDIA}/{name}/numa_status") or "").splitlines():
            key, _, value = line.partition(":")
            node = decimal(value.strip())
            if key.strip() == "Node" and node is not None:
                found.append(node)
    return CpuSet(found)


def read_nodes(
    files: Root, node_cpus: Mapping[int, CpuSet], socket_of: Mapping[int, int], notes: list[str]
) -> tuple[NumaNode, ...]:
    """The nodes with their memory; `node_cpus` as `node_cpus_of` found them."""
    unknown: list[int] = []
    silent = CpuSet(node for node in node_cpus if files.text(_distance_file(node)) == "")
    nodes: list[NumaNode] = []
    for node, its in sorted(node_cpus.items()):
        memory = _meminfo(files, f"{NODE_FOLDER}/node{node}/meminfo", words=2)
        if memory is None and len(node_cpus) == 1:
            memory = _meminfo(files, _MEMINFO, words=0)
        if memory is None:
            unknown.append(node)
        nodes.append(
            NumaNode(
                id=node,
                socket=common(socket_of[cpu] for cpu in its),
                cpus=its,
                memory_bytes=memory[0] if memory else 0,
                available_bytes=memory[1] if memory else 0,
                distances=_distances(files, node, sorted(node_cpus)),
                memory_known=memory is not None,
                hugepages_bytes=_hugepages(files, f"{NODE_FOLDER}/node{node}/hugepages"),
            )
        )
    if silent:
        notes.append(f"distance of node {silent} is empty: its distances are unknown")
    if unknown:
        notes.append(f"meminfo of node {CpuSet(unknown)} is missing: its memory size is unknown")
    return _without_gpus(nodes, _gpu_nodes(files), notes)


def _without_gpus(nodes: list[NumaNode], gpus: CpuSet, notes: list[str]) -> tuple[NumaNode, ...]:
    gone = CpuSet(node.id for node in nodes if node.id in gpus and not node.cpus)
    if not gone:
        return tuple(nodes)
    notes.append(f"nodes {gone} are GPU memory: they are excluded")
    return tuple(
        replace(node, distances={to: far for to, far in node.distances.items() if to not in gone})
        for node in nodes
        if node.id not in gone
    )


def _meminfo(files: Root, path: str, *, words: int) -> tuple[int, int] | None:
    """Total and available bytes; None when the file is absent.

    Lines read "Node 0 MemTotal: 97421888 kB" (`words` = 2 come before the key) or "MemTotal: …". Available is MemFree
    + Active(file) + Inactive(file) + SReclaimable, the sum that vLLM compares its KV cache with
    (vllm/utils/cpu_resource_utils.py, get_memory_node_info, 0.32)."""
    text = files.text(path)
    if text is None:
        return None
    values: dict[str, int] = {}
    for line in text.splitlines():
        fields = line.split()[words:]
        kib = decimal(fields[1]) if len(fields) > 1 else None
        if kib is not None:
            values[fields[0].rstrip(":")] = kib * KIB
    if "MemTotal" not in values:
        raise files.broken(path, "there is no MemTotal")
    parts = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    return values["MemTotal"], sum(values.get(part, 0) for part in parts)


def virtual_memory_limit(files: Root, nodes: Iterable[NumaNode], notes: list[str]) -> int | None:
    """MemTotal of /proc/meminfo where it is clearly less than that of all nodes: lxcfs shows a container's limit there,
    also one that is set above the cgroup that the container sees as the root. None otherwise.

    The kernel's own two figures differ by the memory that it took at boot, a few per cent."""
    text = files.text(_MEMINFO) or ""
    found = next((line.split() for line in text.splitlines() if line.startswith("MemTotal:")), [])
    kib = decimal(found[1]) if len(found) > 1 else None
    total = sum(node.memory_bytes for node in nodes)
    if not kib or kib * KIB >= total * (1 - _SAME_MEMORY):
        return None
    notes.append(
        f"/proc/meminfo shows {format_size(kib * KIB)} of the nodes' {format_size(total)} (lxcfs): it is taken as the "
        "memory limit of this container"
    )
    return kib * KIB


def _hugepages(files: Root, folder: str) -> int:
    """Bytes in a node's hugetlb pools (Documentation/admin-guide/mm/hugetlbpage.rst); 0 without any."""
    pools = ((name, _POOL.fullmatch(name)) for name in files.names(folder))
    return sum(
        int(match["kib"]) * KIB * (files.number(f"{folder}/{name}/nr_hugepages") or 0)
        for name, match in pools
        if match
    )


def _distances(files: Root, node: int, nodes: list[int]) -> dict[int, int]:
    """Distances to each online node; empty when the file is absent or empty.

    The kernel prints one per online node, in the order of ids (drivers/base/node.c), or one per possible node. No
    node is nearer than the node itself (ACPI, SLIT)."""
    path = _distance_file(node)
    text = files.text(path)
    if not text:
        return {}
    values = [decimal(word) for word in text.split()]
    possible = list(files.cpulist(f"{NODE_FOLDER}/possible") or ())
    ids = nodes if len(values) == len(nodes) else possible
    known = [value for value in values if value is not None]
    if len(known) != len(ids) or len(known) != len(values):
        raise files.broken(path, f"{text[:60]!r} is not one distance for each of {len(nodes)} online nodes")
    distances = dict(zip(ids, known, strict=True))
    if min(distances.values()) != distances.get(node):
        raise files.broken(path, f"{text[:60]!r} has another node nearer to node {node} than itself")
    return {other: distances[other] for other in nodes if other in distances}


def _distance_file(node: int) -> str:
    return f"{NODE_FOLDER}/node{node}/distance"


def common(values: Iterable[int | None]) -> int | None:
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None
