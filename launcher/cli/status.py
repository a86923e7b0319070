"""`numa-launcher status`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from typing import Any, Final

from launcher.cli import options
from launcher.cli.status_table import WIDTH, to_text
from launcher.errors import LauncherError
from launcher.verdict import level, summary

# Cursor home and clear to the end: the output overwrites itself.
CLEAR: Final = "\x1b[H\x1b[J"
# Far above the usual milliseconds, so that only a hung daemon exceeds it.
ANSWER_S: Final = 10.0
MIN_WATCH_S: Final = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_socket(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="print JSON; docs/control-protocol.md describes every field"
    )
    form.add_argument(
        "--short", action="store_true",
        help="print one line for a monitor; exit code 0: all slots ready, 1: some, 2: none, or the daemon does not answer",
    )  # fmt: skip
    form.add_argument("--slots", action="store_true", help="print only the slot numbers, one per line")
    form.add_argument(
        "--wide", action="store_true", help="print every column, regardless of the terminal's width"
    )
    parser.add_argument(
        "--watch", type=options.seconds, nargs="?", const=2.0, metavar="S",
        help="print again every S seconds (default: 2) until Ctrl-C",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the state. Exit code 1 when no slot is ready."""
    client = options.client_of(args)
    try:
        status = client.get("/status", ANSWER_S)
    except LauncherError as error:
        if not args.short:
            raise
        print(f"DOWN {error.message}")  # a monitor reads standard output
        return 2
    if args.slots:
        print("\n".join(str(slot["slot"]) for slot in status["slots"]))
        return 0
    if args.watch is None:
        print(_shown(args, status))
        return level(status) if args.short else int(not status["ready"])
    text = _shown(args, status)
    while True:
        print(text if args.json or not sys.stdout.isatty() else CLEAR + text, flush=True)
        time.sleep(max(MIN_WATCH_S, args.watch))
        try:
            text = _shown(args, client.get("/status", ANSWER_S))
        except LauncherError as error:  # the daemon may be restarting
            text = json.dumps({"error": error.message}) if args.json else error.message


def _shown(args: argparse.Namespace, status: dict[str, Any]) -> str:
    if args.json:
        return json.dumps(status, indent=2)
    if args.short:
        return summary(status, time.time())
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    return to_text(status, time.time(), None if args.wide else width)
