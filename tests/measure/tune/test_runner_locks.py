"""Locks of a tuning run."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.base.errors import LauncherError
from launcher.measure.tune.runner import only_engines, only_run


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with only_run(lock), pytest.raises(LauncherError, match=r"another tune \(pid \d+\)"), only_run(lock):
        pass
    with only_run(lock):
        pass


def test_engines_are_measured_by_one_run_of_the_machine() -> None:
    with only_engines(), pytest.raises(LauncherError, match="another tune measures"), only_engines():
        pass


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="no such file"), only_run(tmp_path / "none" / "lock"):
        pass
