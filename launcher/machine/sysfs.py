"""Reads a machine's topology from sysfs and procfs under a root directory.

Rule sources: Documentation/admin-guide/cputopology.rst, Documentation/ABI/{testing/sysfs-devices-system-cpu,
stable/sysfs-devices-node}. A file that is missing is a LauncherError that names it, unless the kernel documents
that it may be missing: then the default is used and noted in `Topology.notes`. Of contradictory maps, one is used
if another file decides, which `Topology.conflicts` notes; otherwise that is a LauncherError, too. hwloc
reads the same files; tests/machine/test_captured_machines.py compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from launcher.base.cpuset import CpuSet
from launcher.machine import cgroup
from launcher.machine.cores import group_cores, l3_domains_of, read_cpu, settle_cpus, sockets_of, with_speeds
from launcher.machine.hardware import parse_cpuinfo
from launcher.machine.kernel_files import CPU_FOLDER, NODE_FOLDER, Root, parse_cpumap
from launcher.machine.numa_nodes import node_cpus_of, read_nodes, virtual_memory_limit
from launcher.machine.packages import read_sockets
from launcher.machine.topology import CpuInfo, CpusApart, NumaNode, Topology

_CPUINFO_BYTES: Final = 16_384
"""One record is 1.5 to 3 KiB; generating /proc/cpuinfo for 256 cpus takes milliseconds."""
HWLOC_INFO: Final = "proc/hwloc-nofile-info"
"""A file that hwloc-gather-topology adds to a captured root."""


def read(
    root: Path = Path("/"),
    *,
    affinity: CpuSet | None = None,
    slice_name: str | None = cgroup.INSTANCES_SLICE,
) -> Topology:
    """The machine under `root`, with this process's limits.

    `affinity` replaces the affinity mask; without it a live root ("/") asks the kernel, and another root uses its
    proc/self/status, else all online cpus. `slice_name`: the slice of the instances' units; None: instances run in
    this process's cgroup. Raises LauncherError."""
    return read_source(Root(root), affinity=affinity, slice_name=slice_name)


def read_source(
    files: Root, *, affinity: CpuSet | None = None, slice_name: str | None = cgroup.INSTANCES_SLICE
) -> Topology:
    """`read`, from any source of files."""
    notes: list[str] = []
    conflicts: list[str] = []
    status = _status(files)
    limits = cgroup.read_limits(files, slice_name=slice_name)
    if affinity is None:
        affinity = files.source.affinity()
    mask = status.get("Cpus_allowed") if affinity is None else affinity
    own = mask
    if limits.cpus is not None:
        mask = limits.cpus if mask is None else mask & limits.cpus
    present, online = _present_online(files, mask, notes)
    info = _cpu_info(files, notes)
    socket_of = read_sockets(files, online, notes, conflicts)
    cpus = [read_cpu(files, f"{CPU_FOLDER}/cpu{cpu}/topology", cpu, online, socket_of[cpu]) for cpu in online]
    emulated: list[CpuSet] = []
    node_cpus = node_cpus_of(files, online, notes, conflicts, emulated)
    nodes = read_nodes(files, node_cpus, socket_of, notes)
    node_of = {cpu: node for node, its in node_cpus.items() for cpu in its}
    cpus = settle_cpus(files, CPU_FOLDER, cpus, node_of, conflicts)
    cores = group_cores(cpus, node_of, compute_units=_has_compute_units(files, info), notes=notes)
    cores = with_speeds(files, cores)
    l3_domains = l3_domains_of(files, cores, node_of, notes, conflicts)
    shown = virtual_memory_limit(files, nodes, notes)
    told = [limit for limit in (limits.memory_bytes, shown) if limit is not None]
    return Topology(
        online=online, offline=present - online,
        allowed=online if mask is None else online & mask, sockets=sockets_of(cores),
        numa_nodes=nodes, l3_domains=l3_domains, cores=cores, cpu=info,
        allowed_nodes=_allowed_nodes(nodes, status, limits.mems), notes=tuple(notes),
        conflicts=tuple(conflicts), memory_limit_bytes=min(told, default=None),
        cpu_quota=limits.cpu_quota, emulated=tuple(emulated), apart=_apart(own, mask, limits),
        has_numa=bool(files.ids(NODE_FOLDER, "node")),
    )  # fmt: skip


def _apart(own: CpuSet | None, both: CpuSet | None, limits: cgroup.Limits) -> CpusApart | None:
    """`own`: the affinity mask, which is within this process's cpuset. `both`: cpus that it and the slice may use."""
    if both or own is None or limits.slice_cpus is None or not own or not limits.slice_cpus:
        return None
    return CpusApart(own, limits.slice_cpus)


def _present_online(files: Root, mask: CpuSet | None, notes: list[str]) -> tuple[CpuSet, CpuSet]:
    """Present and online cpus. `mask`: the cpus of the affinity mask and the cgroup's cpuset; None where unknown.

    1. Present is cpu/present; kernels before 2.6.28 lack it: the cpuN folders.
    2. Online is cpu/online; without it, every cpu whose own `online` file is not 0. A cpu without
       that file cannot be unplugged, so it is online (cpu 0 on x86).
    3. Where the kernel lets this process run on cpus that cpu/online lacks, cpu/online is not the kernel's: lxcfs
       renumbers it from 0, but no other file. Then the cpus of the mask are online."""
    folders = files.ids(CPU_FOLDER, "cpu")
    if not folders:
        raise files.broken(CPU_FOLDER, "there is no cpuN folder")
    present = files.cpulist(f"{CPU_FOLDER}/present") or folders
    online = files.cpulist(f"{CPU_FOLDER}/online")
    states = {cpu: files.text(f"{CPU_FOLDER}/cpu{cpu}/online") for cpu in folders}
    if online is None:
        notes.append("cpu/online is missing (kernel before 2.6.28): each cpu's own online file is used")
        online = CpuSet(cpu for cpu, state in states.items() if state != "0")
    if mask is not None and _running(files, mask & folders - online, states):
        real = _running(files, mask & folders, states)
        notes.append(
            f"cpu/online lists cpus {online}, but the kernel runs this process on cpus {real}: cpu/online is virtual "
            "(lxcfs) and not used"
        )
        online = real
    for cpu in online:
        if cpu not in folders:
            raise files.broken(
                f"{CPU_FOLDER}/cpu{cpu}", "the folder is missing, but cpu/online lists the cpu"
            )
        if states[cpu] == "0":
            raise files.broken(f"{CPU_FOLDER}/cpu{cpu}/online", "reads 0, but cpu/online lists the cpu")
    if not online:
        raise files.broken(f"{CPU_FOLDER}/online", "no cpu is online")
    offline = files.cpulist(f"{CPU_FOLDER}/offline") or CpuSet()
    for name, clash in (("present", online - present), ("offline", online & offline)):
        if clash:
            raise files.broken(
                f"{CPU_FOLDER}/{name}", f"it contradicts cpu/online, which contains cpu {clash.first}"
            )
    return present, online


def _running(files: Root, cpus: CpuSet, states: Mapping[int, str | None]) -> CpuSet:
    """Those of the cpus that are not offline: the kernel removes an offline cpu's topology folder. An affinity mask
    may contain offline cpus."""
    return CpuSet(
        cpu for cpu in cpus if states[cpu] != "0" and files.exists(f"{CPU_FOLDER}/cpu{cpu}/topology")
    )


def _status(files: Root) -> dict[str, CpuSet]:
    """Cpus_allowed and Mems_allowed of proc/self/status, if present.

    Their lists came with 2.6.26; the masks, which have more words than the machine has cpus, are older."""
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


def _allowed_nodes(nodes: tuple[NumaNode, ...], status: Mapping[str, CpuSet], mems: CpuSet | None) -> CpuSet:
    allowed = CpuSet(node.id for node in nodes)
    for limit in (status.get("Mems_allowed"), mems):
        allowed = allowed if limit is None else allowed & limit
    return allowed


def _cpu_info(files: Root, notes: list[str]) -> CpuInfo:
    text = files.head("proc/cpuinfo", _CPUINFO_BYTES)
    if text is None:
        notes.append("proc/cpuinfo is missing: brand and instruction sets are unknown")
    return parse_cpuinfo(text or "")


def _has_compute_units(files: Root, info: CpuInfo) -> bool:
    """AMD families 15h and 16h pair cores that share an FPU; old kernels list the pair as thread siblings.

    The family number has this meaning on x86 only. A captured root names its architecture in the file that
    hwloc-gather-topology writes; without it the kernel's siblings are used, as in hwloc."""
    if info.vendor != "AuthenticAMD" or info.family not in {0x15, 0x16}:
        return False
    machine = files.source.machine()
    if machine is None:
        recorded = files.text(HWLOC_INFO) or ""
        machine = recorded.partition("Architecture:")[2].split("\n")[0].strip()
    return machine in {"x86_64", "i686", "i386"}
