"""`numa-launcher audit verify|anchor`: proves that an audit trail is whole, and prints what to note elsewhere."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.errors import LauncherError, reason
from launcher.cli import options

if TYPE_CHECKING:
    from launcher.accounts.audit_chain import Anchor
    from launcher.accounts.audit_verify import Report

_KINDS = {
    "request": "requests",
    "control": "control actions",
    "start": "starts",
    "lost": "gaps",
    "torn": "incomplete writes",
}


def _anchor(text: str) -> Anchor:
    from launcher.accounts.audit_chain import Anchor  # noqa: PLC0415  heavy

    return Anchor.parse(text)


_ANCHOR = options.Value("an anchor as `audit anchor` prints it, NUMBER:HASH or HASH", _anchor)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    verify = actions.add_parser(
        "verify", help="check that no line of the audit trail was changed, removed or put in",
        description="Check that no line of the audit trail was changed, removed or put in. Exit code 1: one was; the first "
        "is named. Needs no daemon; a trail that is being written can be checked too.",
        allow_abbrev=False,
    )  # fmt: skip
    verify.add_argument(
        "--anchor", type=_ANCHOR, action="append", default=[], dest="anchors", metavar="ANCHOR",
        help="check that this line, noted earlier, is still in the trail; can be repeated",
    )  # fmt: skip
    verify.add_argument(
        "--anchors", type=Path, dest="file", metavar="FILE",
        help="check the anchors of a file: the first word of each line; - for standard input",
    )  # fmt: skip
    anchor = actions.add_parser(
        "anchor", help="print the number and hash of the trail's last line, to be kept on another machine",
        description="Print the number and hash of the trail's last line, where it stands, and its time. Keep it on another "
        "machine: `audit verify --anchor` then proves that nothing before it was written again.",
        allow_abbrev=False,
    )  # fmt: skip
    for action in (verify, anchor):
        action.add_argument(
            "folder", type=Path, nargs="?", metavar="FOLDER", help="use this folder instead of [audit] path"
        )
        action.add_argument(
            "-c", "--config", type=Path, metavar="FILE",
            help=f"use [audit] path of this configuration file (default: {options.DEFAULT_CONFIG})",
        )  # fmt: skip
        action.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    folder = _folder_of(args)
    try:
        return _verify(args, folder) if args.action == "verify" else _print_anchor(args, folder)
    except OSError as error:
        raise LauncherError(
            f"cannot read the audit trail in '{folder}': {reason(error)}",
            "give its folder, and run as root or as the daemon's user",
        ) from None


def _folder_of(args: argparse.Namespace) -> Path:
    """Raises LauncherError for a folder without a trail."""
    config = None if args.folder is not None else options.configured(args.config)
    folder: str | Path | None = args.folder if config is None else config.audit.path
    if folder is None:
        raise LauncherError(
            "cannot find the audit trail: no FOLDER is given, and the configuration does not set audit.path",
            "give its folder, or a configuration with -c FILE",
        )
    return Path(folder)


def _anchors(args: argparse.Namespace) -> Iterator[Anchor]:
    yield from args.anchors
    if args.file is None:
        return
    try:
        text = sys.stdin.read() if str(args.file) == "-" else args.file.read_text(encoding="utf-8")
    except OSError as error:
        raise LauncherError(
            f"cannot read anchors from '{args.file}': {reason(error)}", "name another file"
        ) from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield _anchor(line.split()[0])
            except ValueError:
                raise LauncherError(
                    f"cannot use line {number} of '{args.file}': it does not begin with an anchor",
                    "keep lines as `numa-launcher audit anchor` prints them",
                ) from None


def _verify(args: argparse.Namespace, folder: Path) -> int:
    from launcher.accounts.audit_verify import verify  # noqa: PLC0415  heavy

    anchors = list(_anchors(args))
    report = verify(folder, anchors)
    if not report.files and report.wrong is not None and report.wrong.place.file == "audit.head":
        raise LauncherError(
            f"cannot find an audit trail in '{folder}': it has no files of one", "give another folder"
        )
    if args.json:
        print(json.dumps(_shown(report, folder), indent=2))
    else:
        print("\n".join(_text(report, folder, len(anchors))))
    return 1 if report.wrong is not None else 0


def _shown(report: Report, folder: Path) -> dict[str, object]:
    wrong, place = report.wrong, report.last_place
    return {
        "folder": str(folder),
        "intact": wrong is None,
        "wrong": wrong and {"file": wrong.place.file, "line": wrong.place.line, "what": wrong.what},
        "files": [str(name) for name in report.files],
        "first": report.first,
        "last": report.last.n,
        "hash": report.last.hash,
        "file": place and place.file,
        "line": place and place.line,
        "time": report.last_time and _utc(report.last_time),
        "lines": report.kinds,
        "lost": report.lost,
        "incomplete_bytes": report.torn_bytes,
        "killed": report.crashes,
        "notes": list(report.notes),
    }


def _text(report: Report, folder: Path, anchors: int) -> Iterator[str]:
    if report.wrong is not None:
        where = folder / report.wrong.place.file
        yield (
            f"{where}:{report.wrong.place.line}: {report.wrong.what}"
            if report.wrong.place.line
            else f"{where}: {report.wrong.what}"
        )
        if report.last.n:
            yield f"lines up to {report.last.n} of the trail are right ({report.last_place})"
        return
    first, last = (report.files[0], report.files[-1])
    files = f"{len(report.files)} files, {first.day} to {last.day}" if len(report.files) > 1 else str(first)
    counts = ", ".join(
        f"{words} {report.kinds[kind]:,}" for kind, words in _KINDS.items() if kind in report.kinds
    )
    yield f"audit trail in {folder}: nothing was changed, removed or put in"
    yield f"  {files}; lines {report.first:,} to {report.last.n:,}"
    yield f"  {counts}"
    if report.first > 1:
        yield f"  lines 1 to {report.first - 1:,} were removed by keep_days, as a later line records"
    if report.lost:
        yield f"  {report.lost:,} entries are missing: the daemon could not write them, and recorded that"
    if report.crashes:
        yield f"  killed or crashed {report.crashes} times: up to a second may be missing each time"
    yield from (f"  {note}" for note in report.notes)
    if anchors:
        yield f"  anchors compared: {anchors}"
    else:
        yield "  anchors compared: none; without one a trail that was written again as a whole is not noticed"
    yield f"  last line: {report.last.n}:{report.last.hash} {report.last_place}"


def _print_anchor(args: argparse.Namespace, folder: Path) -> int:
    from launcher.accounts.audit_verify import HEAD, anchored, read_head  # noqa: PLC0415  heavy

    head = read_head(folder)
    if head is None or not head.n:
        raise LauncherError(
            f"cannot print an anchor of '{folder}': {HEAD} is missing, damaged or empty",
            "see `numa-launcher audit verify`, or give another folder",
        )
    line = anchored(folder, head)
    if line is None:
        raise LauncherError(
            f"cannot print an anchor of '{folder}': {head.file} does not have line {head.n} that {HEAD} names",
            "see `numa-launcher audit verify`",
        )
    if args.json:
        shown = {
            "n": head.n,
            "hash": head.last,
            "file": head.file,
            "line": line,
            "time": _utc(head.time),
        }
        print(json.dumps(shown, indent=2))
    else:
        print(f"{head.n}:{head.last} {head.file}:{line} {_utc(head.time)}")
    return 0


def _utc(time: dt.datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")
