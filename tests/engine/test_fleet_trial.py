"""The trial of docs/fleet.md: three hosts with real vLLM, Ray and HAProxy on this machine."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest
from support.daemon_process import eventually

pytestmark = [pytest.mark.engine, pytest.mark.release, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
# A run that hangs ends here.
TRIAL_S = 900


def test_the_trial_answers_and_leaves_nothing() -> None:
    began = time.monotonic()
    done = subprocess.run(
        [str(ROOT / "scripts" / "fleet-trial"), "--once"],
        check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=TRIAL_S,
    )  # fmt: skip
    said = done.stdout
    print(f"{time.monotonic() - began:.0f} s")
    assert done.returncode == 0, said + done.stderr
    assert "cannot" not in said + done.stderr
    for host in (1, 2, 3):
        assert re.search(rf"host{host}\$ ray start --block ", said)
        assert f"host{host}: attached to its daemon at 10.79.0.{host}:8001\n" in said
    assert "3 hosts in the fleet" in said
    assert "ignores" not in said
    assert said.count("\n   tiny: ") == 2  # an answer from each ingress
    assert re.search(r"endpoint +http://10\.79\.0\.1:8000/v1 or http://10\.79\.0\.2:8000/v1", said)
    assert said.rstrip().endswith("stopped")
    # The kernel ends the namespaces a moment later.
    eventually(lambda: not left(), what="nothing of the trial is left")


def left() -> str:
    """Links and processes of the trial."""
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    processes = subprocess.run(
        ["pgrep", "--full", "--list-full", "/fleet-trial/host"], capture_output=True, text=True, check=False
    )
    return processes.stdout + "\n".join(line for line in links.splitlines() if line.startswith("fleet-trial"))
