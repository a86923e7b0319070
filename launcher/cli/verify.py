"""`numa-launcher verify [SLOT]`."""

from __future__ import annotations

import argparse
import json
from typing import Any, Final

from launcher.base.text import counted
from launcher.cli import options
from launcher.control.messages import VERIFY_S

# Longer than the daemon's own time-out, so that its error message arrives.
_PATIENCE_S: Final = VERIFY_S + 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "slot", type=options.slot_number, nargs="?", metavar="SLOT",
        help="check only this slot (default: all slots)",
    )  # fmt: skip
    options.add_socket(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print planned and actual placement.

    Exit code 1 when they differ, when other processes are pinned to the slot's cpus, or when no instance runs; 3 when
    the daemon does not answer in time."""
    client = options.client_of(args)
    slots = (
        [args.slot] if args.slot is not None else [slot["slot"] for slot in client.get("/status")["slots"]]
    )
    checked = [client.post(f"/slots/{slot}/verify", _PATIENCE_S) for slot in slots]
    if args.json:
        print(json.dumps({"slots": checked}, indent=2))
    else:
        print("\n".join(line for slot in checked for line in lines_of(slot)))
    return 0 if all(_as_planned(slot["verified"]) for slot in checked) else 1


def _as_planned(found: dict[str, Any] | None) -> bool:
    return found is not None and found["ok"] and not found["foreign"]


def lines_of(slot: dict[str, Any]) -> list[str]:
    found = slot["verified"]
    if found is None:
        return [f"slot {slot['slot']}: no running instance ({slot['state']})"]
    share = "" if found["bound_share"] is None else f", {found['bound_share']:.0%} of its pages there"
    policies = ", ".join(found["policies"]) or "not readable"
    word = "verified" if found["ok"] else "DIFFERS"
    processes = found["processes"]
    what = f"slot {slot['slot']}: {word}: {counted(found['threads'], 'thread')} of {processes} "
    what += "process" if processes == 1 else "processes"
    lines = [f"{what} on cpus {found['cpus']} (planned {slot['cpus']}), memory {policies}{share}"]
    lines += map(_rank_line, found.get("ranks", ()))  # a daemon of an earlier version has none
    for difference in found["differences"]:
        lines += [
            f"  {difference['what']}",
            f"  - planned: {difference['planned']}",
            f"  + found:   {difference['found']}",
        ]
    return [*lines, *(f"  ! {process}" for process in found["foreign"])]


def _rank_line(rank: dict[str, Any]) -> str:
    node = "" if rank["node"] is None else f", memory of node {rank['node']}"
    planned = f"(planned {rank['planned_cpus']}{node})"
    if rank["pid"] is None:
        return f"  rank {rank['rank']}: no process {planned}"
    share = (
        ""
        if rank["bound_share"] is None
        else f", {rank['bound_share']:.0%} of its pages on node {rank['node']}"
    )
    memory = ", ".join(rank["policies"]) or "not readable"
    process = f"{rank['name']} (pid {rank['pid']})"
    return f"  rank {rank['rank']}: {process} on cpus {rank['cpus']} {planned}, memory {memory}{share}"
