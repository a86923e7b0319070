"""`numa-launcher why SLOT` and `why REQUEST`."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from launcher.base.errors import NotFoundError
from launcher.cli import options
from launcher.control.verdict import duration

if TYPE_CHECKING:
    from launcher.control.client import ControlClient


# --- What became of a request, in words. ---

_SHOWN: Final = {
    "completed": "completed",
    "refused": "refused by an instance or an overflow endpoint",
    "client_aborted": "its client left before the end",
    "rejected": "refused by the proxy",
    "failed": "failed",
    None: "in flight",
}


def request_to_text(request: dict[str, Any], now: float) -> str:
    """All of it: who asked what, what came of it, each step, and where the time went. `now`: Unix time."""
    ended = request["ended"]
    took_s = (now if ended is None else ended) - request["began"]
    lines = [
        _who(request),
        f"  began:   {_local(request['began'])}, {'so far' if ended is None else 'took'} {seconds(took_s)}",
        f"  outcome: {_outcome(request)}",
    ]
    if request["tokens"] is not None:
        lines.append(f"  tokens:  {_tokens(request['tokens'])}")
    if (first := _first_token(request)) is not None:
        lines.append(f"  first token: {first}")
    lines.append("  steps:")
    lines += [f"    {step['at_s']:10.3f} s  {_step(step)}" for step in request["steps"]]
    if (spent := _spent(request, took_s)) is not None:
        lines.append(f"  time:    {spent}")
    if request["trace_id"] is not None:
        lines.append(f"  trace:   {request['trace_id']}")
    lines += _notes(request)
    return "\n".join(lines)


def _who(request: dict[str, Any]) -> str:
    parts = [request["route"]]
    if request["model"] is not None:
        parts.append(f"model {request['model']}")
    if request["key"] is not None:
        parts.append(f"key {request['key']}")
    if request["stream"]:
        parts.append("stream")
    return f"request {request['id']}: {', '.join(parts)}"


def _outcome(request: dict[str, Any]) -> str:
    status = "" if request["status"] is None else f", status {request['status']}"
    why = "" if request["reason"] is None else f": {request['reason']}"
    return f"{_SHOWN.get(request['outcome'], request['outcome'])}{status}{why}"


def _tokens(tokens: dict[str, Any]) -> str:
    about = "about " if tokens["estimated"] else ""
    cached = f" ({tokens['cached']:,} cached)" if tokens["cached"] else ""
    return f"{about}{tokens['prompt']:,} of the prompt{cached}, {tokens['output']:,} generated"


def _first_token(request: dict[str, Any]) -> str | None:
    at_s = next((step["at_s"] for step in request["steps"] if step["what"] == "first token"), None)
    predicted_s = request["predicted_s"]
    if at_s is None:
        return None if predicted_s is None else f"predicted after {seconds(predicted_s)}"
    predicted = "" if predicted_s is None else f", predicted after {seconds(predicted_s)}"
    return f"after {seconds(at_s)}{predicted}"


def _step(step: dict[str, Any]) -> str:
    where, why = _where(step), "" if step["why"] is None else f": {step['why']}"
    words = {
        "sent": f"sent to {where or 'an instance'}{why}",
        "overflowed": f"sent to {where}{_reason(step['why'])}",
        "attempt failed": f"{where or 'attempt'} failed{why}",
        "continued": f"continued by {where or 'another instance'}",
        "first token": f"first token{f' from {where}' if where else ''}",
    }
    return words.get(step["what"], f"{step['what']}{why}")


def _reason(why: str | None) -> str:
    words = {
        "full": ": the queue here was full, or no instance was ready",
        "predicted": ": its first token was predicted to come too late here",
    }
    return "" if why is None else words.get(why, f": {why}")


def _where(step: dict[str, Any]) -> str:
    if step["endpoint"] is not None:
        return f"overflow endpoint {step['endpoint']}"
    if step["slot"] is None:
        return ""
    generation = "" if step["generation"] is None else f" (generation {step['generation']})"
    return f"slot {step['slot']}{generation}"


def _spent(request: dict[str, Any], took_s: float) -> str | None:
    """Where the time went: in the queue, and at each upstream."""
    if took_s <= 0:
        return None
    sums: dict[str, float] = {}
    where, since = "waiting", 0.0
    steps = request["steps"]
    for step in [*steps, {"what": "ended", "at_s": took_s}]:
        if step["what"] in {"first token", "continued", "received"}:
            continue
        sums[where] = sums.get(where, 0.0) + max(0.0, step["at_s"] - since)
        since = step["at_s"]
        where = _where(step) or "an instance" if step["what"] in {"sent", "overflowed"} else "waiting"
    shares = (
        f"{name} {seconds(spent)} ({spent / took_s:.0%})"
        for name, spent in sums.items()
        if spent / took_s >= 0.005
    )
    return ", ".join(shares) or None


def _notes(request: dict[str, Any]) -> list[str]:
    notes = []
    if request["same_id"]:
        notes.append(f"{request['same_id']} more requests in memory have this id; this is the latest")
    if request["source"] != "memory":
        notes.append("from the usage ledger: single attempts are kept in memory only, and for a shorter time")
    return [f"  note: {note}" for note in notes]


def seconds(value: float) -> str:
    """A time in milliseconds or seconds."""
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _local(at: float) -> str:
    whole = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    return f"{whole}.{int(at % 1 * 1000):03}"


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
    print(json.dumps(found, indent=2) if args.json else request_to_text(found, time.time()))
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
