#!/opt/venv/bin/python
"""In the guest, as root: installs the project, runs it as a service, moves threads and pages, and records facts.

Judges nothing: facts.json goes back to the host, whose tests do. Every command has a deadline, and a
failed one is a fact.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from notes import COMMAND_S, SOCKET, ask, facts, note, request, sh, status, until
from units import UNIT, install_package, install_units

READY_S = 600.0
ALLOCATE_MIB = 48
JOURNAL_FIELDS = ("MESSAGE", "NUMA_LAUNCHER_SLOT", "NUMA_LAUNCHER_GENERATION", "PRIORITY", "_SYSTEMD_UNIT")


def install() -> None:
    install_package()
    etc = Path("/etc/numa-launcher")
    etc.mkdir()
    engine = [sys.executable, "/srv/fake_engine.py", "--uds", "{uds}", "--model", "{name}"]
    engine += ["--allocate", str(ALLOCATE_MIB), "--children", "1"]
    (etc / "config.toml").write_text(
        f"""
[[models]]
name = "fake"
path = "fake"
[layout]
strategy = "per-node"
reserve_cores = 0
[engine]
kind = "command"
command = {json.dumps(engine)}
[supervision]
probe_timeout_s = 60
stop_timeout_s = 60
[logging]
level = "debug"
"""
    )
    install_units(UNIT)


def look_at_machine() -> None:
    note("lscpu", json.loads(sh("lscpu", "-J", "-e=CPU,NODE,SOCKET,CORE,CACHE")["out"])["cpus"])
    note("numactl", sh("numactl", "--hardware")["out"])
    note("topology", ask("numa-launcher", "topology", "--json"))
    note("plan", ask("numa-launcher", "plan", "--json"))
    note("doctor", ask("numa-launcher", "doctor", "--json"))
    note("remember", sh(sys.executable, "remember.py"))


def pid_of(slot: int) -> str:
    return str(status()["slots"][slot]["pid"])


def serve() -> None:
    note("start", sh("systemctl", "start", UNIT, timeout=READY_S))
    note("is-active", sh("systemctl", "is-active", UNIT))

    def all_ready() -> dict[str, Any] | None:
        now = status()
        ready = now and now["ready"] == len(now["slots"]) and all(slot["verified"] for slot in now["slots"])
        return now if ready else None

    note("status", until(all_ready, READY_S))
    note("verify", ask("numa-launcher", "verify", "--json"))
    note("drawn", request(SOCKET, "GET", "/v1/topology"))
    note("machine", request(SOCKET, "GET", "/v1/machine"))
    note("measurements", request(SOCKET, "GET", "/v1/measurements"))
    pids = {slot["slot"]: slot["pid"] for slot in facts["status"]["slots"]}
    note("numa_maps", {slot: Path(f"/proc/{pid}/numa_maps").read_text() for slot, pid in pids.items()})
    sh("journalctl", "--sync")
    entries = map(json.loads, sh("journalctl", "--unit", UNIT, "--output", "json")["out"].splitlines())
    note("journal", [{name: entry.get(name) for name in JOURNAL_FIELDS} for entry in entries])


def misplace() -> None:
    """Moves threads, pages and another program, one slot after the other."""
    everywhere = f"0-{os.cpu_count() - 1}"  # type: ignore[operator]
    sh("taskset", "--all-tasks", "--pid", "--cpu-list", everywhere, pid_of(0))
    note("taskset", ask("numa-launcher", "verify", "0", "--json"))
    note("taskset-text", sh("numa-launcher", "verify", "0"))
    sh("migratepages", pid_of(1), "1", "0")
    note("migratepages", ask("numa-launcher", "verify", "1", "--json"))
    note("machine-misplaced", request(SOCKET, "GET", "/v1/machine"))
    ours = facts["status"]["slots"][1]["cpus"].split("-")[0]
    stranger = subprocess.Popen(["taskset", "--cpu-list", ours, "sleep", "1000"], start_new_session=True)
    until(lambda: Path(f"/proc/{stranger.pid}/comm").read_text().strip() == "sleep", COMMAND_S)
    note("stranger", {"pid": stranger.pid, "cpu": ours, "verify": sh("numa-launcher", "verify", "1")})
    stranger.kill()
    stranger.wait()


def cgroups() -> list[str]:
    return [str(path) for path in Path("/sys/fs/cgroup").rglob(f"{UNIT}*.service")]


def stop() -> None:
    pids = [slot["pid"] for slot in status()["slots"]]
    note("stop", sh("systemctl", "stop", UNIT))
    until(lambda: not cgroups(), COMMAND_S)  # they go when the kernel has told systemd that they are empty
    note("stopped", {
        "is-active": sh("systemctl", "is-active", UNIT)["out"].strip(),
        "result": sh("systemctl", "show", UNIT, "--property", "Result", "--value")["out"].strip(),
        "processes": sh("pgrep", "--full", "--list-full", "fake_engine|launcher serve")["out"],
        "sleeping": sh("pgrep", "--exact", "sleep")["out"],
        "instances": [pid for pid in pids if Path(f"/proc/{pid}").exists()],
        "run": [str(path) for path in Path("/run/numa-launcher").rglob("*") if path.is_socket()],
        "cgroup": cgroups(),
    })  # fmt: skip


if __name__ == "__main__":
    for step in (install, look_at_machine, serve, misplace, stop):
        step()
