"""Make the captures in this folder: small sysfs trees for checkouts without ../shared. Run it from anywhere."""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from support.synthetic import Machine  # noqa: E402

MACHINES = {
    "made-2s-nps2-smt2": Machine(sockets=2, nodes=2, l3=2, cores=4, smt=2),
    "made-2s-cxl": Machine(sockets=2, l3=2, cores=2, memory_only=1),
    "made-1s-offline-adjacent": Machine(l3=2, cores=4, smt=2, adjacent=True, offline=frozenset({3, 14, 15})),
}


def pack(machine: Machine, file: Path) -> None:
    """One tree as a tar.gz that is the same bytes each time."""
    with tempfile.TemporaryDirectory() as folder, io.BytesIO() as raw:
        root = machine.write(Path(folder))
        with tarfile.open(fileobj=raw, mode="w") as tar:
            for path in sorted(root.rglob("*")):
                info = tar.gettarinfo(path, arcname=str(path.relative_to(root)))
                info.mtime = info.uid = info.gid = 0
                info.uname = info.gname = "root"
                with path.open("rb") if path.is_file() else io.BytesIO() as stream:
                    tar.addfile(info, stream if path.is_file() else None)
        file.write_bytes(gzip.compress(raw.getvalue(), mtime=0))


if __name__ == "__main__":
    for name, machine in MACHINES.items():
        pack(machine, HERE / f"{name}.tar.gz")
