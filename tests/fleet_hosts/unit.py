"""What systemd does for a service on a host: holds its listening socket, restarts it whenever it ends.

    python -m fleet_hosts.unit [--listen HOST:PORT] run NAME -- COMMAND...
    python -m fleet_hosts.unit restart NAME

A container has no systemd. `restart` returns once the new process runs, as `systemctl restart` of a simple service.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

UNITS = Path("/run/units")
# RestartSec= of numa-launcher.service is of this order; shorter than any time limit of the fleet.
PAUSE_S = 0.3
RESTARTED_WITHIN_S = 90.0
_HANDED_OVER = 3  # the first descriptor that sd_listen_fds(3) looks at


def run(name: str, listen: str, command: list[str]) -> None:
    """Never returns."""
    UNITS.mkdir(exist_ok=True)
    (UNITS / f"{name}.unit").write_text(str(os.getpid()))
    if listen:
        _listen(listen)
    process: subprocess.Popen[bytes] | None = None

    def restart(*_: object) -> None:
        if process is not None:
            process.terminate()

    signal.signal(signal.SIGHUP, restart)
    while True:
        process = subprocess.Popen(
            ["bash", "-c", 'export LISTEN_PID=$$; exec "$@"', "unit", *command],
            close_fds=False,
            env=os.environ | ({"LISTEN_FDS": "1", "LISTEN_FDNAMES": "http"} if listen else {}),
        )
        (UNITS / f"{name}.main").write_text(str(process.pid))
        print(f"unit {name}: exited with {process.wait()}", flush=True)
        time.sleep(PAUSE_S)


def _listen(address: str) -> None:
    host, _, port = address.rpartition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, int(port)))
    sock.listen(1024)
    os.dup2(sock.detach(), _HANDED_OVER)
    os.set_inheritable(_HANDED_OVER, True)  # dup2 onto itself leaves it as it was


def restart(name: str) -> int:
    """0 once another process runs."""
    main = UNITS / f"{name}.main"
    before, deadline = main.read_text(), time.monotonic() + RESTARTED_WITHIN_S
    os.kill(int((UNITS / f"{name}.unit").read_text()), signal.SIGHUP)
    while main.read_text() == before:
        if time.monotonic() > deadline:
            print(f"cannot restart {name}: it has not ended within {RESTARTED_WITHIN_S:g} s", file=sys.stderr)
            return 1
        time.sleep(0.05)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("verb", choices=("run", "restart"))
    parser.add_argument("name")
    parser.add_argument("--listen", default="")
    parser.add_argument("command", nargs="*")
    args = parser.parse_args()
    if args.verb == "run":
        run(args.name, args.listen, args.command)
    return restart(args.name)


if __name__ == "__main__":
    sys.exit(main())
