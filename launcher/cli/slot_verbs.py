"""`numa-launcher restart|drain|resume|stop|start|hold|quarantine|release SLOT`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, Final

from launcher.base.errors import LauncherError, TimedOutError
from launcher.cli import options
from launcher.control.client import ControlClient
from launcher.control.messages import DISRUPTIVE, SlotCommand
from launcher.control.verdict import state_of

POLL_S: Final = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("slot", type=options.slot_number, metavar="SLOT", help="select the slot by its number")
    options.add_socket(parser)
    verb = SlotCommand(parser.prog.rpartition(" ")[2])
    parser.set_defaults(force=False, deadline=None)
    if verb in DISRUPTIVE:
        add(
            "--force",
            action="store_true",
            help="proceed even when fewer ready instances than supervision.min_ready remain",
        )
    if verb is SlotCommand.DRAIN:
        add(
            "--deadline", type=options.seconds, metavar="S",
            help="abort requests still in flight after S seconds",
        )  # fmt: skip
    add("--no-wait", action="store_true", help="return at once, without waiting for the result")
    add(
        "--timeout", type=options.seconds, default=3600.0, metavar="S",
        help="wait for at most S seconds, then exit with 3; the command continues (default: 3600)",
    )  # fmt: skip
    add("--json", action="store_true", help="print the slot's status as JSON")


def run(args: argparse.Namespace) -> int:
    """Send the command and wait for its result. Exit code 1 when the slot ends in another state, 3 after --timeout."""
    client = options.client_of(args)
    verb = SlotCommand(args.verb)
    # Read before the restart is sent: in a reply `starting` may be the start before or after it.
    before = _generation(client, args.slot) if verb is SlotCommand.RESTART else -1
    slot = client.post(f"/slots/{args.slot}/{verb}{_options(args)}")
    least = before + 1
    done = True
    if not args.no_wait:
        slot, done = _wait(client, verb, slot, least, time.monotonic() + args.timeout, quiet=args.json)
    if args.json:
        print(json.dumps(slot, indent=2))
    elif not args.no_wait:
        state = "in quarantine" if slot["intent"] == "quarantine" else state_of(slot)
        print(f"slot {args.slot} is {state}" + ("" if done else f": {verb} did not succeed"))
    if not done and not args.json:
        hint = f"why {args.slot}" if slot["state"] == "failed" else f"events --audit --slot {args.slot}"
        print(f"see `numa-launcher {hint}`", file=sys.stderr)
    return 0 if done else 1


def _options(args: argparse.Namespace) -> str:
    words = ["force=1"] if args.force else []
    words += [] if args.deadline is None else [f"deadline={args.deadline:g}"]
    return "?" + "&".join(words) if words else ""


def _until(slot: dict[str, Any], now: float) -> str:
    if slot["eta"] is not None and slot["eta"] > now:
        return f", estimated {slot['eta'] - now:.0f} s left"
    if slot["deadline"] is not None and slot["deadline"] > now:
        return f", at most {slot['deadline'] - now:.0f} s left"
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
                "check `numa-launcher status`, or use a longer --timeout",
            )
        time.sleep(POLL_S)
        slot = _look_again(client, slot["slot"])


def _generation(client: ControlClient, number: int) -> int:
    """Of the slot; 0 for one that does not exist."""
    slots = client.get("/status")["slots"]
    return next((int(slot["generation"]) for slot in slots if slot["slot"] == number), 0)


def _look_again(client: ControlClient, number: int) -> dict[str, Any]:
    found: dict[str, Any]
    for found in client.get("/status")["slots"]:
        if found["slot"] == number:
            return found
    raise LauncherError(
        f"cannot wait longer for slot {number}: it no longer exists",
        "a reload removed it: see numa-launcher reload --show",
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
    """Another command has changed the slot's intent, or the verb does not apply."""
    if verb is SlotCommand.DRAIN:
        # A starting slot may not have processed the command yet, so intent `run` is not a contradiction.
        return slot["state"] in {"ready", "stopped"} or slot["intent"] in {"stop", "hold", "quarantine"}
    wanted = {SlotCommand.STOP: "stop", SlotCommand.HOLD: "hold", SlotCommand.QUARANTINE: "quarantine"}.get(
        verb
    )
    if wanted is not None:
        return bool(slot["intent"] != wanted)
    return bool(slot["state"] == "stopped" or slot["intent"] != "run")
