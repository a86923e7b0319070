"""Where the ingress is asked, and what it shows of itself: one JSON object to whoever connects to its socket."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import Any, Final

from launcher.address import in_url
from launcher.fleet.config import FleetConfig

SOCKET: Final = "ingress.sock"
ANSWER_S: Final = 1.5


def status_socket(config: FleetConfig) -> Path:
    """The folder of the member list is closed to the group that may read the status."""
    shared = config.ingress.read_group is not None
    return Path(config.hosts.control).with_name(SOCKET) if shared else Path(config.state) / SOCKET


def read_status(config: FleetConfig) -> dict[str, Any]:
    """What the ingress process on this host knows; {} without one."""
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(str(Path(config.state) / SOCKET))
        with connection.makefile("rb") as answer:
            return dict(json.load(answer))
    return {}


def endpoints(config: FleetConfig) -> tuple[str, ...]:
    """What clients ask, one address per ingress host."""
    scheme = "https" if config.ingress.tls_cert else "http"
    port = config.ingress.listen.rpartition(":")[2]
    return tuple(f"{scheme}://{in_url(host)}:{port}" for host in config.ingress.hosts)
