#!/opt/venv/bin/python
"""In the guest, as root: the unit of a fleet's ingress before the daemon of the shipped units, without Ray.

Judges nothing: facts.json goes back to the host, whose tests do.
"""

from __future__ import annotations

import http.client
import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from notes import note, sh, until
from units import UNIT, install_package, install_units

INGRESS = "numa-launcher-ingress"
READY_S = 600.0
TOKEN_S = 0.5
ETC, STATE = Path("/etc/numa-launcher"), Path("/var/lib/numa-launcher/fleet")
FLEET = """
[ingress]
hosts = ["127.0.0.1"]
"""
# As the director's list, by the agent of the host.
MEMBERS = {
    "epoch": 1,
    "version": 1,
    "members": [{"host": "host1", "address": "127.0.0.1:8001", "state": "ready", "node": "n"}],
}


def install() -> None:
    install_package()
    engine = [
        sys.executable,
        "/srv/fake_engine.py",
        "--uds",
        "{uds}",
        "--model",
        "{name}",
        "--token-s",
        str(TOKEN_S),
    ]
    ETC.mkdir()
    (ETC / "config.toml").write_text(
        f"""
[[models]]
name = "fake"
path = "fake"
[layout]
cpus = "0-3"
instances_per_socket = 1
reserve_cores = 0
[engine]
kind = "command"
command = {json.dumps(engine)}
[proxy]
trusted_proxies = ["127.0.0.1"]
[supervision]
probe_timeout_s = 60
stop_timeout_s = 60
"""
    )
    (ETC / "fleet.toml").write_text(FLEET)
    # `systemctl edit numa-launcher.socket` of docs/fleet.md.
    drop_in = Path("/etc/systemd/system/numa-launcher.socket.d")
    drop_in.mkdir(parents=True)
    (drop_in / "address.conf").write_text("[Socket]\nListenStream=\nListenStream=127.0.0.1:8001\n")
    install_units(UNIT, INGRESS)


def health() -> int:
    """Hosts that the ingress serves; -1: nobody listens."""
    to = http.client.HTTPConnection("127.0.0.1", 8000, timeout=60)
    try:
        to.request("GET", "/health")
        return int(json.loads(to.getresponse().read()).get("hosts", 0))
    except (OSError, ValueError, http.client.HTTPException):
        return -1
    finally:
        to.close()


class Stream(threading.Thread):
    """One stream through HAProxy."""

    def __init__(self, tokens: int) -> None:
        super().__init__(daemon=True)
        self._tokens = tokens
        self.begun = threading.Event()
        self.text = ""
        self.start()
        self.begun.wait(READY_S)

    def run(self) -> None:
        to = http.client.HTTPConnection("127.0.0.1", 8000, timeout=READY_S)
        body = {"model": "fake", "stream": True, "max_tokens": self._tokens, "prompt": "Hello"}
        try:
            to.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = to.getresponse()
            self.text = f"{answer.status} "
            for line in answer:
                self.text += line.decode()
                self.begun.set()
        except (OSError, http.client.HTTPException) as error:
            self.text += repr(error)
        self.begun.set()

    def end(self) -> dict[str, Any]:
        """Waits for it."""
        self.join(READY_S)
        whole = self.text.startswith("200 ") and self.text.rstrip().endswith("data: [DONE]")
        return {"whole": whole, "tail": self.text[-300:]}


def haproxy() -> list[str]:
    return sh("pgrep", "--exact", "haproxy")["out"].split()


def main_pid() -> str:
    return str(sh("systemctl", "show", "--property=MainPID", "--value", INGRESS)["out"].strip())


def look() -> None:
    note("enabled", sh("systemctl", "is-enabled", INGRESS))
    # Ray's agent writes it; the unit makes the folder at its start.
    STATE.mkdir(parents=True, exist_ok=True, mode=0o700)
    (STATE / "members.json").write_text(json.dumps(MEMBERS))
    note("start-ingress", sh("systemctl", "start", INGRESS, timeout=READY_S))
    note("start", sh("systemctl", "start", UNIT, timeout=READY_S))
    note("hosts", until(lambda: health() == 1, READY_S))
    note("answer", Stream(2).end())
    before, process = haproxy(), main_pid()
    stream = Stream(60)
    note("restart", sh("systemctl", "restart", INGRESS, timeout=READY_S))
    note(
        "restarted",
        {"haproxy": [before, haproxy()], "ingress": [process, main_pid()], "stream": stream.end()},
    )
    note("found-again", until(lambda: (STATE / "ingress.sock").is_socket() and health() == 1, READY_S))
    stream = Stream(60)
    note("stop", sh("systemctl", "stop", INGRESS, timeout=READY_S))
    note("refused", until(lambda: health() == -1, READY_S))
    note("stopped", {"haproxy": haproxy(), "stream": stream.end()})
    note("ended", until(lambda: not haproxy(), READY_S))
    note("again", sh("systemctl", "start", INGRESS, timeout=READY_S))
    note("serves-again", until(lambda: health() == 1, READY_S))
    note("security", sh("systemd-analyze", "security", INGRESS)["out"].splitlines()[-1:])
    note("journal", sh("journalctl", "--unit", INGRESS, "--output", "cat")["out"].splitlines())
    note("wrong", wrong())
    sh("systemctl", "stop", INGRESS, UNIT, timeout=READY_S)


def wrong() -> dict[str, Any]:
    """A wrong configuration: the unit ends and stays so."""
    sh("systemctl", "stop", INGRESS)
    until(lambda: not haproxy(), READY_S)
    shutil.copy(ETC / "fleet.toml", "/root")
    (ETC / "fleet.toml").write_text(FLEET.replace("hosts", "host"))
    sh("systemctl", "start", INGRESS)
    state = until(lambda: sh("systemctl", "is-failed", INGRESS)["out"].strip() == "failed", READY_S)
    return {
        "failed": state,
        "journal": sh("journalctl", "--unit", INGRESS, "--output", "cat", "--lines", "8")["out"],
    }


if __name__ == "__main__":
    install()
    look()
