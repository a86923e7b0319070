"""Facts about the host and the engine's software that the rules need, as arguments. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Facts:
    """None means unknown: rules that need the fact are skipped."""

    transparent_hugepages: str | None = None
    """The mode between brackets in /sys/kernel/mm/transparent_hugepage/enabled: always, madvise or never."""
    numa_balancing: bool | None = None
    governors: frozenset[str] | None = None
    """cpufreq governors in use; None where the kernel leaves the frequency to the firmware or hypervisor."""
    ld_preload: str | None = None
    """LD_PRELOAD as the instances will have it."""
    vllm: str | None = None
    torch: str | None = None
    zentorch: str | None = None
    weight_prepack: str | None = None
    """VLLM_ZENTORCH_WEIGHT_PREPACK as the instances inherit it; None when not set or not passed on."""
    kv_whole_gib: bool = False
    """This vLLM takes its KV cache in whole GiB only (VLLM_CPU_KVCACHE_SPACE; engines/stack.py knows since when
    it takes bytes)."""


NO_FACTS: Final = Facts()
