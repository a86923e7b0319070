"""`numa-launcher logs SLOT`."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from launcher.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which slot, how many lines, and whether to follow."""
    parser.add_argument("slot", type=options.slot_number, metavar="SLOT")
    options.add_socket(parser)
    parser.add_argument(
        "-n", "--lines", type=options.slot_number, default=100, metavar="N", help="last N lines (default 100)"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new lines until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")


def run(args: argparse.Namespace) -> int:
    """Print the lines."""
    client = options.client_of(args)
    path = f"/slots/{args.slot}/logs?tail={args.lines}"
    lines = client.lines(path + "&follow=1") if args.follow else client.get(path)["lines"]
    for line in lines:
        print(json.dumps(line) if args.json else _text(line), flush=args.follow)
    return 0


def _text(line: dict[str, Any]) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(line['time']))} g{line['generation']} | {line['text']}"
