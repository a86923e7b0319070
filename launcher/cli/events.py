"""`numa-launcher events`."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, Final

from launcher.cli import options
from launcher.cli.logs import over_restarts

# The daemon keeps this many.
_ALL: Final = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_socket(parser)
    parser.add_argument(
        "-n", "--lines", type=options.count, default=50, metavar="N",
        help="print the last N events (default: 50)",
    )  # fmt: skip
    parser.add_argument(
        "--slot", type=options.slot_number, metavar="SLOT", help="print only events of this slot"
    )
    parser.add_argument("--audit", action="store_true", help="print only commands of operators")
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="keep printing new events until Ctrl-C, also after a restart of the daemon",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def run(args: argparse.Namespace) -> int:
    client = options.client_of(args)
    after, count = 0, args.lines

    def ask() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = client.get(f"/events?tail={count}&after={after}")["events"]
        return found

    for event in over_restarts(ask) if args.follow else ask():
        after, count = event["number"], _ALL
        if _wanted(event, args):
            print(json.dumps(event) if args.json else to_text(event), flush=args.follow)
    return 0


def _wanted(event: dict[str, Any], args: argparse.Namespace) -> bool:
    fields = event["fields"]
    if args.audit and "audit" not in fields:
        return False
    return args.slot is None or str(fields.get("slot", "")) == str(args.slot)


def to_text(event: dict[str, Any]) -> str:
    at = time.strftime("%m-%d %H:%M:%S", time.localtime(event["time"]))
    return f"{at} {event['level']:<7} {event['message']}"
