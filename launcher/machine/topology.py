"""The machine as frozen values.

Identity is complete: a core is (socket, die, core_id), because `core_id` repeats on every die
(Documentation/admin-guide/cputopology.rst). All tuples are sorted by id.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from msgspec import Struct

from launcher.base.cpuset import CpuSet


class CoreKey(NamedTuple):
    """Identity of a physical core on this machine."""

    socket: int
    die: int
    core_id: int


class Core(Struct, frozen=True):
    """A physical core and its online cpus (SMT siblings)."""

    key: CoreKey
    cpus: CpuSet
    node: int | None
    """NUMA node id; None where the kernel was built without NUMA."""
    speed: float = 1.0
    """Speed relative to the machine's fastest kind of core. Cores of equal speed are of one kind."""

    def __hash__(self) -> int:
        return hash(self.key)


class L3Domain(Struct, frozen=True):
    """Online cpus that share one L3 cache (AMD: a CCX)."""

    cpus: CpuSet
    size_bytes: int | None
    node: int | None
    """The node that holds all its cpus; None when it spans nodes or there is none."""


class NumaNode(Struct, frozen=True):
    """A NUMA node. `cpus` may be empty (CXL, HBM); `memory_bytes` may be 0."""

    id: int
    socket: int | None
    """Socket of its cpus; None for a node without cpus, or when its cpus are on several sockets."""
    cpus: CpuSet
    memory_bytes: int
    """MemTotal of the node."""
    available_bytes: int
    """Memory available to a new process: MemFree + page cache + reclaimable slab, at the time of reading."""
    distances: Mapping[int, int]
    """ACPI SLIT distance to each online node; 10 is local. Empty where the kernel reports none."""
    memory_known: bool = True
    """False when no file has the node's memory size; `memory_bytes` is then 0."""
    hugepages_bytes: int = 0
    """The part of `memory_bytes` in hugetlb pools, usable only for explicit huge page mappings."""
    memory_channels: int | None = None
    """Memory channels of the node; from a machine's description, as the kernel does not report them."""


class Socket(Struct, frozen=True):
    """A physical package and its online cpus."""

    id: int
    cpus: CpuSet


class CpuInfo(Struct, frozen=True):
    """Brand and instruction sets, with the names of /proc/cpuinfo."""

    vendor: str
    model: str
    family: int | None
    flags: frozenset[str]

    @property
    def is_zen(self) -> bool:
        """vLLM's condition for using zentorch: AuthenticAMD with AVX-512 (platforms/__init__.py)."""
        return self.vendor == "AuthenticAMD" and any(flag.startswith("avx512") for flag in self.flags)


class CpusApart(Struct, frozen=True):
    """This process and the slice of its instances' units may use other cpus, so that no cpu is left for a plan."""

    own: CpuSet
    slice: CpuSet

    def __str__(self) -> str:
        return f"this process may use cpus {self.own}, the slice of its instances cpus {self.slice}, and no cpu is in both"

    @property
    def remedy(self) -> str:
        return (
            "let AllowedCPUs= and CPUAffinity= of the service include the cpus of the slice (the plan keeps cores for the "
            'proxy itself), or set supervision.spawner = "direct": instances then run within the service'
        )


class Topology(Struct, frozen=True):
    online: CpuSet
    offline: CpuSet
    allowed: CpuSet
    """Online cpus inside the affinity mask and the cgroup's cpuset."""
    sockets: tuple[Socket, ...]
    numa_nodes: tuple[NumaNode, ...]
    l3_domains: tuple[L3Domain, ...]
    cores: tuple[Core, ...]
    cpu: CpuInfo
    allowed_nodes: CpuSet
    """Memory nodes that the cgroup's cpuset lets this process allocate from."""
    notes: tuple[str, ...] = ()
    """Documented defaults used because a file is missing (old kernels), one line each."""
    memory_limit_bytes: int | None = None
    """The lowest memory limit of this process: of its cgroups, or as a container's /proc/meminfo shows it; None when there
    is none."""
    cpu_quota: Fraction | None = None
    """CPU seconds per second that the cgroup allows this process (or the instances' slice); None: no limit."""
    conflicts: tuple[str, ...] = ()
    """Contradictory firmware maps, with what was used and what was ignored, one line each."""
    emulated: tuple[CpuSet, ...] = ()
    """Groups of nodes that the kernel made of one node each (numa=fake): equally near to the same cpus."""
    apart: CpusApart | None = None
    """The reason why nothing is allowed, where it is that."""
    has_numa: bool = True
    """False for a kernel without NUMA: the single node is the whole machine, and memory cannot be bound."""

    def emulated_with(self, node_id: int) -> CpuSet:
        """The emulated nodes that one is made with, itself included; empty for a node that is not emulated."""
        return next((group for group in self.emulated if node_id in group), CpuSet())

    def node(self, node_id: int) -> NumaNode:
        """The node with that id. Raises KeyError."""
        for node in self.numa_nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)
