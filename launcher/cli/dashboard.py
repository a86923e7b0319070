"""`numa-launcher dashboard`."""

from __future__ import annotations

import argparse
import asyncio
from typing import Final

from launcher.cli import options
from launcher.errors import LauncherError

DEFAULT: Final = "127.0.0.1:8430"
# So that a wrong --socket is seen at once.
_FIRST_S: Final = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_socket(parser)
    parser.add_argument(
        "--listen", default=DEFAULT, metavar="ADDRESS",
        help=f"listen on 127.0.0.1:PORT (port 0: any free port) or unix:PATH (default: {DEFAULT})",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    import uvloop  # noqa: PLC0415  heavy

    from launcher.dashboard import listen  # noqa: PLC0415  heavy
    from launcher.dashboard.server import serve  # noqa: PLC0415  heavy

    path = options.socket_of(args)

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
        runner.run(serve(sock, path, say))
    return 0
