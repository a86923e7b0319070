"""`numa-launcher usage`."""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from msgspec.structs import asdict

from launcher.accounts.report_values import BY, WANTED, Question, UsageRequest, UsageRow, parse_time
from launcher.base.errors import LauncherError
from launcher.base.text import printable_tree
from launcher.cli import options
from launcher.cli.usage_table import requests_to_lines, to_lines
from launcher.config.schema import Usage
from launcher.control.client import UnreachableError

# --- The usage ledger's file on the command line, for verbs that no daemon answers. ---


def find_ledger(usage: Usage) -> Path:
    """The ledger in the state folder of the user who asks; the service's where only that one exists and $STATE_DIRECTORY
    names no folder. Raises LauncherError for a user without a home."""
    from launcher.accounts.ledger_file import ledger_path  # noqa: PLC0415  heavy
    from launcher.base.files import SYSTEM, state_folder  # noqa: PLC0415  heavy

    own, service = (
        ledger_path(usage, folder) for folder in (state_folder(None, os.environ, os.geteuid()), SYSTEM)
    )
    # os.path: another user's folder, which may not be searched, is no error here.
    if os.environ.get("STATE_DIRECTORY") or os.path.exists(own) or not os.path.exists(service):  # noqa: PTH110
        return own
    return service


WIDTH: Final = 100
DEFAULT_LIMIT: Final = 50
# Of the daemon's answer: as long as it may take for one.
ANSWER_S: Final = 60.0
# What a spreadsheet takes for a formula at the begin of a cell, the full-width forms included (OWASP, "CSV Injection").
_FORMULA: Final = tuple("=+-@\t\r＝＋－＠")


def _checked(text: str) -> str:
    parse_time(text, 0.0, ZoneInfo("UTC"))
    return text


_TIME: Final = options.Value(WANTED, _checked)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_question(parser, BY)
    add = parser.add_argument
    add(
        "--requests",
        action="store_true",
        help="list the latest single requests and what was decided for each",
    )
    add(
        "--limit", type=options.Value("a number from 1 to 10000", options.whole(1, 10_000)), metavar="N",
        help=f"list at most N requests (default: {DEFAULT_LIMIT})",
    )  # fmt: skip
    add_form(parser)
    add("--file", type=Path, metavar="FILE", help="read this ledger instead of asking the daemon")
    options.add_socket(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    put_back = actions.add_parser(
        "restore", help="put a backup in the place of the usage ledger, while the daemon is stopped",
        description="Put a backup in the place of the usage ledger. The daemon must be stopped: stop, restore, start. The "
        "backup is checked before, and not changed; the ledger before is kept beside it.", allow_abbrev=False,
    )  # fmt: skip
    put_back.add_argument(
        "backup",
        type=Path,
        metavar="FILE",
        help="the backup, such as `sqlite3 usage.db '.backup FILE'` makes",
    )
    put_back.add_argument(
        "-c", "--config", type=Path, metavar="FILE", default=argparse.SUPPRESS,
        help="use [usage] path of this configuration file",
    )  # fmt: skip


def add_question(parser: argparse.ArgumentParser, by: Sequence[str]) -> None:
    """Which requests are counted."""
    add = parser.add_argument
    add(
        "--since", type=_TIME, metavar="TIME",
        help=f"begin here: {WANTED} (default: 30d; with --requests 1h). Days count from midnight in [usage] zone",
    )  # fmt: skip
    add("--until", type=_TIME, metavar="TIME", default="now", help="end before this time (default: now)")
    add("--by", choices=by, help="print a row for each of these (default: only the total)")
    add("--key", metavar="NAME", help="count only the requests of this API key")
    add("--model", metavar="NAME", help="count only the requests for this model")


def add_form(parser: argparse.ArgumentParser) -> None:
    """How a report is printed."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--csv", action="store_true", help="print comma-separated values; docs/usage.md describes them"
    )
    form.add_argument(
        "--json", action="store_true", help="print JSON; docs/control-protocol.md describes every field"
    )
    form.add_argument(
        "--wide", action="store_true", help="print every column, regardless of the terminal's width"
    )


def run(args: argparse.Namespace) -> int:
    """Print a report: the daemon's, or of the ledger's file when no daemon answers. Or restore a backup."""
    if args.action == "restore":
        return _restore(args)
    question = _question(args)
    show(args, _from_daemon(args, question) if args.file is None else _from_file(args, question)[1])
    return 0


def _restore(args: argparse.Namespace) -> int:
    from launcher.accounts.ledger_file import restore  # noqa: PLC0415  heavy

    path, _ = _ledger(args)
    found, until = restore(path, args.backup, time.time())
    print(f"{found.path}: restored from {args.backup}")
    if until is not None:
        last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(until))
        print(f"its last request ended at {last}; later ones are not in it")
    if found.replaced is not None:
        print(f"the ledger before: {found.replaced}")
    for retired in found.retired:
        print(f"does not count any longer: {retired}")
    return 0


def show(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Print it as the arguments of `add_form` say."""
    if args.json:
        print(json.dumps(report, indent=2))
        return
    report = printable_tree(report)
    if args.csv:
        _print_csv(report["requests"], UsageRequest) if args.requests else _print_csv(_rows(report), UsageRow)
        return
    width = None if args.wide else shutil.get_terminal_size((WIDTH, 24)).columns
    print("\n".join((requests_to_lines if args.requests else to_lines)(report, width)))


def _question(args: argparse.Namespace) -> Question:
    if args.limit is not None and not args.requests:
        raise LauncherError(
            "cannot limit a report: --limit is for single requests", "add --requests, or remove --limit"
        )
    if args.requests and args.by is not None:
        raise LauncherError(
            f"cannot list single requests by {args.by}: they are listed in order of time",
            "remove --by, or --requests; --key and --model select requests",
        )
    question = Question(
        since=args.since or ("1h" if args.requests else "30d"),
        until=args.until, by=args.by, key=args.key, model=args.model,
    )  # fmt: skip
    if not args.requests:
        question.check()
    return question


def given_of(question: Question) -> dict[str, str]:
    """The options of GET /v1/usage."""
    return {name: value for name, value in asdict(question).items() if value is not None}


def _from_daemon(args: argparse.Namespace, question: Question) -> dict[str, Any]:
    given = given_of(question)
    path = "/usage"
    if args.requests:
        path, given["limit"] = "/usage/requests", str(args.limit or DEFAULT_LIMIT)
    try:
        return options.client_of(args).get(f"{path}?{urlencode(given)}", ANSWER_S)
    except UnreachableError as unreachable:
        try:
            file, report = _from_file(args, question)
        except LauncherError as error:
            raise LauncherError(
                f"{unreachable.message}; and without the daemon: {error.message}", error.remedy
            ) from None
        print(f"{unreachable.message}; the figures are from '{file}'", file=sys.stderr)
        return report


def _from_file(args: argparse.Namespace, question: Question) -> tuple[Path, dict[str, Any]]:
    import msgspec  # noqa: PLC0415  heavy

    from launcher.accounts.usage_report import latest_requests, report  # noqa: PLC0415  heavy

    path, currency = _ledger(args)
    found = (
        latest_requests(path, question, args.limit or DEFAULT_LIMIT, time.time(), currency)
        if args.requests
        else report(path, question, time.time(), currency)
    )
    return path, msgspec.to_builtins(found)


def _ledger(args: argparse.Namespace) -> tuple[Path, str]:
    """The ledger's file, and the currency of its amounts."""
    from launcher.config.usage_schema import Cost, Usage  # noqa: PLC0415  heavy

    config = options.configured(args.config)
    usage, cost = (Usage(), Cost()) if config is None else (config.usage, config.cost)
    return args.file or find_ledger(usage), cost.currency


def _rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Without --by the total, as one row; else no total, so that a column's sum is the total."""
    return [report["total"]] if report["by"] is None else list(report["rows"])


def _print_csv(rows: Iterable[dict[str, Any]], kind: type[UsageRow | UsageRequest]) -> None:
    names = kind.__struct_fields__
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_cell(row[name]) for name in names] for row in rows)


def _cell(value: Any) -> Any:
    """Names come from clients: one that a spreadsheet would take for a formula gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
