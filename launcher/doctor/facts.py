"""The facts that `gather` collects: frozen values without judgement. Pure."""

from __future__ import annotations

from msgspec import Struct

from launcher.base.build import Build
from launcher.base.watched_file import FileState
from launcher.engines.checks import Installed, Trouble
from launcher.engines.numactl import Binding
from launcher.machine.hardware import HostFacts
from launcher.machine.topology import Topology


class Kernel(Struct, frozen=True):
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


class AskedModel(Struct, frozen=True):
    """One model of the configuration, as the engine knows it."""

    name: str
    weights_bytes: int | None = None
    request_bytes: int | None = None
    """KV cache of one request of `tokens`; None where the engine did not say."""
    tokens: int | None = None
    doubts: tuple[Trouble, ...] = ()
    """The reasons against its start, as the plan says them."""


class Facts(Struct, frozen=True):
    host: HostFacts
    topology: Topology
    binding: Binding | None
    """Permissions of numactl; None without numactl."""
    binding_trouble: Trouble | None
    software: Installed
    kernel: Kernel
    build: Build = "python"
    """Which code of numa-launcher itself runs."""
    files: tuple[FileState, ...] = ()
    """Files that the daemon of a configuration reads again when they change."""
    measured: str | None = None
    """Date and layout of the latest verdict of `tune`; None where the state folder has none."""
    models: tuple[AskedModel, ...] = ()
    """Those that the engine was asked about."""
