"""scripts/bench-history measures a history that is really recorded."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.budget
def test_a_few_readings(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [
        ROOT / "scripts" / "bench-history",
        "--slots",
        "3",
        "--cpus",
        "12",
        "--ticks",
        "320",
        "--json",
        file,
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert "3 slots, 12 CPUs, 320 readings" in done.stdout
    assert "of a core (at most 0.3%: " in done.stdout
    found = json.loads(file.read_text())
    assert found["readings"] == 320
    assert 0 < found["cpu_ms_per_reading"] < 1000
    hour, hour_without = (found["answers"][f"1h, {slots}"]["bytes"] for slots in ("all", "none"))
    assert hour > hour_without > 320 * 50
    assert found["answers"]["90d, none"]["bytes"] > 0
