"""Free space of the folders that the daemon writes to."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.machine.load import disk_space


def test_a_folder_that_does_not_exist_yet_is_on_the_disk_above_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = disk_space(tmp_path / "file" / "below")
    assert found is not None
    here = os.statvfs(tmp_path)
    assert found.size_bytes == here.f_blocks * here.f_frsize
    assert 0 < found.free_bytes <= found.size_bytes
