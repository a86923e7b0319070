"""scripts/bench-balance sends a workload through the proxy, and continues an interrupted run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench-balance"


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
def test_a_short_run(tmp_path: Path) -> None:
    kept = tmp_path / "run.json"
    some = ("--only", "ours", "--workloads", "chat", "--seeds", "1", "--requests", "40", "--speed", "20")
    done = run(*some, "--json", str(kept))
    assert done.returncode == 0, done.stdout + done.stderr
    [row] = json.loads(kept.read_text())["rows"]
    assert row["failed"] == 0
    assert row["requests"] >= 40
    assert 0 < row["ttft_p50_s"] <= row["ttft_p99_s"] < row["whole_p99_s"]
    assert 0.0 < row["hit_rate"] < 1.0
    assert sum(row["shares"]) > 1000
    assert "TTFT p99 ÷ best rival" in done.stdout

    # Nothing is measured twice.
    again = run(*some, "--json", str(kept))
    assert again.stdout == done.stdout
    assert json.loads(kept.read_text())["rows"] == [row]


def test_a_name_that_is_not_there() -> None:
    done = run("--only", "apache")
    assert done.returncode != 0
    assert "cannot run setting 'apache'" in done.stderr
