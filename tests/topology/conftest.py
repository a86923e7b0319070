"""Captured machines, unpacked once: no test writes into one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from trees import unpack


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """The root of an archive's tree."""
    kept: dict[Path, Path] = {}

    def unpacked(archive: Path) -> Path:
        if archive not in kept:
            kept[archive] = unpack(archive, tmp_path_factory.mktemp("tree"))
        return kept[archive]

    return unpacked
