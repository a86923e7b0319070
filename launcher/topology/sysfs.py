"""Read a machine's topology from sysfs and procfs under a root directory.

Rule sources: Documentation/admin-guide/cputopology.rst, Documentation/ABI/{testing/sysfs-devices-system-cpu,
stable/sysfs-devices-node}. A file that is missing is a LauncherError that names it, unless the kernel documents
that it may be missing: then the default is taken and said in `Topology.notes`. Of maps that contradict each other
one is taken where another file decides, which `Topology.conflicts` says; else that is a LauncherError too. hwloc
reads the same files; tests/topology/test_captured_machines.py compares the two.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from launcher.cpuset import CpuSet
from launcher.sizes import KIB
from launcher.topology import cgroup
from launcher.topology.conflicts import cutting, first_come
from launcher.topology.cores import group_cores, read_cpu, settle_cpus
from launcher.topology.cpuinfo import parse_cpuinfo
from launcher.topology.files import Root, parse_cpumap
from launcher.topology.model import Core, CpuInfo, L3Domain, NumaNode, Socket, Topology
from launcher.topology.packages import read_sockets

_CPU: Final = "sys/devices/system/cpu"
_NODE: Final = "sys/devices/system/node"
_CPUINFO_BYTES: Final = 16_384
"""One record is 1.5 to 3 KiB; a whole /proc/cpuinfo of 256 cpus costs the kernel milliseconds."""
HWLOC_INFO: Final = "proc/hwloc-nofile-info"
"""What hwloc-gather-topology writes into a captured root beside the kernel's files."""
_UNIFIED_L3: Final = 3
_NVIDIA: Final = "proc/driver/nvidia/gpus"
_POOL: Final = re.compile(r"hugepages-(?P<kib>[0-9]{1,12})kB")
_SIZES: Final = {"K": KIB, "M": KIB**2, "G": KIB**3}


def read(root: Path = Path("/"), *, affinity: CpuSet | None = None) -> Topology:
    """The machine under `root`, as this process may use it.

    `affinity` replaces the affinity mask; without it a live root ("/") asks the kernel, and another
    root uses its proc/self/status, else all online cpus. Raises LauncherError.
    """
    return read_source(Root(root), affinity=affinity)


def read_source(files: Root, *, affinity: CpuSet | None = None) -> Topology:
    """`read`, from any source of files."""
    notes: list[str] = []
    conflicts: list[str] = []
    present, online = _present_online(files, notes)
    status = _status(files)
    info = _cpu_info(files, notes)
    socket_of = read_sockets(files, online, notes, conflicts)
    cpus = [read_cpu(files, f"{_CPU}/cpu{cpu}/topology", cpu, online, socket_of[cpu]) for cpu in online]
    node_cpus = _node_cpus(files, online, notes, conflicts)
    nodes = _nodes(files, node_cpus, socket_of, notes)
    node_of = {cpu: node for node, its in node_cpus.items() for cpu in its}
    cpus = settle_cpus(files, _CPU, cpus, node_of, conflicts)
    cores = group_cores(cpus, node_of, compute_units=_has_compute_units(files, info), notes=notes)
    l3_domains = _l3_domains(files, cores, node_of, notes, conflicts)
    limits = cgroup.read_limits(files)
    allowed = online & (affinity if affinity is not None else _affinity(files, status, online))
    return Topology(
        online=online,
        offline=present - online,
        allowed=allowed if limits.cpus is None else allowed & limits.cpus,
        sockets=_sockets(cores),
        numa_nodes=nodes,
        l3_domains=l3_domains,
        cores=cores,
        cpu=info,
        allowed_nodes=_allowed_nodes(nodes, status, limits.mems),
        notes=tuple(notes),
        conflicts=tuple(conflicts),
        memory_limit_bytes=limits.memory_bytes,
        has_numa=bool(files.ids(_NODE, "node")),
    )


def _present_online(files: Root, notes: list[str]) -> tuple[CpuSet, CpuSet]:
    """Cpus that exist, and those of them that run.

    1. Present is cpu/present; kernels before 2.6.28 lack it: the cpuN folders.
    2. Online is cpu/online; where it lacks: every cpu whose own `online` file is not 0. A cpu without
       that file cannot be unplugged, so it is online (cpu 0 on x86).
    """
    folders = files.ids(_CPU, "cpu")
    if not folders:
        raise files.broken(_CPU, "there is no cpuN folder")
    present = files.cpulist(f"{_CPU}/present") or folders
    online = files.cpulist(f"{_CPU}/online")
    states = {cpu: files.text(f"{_CPU}/cpu{cpu}/online") for cpu in folders}
    if online is None:
        notes.append("cpu/online is missing (kernel before 2.6.28): taken from each cpu's own online file")
        online = CpuSet(cpu for cpu, state in states.items() if state != "0")
    for cpu in online:
        if cpu not in folders:
            raise files.broken(f"{_CPU}/cpu{cpu}", "the folder is missing, yet cpu/online lists the cpu")
        if states[cpu] == "0":
            raise files.broken(f"{_CPU}/cpu{cpu}/online", "reads 0, yet cpu/online lists the cpu")
    if not online:
        raise files.broken(f"{_CPU}/online", "no cpu is online")
    offline = files.cpulist(f"{_CPU}/offline") or CpuSet()
    for name, clash in (("present", online - present), ("offline", online & offline)):
        if clash:
            raise files.broken(f"{_CPU}/{name}", f"it contradicts cpu/online, where cpu {clash.first} is")
    return present, online


def _sockets(cores: tuple[Core, ...]) -> tuple[Socket, ...]:
    members: dict[int, list[int]] = defaultdict(list)
    for core in cores:
        members[core.key.socket].extend(core.cpus)
    return tuple(Socket(id=socket, cpus=CpuSet(members[socket])) for socket in sorted(members))


def _l3_domains(
    files: Root,
    cores: tuple[Core, ...],
    node_of: Mapping[int, int],
    notes: list[str],
    conflicts: list[str],
) -> tuple[L3Domain, ...]:
    """Sets of online cpus that share a level-3 cache; none for cpus that have no L3.

    An empty mask (ia64) means that the core shares the cache with no other, as in hwloc. Of masks that overlap the
    lowest cpu's is taken and the other dropped, as in hwloc, and so is one that cuts a core or a socket; cpus that only
    dropped ones hold are in no L3 domain.
    """
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
            f"shared_cpu_list of the L3 of cpus {CpuSet(odd)} is not shared_cpu_map: the map is taken"
        )
    socket_of = {cpu: socket.cpus for socket in _sockets(cores) for cpu in socket.cpus}
    cut = cutting(maps.values(), core_of) | cutting(maps.values(), socket_of)
    taken, dropped = first_come({cpu: its for cpu, its in maps.items() if its not in cut})
    dropped |= CpuSet(cpu for cpu, its in maps.items() if its in cut)
    if dropped:
        without = CpuSet(maps) - CpuSet(taken)
        conflicts.append(
            f"the L3 maps (shared_cpu_map) of cpus {dropped} contradict those of other cpus, or cut a core or a socket: "
            "they are dropped" + (f", and cpus {without} are in no L3 domain" if without else "")
        )
    return tuple(
        L3Domain(
            cpus=cpus,
            size_bytes=_cache_size(files, f"{folders[cpus.first]}/size"),
            node=_common(node_of.get(cpu) for cpu in cpus),
        )
        for cpus in sorted(set(taken.values()), key=lambda cpus: cpus.first)
    )


def _l3_index(files: Root, cpu: int) -> str | None:
    """The folder of the cpu's L3. index3 on most machines, so it is looked at first."""
    base = f"{_CPU}/cpu{cpu}/cache"
    if files.text(f"{base}/index3/level") == "3":
        return f"{base}/index3"
    for index in files.ids(base, "index") or ():
        folder = f"{base}/index{index}"
        if files.number(f"{folder}/level") == _UNIFIED_L3 and files.text(f"{folder}/type") != "Instruction":
            return folder
    return None


def _cache_size(files: Root, path: str) -> int | None:
    """Bytes in a cache's `size`, e.g. "32768K"; None where the firmware does not say."""
    text = files.text(path)
    if not text:
        return None
    number, factor = (text[:-1], _SIZES[text[-1]]) if text[-1] in _SIZES else (text, 1)
    if not (number.isascii() and number.isdigit()):
        raise files.broken(path, f"{text[:40]!r} is not a cache size")
    return int(number) * factor or None


def _node_cpus(files: Root, online: CpuSet, notes: list[str], conflicts: list[str]) -> dict[int, CpuSet]:
    """Online cpus of each online NUMA node; empty without NUMA.

    A cpu that several nodes claim is in the one that its own cpuN/nodeM link names. Raises LauncherError where
    there is no such link: hwloc would drop the later node, and with it the memory that instances are bound to.
    """
    folders = files.ids(_NODE, "node") or CpuSet()
    listed = files.cpulist(f"{_NODE}/online")
    if listed is not None and not listed <= folders and folders:
        raise files.broken(
            f"{_NODE}/node{(listed - folders).first}", "the folder is missing, yet node/online lists it"
        )
    result: dict[int, CpuSet] = {}
    claims: dict[int, list[int]] = defaultdict(list)
    for node in folders if listed is None else folders & listed:
        cpus = files.cpus(f"{_NODE}/node{node}/cpumap", f"{_NODE}/node{node}/cpulist", online)
        if cpus is None:
            raise files.broken(f"{_NODE}/node{node}/cpumap", "it and cpulist are missing")
        result[node] = cpus
        for cpu in cpus:
            claims[cpu].append(node)
    if not result:
        notes.append("no node folder (kernel without NUMA): the whole machine is taken as node 0")
        return {0: online}
    clash = CpuSet(cpu for cpu, nodes in claims.items() if len(nodes) > 1)
    if clash:
        home = {cpu: _linked_node(files, cpu, claims[cpu]) for cpu in clash}
        result = {
            node: CpuSet(cpu for cpu in its if home.get(cpu, node) == node) for node, its in result.items()
        }
        conflicts.append(
            f"several NUMA nodes claim cpus {clash}: each is taken as a cpu of the node that its own link (cpuN/nodeM) "
            f"names ({', '.join(f'node {node}: {its & clash}' for node, its in result.items() if its & clash)})"
        )
    homeless = online - CpuSet(claims)
    if homeless:
        notes.append(f"cpus {homeless} are in no NUMA node: nothing is placed on them")
    return result


def _linked_node(files: Root, cpu: int, claims: list[int]) -> int:
    """Of the nodes that claim a cpu, the one that its folder links to (Documentation/ABI/testing/sysfs-devices-system-cpu).

    Raises LauncherError where it links to none of them, or to several.
    """
    linked = [node for node in files.ids(f"{_CPU}/cpu{cpu}", "node") or () if node in claims]
    if len(linked) != 1:
        raise files.broken(
            f"{_NODE}/node{claims[1]}/cpumap",
            f"cpu {cpu} is also in node {claims[0]}, and {_CPU}/cpu{cpu} has "
            + ("no link to either" if not linked else "links to both"),
        )
    return linked[0]


def _gpu_nodes(files: Root) -> CpuSet:
    """Nodes that NVIDIA's driver made of its GPUs' memory (POWER9, Grace): no place for a program's own.

    Its file reads "Node:  255", -1 without one; hwloc leaves them out too (topology-linux.c, numa_status).
    """
    found: list[int] = []
    for name in files.names(_NVIDIA):
        for line in (files.text(f"{_NVIDIA}/{name}/numa_status") or "").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Node" and value.strip().isascii() and value.strip().isdigit():
                found.append(int(value))
    return CpuSet(found)


def _nodes(
    files: Root, node_cpus: Mapping[int, CpuSet], socket_of: Mapping[int, int], notes: list[str]
) -> tuple[NumaNode, ...]:
    unknown: list[int] = []
    nodes: list[NumaNode] = []
    for node, its in sorted(node_cpus.items()):
        memory = _meminfo(files, f"{_NODE}/node{node}/meminfo", words=2)
        if memory is None and len(node_cpus) == 1:
            memory = _meminfo(files, "proc/meminfo", words=0)
        if memory is None:
            unknown.append(node)
        nodes.append(
            NumaNode(
                id=node,
                socket=_common(socket_of[cpu] for cpu in its),
                cpus=its,
                memory_bytes=memory[0] if memory else 0,
                available_bytes=memory[1] if memory else 0,
                distances=_distances(files, node, sorted(node_cpus)),
                memory_known=memory is not None,
                hugepages_bytes=_hugepages(files, f"{_NODE}/node{node}/hugepages"),
            )
        )
    if unknown:
        notes.append(f"meminfo of node {CpuSet(unknown)} is missing: how much memory it has is not known")
    return _without_gpus(nodes, _gpu_nodes(files), notes)


def _without_gpus(nodes: list[NumaNode], gpus: CpuSet, notes: list[str]) -> tuple[NumaNode, ...]:
    gone = CpuSet(node.id for node in nodes if node.id in gpus and not node.cpus)
    if not gone:
        return tuple(nodes)
    notes.append(f"nodes {gone} are the memory of GPUs: they are left out")
    return tuple(
        replace(node, distances={to: far for to, far in node.distances.items() if to not in gone})
        for node in nodes
        if node.id not in gone
    )


def _meminfo(files: Root, path: str, *, words: int) -> tuple[int, int] | None:
    """Total and available bytes; None when the file is absent.

    Lines read "Node 0 MemTotal: 97421888 kB" (`words` = 2 come before the key) or "MemTotal: …".
    Available is MemFree + Active(file) + Inactive(file) + SReclaimable, the sum that vLLM compares
    its KV cache with (vllm/utils/cpu_resource_utils.py, get_memory_node_info, 0.32).
    """
    text = files.text(path)
    if text is None:
        return None
    values: dict[str, int] = {}
    for line in text.splitlines():
        fields = line.split()[words:]
        if len(fields) > 1 and fields[1].isascii() and fields[1].isdigit():
            values[fields[0].rstrip(":")] = int(fields[1]) * KIB
    if "MemTotal" not in values:
        raise files.broken(path, "there is no MemTotal")
    parts = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    return values["MemTotal"], sum(values.get(part, 0) for part in parts)


def _hugepages(files: Root, folder: str) -> int:
    """Bytes in a node's hugetlb pools (Documentation/admin-guide/mm/hugetlbpage.rst); 0 without any."""
    pools = ((name, _POOL.fullmatch(name)) for name in files.names(folder))
    return sum(
        int(match["kib"]) * KIB * (files.number(f"{folder}/{name}/nr_hugepages") or 0)
        for name, match in pools
        if match
    )


def _distances(files: Root, node: int, nodes: list[int]) -> dict[int, int]:
    """Distances to each online node; empty when the file is absent.

    The kernel prints one for each online node, in the order of their ids (drivers/base/node.c). Where
    there are more, and one for each possible node, they are those. No node is nearer than the node itself (ACPI, SLIT).
    """
    path = f"{_NODE}/node{node}/distance"
    text = files.text(path)
    if text is None:
        return {}
    values = text.split()
    possible = list(files.cpulist(f"{_NODE}/possible") or ())
    ids = nodes if len(values) == len(nodes) else possible
    if len(values) != len(ids) or not all(value.isdigit() for value in values):
        raise files.broken(path, f"{text[:60]!r} is not one distance for each of {len(nodes)} online nodes")
    distances = dict(zip(ids, map(int, values), strict=True))
    if min(distances.values()) != distances.get(node):
        raise files.broken(path, f"{text[:60]!r} makes another node nearer than node {node} is to itself")
    return {other: distances[other] for other in nodes if other in distances}


def _status(files: Root) -> dict[str, CpuSet]:
    """Cpus_allowed and Mems_allowed of proc/self/status, where it is there.

    Their lists came with 2.6.26; the masks, which have more words than the machine has cpus, are older.
    """
    text = files.text("proc/self/status")
    result: dict[str, CpuSet] = {}
    for line in (text or "").splitlines():
        key, _, value = line.partition(":")
        name = key.removesuffix("_list")
        if name in {"Cpus_allowed", "Mems_allowed"}:
            try:
                told = parse_cpumap(value.strip()) if name == key else CpuSet.parse(value)
            except ValueError as error:
                raise files.broken("proc/self/status", f"{key}: {error}") from None
            result[name] = told if name != key else result.get(name, told)
    return result


def _affinity(files: Root, status: Mapping[str, CpuSet], online: CpuSet) -> CpuSet:
    told = files.source.affinity()
    return status.get("Cpus_allowed", online) if told is None else told


def _allowed_nodes(nodes: tuple[NumaNode, ...], status: Mapping[str, CpuSet], mems: CpuSet | None) -> CpuSet:
    allowed = CpuSet(node.id for node in nodes)
    for limit in (status.get("Mems_allowed"), mems):
        allowed = allowed if limit is None else allowed & limit
    return allowed


def _cpu_info(files: Root, notes: list[str]) -> CpuInfo:
    text = files.head("proc/cpuinfo", _CPUINFO_BYTES)
    if text is None:
        notes.append("proc/cpuinfo is missing: brand and instruction sets are not known")
    return parse_cpuinfo(text or "")


def _has_compute_units(files: Root, info: CpuInfo) -> bool:
    """AMD families 15h and 16h pair cores that share an FPU; old kernels list the pair as thread siblings.

    The family number says so on x86 only. A captured root names its architecture in the file that
    hwloc-gather-topology writes; without it the siblings are taken as the kernel has them, as hwloc does.
    """
    if info.vendor != "AuthenticAMD" or info.family not in {0x15, 0x16}:
        return False
    machine = files.source.machine()
    if machine is None:
        recorded = files.text(HWLOC_INFO) or ""
        machine = recorded.partition("Architecture:")[2].split("\n")[0].strip()
    return machine in {"x86_64", "i686", "i386"}


def _common(values: Iterable[int | None]) -> int | None:
    """The value that all share, else None."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None
