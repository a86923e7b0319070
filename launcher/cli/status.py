"""`numa-launcher status`."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, Final

from launcher.cli import options
from launcher.columns import table

# Home and clear to the end: one screen that is drawn over itself.
CLEAR: Final = "\x1b[H\x1b[J"
MIN_WATCH_S: Final = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which daemon, and the form of the answer."""
    options.add_socket(parser)
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=2.0,
        metavar="S",
        help="again every S seconds (2) until Ctrl-C",
    )


def run(args: argparse.Namespace) -> int:
    """Print the state. Exit code 1 when no slot is ready."""
    client = options.client_of(args)
    while True:
        status = client.get("/status")
        if args.watch is not None and not args.json:
            print(CLEAR, end="")
        print(json.dumps(status, indent=2) if args.json else to_text(status, time.time()), flush=True)
        if args.watch is None:
            return 0 if status["ready"] else 1
        time.sleep(max(MIN_WATCH_S, args.watch))


def to_text(status: dict[str, Any], now: float) -> str:
    """One screen for a person."""
    requests = status["requests"]
    head = (
        f"{status['ready']}/{len(status['slots'])} ready at {status['endpoint']} · memory {status['binding']} · "
        + ", ".join(
            f"{name} {version}" for name, version in status["stack"].items() if version and name != "tcmalloc"
        )
    )
    counts = " · ".join(
        f"{name.replace('_', ' ')} {requests[name]}"
        for name in ("accepted", "completed", "client_aborted", "rejected", "failed", "retried")
        if name in requests
    )
    rows: list[tuple[str, ...]] = [
        (
            "SLOT",
            "MODEL",
            "STATE",
            "SINCE",
            "PID",
            "GEN",
            "IN FLIGHT",
            "QUEUED",
            "TOK/S",
            "KV",
            "HITS",
            "LAST CAUSE",
            "NODE",
            "CPUS",
            "PLACEMENT",
            "ZENTORCH",
        )
    ]
    rows += [_row(slot, now) for slot in status["slots"]]
    lines = [head, f"requests: {counts}", "", *table(rows)]
    for slot in status["slots"]:
        cause = slot["last_cause"]
        if cause and slot["state"] in {"failed", "backoff", "held"}:
            lines += ["", f"slot {slot['slot']}: {cause['name']}: {cause['message']}", f"  {cause['remedy']}"]
            lines += [f"  | {line}" for line in cause["evidence"]]
        lines += [
            f"slot {slot['slot']}: {problem}" for problem in (slot["verified"] or {}).get("problems", ())
        ]
    lines += [f"warning: {warning}" for warning in status["warnings"]]
    return "\n".join(lines)


def _row(slot: dict[str, Any], now: float) -> tuple[str, ...]:
    state = {"quarantine": "quarantined"}.get(slot["intent"], slot["state"])
    if slot["stalled_s"]:
        state += f" (no progress for {slot['stalled_s']:.0f} s)"
    if slot["phase"]:
        state += f" ({slot['phase']})"
    if slot["next_start"]:
        state += f" ({max(0.0, slot['next_start'] - now):.0f} s)"
    verified = slot["verified"]
    placement = "-" if verified is None else ("verified" if verified["ok"] else "DIFFERS")
    active = slot["zentorch"]["active"]
    zentorch = (
        "not installed"
        if slot["zentorch"]["found"] is None
        else {True: "on", False: "OFF", None: "?"}[active]
    )
    node = "-" if slot["node"] is None else str(slot["node"])
    return (
        str(slot["slot"]),
        slot["model"],
        state,
        duration(now - slot["since"]),
        str(slot["pid"] or "-"),
        str(slot["generation"]),
        str(slot["in_flight"]),
        *_load(slot),
        slot["last_cause"]["name"] if slot["last_cause"] else "-",
        node,
        slot["cpus"] if len(slot["cpus"]) <= 24 else slot["cpus"][:21] + "...",
        placement,
        zentorch,
    )


def _load(slot: dict[str, Any]) -> tuple[str, str, str, str]:
    """Queued, tokens per second, KV cache in use and prefix cache hits, where the engine counts them."""
    load, speed = slot["load"], slot["tokens_per_s"]
    if load is None:
        return "-", "-", "-", "-"
    asked = load["prefix_queries"]
    return (
        str(load["waiting"]),
        "-" if speed is None else f"{speed:.0f}",
        "-" if load["kv_usage"] is None else f"{load['kv_usage'] * 100:.0f} %",
        f"{load['prefix_hits'] / asked * 100:.0f} %" if asked else "-",
    )


def duration(seconds: float) -> str:
    """A span for people: 5s, 3m12s, 4h05m, 2d03h."""
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if not minutes:
        return f"{whole}s"
    if not hours:
        return f"{minutes}m{whole % 60:02}s"
    return f"{hours}h{minutes % 60:02}m" if not days else f"{days}d{hours % 24:02}h"
