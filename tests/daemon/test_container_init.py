"""Process 1, in a process namespace of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

SCRIPT = """
import os, signal, subprocess, sys, time
from launcher.daemon.container_init import become_child_of_init
status = become_child_of_init()
if status is not None:
    sys.exit(status)
assert os.getpid() != 1 and os.getppid() == 1
{body}
"""
IN_ITS_OWN = (
    "unshare",
    "--user",
    "--map-root-user",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
    sys.executable,
    "-c",
)


def start(body: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*IN_ITS_OWN, SCRIPT.format(body=body)], stdout=subprocess.PIPE, text=True)


def code_of(body: str) -> int:
    with start(body) as process:
        return process.wait(60)


def test_the_exit_status_is_the_childs() -> None:
    assert code_of("sys.exit(7)") == 7
    assert code_of("os.kill(os.getpid(), signal.SIGKILL)") == 128 + 9


def test_orphans_are_reaped() -> None:
    """A grandchild's death leaves no zombie, whoever its parent was."""
    body = """
subprocess.run(["sh", "-c", "sleep 0.1 & sleep 0.1 & exit 0"])
deadline = time.monotonic() + 20
while True:
    left = [p for p in os.listdir("/proc") if p.isdigit() and int(p) not in {1, os.getpid()}]
    if not left or time.monotonic() > deadline:
        break
    time.sleep(0.02)
sys.exit(len(left))
"""
    assert code_of(body) == 0


def test_signals_are_handed_on() -> None:
    body = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("up", flush=True)
time.sleep(60)
"""
    with start(body) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        # unshare is the parent of process 1 there, and passes no signal on: it is sent to process 1 itself.
        first = int(
            subprocess.run(
                ["pgrep", "--parent", str(process.pid)], capture_output=True, text=True, check=True
            ).stdout
        )
        subprocess.run(["kill", f"-{signal.SIGTERM.value}", str(first)], check=True)
        assert process.wait(30) == 5


def test_elsewhere_nothing_is_done() -> None:
    body = "from launcher.daemon.container_init import become_child_of_init; print(become_child_of_init())"
    done = subprocess.run(
        [sys.executable, "-c", body], capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout == "None\n"
