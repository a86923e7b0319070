"""Facts of this host's processor and memory, from py-cpuinfo and psutil, for `doctor` and `status`.

The plan does not read these: it has the topology, which works offline on captured machines and takes
20 ms. py-cpuinfo runs cpuid in child processes and takes a second, so it is asked only here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import cpuinfo
import psutil

# Family and model ranges of AMD's Zen generations that vLLM with ZenTorch is used on: 19h is shared by
# Zen 3 and Zen 4, told apart by AVX-512 (AMD revision guides 56323, 57095, 58251).
_ZEN_1_2: Final = 0x17
_ZEN_3_4: Final = 0x19
_ZEN_5: Final = 0x1A


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The processor's brand and instruction sets, and the machine's memory now."""

    vendor: str
    brand: str
    family: int | None
    model: int | None
    flags: frozenset[str]
    """As the kernel names them; py-cpuinfo adds what cpuid says beyond /proc/cpuinfo."""
    physical_cores: int | None
    logical_cpus: int
    memory_total_bytes: int
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
    info: dict[str, Any] = cpuinfo.get_cpu_info()
    memory = psutil.virtual_memory()
    return HostFacts(
        vendor=info.get("vendor_id_raw", ""), brand=info.get("brand_raw", ""), family=info.get("family"),
        model=info.get("model"), flags=frozenset(info.get("flags", ())),
        physical_cores=psutil.cpu_count(logical=False), logical_cpus=psutil.cpu_count() or 1,
        memory_total_bytes=memory.total, memory_available_bytes=memory.available,
    )  # fmt: skip
