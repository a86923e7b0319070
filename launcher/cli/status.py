"""`numa-launcher status`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from typing import Any, Final

from launcher.cli import options
from launcher.cli.status_table import WIDTH, level, summary, to_text
from launcher.errors import LauncherError

# Home and clear to the end: one screen that is drawn over itself.
CLEAR: Final = "\x1b[H\x1b[J"
# It is answered within milliseconds; whoever looks must not hang with a daemon that does.
ANSWER_S: Final = 10.0
MIN_WATCH_S: Final = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which daemon, and the form of the answer."""
    options.add_socket(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="for machines; every field is in docs/control-protocol.md"
    )
    form.add_argument(
        "--short", action="store_true",
        help="one line for a pager; exit code 0: all slots are ready, 1: some are, 2: none is, or nobody answers",
    )  # fmt: skip
    form.add_argument("--slots", action="store_true", help="only the slots' numbers, one a line, for scripts")
    form.add_argument("--wide", action="store_true", help="every column, however wide the terminal is")
    parser.add_argument(
        "--watch",
        type=options.seconds,
        nargs="?",
        const=2.0,
        metavar="S",
        help="again every S seconds (2) until Ctrl-C",
    )


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
        except (
            LauncherError
        ) as error:  # it restarts, perhaps: the screen says so, and goes on when it answers
            text = json.dumps({"error": error.message}) if args.json else error.message


def _shown(args: argparse.Namespace, status: dict[str, Any]) -> str:
    if args.json:
        return json.dumps(status, indent=2)
    if args.short:
        return summary(status, time.time())
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    return to_text(status, time.time(), None if args.wide else width)
