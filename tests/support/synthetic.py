"""Machines made from a description: as a Topology in memory, or as a sysfs tree on disk.

The two are made independently; test_synthetic_trees.py checks that reading the tree gives the Topology.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from launcher.base.cpuset import CpuSet
from launcher.base.text import GIB
from launcher.machine.topology import Core, CoreKey, CpuInfo, L3Domain, NumaNode, Socket, Topology

EPYC = CpuInfo(
    vendor="AuthenticAMD",
    model="AMD EPYC 9755 128-Core Processor",
    family=26,
    flags=frozenset({"sse2", "avx2", "avx512f", "avx512_bf16"}),
)


class Machine(Struct, frozen=True):
    """sockets x nodes a socket x L3 a node x cores an L3 x SMT; one die a socket."""

    sockets: int = 1
    nodes: int = 1
    l3: int = 1
    cores: int = 4
    smt: int = 1
    node_bytes: int = 64 * GIB
    adjacent: bool = False
    """SMT siblings are neighbours (2k, 2k+1); else cpu k and k + all cores, as on EPYC."""
    offline: frozenset[int] = frozenset()
    allowed: CpuSet | None = None
    memory_only: int = 0
    """Nodes without cpus (CXL) after the others."""
    memoryless: frozenset[int] = frozenset()
    """Nodes with cpus and no memory."""
    memory_limit_bytes: int | None = None
    cpu_quota: Fraction | None = None
    has_l3: bool = True
    cpu: CpuInfo = EPYC

    @property
    def core_count(self) -> int:
        return self.sockets * self.nodes * self.l3 * self.cores

    def cpus_of(self, core: int) -> list[int]:
        """All cpus of the core with that machine-wide number, offline ones too."""
        if self.adjacent:
            return [core * self.smt + thread for thread in range(self.smt)]
        return [core + thread * self.core_count for thread in range(self.smt)]

    def cores_of_node(self, node: int) -> range:
        each = self.l3 * self.cores
        return range(node * each, (node + 1) * each)

    @property
    def online(self) -> CpuSet:
        return CpuSet(range(self.core_count * self.smt)) - CpuSet(self.offline)

    def memory_of(self, node: int) -> int:
        return 0 if node in self.memoryless else self.node_bytes

    @property
    def node_count(self) -> int:
        return self.sockets * self.nodes + self.memory_only

    def distance(self, a: int, b: int) -> int:
        if a == b:
            return 10
        cpu_nodes = self.sockets * self.nodes
        if a >= cpu_nodes or b >= cpu_nodes:
            return 50
        return 12 if a // self.nodes == b // self.nodes else 32

    @lru_cache(maxsize=64)  # noqa: B019  for each cpu of a socket the same set
    def _online_of(self, cores: range) -> CpuSet:
        return CpuSet(cpu for core in cores for cpu in self.cpus_of(core)) & self.online

    def topology(self) -> Topology:
        """The machine in memory."""
        per_socket = self.nodes * self.l3 * self.cores
        cores = tuple(
            Core(
                key=CoreKey(core // per_socket, 0, core % per_socket),
                cpus=self._online_of(range(core, core + 1)),
                node=core // (self.l3 * self.cores),
            )
            for core in range(self.core_count)
            if self._online_of(range(core, core + 1))
        )
        domains = [self._online_of(range(i, i + self.cores)) for i in range(0, self.core_count, self.cores)]
        nodes = tuple(
            NumaNode(
                id=node,
                socket=node // self.nodes if node < self.sockets * self.nodes else None,
                cpus=self._online_of(self.cores_of_node(node))
                if node < self.sockets * self.nodes
                else CpuSet(),
                memory_bytes=self.memory_of(node),
                available_bytes=self.memory_of(node),
                distances={other: self.distance(node, other) for other in range(self.node_count)},
            )
            for node in range(self.node_count)
        )
        return Topology(
            online=self.online,
            offline=CpuSet(self.offline),
            allowed=self.online if self.allowed is None else self.online & self.allowed,
            sockets=tuple(
                Socket(socket, self._online_of(range(socket * per_socket, (socket + 1) * per_socket)))
                for socket in range(self.sockets)
            ),
            numa_nodes=nodes,
            l3_domains=tuple(
                L3Domain(cpus, 32 * 1024**2, cores_node)
                for i, cpus in enumerate(domains)
                if cpus and self.has_l3
                for cores_node in [i // self.l3]
            ),
            cores=cores,
            cpu=self.cpu,
            allowed_nodes=CpuSet(range(self.node_count)),
            memory_limit_bytes=self.memory_limit_bytes,
            cpu_quota=self.cpu_quota,
        )

    def write(self, root: Path) -> Path:
        """The machine as sysfs and procfs files under `root`."""
        cpu_root = root / "sys/devices/system/cpu"
        every = CpuSet(range(self.core_count * self.smt))
        put(cpu_root / "present", every.format())
        put(cpu_root / "possible", every.format())
        put(cpu_root / "online", self.online.format())
        per_socket = self.nodes * self.l3 * self.cores
        for core in range(self.core_count):
            first = core // self.cores * self.cores
            siblings = self._online_of(range(core, core + 1))
            for cpu in self.cpus_of(core):
                folder = cpu_root / f"cpu{cpu}"
                put(folder / "online", "0" if cpu in self.offline else "1")
                if cpu in self.offline:
                    continue
                put(folder / "topology/physical_package_id", f"{core // per_socket}")
                put(folder / "topology/die_id", "0")
                put(folder / "topology/core_id", f"{core % per_socket}")
                socket = core // per_socket
                package = self._online_of(range(socket * per_socket, (socket + 1) * per_socket))
                put_cpus(folder / "topology/core_cpus", siblings)
                put_cpus(folder / "topology/thread_siblings", siblings)
                put_cpus(folder / "topology/package_cpus", package)
                put_cpus(folder / "topology/core_siblings", package)
                if self.has_l3:
                    put(folder / "cache/index3/level", "3")
                    put(folder / "cache/index3/type", "Unified")
                    put(folder / "cache/index3/size", "32768K")
                    shared = self._online_of(range(first, first + self.cores))
                    put(folder / "cache/index3/shared_cpu_list", shared.format())
                    put(folder / "cache/index3/shared_cpu_map", mask(shared))
        self._write_nodes(root)
        return root

    def _write_nodes(self, root: Path) -> None:
        node_root = root / "sys/devices/system/node"
        put(node_root / "online", CpuSet(range(self.node_count)).format())
        for node in range(self.node_count):
            folder = node_root / f"node{node}"
            has_cpus = node < self.sockets * self.nodes
            cpus = self._online_of(self.cores_of_node(node)) if has_cpus else CpuSet()
            kib = self.memory_of(node) // 1024
            put(folder / "cpulist", cpus.format())
            put(folder / "cpumap", mask(cpus))
            put(folder / "distance", " ".join(str(self.distance(node, to)) for to in range(self.node_count)))
            put(
                folder / "meminfo",
                f"Node {node} MemTotal:       {kib} kB\nNode {node} MemFree:        {kib} kB\n"
                f"Node {node} Active(file):   0 kB\nNode {node} Inactive(file): 0 kB\nNode {node} SReclaimable:   0 kB",
            )
        put(
            root / "proc/cpuinfo",
            f"processor\t: 0\nvendor_id\t: {self.cpu.vendor}\ncpu family\t: {self.cpu.family}\n"
            f"model name\t: {self.cpu.model}\nflags\t\t: {' '.join(sorted(self.cpu.flags))}\n",
        )
        if self.allowed is not None:
            put(root / "proc/self/status", f"Name:\tcat\nCpus_allowed_list:\t{self.allowed}")


def put(file: Path, text: str) -> None:
    """Write one file with its folders, ending in a line feed as the kernel does."""
    try:
        file.write_text(text + "\n")
    except FileNotFoundError:
        file.parent.mkdir(parents=True)
        file.write_text(text + "\n")


def put_cpus(file: Path, cpus: CpuSet) -> None:
    """A set as the kernel's pair of files: the mask, and the list beside it."""
    put(file, mask(cpus))
    put(file.with_name(f"{file.name}_list"), cpus.format())


@lru_cache(maxsize=64)
def mask(cpus: CpuSet) -> str:
    """The kernel's bitmap format: 32-bit hex words, most significant first."""
    bits = sum(1 << cpu for cpu in cpus)
    words = [bits >> shift & 0xFFFFFFFF for shift in range(0, max(bits.bit_length(), 1), 32)]
    return ",".join(f"{word:08x}" for word in reversed(words))
