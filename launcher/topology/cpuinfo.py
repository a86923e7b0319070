"""Brand and instruction sets from /proc/cpuinfo: x86, arm, and keys common to other architectures."""

from __future__ import annotations

from typing import Final

from launcher.topology.model import CpuInfo

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
        vendor=vendor, model=model, family=int(family) if family.isascii() and family.isdigit() else None,
        flags=frozenset(flags.split()),
    )  # fmt: skip


def _arm_vendor(implementer: str) -> str:
    try:
        return _ARM_VENDORS.get(int(implementer, 16), f"implementer {implementer}")
    except ValueError:
        return ""
