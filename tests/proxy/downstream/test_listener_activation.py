"""Sockets of systemd's, as a process of its own gets them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json
from launcher.proxy.downstream import listener
found = listener.sockets()
assert listener.sockets() is found
print(json.dumps({name: [[s.getsockname(), s.gettimeout(), s.get_inheritable()] for s in socks]
                  for name, socks in found.items()}))
"""


def child(environ: dict[str, str], *fds: int) -> dict[str, object]:
    """Run SCRIPT with these as descriptors 3, 4, ... and LISTEN_PID set to its own."""
    moves = " ".join(f"{3 + index}<&{fd}" for index, fd in enumerate(fds))
    line = f'exec env LISTEN_PID=$$ "$0" -c "$1" {moves}' if fds else 'exec "$0" -c "$1"'
    done = subprocess.run(
        ["bash", "-c", line, sys.executable, SCRIPT],
        env=os.environ | environ, pass_fds=fds, capture_output=True, text=True, check=True, timeout=240,
    )  # fmt: skip
    return dict(json.loads(done.stdout))


def test_sockets_come_by_their_names(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
        for sock, name in ((one, "a"), (two, "b")):
            sock.bind(str(tmp_path / name))
            sock.listen()
        found = child({"LISTEN_FDS": "2", "LISTEN_FDNAMES": "http:control"}, one.fileno(), two.fileno())
    assert found == {
        "http": [[str(tmp_path / "a"), 0.0, False]],
        "control": [[str(tmp_path / "b"), 0.0, False]],
    }


def test_without_systemd_there_are_none() -> None:
    assert child({}) == {}
