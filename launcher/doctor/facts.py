"""The facts that `gather` collects: frozen values without judgement. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.base.build import Build
from launcher.base.watched_file import FileState
from launcher.engines.numactl import Binding
from launcher.machine.hardware import HostFacts
from launcher.machine.topology import Topology


@dataclass(frozen=True, slots=True)
class Trouble:
    """A failed probe: message and remedy of a LauncherError."""

    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Compiler:
    command: str
    version: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """Settings of the kernel and of this process's container. None where unknown."""

    hugepages: str | None = None
    """The mode of transparent huge pages: always, madvise or never."""
    numa_balancing: bool | None = None
    governors: frozenset[str] | None = None
    """cpufreq governors in use; None where firmware or hypervisor control the frequency."""
    seccomp: bool | None = None
    """A system call filter is active."""
    sys_nice: bool | None = None
    """CAP_SYS_NICE is effective."""
    container: str | None = None
    """Kind of container; None outside of one."""


@dataclass(frozen=True, slots=True)
class Software:
    is_vllm: bool = True
    """False for a custom command."""
    command: str | None = None
    """The command that starts it; None when not found."""
    trouble: Trouble | None = None
    """Why it cannot be started."""
    vllm: str | None = None
    torch: str | None = None
    zentorch: str | None = None
    cpu_build: bool | None = None
    """Whether vLLM was built for CPUs; None: unknown."""
    tcmalloc: str | None = None
    tcmalloc_off: bool = False
    """Switched off by the configuration."""
    openmp: tuple[str, ...] = ()
    """Paths of OpenMP runtimes, the engine's own first."""


@dataclass(frozen=True, slots=True)
class AskedModel:
    """One model of the configuration, as the engine knows it."""

    name: str
    weights_bytes: int | None = None
    request_bytes: int | None = None
    """KV cache of one request of `tokens`; None where the engine did not say."""
    tokens: int | None = None
    doubts: tuple[Trouble, ...] = ()
    """The reasons against its start, as the plan says them."""


@dataclass(frozen=True, slots=True)
class Facts:
    host: HostFacts
    topology: Topology
    binding: Binding | None
    """Permissions of numactl; None without numactl."""
    binding_trouble: Trouble | None
    software: Software
    compiler: Compiler | None
    kernel: Kernel
    build: Build = "python"
    """Which code of numa-launcher itself runs."""
    files: tuple[FileState, ...] = ()
    """Files that the daemon of a configuration reads again when they change."""
    measured: str | None = None
    """Date and layout of the latest verdict of `tune`; None where the state folder has none."""
    models: tuple[AskedModel, ...] = ()
    """Those that the engine was asked about."""
