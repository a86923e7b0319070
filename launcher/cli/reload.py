"""`numa-launcher reload` and `numa-launcher scale N`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, Final
from urllib.parse import quote

from launcher.cli import options

POLL_S: Final = 0.5
# Time to read models' files and probe the engine's versions.
BEGIN_S: Final = 90.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_socket(parser)
    if parser.prog.endswith("scale"):
        parser.add_argument(
            "instances", type=options.Value('a number of 1 or more, or "auto"', _instances), metavar="N",
            help='set the instances per socket, or "auto", until the next reload',
        )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the changes without applying them")
    parser.add_argument("--show", action="store_true", help="print the progress of the latest reload")
    parser.add_argument(
        "--force",
        action="store_true",
        help="proceed even when fewer ready instances than supervision.min_ready remain",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides",
        help="override one configuration key until the next reload; can be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--no-wait", action="store_true", help="return at once, without waiting for the result"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _instances(text: str) -> str:
    return text if text == "auto" else str(options.whole(1)(text))


def run(args: argparse.Namespace) -> int:
    """Reload and wait. Exit code 0: done. 1: rolled back, or the dry run found changes."""
    client = options.client_of(args)
    if args.show:
        now = client.get("/reload")
        print(json.dumps(now, indent=2) if args.json else to_text(now))
        return _exit_code(now)
    overrides = list(args.overrides)
    if args.verb == "scale":
        overrides.append(f"layout.instances_per_socket={args.instances}")
    words = [f"set={quote(override, safe='')}" for override in overrides]
    words += ["dry_run=1"] * args.dry_run + ["force=1"] * args.force
    now = client.post("/reload?" + "&".join(words), BEGIN_S)
    if not args.json:
        print("\n".join(plan_lines(now)), flush=True)
    said = ""
    while not args.no_wait and now["stage"] in {"running", "rolling back"}:
        if now["doing"] and now["doing"] != said and not args.json:
            said = now["doing"]
            print(f"{now['stage']}: {said}", file=sys.stderr)
        time.sleep(POLL_S)
        now = client.get("/reload")
    print(json.dumps(now, indent=2) if args.json else "\n".join(outcome_lines(now)))
    return _exit_code(now)


def _exit_code(now: dict[str, Any]) -> int:
    if now["stage"] == "dry run":
        changes = now["changes"]
        steps = any(change["step"] != "nothing" for change in changes["slots"])
        return int(steps or bool(changes["needs_restart"]))
    return int(now["stage"] in {"rolled back", "stuck"})


def to_text(now: dict[str, Any]) -> str:
    if now["stage"] == "none":
        return "no reload since the daemon started"
    return "\n".join([*plan_lines(now), *outcome_lines(now)])


def plan_lines(now: dict[str, Any]) -> list[str]:
    changes, lines = now["changes"], []
    for change in changes["slots"]:
        word = "unchanged" if change["step"] == "nothing" else change["step"]
        lines.append(f"slot {change['slot']}: {word}")
        lines += [f"  {reason}" for reason in change["reasons"]]
    lines += [f"applied at once: {', '.join(changes['live'])}"] * bool(changes["live"])
    if changes["needs_restart"]:
        lines.append(f"needs a restart of the daemon: {', '.join(changes['needs_restart'])}")
    return lines


def outcome_lines(now: dict[str, Any]) -> list[str]:
    doing = now.get("doing") or ""
    lines = [f"{now['stage']}: {doing}" if doing else now["stage"]]
    return [*lines, f"  {now['error']}", f"  {now['remedy']}"] if now.get("error") else lines
