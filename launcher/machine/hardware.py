"""The machine as far as it decides speed: fingerprint of a measurement."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from launcher.machine.kernel_files import decimal
from launcher.machine.topology import CpuInfo, Topology

# --- The kernel's settings that matter to inference, read from files under a root. ---
#
# Sources: Documentation/admin-guide/mm/transhuge.rst, admin-guide/sysctl/kernel.rst (numa_balancing),
# admin-guide/pm/cpufreq.rst. What is not there is None: many virtual machines have no cpufreq.

LIVE_ROOT: Final = Path("/")
_CHOSEN: Final = re.compile(r"\[(\w+)\]")


class KernelSettings(Struct, frozen=True):
    """None: the kernel does not report it."""

    transparent_hugepages: str | None
    """always, madvise or never."""
    numa_balancing: bool | None
    governors: frozenset[str] | None
    """Every cpufreq governor in use."""


def read_settings(root: Path = LIVE_ROOT) -> KernelSettings:
    """Read them. One file a cpufreq policy: milliseconds at 256 cpus."""
    hugepages = _CHOSEN.search(_read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    balancing = _read_text(root / "proc/sys/kernel/numa_balancing")
    return KernelSettings(
        transparent_hugepages=hugepages[1] if hugepages else None,
        # 1 is on, 2 is memory tiering, which moves pages between nodes as well.
        numa_balancing=None if balancing is None else balancing.strip() not in {"", "0"},
        governors=_governors(root / "sys/devices/system/cpu/cpufreq"),
    )


def _governors(folder: Path) -> frozenset[str] | None:
    try:
        policies = [entry.path for entry in os.scandir(folder) if entry.name.startswith("policy")]
    except OSError:
        return None
    found = (_read_text(Path(policy, "scaling_governor")) for policy in policies)
    return frozenset(text.strip() for text in found if text) or None


def _read_text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


# --- Facts of this host's processor and memory, from py-cpuinfo and psutil, for `doctor` and `status`. ---
#
# The plan does not read these: it has the topology, which works offline on captured machines and takes
# 20 ms. py-cpuinfo runs cpuid in child processes and takes a second, so it is asked only here.

# Family and model ranges of AMD's Zen generations that vLLM with ZenTorch is used on: 19h is shared by
# Zen 3 and Zen 4, told apart by AVX-512 (AMD revision guides 56323, 57095, 58251).
_ZEN_1_2: Final = 0x17
_ZEN_3_4: Final = 0x19
_ZEN_5: Final = 0x1A


class HostFacts(Struct, frozen=True):
    """The processor's brand and instruction sets, and the machine's memory now."""

    vendor: str
    brand: str
    family: int | None
    flags: frozenset[str]
    """As the kernel names them; py-cpuinfo adds what cpuid says beyond /proc/cpuinfo."""
    logical_cpus: int
    memory_available_bytes: int

    @property
    def zen(self) -> str | None:
        """The Zen generation in words; None for other processors."""
        if self.vendor != "AuthenticAMD":
            return None
        if self.family == _ZEN_1_2:
            return "Zen or Zen 2"
        if self.family == _ZEN_3_4:
            return "Zen 4" if "avx512f" in self.flags else "Zen 3"
        return "Zen 5" if self.family == _ZEN_5 else None


def read_host() -> HostFacts:
    """Ask py-cpuinfo (about a second) and psutil. What py-cpuinfo cannot tell is empty or None."""
    import cpuinfo  # noqa: PLC0415  heavy
    import psutil  # noqa: PLC0415  heavy

    info: dict[str, Any] = cpuinfo.get_cpu_info()
    return HostFacts(
        vendor=info.get("vendor_id_raw", ""), brand=info.get("brand_raw", ""), family=info.get("family"),
        flags=frozenset(info.get("flags", ())), logical_cpus=psutil.cpu_count() or 1,
        memory_available_bytes=psutil.virtual_memory().available,
    )  # fmt: skip


# --- Memory modules from the firmware's SMBIOS table (DMTF DSP0134 3.7). ---
#
# The kernel exports the table as sys/firmware/dmi/tables/DMI, readable by root only. Virtual machines often have none, or
# describe modules without a speed.

# Structure types, section 6.2.
_ARRAY: Final = 16
_DEVICE: Final = 17
_END: Final = 127
# 7.17.2: arrays may also describe video memory, flash chips or caches.
_SYSTEM_MEMORY: Final = 0x03
# 7.18.6: NVDIMM-N, -F, -P and Intel Optane persistent memory are no memory channels' DRAM.
_NON_VOLATILE: Final = frozenset({0x04, 0x05, 0x06, 0x07})
# Of a 16-bit field: the value is in the 32-bit extended field (7.18.4, 7.18.5).
_EXTENDED: Final = 0xFFFF


class MemoryModules(Struct, frozen=True):
    count: int
    """Installed modules; empty slots are not counted."""
    speed_mts: int | None
    """Configured speed of the slowest module, at which a memory controller runs all of its own; None: not reported."""


class _Structure(Struct, frozen=True):
    type: int
    handle: int
    data: bytes
    """The formatted area; older versions of the standard have shorter ones."""

    def number(self, offset: int, size: int) -> int | None:
        """A little-endian field; None where the structure is shorter."""
        field = self.data[offset : offset + size]
        return int.from_bytes(field, "little") if len(field) == size else None


def memory_modules(table: bytes) -> MemoryModules | None:
    """The installed modules of system memory; None when the table describes none."""
    structures = list(_structures(table))
    elsewhere = {it.handle for it in structures if it.type == _ARRAY and it.number(0x05, 1) != _SYSTEM_MEMORY}
    found = [
        it
        for it in structures
        if it.type == _DEVICE
        and it.number(0x0C, 2)  # size: 0 for an empty slot
        and it.number(0x04, 2) not in elsewhere
        and it.number(0x28, 1) not in _NON_VOLATILE
    ]
    if not found:
        return None
    speeds = [speed for it in found if (speed := _configured_speed(it))]
    return MemoryModules(len(found), min(speeds, default=None))


def _configured_speed(device: _Structure) -> int | None:
    """MT/s; None or 0 where unknown. Since 2.7; the rated speed at 15h is not what the module runs at."""
    speed = device.number(0x20, 2)
    return device.number(0x58, 4) if speed == _EXTENDED else speed


def _structures(table: bytes) -> Iterator[_Structure]:
    """6.1: type, length of the formatted area, handle; after it strings, ended by two NULs. Ends at a malformed one."""
    start = 0
    while start + 4 <= len(table):
        length = table[start + 1]
        if length < 4:
            return
        data = table[start : start + length]
        yield _Structure(data[0], int.from_bytes(data[2:4], "little"), data)
        end = table.find(b"\0\0", start + length)
        if data[0] == _END or end < 0:
            return
        start = end + 2


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
    cpu_quota: float | None = None
    """CPU seconds per second that this process's cgroups allow; None: no limit."""


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
        cpu_quota=None if topology.cpu_quota is None else float(topology.cpu_quota),
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


# --- Brand and instruction sets from /proc/cpuinfo: x86, arm, and keys common to other architectures. ---

# MIDR_EL1 implementer codes, arch/arm64/include/asm/cputype.h; names as lscpu prints them.
_ARM_VENDORS: Final = {
    0x41: "ARM", 0x42: "Broadcom", 0x43: "Cavium", 0x46: "FUJITSU", 0x48: "HiSilicon", 0x4E: "NVIDIA",
    0x50: "APM", 0x51: "Qualcomm", 0x61: "Apple", 0x6D: "Microsoft", 0x70: "Phytium", 0xC0: "Ampere",
}  # fmt: skip

# MIDR_EL1 part numbers of server cpus with a name in lscpu (sys-utils/lscpu-arm.c).
_ARM_PARTS: Final = {
    ("ARM", "0xd07"): "Cortex-A57", ("ARM", "0xd08"): "Cortex-A72", ("ARM", "0xd0c"): "Neoverse-N1",
    ("ARM", "0xd40"): "Neoverse-V1", ("ARM", "0xd49"): "Neoverse-N2", ("ARM", "0xd4f"): "Neoverse-V2",
    ("ARM", "0xd84"): "Neoverse-V3", ("ARM", "0xd8e"): "Neoverse-N3", ("Cavium", "0x0af"): "ThunderX2-99xx",
    ("HiSilicon", "0xd01"): "Kunpeng-920", ("Ampere", "0xac3"): "Ampere-1", ("Ampere", "0xac4"): "Ampere-1a",
}  # fmt: skip

_MARKERS: Final = frozenset({"flags", "Features", "features", "CPU implementer", "vendor_id"})
KEYS: Final = _MARKERS | {"vendor", "model name", "cpu", "CPU part", "cpu family", "CPU architecture"}
"""Keys that `parse_cpuinfo` reads; a snapshot keeps only these lines."""


def parse_cpuinfo(text: str) -> CpuInfo:
    """The first cpu's record; missing values are empty strings, None and the empty set."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if not separator:
            if fields.keys() & _MARKERS:
                break  # the blank line after the first record
            continue
        fields.setdefault(key.strip(), value.strip())
    vendor = fields.get("vendor_id") or fields.get("vendor") or _arm_vendor(fields.get("CPU implementer", ""))
    model = fields.get("model name") or fields.get("cpu") or ""
    if not vendor and model.startswith("POWER"):
        vendor = "IBM"
    if not model and "CPU part" in fields:
        model = _ARM_PARTS.get((vendor, fields["CPU part"].lower())) or f"{vendor} part {fields['CPU part']}"
    family = fields.get("cpu family") or fields.get("CPU architecture") or ""
    flags = fields.get("flags") or fields.get("Features") or fields.get("features") or ""
    return CpuInfo(
        vendor=vendor, model=model, family=decimal(family),
        flags=frozenset(flags.split()),
    )  # fmt: skip


def _arm_vendor(implementer: str) -> str:
    try:
        return _ARM_VENDORS.get(int(implementer, 16), f"implementer {implementer}")
    except ValueError:
        return ""
