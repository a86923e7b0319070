"""Captured machines, unpacked and read once: no test writes into one."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.trees import unpack

from launcher.machine import sysfs
from launcher.machine.topology import Topology

# In memory where there is room for all: 60,000 small files take minutes on a disk.
MEMORY = Path("/dev/shm")
NEEDED_BYTES = 1 << 30


def scratch() -> str | None:
    """None: the usual folder for temporary files."""
    try:
        found = os.statvfs(MEMORY)
    except FileNotFoundError:
        return None
    return str(MEMORY) if found.f_bavail * found.f_frsize > NEEDED_BYTES else None


@pytest.fixture(scope="session")
def tree() -> Iterator[Callable[[Path], Path]]:
    """The root of an archive's tree."""
    kept: dict[Path, Path] = {}
    folder = Path(tempfile.mkdtemp(prefix="numa-launcher-trees-", dir=scratch()))

    def unpacked(archive: Path) -> Path:
        if archive not in kept:
            kept[archive] = unpack(archive, folder / str(len(kept)))
        return kept[archive]

    yield unpacked
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def captured(tree: Callable[[Path], Path]) -> Callable[[Path], Topology]:
    """The topology of an archive, read once."""
    return functools.cache(lambda archive: sysfs.read(tree(archive)))
