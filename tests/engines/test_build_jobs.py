"""Compilers at once."""

from __future__ import annotations

import pytest

from launcher.base.text import GIB
from launcher.engines.build_jobs import available_bytes, build_jobs, main


@pytest.mark.parametrize(
    ("cpus", "gib", "jobs"), [(128, 1024, 128), (128, 64, 32), (8, 5, 2), (8, 1, 1), (1, 0, 1), (2, 1000, 2)]
)
def test_as_many_as_memory_holds(cpus: int, gib: int, jobs: int) -> None:
    assert build_jobs(cpus, gib * GIB) == jobs


def test_meminfo() -> None:
    assert available_bytes("MemTotal:  9 kB\nMemAvailable:    2048 kB\n") == 2048 * 1024
    with pytest.raises(ValueError, match="no MemAvailable"):
        available_bytes("MemTotal: 9 kB\n")


def test_the_number_for_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert int(capsys.readouterr().out) >= 1
