"""One question to all hosts."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from launcher.base.errors import LauncherError
from launcher.fleet.hosts import each


def test_results_and_errors_by_host_in_order() -> None:
    def work(host: str) -> str:
        if host == "b":
            raise LauncherError("cannot do it", "do it otherwise")
        return host.upper()

    done, failed = each(["c", "b", "a"], work)
    assert list(done.items()) == [("c", "C"), ("a", "A")]
    assert [(host, error.message) for host, error in failed.items()] == [("b", "cannot do it")]


def test_all_are_asked_at_once() -> None:
    together = threading.Barrier(20, timeout=30)
    done, failed = each([str(number) for number in range(20)], lambda _: together.wait())
    assert len(done) == 20
    assert not failed


def test_an_error_that_is_a_fault_of_ours_is_raised() -> None:
    """No host is left out in silence."""
    with pytest.raises(ZeroDivisionError):
        each(["a", "b"], lambda host: 1 // (host == "a"))


def test_an_interrupt_does_not_wait_for_hosts_that_hang() -> None:
    code = (
        "import os, signal, threading, time\n"
        "from launcher.fleet.hosts import each\n"
        "threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "each(['a', 'b'], lambda host: time.sleep(600))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode in {1, -signal.SIGINT}
    assert "KeyboardInterrupt" in done.stderr
