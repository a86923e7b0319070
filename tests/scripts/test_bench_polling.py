"""scripts/bench-polling measures a daemon that runs already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.fake_operations import Backstage, FakeOperations

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "bench-polling", *arguments],
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.budget
def test_each_request_is_measured(tmp_path: Path) -> None:
    with Backstage(str(tmp_path / "c.sock"), FakeOperations()) as daemon:
        done = run(
            "--socket",
            daemon.path,
            "--seconds",
            "0.2",
            "--rounds",
            "1",
            "--interval",
            "0.1",
            "--requests",
            "2",
        )
    assert done.returncode == 0, done.stderr
    for word in ("status", "machine", "events", "history", "topology", "added by a poll every 0.1 s"):
        assert word in done.stdout


def test_without_a_daemon_it_says_what_to_do(tmp_path: Path) -> None:
    done = run("--socket", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "cannot reach" in done.stderr
    assert "what to do:" in done.stderr


def test_help() -> None:
    assert "usage: scripts/bench-polling" in run("--help").stdout
