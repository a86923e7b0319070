"""What the machine is: frozen values, read once, planned over, drawn.

Identity is complete: a core is (socket, die, core_id), because `core_id` repeats on every die
(Documentation/admin-guide/cputopology.rst). All tuples are sorted by id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from launcher.cpuset import CpuSet


class CoreKey(NamedTuple):
    """Identity of a physical core on this machine."""

    socket: int
    die: int
    core_id: int


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core and its online cpus (SMT siblings)."""

    key: CoreKey
    cpus: CpuSet
    node: int | None
    """NUMA node id; None where the kernel was built without NUMA."""


@dataclass(frozen=True, slots=True)
class L3Domain:
    """Online cpus that share one L3 cache (AMD: a CCX)."""

    cpus: CpuSet
    size_bytes: int | None
    node: int | None
    """The node that holds all its cpus; None when it spans nodes or there is none."""


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node. `cpus` may be empty (CXL, HBM); `memory_bytes` may be 0."""

    id: int
    socket: int | None
    """Socket of its cpus; None for a node without cpus, or when its cpus are on several sockets."""
    cpus: CpuSet
    memory_bytes: int
    """MemTotal of the node."""
    available_bytes: int
    """What a new process can get: MemFree + page cache + reclaimable slab, when it was read."""
    distances: Mapping[int, int]
    """ACPI SLIT distance to each online node; 10 is local. Empty where the kernel does not say."""
    memory_known: bool = True
    """False when no file says how much memory the node has; `memory_bytes` is then 0."""
    hugepages_bytes: int = 0
    """Of `memory_bytes`, the hugetlb pools: set aside for who maps huge pages by name, and for nobody else."""
    memory_channels: int | None = None
    """Memory channels of the node. No file of the kernel tells; a machine's description does."""


@dataclass(frozen=True, slots=True)
class Socket:
    """A physical package and its online cpus."""

    id: int
    cpus: CpuSet


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """Brand and instruction sets, as /proc/cpuinfo names them."""

    vendor: str
    model: str
    family: int | None
    flags: frozenset[str]

    @property
    def is_zen(self) -> bool:
        """What vLLM asks before it looks for zentorch: AuthenticAMD with AVX-512 (platforms/__init__.py)."""
        return self.vendor == "AuthenticAMD" and any(flag.startswith("avx512") for flag in self.flags)


@dataclass(frozen=True, slots=True)
class Topology:
    """A whole machine as this process may use it."""

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
    """Documented defaults that were taken because a file is missing (old kernels), one line each."""
    memory_limit_bytes: int | None = None
    """The tightest cgroup memory limit above this process; None when there is none."""
    conflicts: tuple[str, ...] = ()
    """Maps of the firmware that contradict each other, what was taken of them and what was dropped, one line each."""
    has_numa: bool = True
    """False for a kernel without NUMA: the one node is the whole machine, and nothing can be bound to it."""

    def node(self, node_id: int) -> NumaNode:
        """The node with that id. Raises KeyError."""
        for node in self.numa_nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)
