"""`numa-launcher cost`: what a token costs on this machine, from the usage ledger; `cost estimate` without one."""

from __future__ import annotations

import argparse
import json
import os
import time
import urllib.parse
from pathlib import Path
from typing import Any, Final

from launcher.base.errors import LauncherError
from launcher.cli import cost_estimate, options
from launcher.cli.usage import find_ledger


def _since(text: str) -> str:
    from launcher.accounts.report_values import parse_time, zone_of  # noqa: PLC0415  heavy

    parse_time(text, time.time(), zone_of("UTC"))
    return text


_SINCE: Final = options.Value("a time such as 12h, 30d, 4w, today or 2026-11-01", _since)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_socket(parser)
    parser.add_argument(
        "--since", type=_SINCE, default="30d", metavar="TIME",
        help="count from this time on: 12h, 30d, 4w, today or a day such as 2026-11-01 (default: 30d)",
    )  # fmt: skip
    parser.add_argument(
        "--file", type=Path, metavar="FILE",
        help="read this usage ledger and do not ask the daemon; prices are those of -c, or of the default configuration",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=False)
    summary = "print what a machine would cost for a throughput and a number of requests; needs no daemon"
    cost_estimate.add_arguments(
        actions.add_parser(
            "estimate", help=summary, description=f"{summary[:1].upper()}{summary[1:]}.", allow_abbrev=False
        )
    )


def run(args: argparse.Namespace) -> int:
    """Print costs. Exit code 1: the requests of an estimate do not fit the machine, or the SLO that was measured."""
    if args.action == "estimate":
        return cost_estimate.run(args)
    from launcher.accounts.cost import CostReport  # noqa: PLC0415  heavy
    from launcher.accounts.report_values import zone_of  # noqa: PLC0415  heavy
    from launcher.cli.cost_text import report_lines  # noqa: PLC0415  heavy

    answer = _report(args)
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    import msgspec  # noqa: PLC0415  heavy

    report = msgspec.convert(answer, CostReport)
    print("\n".join(report_lines(report, zone_of(report.zone))))
    return 0


def _report(args: argparse.Namespace) -> dict[str, Any]:
    """Of the daemon, or of the file where none answers."""
    from launcher.control.client import UnreachableError  # noqa: PLC0415  heavy

    if args.file is None:
        try:
            return options.client_of(args).get(f"/cost?since={urllib.parse.quote(args.since)}")
        except UnreachableError as error:
            unreachable = error
        try:
            return _of_file(args)
        except LauncherError as error:
            raise LauncherError(
                f"{unreachable.message}, and without the daemon: {error.message}", error.remedy
            ) from None
    return _of_file(args)


def _of_file(args: argparse.Namespace) -> dict[str, Any]:
    import msgspec  # noqa: PLC0415  heavy

    from launcher.accounts.cost import spent  # noqa: PLC0415  heavy
    from launcher.config.loading import load_config  # noqa: PLC0415  heavy

    config = load_config(args.config or options.default_config(), environ=os.environ)
    path = args.file or find_ledger(config.usage)
    report: dict[str, Any] = msgspec.to_builtins(spent(path, config.cost, args.since, time.time()))
    return report
