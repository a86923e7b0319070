#!/opt/venv/bin/python
"""In the guest, as root: the shipped units when the models' mount and the listener's address come after the start.

Judges nothing: facts.json goes back to the host, whose tests do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from notes import note, sh, status, until
from units import BIN, UNIT, install_package, install_units

READY_S = 600.0
ADDRESS = "10.86.0.7"
MOUNT, MODEL = Path("/srv/share"), Path("/srv/share/model")
ASK = """
import http.client, sys
to = http.client.HTTPConnection(sys.argv[1], 8000); to.request("GET", "/health"); print(to.getresponse().status)
"""


def install() -> None:
    install_package()
    engine = [
        sys.executable,
        "/srv/fake_engine.py",
        "--uds",
        "{uds}",
        "--model",
        "{name}",
        "--metrics",
        "{model}/metrics",
    ]
    Path("/etc/numa-launcher").mkdir()
    Path("/etc/numa-launcher/config.toml").write_text(
        f"""
[[models]]
name = "fake"
path = "{MODEL}"
[layout]
strategy = "per-node"
reserve_cores = 0
[engine]
kind = "command"
command = {json.dumps(engine)}
[supervision]
probe_timeout_s = 60
stop_timeout_s = 60
"""
    )
    install_units(UNIT)
    drop_in = Path(f"/etc/systemd/system/{UNIT}.socket.d")
    drop_in.mkdir()
    (drop_in / "listen.conf").write_text(f"[Socket]\nListenStream=\nListenStream={ADDRESS}:8000\n")
    sh("systemctl", "daemon-reload")
    MOUNT.mkdir()


def mount() -> None:
    """As a network mount that comes: the model is on it."""
    sh("mount", "-t", "tmpfs", "share", str(MOUNT))
    MODEL.mkdir()
    (MODEL / "config.json").write_text("{}")
    (MODEL / "metrics").write_text("")


def link() -> None:
    """As a network card that is found late, or a floating address that moves here."""
    for words in (
        ("link", "add", "late0", "type", "dummy"),
        ("address", "add", f"{ADDRESS}/24", "dev", "late0"),
        ("link", "set", "late0", "up"),
    ):
        note(" ".join(words[:2]), sh("ip", *words))


def asked(address: str) -> dict[str, Any]:
    return sh(sys.executable, "-I", "-c", ASK, address)


def listening() -> list[str]:
    """Local addresses of every TCP listener of the host."""
    return [line.split()[3] for line in sh("ss", "-Hltn")["out"].splitlines()]


def unit(name: str, what: str) -> str:
    return str(sh("systemctl", "show", f"--property={what}", "--value", name)["out"].strip())


def slot0() -> dict[str, Any]:
    return next(iter(status().get("slots", ())), {})


def look() -> None:
    note("start", sh("systemctl", "start", "--no-block", UNIT))
    said = until(lambda: "waiting for it" in unit(f"{UNIT}.service", "StatusText"), READY_S)
    note(
        "before the mount",
        [said, unit(f"{UNIT}.service", "ActiveState"), unit(f"{UNIT}.service", "StatusText")],
    )
    note("asked meanwhile", sh(str(BIN / UNIT), "status"))
    note("socket", unit(f"{UNIT}.socket", "ActiveState"))
    mount()
    note("after the mount", until(lambda: status().get("ready"), READY_S))
    note("restarts", unit(f"{UNIT}.service", "NRestarts"))
    note("before the address", [asked(ADDRESS), asked("127.0.0.1"), listening()])
    note("absent", status().get("absent_endpoints"))
    link()
    note("after the address", [asked(ADDRESS), asked("127.0.0.1"), listening()])
    note("absent no more", status().get("absent_endpoints"))
    note("away", sh("umount", "--lazy", str(MOUNT)))
    sh("systemctl", "kill", "--signal=KILL", f"{UNIT}-slot0.service")
    note(
        "without the mount",
        until(lambda: (slot0().get("last_cause") or {}).get("name") == "cannot-start" and slot0(), READY_S),
    )
    mount()
    note("again", until(lambda: slot0().get("state") == "ready", READY_S))
    note("stop", sh("systemctl", "stop", UNIT, timeout=READY_S))


if __name__ == "__main__":
    install()
    look()
