"""scripts/sim-balance: what each mechanism of the balancer is worth, and how good its predictions are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sim-balance"


@pytest.mark.release
def test_each_mechanism_is_switched_off(tmp_path: Path) -> None:
    kept = tmp_path / "ablation.json"
    done = subprocess.run(
        [SCRIPT, "ablate", "--seeds", "1", "--requests", "60", "--json", kept],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(kept.read_text())
    assert len(found) >= 9
    assert all(f"| {mechanism} |" in done.stdout for mechanism in found)
    # Without ejection, an engine that fails gets requests for as long as it fails.
    failed = {
        name: sum(cells["one engine fails for a third"]["failed attempts"]) for name, cells in found.items()
    }
    assert max(failed, key=failed.__getitem__) == "ejection"
    # What is switched off changes something.
    waiting = found["wait for a busy instance that has the prefix"]
    assert any(ratio != 1.0 for cells in waiting.values() for ratio in cells["12 prompts"])


def test_a_few_requests_are_simulated_and_their_predictions_judged(tmp_path: Path) -> None:
    kept = tmp_path / "predictions.json"
    done = subprocess.run(
        [SCRIPT, "predict", "--workloads", "chat", "--seeds", "5", "--loads", "0.8", "--requests", "40", "--json", kept],
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(kept.read_text())
    assert {row["case"]["workload"] for row in rows} == {"chat"}
    assert all(row["good"] >= 0.5 for row in rows)
    assert all(row["met"] >= 0.99 for row in rows if row["case"]["limit_s"] is not None)


@pytest.mark.release
def test_predictions_of_first_tokens(tmp_path: Path) -> None:
    kept = tmp_path / "predictions.json"
    workloads = "chat,long prompts,mixed,prefix-heavy"
    done = subprocess.run(
        [SCRIPT, "predict", "--workloads", workloads, "--seeds", "5", "--loads", "0.8,1.3", "--requests", "400",
         "--json", kept],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(kept.read_text())
    at_80 = [row for row in rows if row["case"]["load"] == 0.8]
    assert sum(row["good"] for row in at_80) / len(at_80) >= 0.9
    assert min(row["good"] for row in at_80) >= 0.5
    limited = [row for row in rows if row["case"]["limit_s"] is not None]
    assert all(row["met"] >= 0.99 for row in limited)
    # The excess of 30 in 130, and a tenth of it.
    assert all(row["overflowed"] <= 0.33 / 1.3 for row in limited)
    # Without overflow most of these miss the limit.
    long_prompts = [
        row for row in rows if row["case"]["workload"] == "long prompts" and row["case"]["load"] == 1.3
    ]
    assert min(row["met"] for row in long_prompts) < 0.5


def test_an_unknown_workload_is_refused() -> None:
    done = subprocess.run(
        [SCRIPT, "predict", "--workloads", "chta"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "cannot simulate 'chta': there is no such workload" in done.stdout


def fleet(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, "fleet", *arguments],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.mark.release
def test_a_fleet_is_compared_with_one_host(tmp_path: Path) -> None:
    kept = tmp_path / "fleet.json"
    ways = "picker,picker+taken over in the middle,least connections,hash of the prompt"
    done = fleet("--hosts", "4", "--workloads", "chat,48 prompts", "--ways", ways, "--seeds", "1", "--requests", "60",
                 "--json", kept)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {(row["way"], row["workload"]): row for row in json.loads(kept.read_text())}
    assert all(row["requests"] >= 60 * 16 for row in rows.values())
    for name in ("chat", "48 prompts"):
        picker = rows["picker", name]
        assert picker["p99_ratio"] <= 1.15
        assert picker["hit_ratio"] >= 0.95
        assert picker["picker_us"] > 0
        assert rows["one host", name]["p99_ratio"] == 1.0
        # Without a picker first tokens come late, and a new one knows of no cache at first.
        assert rows["least connections", name]["p99_ratio"] > 1.5
        taken_over = rows["picker, taken over in the middle", name]["p99_ratio"]
        assert picker["p99_ratio"] < taken_over < rows["least connections", name]["p99_ratio"]
    # All conversations begin alike: hashed by that, they all go to the same hosts.
    assert (
        rows["hash of the prompt", "chat"]["p99_ratio"]
        > rows["hash of the prompt", "48 prompts"]["p99_ratio"]
    )
    assert "| picker | " in done.stdout


def test_a_small_fleet_is_simulated(tmp_path: Path) -> None:
    kept = tmp_path / "fleet.json"
    done = fleet("--hosts", "2", "--workloads", "chat", "--ways", "picker", "--seeds", "1", "--requests", "10",
                 "--json", kept)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["way"]: row for row in json.loads(kept.read_text())}
    assert rows["picker"]["p99_ratio"] <= 1.3
    assert rows["picker"]["hit_ratio"] >= 0.95
    assert rows["one host"]["p99_ratio"] == 1.0
    assert "| picker | " in done.stdout


@pytest.mark.release
def test_a_fleet_of_more_than_one_balancer(tmp_path: Path) -> None:
    kept = tmp_path / "fleet.json"
    done = fleet("--hosts", "20", "--workloads", "short,chat", "--ways", "picker", "--seeds", "1", "--requests", "10",
                 "--json", kept)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [row for row in json.loads(kept.read_text()) if row["way"] == "picker"]
    assert len(rows) == 2
    assert all(row["p99_ratio"] <= 1.3 for row in rows)
    assert all(row["hit_ratio"] is None or row["hit_ratio"] >= 0.95 for row in rows)


def test_an_unknown_way_is_refused() -> None:
    done = fleet("--ways", "picker,luck")
    assert done.returncode == 2
    assert "cannot simulate 'luck': there is no such way" in done.stdout
