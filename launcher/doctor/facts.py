"""What `gather` found: frozen values, and nothing about what they mean. No effects."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.engines.numa_binding import Binding
from launcher.host.cpu import HostFacts
from launcher.topology.model import Topology


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that could not be found or started: message and remedy of a LauncherError."""

    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler."""

    command: str
    version: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """Settings of the kernel and of the box that this process is in. None where it does not say."""

    hugepages: str | None = None
    """The mode of transparent huge pages: always, madvise or never."""
    numa_balancing: bool | None = None
    governors: frozenset[str] | None = None
    """cpufreq governors in use; None where firmware or hypervisor rule."""
    seccomp: bool | None = None
    """A system call filter is on."""
    sys_nice: bool | None = None
    """CAP_SYS_NICE is effective."""
    container: str | None = None
    """The kind of container; None outside."""


@dataclass(frozen=True, slots=True)
class Software:
    """The engine's."""

    is_vllm: bool = True
    """False for a command of the operator's own."""
    command: str | None = None
    """What starts it; None where it was not found."""
    trouble: Trouble | None = None
    """Why it can't be started."""
    vllm: str | None = None
    torch: str | None = None
    zentorch: str | None = None
    tcmalloc: str | None = None
    tcmalloc_off: bool = False
    """Switched off by the configuration."""
    openmp: tuple[str, ...] = ()
    """Paths of OpenMP runtimes, the engine's own first."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything."""

    host: HostFacts
    topology: Topology
    binding: Binding | None
    """What numactl may do; None where there is none."""
    binding_trouble: Trouble | None
    software: Software
    compiler: Compiler | None
    kernel: Kernel
