"""`numa-launcher why SLOT` and `why REQUEST`."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from launcher.cli import options, request_text
from launcher.errors import NotFoundError
from launcher.verdict import duration

if TYPE_CHECKING:
    from launcher.control.client import ControlClient

# A longer number is a request's id; ids of ours have 21 digits and more.
SLOT_DIGITS: Final = 6
MAX_REQUEST_ID: Final = 144
# Lines searched for those of the failed generation.
_TAIL: Final = 2000


def _read(text: str) -> int | str:
    if not text or len(text) > MAX_REQUEST_ID or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError
    return int(text) if text.isdecimal() and len(text) <= SLOT_DIGITS else text


_SLOT_OR_REQUEST: Final = options.Value("a slot's number or a request's id", _read)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", type=_SLOT_OR_REQUEST, metavar="SLOT|REQUEST",
        help="select a slot by its number, or a request by its id (the X-Request-Id of its response)",
    )  # fmt: skip
    options.add_socket(parser)
    parser.add_argument(
        "-n", "--lines", type=options.count, default=20, metavar="N",
        help="print the last N log lines (default: 20)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what became of a request, or the cause of a slot's last failure. Exit code 1 when there was none."""
    client = options.client_of(args)
    if isinstance(args.what, str):
        return _run_request(client, args)
    status = client.get("/status")
    slot = next((found for found in status["slots"] if found["slot"] == args.what), None)
    if slot is None:
        known = ", ".join(str(found["slot"]) for found in status["slots"])
        raise NotFoundError(f"cannot use slot '{args.what}': unknown slot", f"slots are {known}")
    cause = slot["last_cause"]
    lines = []
    if cause is not None:
        found = client.get(f"/slots/{args.what}/logs?tail={_TAIL}&redact=1")["lines"]
        lines = [line for line in found if line["generation"] == slot["last_cause_generation"]]
        lines = lines[-args.lines :] if args.lines else []
    if args.json:
        keys = ("slot", "state", "intent", "generation", "restarts", "next_start")
        answer = {key: slot[key] for key in keys} | {
            "cause": cause, "at": slot["last_cause_at"], "of_generation": slot["last_cause_generation"], "lines": lines,
        }  # fmt: skip
        print(json.dumps(answer, indent=2))
    else:
        print(to_text(slot, lines, time.time()))
    return 0 if cause is not None else 1


def _run_request(client: ControlClient, args: argparse.Namespace) -> int:
    found = client.get(f"/requests/{quote(args.what, safe='')}")
    print(json.dumps(found, indent=2) if args.json else request_text.to_text(found, time.time()))
    return 0


def to_text(slot: dict[str, Any], lines: list[dict[str, Any]], now: float) -> str:
    cause, number = slot["last_cause"], slot["slot"]
    standing = f"slot {number} has been in state {slot['state']} for {duration(now - slot['since'])}"
    if cause is None:
        return f"{standing}; none of its instances has failed"
    ago = duration(now - slot["last_cause_at"])
    text = [
        f"slot {number}, generation {slot['last_cause_generation']}, {ago} ago: {cause['name']}: {cause['message']}",
        f"  remedy:  {cause['remedy']}",
        f"  policy:  restart {cause['retry']}; {standing}{_next(slot, now)}",
    ]
    text += ["  evidence:"] * bool(cause["evidence"])
    text += [f"    | {line}" for line in cause["evidence"]]
    text += [f"  last {len(lines)} lines:"] * bool(lines)
    text += [f"    | {line['text']}" for line in lines]
    return "\n".join(text)


def _next(slot: dict[str, Any], now: float) -> str:
    if slot["next_start"]:
        return f", next start in {max(0.0, slot['next_start'] - now):.0f} s"
    words = {"failed": f"; `numa-launcher start {slot['slot']}` tries again"}
    words["held"] = f"; `numa-launcher release {slot['slot']}` starts it"
    return words.get(slot["state"], "")
