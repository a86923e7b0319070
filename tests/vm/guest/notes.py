"""Shared by the guest's scripts: facts.json, commands with deadlines, the daemon's status."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOCKET = "/run/numa-launcher/control.sock"
# Emulation is 10 to 30 times slower than the host, and slower still on a busy host.
COMMAND_S = 900.0

facts: dict[str, Any] = {}
began = time.monotonic()


def note(name: str, value: Any) -> Any:
    """Records one fact; the file is always complete, even if the guest dies later."""
    facts[name] = value
    facts.setdefault("seconds", {})[name] = round(time.monotonic() - began, 1)
    new = Path("facts.new")
    new.write_text(json.dumps(facts, indent=1))
    new.replace("facts.json")
    print(f"{time.monotonic() - began:6.1f} s  {name}", flush=True)
    return value


def sh(*argv: str, timeout: float = COMMAND_S) -> dict[str, Any]:
    """Runs a command; a failure is recorded, too."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"status": None, "out": "", "error": f"{' '.join(argv)}: more than {timeout:.0f} s"}
    return {"status": done.returncode, "out": done.stdout, "error": done.stderr}


def ask(*argv: str) -> Any:
    """The JSON that a verb prints, or the failure."""
    done = sh(*argv)
    try:
        return {"status": done["status"], **json.loads(done["out"])}
    except ValueError:
        return done


def until(look: Callable[[], Any], seconds: float, pause_s: float = 1.0) -> Any:
    """Polls `look`: its first true value, or the last value after the deadline."""
    deadline = time.monotonic() + seconds
    while not (seen := look()) and time.monotonic() < deadline:
        time.sleep(pause_s)
    return seen


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def request(path: str, method: str, target: str, body: Any = None, timeout: float = 60.0) -> Any:
    """One exchange over a UNIX socket: the JSON of its answer; None when there is none."""
    to = _Unix(path, timeout)
    try:
        to.request(method, target, body=None if body is None else json.dumps(body),
                   headers={"Content-Type": "application/json"} if body is not None else {})  # fmt: skip
        return json.loads(to.getresponse().read())
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        to.close()


def status() -> dict[str, Any]:
    """The daemon's status, without starting another interpreter; {} while it does not answer."""
    return request(SOCKET, "GET", "/v1/status") or {}
