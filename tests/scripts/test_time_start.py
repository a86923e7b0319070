"""scripts/time-start says why a start failed, with the daemon's last words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "time-start"


def test_a_start_that_fails(tmp_path: Path) -> None:
    """A model that is not there is waited for; one that cannot be read is a mistake."""
    (tmp_path / "config.json").write_text("{")
    done = subprocess.run(
        [SCRIPT, "--model", str(tmp_path), "--vllm", "vllm"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 1
    assert "cannot time the start: it failed" in done.stderr
    assert f"cannot read model '{tmp_path}'" in done.stderr
