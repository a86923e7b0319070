"""`serve` waits for what may come by itself, and for nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.base.errors import LauncherError, PassingError
from launcher.cli.serve import when_there


class Build:
    """Fails with these errors, one try after the other."""

    def __init__(self, *errors: LauncherError) -> None:
        self.errors = list(errors)

    def __call__(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "it"


def test_a_model_that_is_not_there_yet_is_waited_for() -> None:
    waits: list[float] = []
    told: list[PassingError] = []
    away = PassingError("cannot read model '/m': no such directory", "give it")
    stale = PassingError("cannot read model '/m': stale file handle", "give it")
    assert when_there(Build(*[away] * 7, stale), waits.append, told.append) == "it"
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert told == [away, stale], "each once"


def test_a_mistake_ends_the_wait() -> None:
    build = Build(PassingError("away", ""), LauncherError("cannot use it", "mend it"))
    with pytest.raises(LauncherError, match="cannot use it"):
        when_there(build, lambda _s: None, lambda _error: None)


def test_the_unit_starts_after_the_mounts_of_the_network() -> None:
    unit = Path(__file__).parents[2] / "systemd" / "numa-launcher.service"
    [after] = [line for line in unit.read_text(encoding="utf-8").splitlines() if line.startswith("After=")]
    assert "remote-fs.target" in after.split("=")[1].split()
