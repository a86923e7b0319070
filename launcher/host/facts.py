"""The kernel's settings that matter to inference, read from files under a root.

Sources: Documentation/admin-guide/mm/transhuge.rst, admin-guide/sysctl/kernel.rst (numa_balancing),
admin-guide/pm/cpufreq.rst. What is not there is None: many virtual machines have no cpufreq.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LIVE_ROOT: Final = Path("/")
_CHOSEN: Final = re.compile(r"\[(\w+)\]")


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """None: the kernel does not report it."""

    transparent_hugepages: str | None
    """always, madvise or never."""
    numa_balancing: bool | None
    governors: frozenset[str] | None
    """Every cpufreq governor in use."""


def read_settings(root: Path = LIVE_ROOT) -> KernelSettings:
    """Read them. One file a cpufreq policy: milliseconds at 256 cpus."""
    hugepages = _CHOSEN.search(_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    balancing = _text(root / "proc/sys/kernel/numa_balancing")
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
    found = (_text(Path(policy, "scaling_governor")) for policy in policies)
    return frozenset(text.strip() for text in found if text) or None


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
