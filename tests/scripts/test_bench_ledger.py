"""scripts/bench-ledger measures both proxies, and writes a month that can be asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> str:
    done = subprocess.run(
        [ROOT / "scripts" / "bench-ledger", *arguments],
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.budget
def test_both_proxies_are_measured(tmp_path: Path) -> None:
    kept = tmp_path / "run.json"
    text = run("--rounds", "2", "--seconds", "0.5", "--rate", "300", "--no-pin", "--json", str(kept))
    assert "threads of the ledger" in text
    rows = json.loads(kept.read_text())
    assert sorted((row["round"], row["ledger"]) for row in rows) == [
        (1, "off"),
        (1, "on"),
        (2, "off"),
        (2, "on"),
    ]
    for row in rows:
        assert row["failures"] == 0
        assert row["requests"] > 10
        assert 1 < row["cpu_us"] < 100_000
    assert all(row["threads_us"] > 0 for row in rows if row["ledger"] == "on")


@pytest.mark.budget
def test_a_month_is_written_and_asked(tmp_path: Path) -> None:
    file = tmp_path / "month.db"
    text = run("month", str(file), "--requests", "4000")
    assert text.count("usage --since 30d --by key") == 3
    again = run("month", str(file), "--requests", "4000")
    assert "written" not in again


def test_help() -> None:
    assert "usage: scripts/bench-ledger [requests]" in run("--help")
