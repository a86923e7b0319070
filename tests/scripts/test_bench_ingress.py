"""scripts/bench-ingress measures the real ingress before hosts that it starts itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "bench-ingress", *arguments],
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip


@pytest.mark.budget
def test_each_phase_is_measured() -> None:
    done = run("--hosts", "2", "--instances", "1", "--requests", "30", "--rate", "200", "--seconds", "2")
    assert done.returncode == 0, done.stderr
    rows = re.findall(
        r"^\| (\w.*?) \| ([\d.]+)% \| (\d+) \| ([\d.]+)% \| (\d+) \|$", done.stdout, re.MULTILINE
    )
    assert [row[0].partition("(")[0].strip() for row in rows] == [
        "nobody asks",
        "200 requests a second",
        "30 streams in hand",
        "30 come at once and wait",
    ]
    assert all(float(memory) > 1 for row in rows for memory in (row[2], row[4]))
    of_request = re.search(r"CPU time of a request: picker (\d+) µs, HAProxy (\d+) µs", done.stdout)
    assert of_request is not None
    assert all(0 < int(us) < 100_000 for us in of_request.groups())
    assert "asking all hosts for their loads" in done.stdout


def test_help() -> None:
    assert "usage: scripts/bench-ingress" in run("--help").stdout
