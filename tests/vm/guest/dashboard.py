#!/opt/venv/bin/python
"""In the guest, as root: the dashboard's unit as its own user, before the daemon of the shipped unit.

Judges nothing: facts.json goes back to the host, whose tests do.
"""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

from notes import note, request, sh, status, until
from units import UNIT, install_package, install_units

PAGE = "numa-launcher-dashboard"
OWN = "/run/numa-launcher-dashboard/http.sock"
READY_S = 600.0
ASK = f"""
import http.client, socket, sys
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX); self.sock.connect({OWN!r})
to = Unix("localhost"); to.request("GET", "/api/now"); print(to.getresponse().status)
"""


def install() -> None:
    install_package()
    engine = [sys.executable, "/srv/fake_engine.py", "--uds", "{uds}", "--model", "{name}"]
    Path("/etc/numa-launcher").mkdir()
    Path("/etc/numa-launcher/config.toml").write_text(
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
[control]
read_group = "{PAGE}"
[supervision]
probe_timeout_s = 60
stop_timeout_s = 60
"""
    )
    install_units(UNIT, PAGE)


def page() -> dict[str, Any]:
    return request(OWN, "GET", "/api/now") or {}


def as_user(*options: str) -> dict[str, Any]:
    """What a user gets of the page."""
    return sh("setpriv", *options, "--", sys.executable, "-I", "-c", ASK)


def look() -> None:
    note("enabled", sh("systemctl", "is-enabled", PAGE))
    note("start-page", sh("systemctl", "start", PAGE, timeout=READY_S))
    note("before", until(page, READY_S))
    note("start", sh("systemctl", "start", UNIT, timeout=READY_S))
    until(lambda: status().get("ready"), READY_S)
    note("now", until(lambda: (now := page()).get("answers") and now, READY_S) or page())
    pid = sh("systemctl", "show", "--property=MainPID", "--value", PAGE)["out"].strip()
    note("process", sh("ps", "-o", "user:40=,group:40=,nice=", "-p", pid)["out"].split())
    file, folder = Path(OWN), Path(OWN).parent
    note(
        "socket",
        [file.owner(), file.group(), stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(folder.stat().st_mode)],
    )
    member, stranger = "--reuid=65534", "--regid=65534"
    note("member", as_user(member, stranger, f"--groups={sh('id', '-g', PAGE)['out'].strip()}"))
    note("stranger", as_user(member, stranger, "--clear-groups"))
    note("change", request_as_reader())
    note("security", sh("systemd-analyze", "security", PAGE)["out"].splitlines()[-1:])
    note("stop", sh("systemctl", "stop", PAGE, timeout=READY_S))
    note("left", [file.exists(), sh("journalctl", "--unit", PAGE, "--output", "cat")["out"]])
    sh("systemctl", "stop", UNIT, timeout=READY_S)


def request_as_reader() -> dict[str, Any]:
    """A change that the dashboard's user asks for."""
    return sh("setpriv", f"--reuid={PAGE}", f"--regid={PAGE}", "--init-groups", "--",
              f"{Path(sys.executable).parent}/{UNIT}", "drain", "0", "--no-wait")  # fmt: skip


if __name__ == "__main__":
    install()
    look()
