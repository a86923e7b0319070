"""Sockets that systemd opened for us: they outlive the daemon, and clients queue in them while it restarts.

Source: sd_listen_fds_with_names(3), systemd.socket(5) FileDescriptorName=.
"""

from __future__ import annotations

import socket
from typing import Final

from systemd import daemon

HTTP: Final = "http"
"""FileDescriptorName= of numa-launcher.socket."""
CONTROL: Final = "control"
"""FileDescriptorName= of numa-launcher-control.socket."""

_handed_over: dict[str, list[socket.socket]] | None = None


def sockets() -> dict[str, list[socket.socket]]:
    """Listening sockets by their FileDescriptorName=, non-blocking and not inherited by children; {} without systemd.

    They can be taken once; later calls return the same. Their paths are systemd's: whoever serves on one closes it in
    the end and unlinks nothing."""
    global _handed_over  # noqa: PLW0603  descriptors can be taken only once
    if _handed_over is None:
        _handed_over = _take()
    return _handed_over


def _take() -> dict[str, list[socket.socket]]:
    found: dict[str, list[socket.socket]] = {}
    for fd, name in daemon.listen_fds_with_names().items():
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        sock.set_inheritable(False)
        found.setdefault(name, []).append(sock)
    return found
