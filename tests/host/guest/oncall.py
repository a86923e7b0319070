#!/usr/bin/python3
"""In the guest, as root: installs the project as an operator would, and does to it, under load, all that a night may bring.

Judges nothing: facts.json and load.jsonl go back to the host, whose tests do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from notes import ask, facts, note, request, sh, status, until

UNIT = "numa-launcher"
SLOTS = range(4)
PREFIX = Path("/opt/numa-launcher/venv/bin")
ENGINE = "/srv/fake_engine.py"
TOKEN = "hf_thisIsAVeryPrivateToken"
READY_S = 300.0
MEMORY_MAX_MIB = 320
JOURNAL_FIELDS = (
    "MESSAGE",
    "NUMA_LAUNCHER_SLOT",
    "NUMA_LAUNCHER_GENERATION",
    "PRIORITY",
    "_SYSTEMD_UNIT",
    "UNIT",
)

CONFIG = f"""
[[models]]
name = "fake"
path = "fake"
[layout]
strategy = "per-node"
reserve_cores = 0
[engine]
kind = "command"
command = ["{PREFIX}/python", "{ENGINE}", "--uds", "{{uds}}", "--model", "{{name}}", "--allocate", "48", "--children", "1",
  "--token-s", "0.3"]
hf_token_file = "/run/credentials/{UNIT}.service/secret_hf-token"
[supervision]
probe_timeout_s = 15
stop_timeout_s = 30
drain_timeout_s = 120
stall_timeout_s = 15
backoff_initial_s = 0.5
[systemd]
memory_max = "{MEMORY_MAX_MIB}MiB"
allowed_cpus = true
"""


def write_config(text: str) -> None:
    new = Path("/etc/numa-launcher/config.new")
    new.write_text(text)
    new.replace("/etc/numa-launcher/config.toml")


def install() -> None:
    """As docs say, without network; then the configuration, the token, and a short watchdog: emulation is slow enough."""
    wheels = Path("/root/wheels")
    wheels.mkdir()
    for wheel in [*Path("/opt/wheelhouse").glob("*.whl"), *Path().glob("*.whl")]:
        (wheels / wheel.name).symlink_to(wheel.absolute())
    script = str(Path("repo/scripts/install").absolute())
    note("dry-run", sh("bash", script, "--without-vllm", "--dry-run"))
    note("before", {"opt": Path("/opt/numa-launcher").exists(), "etc": Path("/etc/numa-launcher").exists()})
    note("install", sh("bash", script, "--without-vllm", "--wheels", str(wheels), timeout=600))
    Path(ENGINE).write_bytes(Path("repo/fake_engine.py").read_bytes())
    write_config(CONFIG)
    Path("/etc/numa-launcher/secrets/hf-token").write_text(TOKEN + "\n")
    drop_in = Path(f"/etc/systemd/system/{UNIT}.service.d")
    drop_in.mkdir()
    (drop_in / "watchdog.conf").write_text("[Service]\nWatchdogSec=30\n")
    sh("systemctl", "daemon-reload")
    note("security", sh("systemd-analyze", "security", f"{UNIT}.service", "--no-pager", "--threshold=25"))


# --- what is looked at -------------------------------------------------------------------------------


def pids() -> dict[str, int]:
    """Main process of each instance's unit."""
    return {str(slot): main_pid(f"{UNIT}-slot{slot}") for slot in SLOTS}


def main_pid(unit: str) -> int:
    return int(sh("systemctl", "show", "--property", "MainPID", "--value", unit)["out"] or 0)


def all_ready() -> dict[str, Any] | None:
    now = status()
    return now if now and now["ready"] == len(SLOTS) else None


def strays() -> list[str]:
    """Processes of ours outside their unit's cgroup."""
    found = []
    for proc in Path("/proc").iterdir():
        try:
            words = (proc / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            unit = (proc / "cgroup").read_text().strip().rpartition("/")[2]
        except (OSError, NotADirectoryError):
            continue
        if ENGINE in words and not unit.startswith(f"{UNIT}-slot"):
            found.append(f"{proc.name} {words}in {unit}")
        if "numa-launcher serve" in words and unit != f"{UNIT}.service":
            found.append(f"{proc.name} {words}in {unit}")
        if unit == f"{UNIT}.service" and "numa-launcher serve" not in words:
            found.append(f"{proc.name} {words}in {unit}")
    return found


def step(name: str, act: Callable[[], Any], *, within_s: float = READY_S) -> None:
    """One thing that happens under load: what was before, what was done, when all was well again."""
    before = {"pids": pids(), "daemon": main_pid(UNIT)}
    started = time.time()
    done = act()
    acted = time.time()
    well = until(all_ready, within_s, 0.5)
    seen = time.time()
    time.sleep(4)  # some requests more
    note(name, {
        "before": before, "done": done, "from": started, "acted": acted, "to": time.time(), "recovered_s": seen - acted,
        "well": well is not None, "after": {"pids": pids(), "daemon": main_pid(UNIT)}, "strays": strays(),
    })  # fmt: skip


def address(slot: int) -> str:
    return str(status()["slots"][slot]["address"]).removeprefix("unix:")


def changed(what: Callable[[], Any]) -> Callable[[], bool]:
    """Whether it is another than now."""
    old = what()
    return lambda: what() not in {old, 0}


# --- the night ------------------------------------------------------------------------------------------


def start() -> None:
    note("enable", sh("systemctl", "enable", "--now", UNIT, timeout=READY_S))
    note("status", until(all_ready, READY_S))
    entries = [
        json.loads(line)
        for line in sh("journalctl", "--unit", f"{UNIT}*", "--output", "json")["out"].splitlines()
    ]
    note("journal", [{name: entry.get(name) for name in JOURNAL_FIELDS} for entry in entries])
    note("show", sh("systemctl", "show", f"{UNIT}-slot0.service")["out"])


def secrets() -> None:
    """Everywhere where anybody could read it, and where it has to be."""
    environ = Path(f"/proc/{main_pid(f'{UNIT}-slot0')}/environ").read_bytes().decode().split("\0")
    words = [
        path.read_bytes()
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.parent.name != str(os.getpid())
    ]
    units = [f"{UNIT}.service", *(f"{UNIT}-slot{slot}.service" for slot in SLOTS)]
    note("secrets", {
        "instance": f"HF_TOKEN={TOKEN}" in environ,
        "cmdline": any(TOKEN.encode() in word for word in words),
        "show": TOKEN in sh("systemctl", "show", "--all", *units)["out"],
        "units": TOKEN in "".join(path.read_text() for path in Path("/run/systemd/transient").glob(f"{UNIT}*")),
        "state": [str(path) for path in Path("/run/numa-launcher").rglob("*.env")],
    })  # fmt: skip


def planned() -> None:
    for slot in SLOTS:
        old = changed(lambda slot=slot: main_pid(f"{UNIT}-slot{slot}"))  # type: ignore[misc]

        def restart(slot: int = slot, old: Callable[[], bool] = old) -> Any:
            done = sh("numa-launcher", "restart", str(slot), timeout=READY_S)
            until(old, READY_S)
            return done

        step(f"restart-{slot}", restart)
    step("systemctl-restart", lambda: sh("systemctl", "restart", UNIT, timeout=READY_S))


def reload() -> None:
    good = CONFIG.replace('"--token-s", "0.3"', '"--token-s", "0.25"')
    bad = CONFIG.replace("[layout]", "[layuot]")

    def to(text: str) -> Callable[[], Any]:
        def act() -> Any:
            write_config(text)
            return sh("numa-launcher", "reload", timeout=READY_S)

        return act

    step("reload-bad", to(bad))
    step("reload-good", to(good))


def unplanned() -> None:
    def kill_daemon() -> None:
        new = changed(lambda: main_pid(UNIT))
        os.kill(main_pid(UNIT), signal.SIGKILL)
        until(new, READY_S, 0.2)

    def hit(slot: int, blow: Callable[[int], Any]) -> Callable[[], Any]:
        def act() -> Any:
            pid = main_pid(f"{UNIT}-slot{slot}")
            blow(pid)
            until(lambda: main_pid(f"{UNIT}-slot{slot}") not in {0, pid}, READY_S, 0.5)
            until(all_ready, READY_S, 0.5)
            return (
                ask("numa-launcher", "why", str(slot), "--json")
                if slot
                else sh("numa-launcher", "why", str(slot))
            )

        return act

    def freeze_daemon() -> None:
        new = changed(lambda: main_pid(UNIT))
        os.kill(main_pid(UNIT), signal.SIGSTOP)
        until(new, READY_S, 0.5)

    step("kill-daemon", kill_daemon)
    step("kill-instance", hit(0, lambda pid: os.kill(pid, signal.SIGKILL)))
    step(
        "oom-instance",
        hit(1, lambda _: request(address(1), "POST", "/fault", {"kind": f"eat {2 * MEMORY_MAX_MIB}"})),
    )
    step("stop-instance", hit(2, lambda pid: os.kill(pid, signal.SIGSTOP)))
    step("freeze-daemon", freeze_daemon)


def offline() -> None:
    """The second cpu of the last node goes away, and comes back."""
    online = Path("/sys/devices/system/cpu/cpu7/online")
    step("cpu-offline", lambda: online.write_text("0"))
    note("offline-status", status())
    step("cpu-online", lambda: online.write_text("1"))


def end() -> None:
    note("final", status())
    note("verify", ask("numa-launcher", "verify", "--json"))
    load.terminate()
    load.wait(60)
    before = list(pids().values())
    note("stop", sh("systemctl", "stop", UNIT, timeout=READY_S))
    note("stopped", {
        "units": sh("systemctl", "list-units", "--plain", "--no-legend", "--state=active,failed,deactivating",
                    f"{UNIT}*.service", f"{UNIT}*.socket")["out"],
        "instances": [pid for pid in before if Path(f"/proc/{pid}").exists()],
        "processes": sh("pgrep", "--full", "--list-full", "fake_engine|launcher serve")["out"],
        "port": sh("bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8000")["status"],
    })  # fmt: skip
    note("uninstall", sh("bash", str(Path("repo/scripts/uninstall").absolute()), "--purge"))
    note("left", [str(path) for folder in ("/opt", "/etc", "/run", "/usr/lib/sysusers.d", "/var/lib", "/var/cache")
                  for path in Path(folder).glob("numa-launcher*")]
         + sh("systemctl", "list-unit-files", "--no-legend", f"{UNIT}*")["out"].splitlines())  # fmt: skip


if __name__ == "__main__":
    install()
    start()
    secrets()
    load = subprocess.Popen([sys.executable, "load.py", "127.0.0.1", "8000", "load.jsonl"])
    try:
        time.sleep(5)
        for act in (planned, reload, unplanned, offline, end):
            act()
    finally:
        load.terminate()
    print(json.dumps(facts["seconds"]))
