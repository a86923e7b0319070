"""`numa-launcher dashboard`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Final

from launcher.base.errors import LauncherError
from launcher.cli import options
from launcher.fleet.config import DEFAULT_CONFIG, load_fleet
from launcher.fleet.ingress import endpoints, status_socket

DEFAULT: Final = "127.0.0.1:8430"
# So that a wrong --socket is seen at once.
_FIRST_S: Final = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_socket(parser)
    parser.add_argument(
        "--listen", default=DEFAULT, metavar="ADDRESS",
        help=f"listen on 127.0.0.1:PORT (port 0: any free port) or unix:PATH (default: {DEFAULT})",
    )  # fmt: skip
    parser.add_argument(
        "--fleet", nargs="?", const=DEFAULT_CONFIG, type=Path, metavar="FILE",
        help=f"show all hosts of a fleet, too: on an ingress host, by its fleet.toml (default: {DEFAULT_CONFIG})",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    import uvloop  # noqa: PLC0415  heavy

    from launcher.dashboard import listen  # noqa: PLC0415  heavy
    from launcher.dashboard.fleet import FleetAt  # noqa: PLC0415  heavy
    from launcher.dashboard.server import serve  # noqa: PLC0415  heavy

    path, fleet = options.socket_of(args), None
    if args.fleet is not None:
        config = load_fleet(args.fleet)
        fleet = FleetAt(
            status=str(status_socket(config)),
            endpoints=endpoints(config),
            dashboard=config.hosts.dashboard,
        )

    def say(where: str) -> None:
        print(where, flush=True)
        try:
            options.client_of(args).get("/status", _FIRST_S)
        except LauncherError as error:
            print(f"{error.message}; the page says so until it answers\n{error.remedy}", flush=True)

    with (
        listen.listening(listen.parse(args.listen)) as sock,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(serve(sock, path, say, fleet))
    return 0
