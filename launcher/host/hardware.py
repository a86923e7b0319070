"""The machine as far as it decides speed: fingerprint of a measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from launcher.host.facts import LIVE_ROOT, read_settings
from launcher.host.smbios import MemoryModules, memory_modules
from launcher.topology.model import CpuInfo, Topology

_DMI: Final = "sys/firmware/dmi/tables/DMI"
_CPU: Final = "sys/devices/system/cpu"
# Their cpuid has a bit for "runs under a hypervisor", which the kernel lists as a flag.
_X86: Final = frozenset({"AuthenticAMD", "GenuineIntel", "HygonGenuine", "CentaurHauls"})


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """The machine. None: cannot be read here."""

    cpu_model: str
    sockets: int
    cores: int
    """Online ones."""
    cpus: int
    """Online ones."""
    allowed_cpus: int
    """Within this process's affinity mask and cgroup."""
    numa_nodes: int
    """With those that have no cpus (CXL)."""
    nodes_per_socket: float
    """NUMA nodes with cpus, for each socket: AMD's NPS setting."""
    memory_bytes: int
    """MemTotal of all nodes."""
    memory_limit_bytes: int | None
    """The lowest memory limit of this process's cgroups; None: no limit."""
    memory_speed_mts: int | None
    """Of the slowest module. Read from SMBIOS, as root only."""
    memory_modules: int | None
    governor: str | None
    """Every cpufreq governor in use, joined by commas."""
    boost: bool | None
    """Frequencies above the base frequency are allowed."""
    smt: bool | None
    transparent_hugepages: str | None
    kernel: str | None
    virtual: bool | None


def read_hardware(topology: Topology, root: Path | None = LIVE_ROOT) -> Hardware:
    """Counts from the topology, settings from the files under `root`.

    `root` is None for a machine of which only the topology is known: a snapshot or a description."""
    settings = None if root is None else read_settings(root)
    modules = None if root is None else _modules(root)
    kernel = None if root is None else _text(root / "proc/sys/kernel/osrelease")
    with_cpus = sum(1 for node in topology.numa_nodes if node.cpus)
    return Hardware(
        cpu_model=topology.cpu.model,
        sockets=len(topology.sockets),
        cores=len(topology.cores),
        cpus=len(topology.online),
        allowed_cpus=len(topology.allowed),
        numa_nodes=len(topology.numa_nodes),
        nodes_per_socket=with_cpus / len(topology.sockets),
        memory_bytes=sum(node.memory_bytes for node in topology.numa_nodes),
        memory_limit_bytes=topology.memory_limit_bytes,
        memory_speed_mts=None if modules is None else modules.speed_mts,
        memory_modules=None if modules is None else modules.count,
        governor=None if settings is None else ", ".join(sorted(settings.governors or ())) or None,
        boost=None if root is None else _boost(root / _CPU),
        smt=any(len(core.cpus) > 1 for core in topology.cores),
        transparent_hugepages=None if settings is None else settings.transparent_hugepages,
        kernel=kernel,
        virtual=_virtual(topology.cpu),
    )


def _modules(root: Path) -> MemoryModules | None:
    try:
        return memory_modules((root / _DMI).read_bytes())
    except OSError:  # not root, or firmware without SMBIOS
        return None


def _boost(folder: Path) -> bool | None:
    """acpi-cpufreq's and amd-pstate's switch, else intel_pstate's, else that of each policy (amd-pstate since 6.11).

    None without any, or where the policies differ."""
    switch, no_turbo = _text(folder / "cpufreq/boost"), _text(folder / "intel_pstate/no_turbo")
    if switch is not None:
        return switch == "1"
    if no_turbo is not None:
        return no_turbo == "0"
    each = {_text(file) for file in folder.glob("cpufreq/policy*/boost")}
    return each == {"1"} if len(each) == 1 else None


def _virtual(cpu: CpuInfo) -> bool | None:
    if "hypervisor" in cpu.flags:
        return True
    return False if cpu.flags and cpu.vendor in _X86 else None


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip() or None
    except OSError:
        return None
