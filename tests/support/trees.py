"""The captured machines: ../shared/topologies beside the checkout, and tests/machines of our own."""

from __future__ import annotations

import subprocess
from pathlib import Path

HERE = Path(__file__).resolve()
SHARED = HERE.parents[3] / "shared" / "topologies"
OWN = HERE.parents[1] / "machines"
ARCHIVES = sorted([*OWN.glob("*.tar.gz"), *SHARED.glob("captured/*.tar.*"), *SHARED.glob("vm/*/*.tar.gz")])


def title(archive: Path) -> str:
    return archive.parent.name if archive.parent.parent.name == "vm" else archive.name.partition(".tar")[0]


# Neither reader looks there, and they are nine tenths of the files.
UNREAD = (
    *("memory[0-9]*", "power", "cpufreq", "cpuidle", "vulnerabilities"),
    *("hugepages", "pci*", "thermal_throttle"),
)


def unpack(archive: Path, target: Path) -> Path:
    """By tar: a third of the time that tarfile takes."""
    target.mkdir(parents=True, exist_ok=True)
    excluded = [f"--exclude=*/{name}" for name in UNREAD]
    subprocess.run(
        ["tar", "--extract", "--file", archive, "--directory", target, "--no-same-owner", *excluded],
        check=True,
    )
    return next(folder.parent for folder in sorted(target.rglob("sys")) if (folder / "devices").is_dir())
