"""scripts/sim-balance: what each mechanism of the balancer is worth, and how good its predictions are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sim-balance"


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
