"""`numa-launcher logs SLOT`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

from launcher.cli import options
from launcher.control.client import UnreachableError

if TYPE_CHECKING:
    from launcher.control.client import ControlClient


# --- Follows output of a daemon across its restarts. ---

POLL_S: Final = 0.5
T = TypeVar("T")


def over_restarts(ask: Callable[[], Iterable[T]]) -> Iterator[T]:
    """The items of repeated answers, until Ctrl-C. While the daemon is away, prints one note and retries.

    Raises LauncherError when the daemon refuses, or does not answer the first request."""
    reached = said = False
    while True:
        try:
            answer = ask()
            reached, said = True, False
            yield from answer
        except UnreachableError as error:
            if not reached:
                raise
            if not said:
                print(f"{error.message}; waiting for the daemon", file=sys.stderr, flush=True)
                said = True
        time.sleep(POLL_S)


_LAST: Final = 100
# The maximum that the daemon accepts; it keeps logging.tail_lines.
_ALL: Final = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "slot", type=options.slot_number, metavar="SLOT", help="select the slot by its number"
    )
    options.add_socket(parser)
    parser.add_argument(
        "-n", "--lines", type=options.count, metavar="N",
        help="print the last N lines (default: 100; with --since: all)",
    )  # fmt: skip
    parser.add_argument(
        "--since", type=options.since, metavar="AGO",
        help="print only lines newer than AGO, such as 90s, 10m, 2h or 1d",
    )  # fmt: skip
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="keep printing new lines until Ctrl-C, also after a restart of the daemon",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def run(args: argparse.Namespace) -> int:
    client = options.client_of(args)
    count = args.lines if args.lines is not None else _ALL if args.since is not None else _LAST
    after = 0.0 if args.since is None else time.time() - args.since
    path = f"/slots/{args.slot}/logs?tail="
    for line in _followed(client, path, count) if args.follow else client.get(f"{path}{count}")["lines"]:
        if line["time"] >= after:
            print(json.dumps(line) if args.json else _text(line), flush=args.follow)
    return 0


def _followed(client: ControlClient, path: str, count: int) -> Iterator[dict[str, Any]]:
    """Across restarts of the daemon. A new daemon repeats earlier lines; these are skipped."""
    seen: float | None = None

    def ask() -> Iterator[dict[str, Any]]:
        before = seen
        lines = client.lines(f"{path}{count if before is None else _ALL}&follow=1")
        return (line for line in lines if before is None or line["time"] > before)

    for line in over_restarts(ask):
        seen = line["time"]
        yield line


def _text(line: dict[str, Any]) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(line['time']))} g{line['generation']} | {line['text']}"
