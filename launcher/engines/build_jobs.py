"""Number of parallel compilers for a build of an engine. Standard library only.

python -m launcher.engines.build_jobs     prints the number for this machine now
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

# Peak of one compiler on vLLM's kernels. Too many of them end with "Killed signal terminated program cc1plus".
JOB_BYTES: Final = 2 * 1024**3


def build_jobs(cpus: int, available_bytes: int) -> int:
    """One per cpu, limited by memory; at least one."""
    return max(1, min(cpus, available_bytes // JOB_BYTES))


def available_bytes(meminfo: str) -> int:
    """MemAvailable of /proc/meminfo's text. Raises ValueError without it."""
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise ValueError("cannot tell free memory: /proc/meminfo has no MemAvailable")


def main() -> None:
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    print(build_jobs(len(os.sched_getaffinity(0)), available_bytes(text)))


if __name__ == "__main__":
    main()
