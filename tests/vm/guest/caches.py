#!/opt/venv/bin/python
"""In the guest, as root: compile caches under the shipped unit, with instances as their own user.

Judges nothing: facts.json goes back to the host, whose tests do.
"""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

from notes import note, sh, status, until
from units import BIN, SITE, UNIT, install_package, install_units

READY_S = 600.0
BASE = Path("/var/cache/numa-launcher")
ROOTS = Path("/var/lib/only-root")
SECRET = "only root may read this"
PRECIOUS = "root's state"

CONFIG = """
[[models]]
name = "fake"
path = "fake/model"
dtype = "float32"
[layout]
strategy = "per-node"
reserve_cores = 0
[memory]
kv_cache = "16MiB"
reserve = "16MiB"
instance_overhead = "32MiB"
[engine]
command = ["/opt/venv/bin/vllm"]
[supervision]
probe_timeout_s = 60
stop_timeout_s = 60
"""


def install() -> None:
    """The units as they are, and a stand-in for vLLM with vLLM's metadata beside our own package."""
    install_package()
    vllm = BIN / "vllm"
    shutil.copy("stand_in_vllm.py", vllm)
    vllm.chmod(0o755)
    metadata = SITE / "vllm-0.32.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    Path("/etc/numa-launcher").mkdir()
    Path("/etc/numa-launcher/config.toml").write_text(CONFIG)
    install_units(UNIT)
    ROOTS.mkdir(mode=0o700)
    (ROOTS / "secret").write_text(SECRET)
    (ROOTS / "state").write_text(PRECIOUS)
    for file in ROOTS.iterdir():
        file.chmod(0o644)


def ready() -> dict[str, Any] | None:
    now = status()
    return now if now and now["ready"] == len(now["slots"]) == 2 else None


def slot(number: int) -> Path:
    (found,) = BASE.glob(f"*/slot{number}")
    return found


def kept() -> bool:
    """Whether both slots have stamped caches, and nobody compiles together any more."""
    return len([*BASE.glob("*/slot*/stamp.json")]) == 2 and not [*BASE.glob("*/workshop-*")]


def tree() -> dict[str, Any]:
    """Every file, folder and link of the caches: its owner, mode, and content or target."""
    found = {}
    for path in sorted(BASE.rglob("*")):
        facts = path.lstat()
        what = (
            str(path.readlink()) if path.is_symlink() else path.read_bytes().hex() if path.is_file() else None
        )
        found[str(path.relative_to(BASE))] = [path.owner(), stat.S_IMODE(facts.st_mode), what]
    return found


def as_user(script: str) -> dict[str, Any]:
    """Plants links, as a model's code could."""
    return sh("setpriv", f"--reuid={UNIT}", f"--regid={UNIT}", "--init-groups", "--", "sh", "-c", script)


def restart(number: int) -> dict[str, Any]:
    done = sh("numa-launcher", "restart", str(number), timeout=READY_S)
    return {"done": done, "ready": until(ready, READY_S) is not None}


def serve() -> None:
    note("start", sh("systemctl", "start", UNIT, timeout=READY_S))
    note("ready", until(ready, READY_S) is not None)
    note("unit", sh("systemctl", "show", UNIT, "--property=RestrictSUIDSGID,CapabilityBoundingSet")["out"])
    until(kept, READY_S)
    note("first", tree())
    file = Path("/var/lib/numa-launcher/usage/usage.db")
    until(file.exists, READY_S)
    note("ledger", {
        "owners": [file.owner(), file.parent.owner()],
        "modes": [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent)],
        "instances": as_user(f"cat {file}; touch {file.parent}/mine"),
    })  # fmt: skip


def copy() -> None:
    """The second slot has nothing, and the first one what it needs."""
    note("emptied", as_user(f"rm -rf {slot(1)}"))
    note("restart-1", restart(1))
    until(kept, READY_S)
    note("second", tree())


def plant() -> None:
    """Links that lead root to its own files."""
    folder = slot(0)
    note("planted", as_user(
        f"cd {folder} && rm -rf inductor && ln -s {ROOTS} inductor && ln -sf {ROOTS}/state .stamp.json.0 && "
        f"cd /run/numa-launcher/control.instances && rm -rf slot0 && ln -s {ROOTS} slot0"
    ))  # fmt: skip
    note("restart-0", restart(0))
    until(lambda: "slot 0: cannot stamp" in sh("journalctl", "--unit", UNIT)["out"], 60.0)
    note("planted-tree", tree())
    facts = ROOTS.stat()
    note("roots", {
        "group": facts.st_gid, "mode": stat.S_IMODE(facts.st_mode), "state": (ROOTS / "state").read_text(),
        "names": sorted(path.name for path in ROOTS.iterdir()),
        "found": as_user(f"grep -rlF '{SECRET}' {BASE} /run/numa-launcher/control.instances 2>/dev/null || true")["out"],
    })  # fmt: skip


def end() -> None:
    lines = sh("journalctl", "--unit", f"{UNIT}*", "--output", "json")["out"].splitlines()
    note("journal", [[entry.get("_SYSTEMD_UNIT"), entry.get("MESSAGE")] for entry in map(json.loads, lines)])
    note("stop", sh("systemctl", "stop", UNIT))
    note("run", sorted(str(path) for path in Path("/run/numa-launcher").rglob("*")))


if __name__ == "__main__":
    for step in (install, serve, copy, plant, end):
        step()
