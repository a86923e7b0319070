"""scripts/sim-balance ablate switches each mechanism of the balancer off and says what that costs."""

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
