"""scripts/bench-plan runs, holds its budgets, and says no when it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench-plan"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.mark.budget
def test_within_the_budgets() -> None:
    done = run("--runs", "3", "--scale", "4")  # a slower machine than the budgets' own
    assert done.returncode == 0, done.stdout + done.stderr
    assert "read 256 cpus" in done.stdout
    assert done.stdout.count("plan 1,024 cpus") == 7
    assert "OVER" not in done.stdout


@pytest.mark.budget
def test_over_the_budgets() -> None:
    done = run("--runs", "1", "--scale", "0.0001")
    assert done.returncode == 1
    assert "OVER" in done.stdout
