#!/opt/venv/bin/python
"""In the guest, as root: `tune --stop-service` beside the shipped units, killed and resumed.

Judges nothing: facts.json goes back to the host, whose tests do.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from notes import COMMAND_S, note, sh, status, until
from units import UNIT, install_package, install_units

UNITS = ("numa-launcher.socket", "numa-launcher-control.socket", "numa-launcher.service")
READY_S = 600.0
CONFIG = Path("/etc/numa-launcher/config.toml")
CALLS = Path("/srv/calls")
# While it is there, a measurement takes longer than the test.
SLOW = Path("/srv/slow")
MEASURE = Path("/srv/measure")
SEARCH = ("--strategies", "interleaved", "--instances", "1,2", "--no-refine", "--repeats", "1")


def install() -> None:
    """The units as they are; the engine is the fake one."""
    install_package()
    MEASURE.write_text(
        f"#!/bin/sh\ncat >/dev/null\necho call >>{CALLS}\n[ ! -e {SLOW} ] || sleep 3000\n"
        'echo \'{"output_tokens_per_s": 100, "ttft_p99_s": 0.5, "itl_p99_s": 0.1, "failed": 0}\'\n'
    )
    MEASURE.chmod(0o755)
    CALLS.touch()
    engine = [sys.executable, "/srv/fake_engine.py", "--uds", "{uds}", "--model", "{name}"]
    CONFIG.parent.mkdir()
    CONFIG.write_text(
        f'# a remark\n[[models]]\nname = "fake"\npath = "fake"\n[layout]\nstrategy = "per-node"\nreserve_cores = 0\n'
        f'[engine]\nkind = "command"\ncommand = {json.dumps(engine)}\n'
        "[supervision]\nprobe_timeout_s = 60\nstop_timeout_s = 60\n"
    )
    install_units(UNIT)


def states() -> dict[str, str]:
    return {unit: sh("systemctl", "is-active", unit)["out"].strip() for unit in UNITS}


def ready() -> bool:
    return bool((now := status()) and now["ready"] == len(now["slots"]) == 2)


def host() -> dict[str, Any]:
    """What a run must leave as it was."""
    slots = sh("systemctl", "list-units", "--plain", "--no-legend", "--state=active", f"{UNIT}-slot*")["out"]
    return {"units": states(), "slots": len(slots.splitlines()), "config": CONFIG.read_text()}


def connects() -> bool:
    try:
        socket.create_connection(("127.0.0.1", 8000), timeout=30).close()
    except OSError:
        return False
    return True


def tune(*words: str) -> dict[str, Any]:
    return sh(UNIT, "tune", *words)


def in_a_measurement(*words: str) -> subprocess.Popen[str]:
    """A running `tune` whose command has been called once more."""
    before = len(CALLS.read_text().splitlines())
    SLOW.touch()
    process = subprocess.Popen(
        [UNIT, "tune", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until(lambda: process.poll() is not None or len(CALLS.read_text().splitlines()) > before, READY_S)
    return process


def ended(process: subprocess.Popen[str], name: signal.Signals) -> dict[str, Any]:
    process.send_signal(name)
    out, error = process.communicate(timeout=COMMAND_S)
    SLOW.unlink()
    began = time.monotonic()
    back = bool(until(ready, READY_S))
    return {
        "status": process.returncode, "out": out, "error": error, "back": back, "host": host(),
        "seconds": time.monotonic() - began, "measures": sh("pgrep", "-f", str(MEASURE))["out"].split(),
    }  # fmt: skip


def serve() -> None:
    note("start", sh("systemctl", "start", *UNITS, timeout=READY_S))
    note("ready", bool(until(ready, READY_S)))
    note("before", host())
    note("refused", tune("--measure", str(MEASURE), *SEARCH))
    note("after-refused", host())


def kill() -> None:
    process = in_a_measurement("--measure", str(MEASURE), *SEARCH, "--stop-service")
    note("stopped", {**host(), "connects": connects(), "after": host()["units"]})
    note("killed", ended(process, signal.SIGKILL))
    process = in_a_measurement("--resume")
    note("stopped-again", host())
    note("terminated", ended(process, signal.SIGTERM))


def finish() -> None:
    note("resumed", tune("--resume", "--json"))
    note("back", bool(until(ready, READY_S)))
    note("after", host())
    note("calls", len(CALLS.read_text().splitlines()))
    (journal,) = Path("/var/lib/numa-launcher/tuning").glob("*/journal.jsonl")
    note("journal", [json.loads(line) for line in journal.read_text().splitlines()])
    note(
        "guards",
        sh("systemctl", "list-units", "--all", "--plain", "--no-legend", f"{UNIT}-after-tune*")["out"],
    )


if __name__ == "__main__":
    for step in (install, serve, kill, finish):
        step()
