"""`numa-launcher restart|drain|resume|stop|start|hold|quarantine|release SLOT`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, Final

from launcher.cli import options
from launcher.cli.status_table import state_of
from launcher.control.client import ControlClient
from launcher.control.messages import DISRUPTIVE, SlotCommand
from launcher.errors import LauncherError, TimedOutError

POLL_S: Final = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which slot, and whether to wait."""
    parser.add_argument("slot", type=options.slot_number, metavar="SLOT")
    options.add_socket(parser)
    verb = SlotCommand(parser.prog.rpartition(" ")[2])
    parser.set_defaults(force=False, deadline=None)
    if verb in DISRUPTIVE:
        parser.add_argument(
            "--force",
            action="store_true",
            help="also when too few ready instances of the model would be left",
        )
    if verb is SlotCommand.DRAIN:
        parser.add_argument(
            "--deadline",
            type=options.seconds,
            metavar="S",
            help="end what is still in flight after S seconds",
        )
    parser.add_argument("--no-wait", action="store_true", help="ask, and return at once")
    parser.add_argument(
        "--timeout", type=options.seconds, default=3600.0, metavar="S", help="give up waiting after S seconds"
    )
    parser.add_argument("--json", action="store_true", help="print the slot's last status for machines")


def run(args: argparse.Namespace) -> int:
    """Ask, then wait until it is so. Exit code 1 when the slot ends elsewhere, 3 when time runs out."""
    client = options.client_of(args)
    verb = SlotCommand(args.verb)
    slot = client.post(f"/slots/{args.slot}/{verb}{_options(args)}")
    least = slot["generation"] + (
        verb is SlotCommand.RESTART and slot["state"] in {"draining", "stopping", "ready"}
    )
    done = True
    if not args.no_wait:
        slot, done = _wait(client, verb, slot, least, time.monotonic() + args.timeout, quiet=args.json)
    if args.json:
        print(json.dumps(slot, indent=2))
    elif not args.no_wait:
        print(f"slot {args.slot} is {_standing(slot)}" + ("" if done else f", not what {verb} asks for"))
    if not done and not args.json:
        hint = f"why {args.slot}" if slot["state"] == "failed" else f"events --audit --slot {args.slot}"
        print(f"look at `numa-launcher {hint}`", file=sys.stderr)
    return 0 if done else 1


def _options(args: argparse.Namespace) -> str:
    words = ["force=1"] if args.force else []
    words += [] if args.deadline is None else [f"deadline={args.deadline:g}"]
    return "?" + "&".join(words) if words else ""


def _standing(slot: dict[str, Any]) -> str:
    return "in quarantine" if slot["intent"] == "quarantine" else state_of(slot)


def _until(slot: dict[str, Any], now: float) -> str:
    """When it is likely over, or at the latest."""
    if slot["eta"] is not None and slot["eta"] > now:
        return f", likely over in {slot['eta'] - now:.0f} s"
    if slot["deadline"] is not None and slot["deadline"] > now:
        return f", at the latest in {slot['deadline'] - now:.0f} s"
    return ""


def _wait(
    client: ControlClient,
    verb: SlotCommand,
    slot: dict[str, Any],
    least: int,
    deadline: float,
    *,
    quiet: bool,
) -> tuple[dict[str, Any], bool]:
    said, begun = "", time.time()
    while True:
        words = f"slot {slot['slot']}: {slot['state']}"
        words += f" ({slot['phase']})" if slot["phase"] not in {"", slot["state"]} else ""
        words += f", {slot['in_flight']} in flight" if slot["state"] in {"draining", "stopping"} else ""
        if words != said and not quiet:
            print(words + _until(slot, begun), file=sys.stderr)
            said = words
        if _reached(verb, slot, least):
            return slot, True
        if slot["state"] == "failed" or _contradicts(verb, slot):
            return slot, False
        if time.monotonic() > deadline:
            raise TimedOutError(
                f"cannot wait longer for slot {slot['slot']}: it is still {slot['state']}",
                "look at `numa-launcher status`, or give a longer --timeout",
            )
        time.sleep(POLL_S)
        slot = _look_again(client, slot["slot"])


def _look_again(client: ControlClient, number: int) -> dict[str, Any]:
    """The slot as it is now. Raises LauncherError where a reload has taken it away."""
    found: dict[str, Any]
    for found in client.get("/status")["slots"]:
        if found["slot"] == number:
            return found
    raise LauncherError(
        f"cannot wait longer for slot {number}: it is no longer there",
        "a reload has taken it away: numa-launcher reload --show",
    )


def _reached(verb: SlotCommand, slot: dict[str, Any], least: int) -> bool:
    match verb:
        case SlotCommand.DRAIN:
            return bool(slot["state"] == "draining" and slot["in_flight"] == 0)
        case SlotCommand.QUARANTINE:
            return bool(slot["intent"] == "quarantine" and slot["state"] in {"draining", "starting"})
        case SlotCommand.HOLD:
            return bool(slot["state"] == "held")
        case SlotCommand.STOP:
            return bool(slot["state"] == "stopped")
        case SlotCommand.START | SlotCommand.RESUME | SlotCommand.RESTART | SlotCommand.RELEASE:
            return bool(slot["state"] == "ready" and slot["generation"] >= least)


def _contradicts(verb: SlotCommand, slot: dict[str, Any]) -> bool:
    """Someone else has asked for something else, or the verb does not apply."""
    if verb is SlotCommand.DRAIN:
        # While it starts, it may not have taken the verb yet: `run` alone says nothing.
        return slot["state"] in {"ready", "stopped"} or slot["intent"] in {"stop", "hold", "quarantine"}
    wanted = {SlotCommand.STOP: "stop", SlotCommand.HOLD: "hold", SlotCommand.QUARANTINE: "quarantine"}.get(
        verb
    )
    if wanted is not None:
        return bool(slot["intent"] != wanted)
    return bool(slot["state"] == "stopped" or slot["intent"] != "run")
