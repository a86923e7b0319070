"""The captured machines: ../shared/topologies beside the checkout, and tests/machines of our own."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve()
SHARED = HERE.parents[3] / "shared" / "topologies"
OWN = HERE.parents[1] / "machines"
ARCHIVES = sorted([*OWN.glob("*.tar.gz"), *SHARED.glob("captured/*.tar.*"), *SHARED.glob("vm/*/*.tar.gz")])


def title(archive: Path) -> str:
    return archive.parent.name if archive.parent.parent.name == "vm" else archive.name.partition(".tar")[0]


# Neither reader looks there, and they are nine tenths of the files.
UNREAD = re.compile(
    r"/(memory\d+|power|cpufreq|cpuidle|vulnerabilities|hugepages|pci[^/]*|thermal_throttle)(/|$)"
)


def unpack(archive: Path, target: Path) -> Path:
    with tarfile.open(archive) as tar:
        members = [member for member in tar if not UNREAD.search(member.name)]
        # The archives are our own; a stricter filter looks at each part of each path. Python 3.11.3 has none.
        tar.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
        tar.extractall(target, members=members)  # noqa: S202
    return next(folder.parent for folder in sorted(target.rglob("sys")) if (folder / "devices").is_dir())
