"""A child of a killed parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PARENT = """
import subprocess, sys, time
from launcher.base.processes import dies_with_parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], preexec_fn=dies_with_parent())
print(child.pid, flush=True)
time.sleep(600)
"""


def runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 :].split()[0] != b"Z"


def test_sigkill_of_the_parent_kills_the_child() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert runs(child)
        os.kill(parent.pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while runs(child):
            assert time.monotonic() < deadline, "the child survived its parent"
            time.sleep(0.01)
