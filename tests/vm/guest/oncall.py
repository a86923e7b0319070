#!/usr/bin/python3
"""In the guest, as root: installs the project and carries out an operator's tasks and failures under load.

Judges nothing: tests on the host judge facts.json and load.jsonl.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from load import CLIENTS
from notes import ask, facts, note, request, sh, status, until

UNIT = "numa-launcher"
SLOTS = range(4)
PREFIX = Path("/opt/numa-launcher/current/venv/bin")
ENGINE = "/srv/fake_engine.py"
TOKEN = "hf_thisIsAVeryPrivateToken"
# Passwords in URLs: of a variable that instances are given, and of one that they inherit.
PROXY, INHERITED = "Kq7-proxy-password", "Kq7-inherited-password"
SECRETS = (TOKEN, PROXY, INHERITED)
READY_S = 900.0
MEMORY_MAX_MIB = 320
LOAD = Path("load.jsonl")
AUDIT = Path("/var/log/numa-launcher/audit")
# When the last step ended, and the processes then.
last: tuple[float, dict[str, Any]] = (0.0, {})
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
env = {{ https_proxy = "http://proxy:{PROXY}@192.0.2.1:3128" }}
hf_token_file = "/run/credentials/{UNIT}.service/secret_hf-token"
[proxy]
access_log = "errors"
[supervision]
probe_timeout_s = 4
stop_timeout_s = 30
drain_timeout_s = 120
stall_timeout_s = 10
backoff_initial_s = 0.5
[systemd]
memory_max = "{MEMORY_MAX_MIB}MiB"
allowed_cpus = true
[audit]
path = "{AUDIT}"
"""


def write_config(text: str) -> None:
    new = Path("/etc/numa-launcher/config.new")
    new.write_text(text)
    new.replace("/etc/numa-launcher/config.toml")


def install() -> None:
    """As docs say, without network; then the configuration, the token, and a short watchdog: emulation is slow enough.

    Beside it the contract of a Spawner is held against systemd: it needs another cpu than pip does.
    """
    contract = subprocess.Popen(
        ["bash", "contract"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wheels = Path("/root/wheels")
    wheels.mkdir()
    for wheel in [*Path("/opt/wheelhouse").glob("*.whl"), *Path().glob("*.whl")]:
        (wheels / wheel.name).symlink_to(wheel.absolute())
    script = str(Path("repo/scripts/install").absolute())
    note("dry-run", sh("bash", script, "--without-vllm", "--dry-run"))
    note("before", {"opt": Path("/opt/numa-launcher").exists(), "etc": Path("/etc/numa-launcher").exists()})
    note("install", sh("bash", script, "--without-vllm", "--wheels", str(wheels), timeout=1800))
    Path(ENGINE).write_bytes(Path("support/fake_engine.py").read_bytes())
    write_config(CONFIG)
    Path("/etc/numa-launcher/secrets/hf-token").write_text(TOKEN + "\n")
    Path("/etc/numa-launcher/environment").write_text(f"FTP_PROXY=http://proxy:{INHERITED}@192.0.2.1:3128\n")
    drop_in = Path(f"/etc/systemd/system/{UNIT}.service.d")
    drop_in.mkdir()
    (drop_in / "watchdog.conf").write_text("[Service]\nWatchdogSec=20\nTimeoutAbortSec=3\n")
    sh("systemctl", "daemon-reload")
    note("security", sh("systemd-analyze", "security", f"{UNIT}.service", "--no-pager", "--threshold=25"))
    out, _ = contract.communicate(timeout=1800)
    note("contract", {"status": contract.returncode, "out": out})


# --- observations -------------------------------------------------------------------------------


def processes() -> dict[str, Any]:
    """The main process of the daemon and of each instance's unit."""
    units = [f"{UNIT}.service", *(f"{UNIT}-slot{slot}.service" for slot in SLOTS)]
    told = sh("systemctl", "show", "--property=Id,MainPID", *units)["out"]
    found = [dict(line.split("=", 1) for line in block.splitlines()) for block in told.strip().split("\n\n")]
    pids = {one["Id"]: int(one["MainPID"]) for one in found}
    return {"pids": {str(slot): pids[unit] for slot, unit in enumerate(units[1:])}, "daemon": pids[units[0]]}


def all_ready() -> dict[str, Any] | None:
    now = status()
    return now if now and now["ready"] == len(SLOTS) else None


def strays() -> list[str]:
    """Processes outside their unit's cgroup."""
    found = []
    for proc in Path("/proc").iterdir():
        try:
            words = (proc / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            unit = (proc / "cgroup").read_text().strip().rpartition("/")[2]
        except (OSError, NotADirectoryError):
            continue
        if not words:
            continue  # a kernel thread
        if ENGINE in words and not unit.startswith(f"{UNIT}-slot"):
            found.append(f"{proc.name} {words}in {unit}")
        if "numa-launcher serve" in words and unit != f"{UNIT}.service":
            found.append(f"{proc.name} {words}in {unit}")
        if unit == f"{UNIT}.service" and "numa-launcher serve" not in words:
            found.append(f"{proc.name} {words}in {unit}")
    return found


def served(since: float) -> bool:
    """Whether so many requests as there are clients have begun and gone well since."""
    lines = LOAD.read_text().splitlines()[-50:]
    done = [json.loads(line) for line in lines if line.endswith("}")]
    return sum(one["ok"] and one["began"] >= since for one in done) >= CLIENTS


def step(name: str, act: Callable[[], Any]) -> None:
    """One thing that happens under load: what was before, what was done, when all was well again.

    `act` does it and returns what it has seen of it, or, where there is more to wait for, a function that does.
    One step ends where the next one begins.
    """
    global last  # noqa: PLW0603
    began, before = last
    done = act()
    acted = time.time()
    if callable(done):
        done = done()
    well = until(all_ready, READY_S)
    seen = time.time()
    until(lambda: served(seen), READY_S, 0.5)
    after, ended = processes(), time.time()
    last = ended, after
    note(name, {
        "before": before, "done": done, "from": began, "acted": acted, "to": ended, "well": well is not None,
        "after": after, "strays": strays(), "took": [round(seen - acted, 1), round(ended - seen, 1)],
    })  # fmt: skip


def address(slot: int) -> str:
    return str(status()["slots"][slot]["address"]).removeprefix("unix:")


# --- the steps ------------------------------------------------------------------------------------------


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
    environ = Path(f"/proc/{processes()['pids']['0']}/environ").read_bytes().decode().split("\0")
    words = [
        path.read_bytes()
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.parent.name != str(os.getpid())
    ]
    units = [f"{UNIT}.service", *(f"{UNIT}-slot{slot}.service" for slot in SLOTS)]
    shown = sh("systemctl", "show", "--all", *units)["out"]
    written = "".join(path.read_text() for path in Path("/run/systemd/transient").glob(f"{UNIT}*"))
    note("secrets", {
        "instance": all(secret in "".join(environ) for secret in SECRETS),
        "cmdline": any(secret.encode() in word for word in words for secret in SECRETS),
        "show": any(secret in shown for secret in SECRETS),
        "units": any(secret in written for secret in SECRETS),
        "state": [str(path) for path in Path("/run/numa-launcher").rglob("*.env")],
    })  # fmt: skip


def restart() -> None:
    step("restart-0", lambda: sh("numa-launcher", "restart", "0", timeout=READY_S))


def upgrade() -> None:
    """To a release of the same versions, and back; each time the daemon is started anew from it."""

    def to(*how: str) -> Callable[[], Any]:
        def act() -> Any:
            done = sh("bash", str(Path("repo/scripts/install").absolute()), *how, timeout=600)
            return {"done": done, "restarted": sh("systemctl", "restart", UNIT, timeout=READY_S)}

        return act

    def runs(name: str) -> None:
        words = Path(f"/proc/{last[1]['daemon']}/cmdline").read_bytes().split(b"\0")
        current = str(Path("/opt/numa-launcher/current").resolve())
        note(f"{name}-release", {"current": current, "daemon": words[0].decode()})

    began = time.time()
    step("upgrade", to("--without-vllm", "--wheels", "/root/wheels"))
    runs("upgrade")
    # Log lines that instances printed before this daemon started, with their time.
    old = sh("numa-launcher", "logs", "0", "--since", "1h", "--json")
    lines = [json.loads(line) for line in old["out"].splitlines()]
    recent = sh("numa-launcher", "logs", "0", "--since", f"{int(time.time() - began)}s")
    note("logs", {"old": old, "lines": lines, "recent": recent})
    step("rollback", to("--rollback"))
    runs("rollback")


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
    def hit_daemon(number: signal.Signals) -> Callable[[], Any]:
        def act() -> Any:
            old = last[1]["daemon"]
            os.kill(old, number)
            return lambda: until(lambda: processes()["daemon"] not in {0, old}, READY_S, 0.5)

        return act

    def hit(slot: int, blow: Callable[[int], Any]) -> Callable[[], Any]:
        def act() -> Any:
            old = last[1]["pids"][str(slot)]
            blow(old)

            def replaced() -> bool:
                now = all_ready()
                return now is not None and now["slots"][slot]["pid"] != old

            def again() -> Any:
                until(replaced, READY_S)
                # Once as text.
                if slot == 0:
                    return sh("numa-launcher", "why", "0")
                return ask("numa-launcher", "why", str(slot), "--json")

            return again

        return act

    step("kill-daemon", hit_daemon(signal.SIGKILL))
    step("kill-instance", hit(0, lambda pid: os.kill(pid, signal.SIGKILL)))
    step(
        "oom-instance",
        hit(1, lambda _: request(address(1), "POST", "/fault", {"kind": f"eat {2 * MEMORY_MAX_MIB}"})),
    )
    step("stop-instance", hit(2, lambda pid: os.kill(pid, signal.SIGSTOP)))
    step("freeze-daemon", hit_daemon(signal.SIGSTOP))


def bundle() -> None:
    """Makes a bundle, as for a bug report."""
    file = Path("/root/bundle.tar.gz")
    made = sh("numa-launcher", "bundle", "--lines", "20000", "-o", str(file))
    parts = {}
    if file.exists():
        with tarfile.open(file) as tar:
            for member in tar:
                opened = tar.extractfile(member)
                parts[member.name.partition("/")[2]] = opened.read() if opened is not None else b""
    note("bundle", {
        "made": made,
        "parts": sorted(parts),
        "journal": parts.get("journal.txt", b"").decode(),
        "secret": [name for name, data in parts.items() if any(secret.encode() in data for secret in SECRETS)],
    })  # fmt: skip


def offline() -> None:
    """Takes the second cpu of the last node offline, and online again."""
    online = Path("/sys/devices/system/cpu/cpu7/online")
    step("cpu-offline", lambda: online.write_text("0"))
    note("offline-status", status())
    step("cpu-online", lambda: online.write_text("1"))


def end() -> None:
    note("final", status())
    note("verify", ask("numa-launcher", "verify", "--json"))
    load.terminate()
    load.wait(60)
    before = list(last[1]["pids"].values())
    note("stop", sh("systemctl", "stop", UNIT, timeout=READY_S))
    note("stopped", {
        "units": sh("systemctl", "list-units", "--plain", "--no-legend", "--state=active,failed,deactivating",
                    f"{UNIT}*.service", f"{UNIT}*.socket")["out"],
        "instances": [pid for pid in before if Path(f"/proc/{pid}").exists()],
        "processes": sh("pgrep", "--full", "--list-full", "fake_engine|launcher serve")["out"],
        "port": sh("bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8000")["status"],
    })  # fmt: skip
    note("audit", {
        "verify": sh("numa-launcher", "audit", "verify", str(AUDIT)),
        "kinds": [json.loads(line)["kind"] for path in sorted(AUDIT.glob("audit-*.jsonl"))
                  for line in path.read_text().splitlines()],
    })  # fmt: skip
    note("uninstall", sh("bash", str(Path("repo/scripts/uninstall").absolute()), "--purge"))
    note("left", [str(path) for folder in ("/opt", "/etc", "/run", "/usr/lib/sysusers.d", "/var/lib", "/var/cache")
                  for path in Path(folder).glob("numa-launcher*")]
         + sh("systemctl", "list-unit-files", "--no-legend", f"{UNIT}*")["out"].splitlines())  # fmt: skip


if __name__ == "__main__":
    install()
    start()
    secrets()
    load = subprocess.Popen([sys.executable, "load.py", "127.0.0.1", "8000", str(LOAD)])
    try:
        until(lambda: LOAD.exists() and served(0), READY_S)
        last = time.time(), processes()
        for act in (restart, upgrade, reload, unplanned, offline, bundle, end):
            act()
    finally:
        load.terminate()
    print(json.dumps(facts["seconds"]))
