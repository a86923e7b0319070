"""`numa-launcher status`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from launcher.base.errors import LauncherError
from launcher.base.money import shown
from launcher.base.text import GIB, MIB, counted, fitted, table
from launcher.cli import options
from launcher.control.verdict import (
    Problem,
    Slot,
    Status,
    duration,
    level,
    of_files,
    problems_of,
    problems_of_daemon,
    seconds,
    state_of,
    summary,
)

# --- `status` as text: summary line, table, and notes on slots with problems. ---

# Default width in columns.
WIDTH: Final = 100


@dataclass(frozen=True, slots=True)
class Column:
    head: str
    cell: Callable[[Slot, float], str]


def to_text(status: Status, now: float, width: int | None = WIDTH) -> str:
    """The complete text. `width`: columns of the terminal; None shows every column in full."""
    measured = status.get("measured_layout")  # a daemon from before an upgrade may not send it
    about = [*head(status, now), *([measured["text"]] if measured else [])]
    return "\n".join([*about, "", *rows(status, now, width), *notes(status, now)])


def head(status: Status, now: float) -> list[str]:
    versions = [
        f"{name} {version}" for name, version in status["stack"].items() if version and name != "tcmalloc"
    ]
    models = {slot["model"] for slot in status["slots"]}
    about = [
        *([f"model {next(iter(models))}"] if len(models) == 1 else []),
        status["endpoint"] or "no endpoint yet",
        f"memory {status['binding']}",
        *versions,
        # A daemon from before an upgrade may not send it.
        *([f"{status['build']} build"] if "build" in status else []),
        f"up {duration(now - status['since'])}",
    ]
    requests = status["requests"]
    names = (
        "accepted",
        "completed",
        "refused",
        "client_aborted",
        "rejected",
        "failed",
        "retried",
        "continued",
    )
    counts = [f"{name.replace('_', ' ')} {requests[name]}" for name in names if name in requests]
    lines = [summary(status, now), " · ".join(about), f"requests: {' · '.join(counts)}"]
    if usage := status.get("usage"):
        figures = (
            counted(usage["requests"], "request"),
            f"{usage['prompt_tokens']:,} prompt and {usage['output_tokens']:,} output tokens",
        )
        lines.append(f"today: {', '.join(figures)}")
    if cost := status.get("cost"):
        lines.append(f"cost: {_cost(cost)}")
    return lines


def _cost(cost: dict[str, Any]) -> str:
    currency, each, today = cost["currency"], cost["per_million_output"], cost["today"]
    time = "hour" if cost["seconds"] >= 3600 else duration(cost["seconds"])
    parts = [
        f"no output tokens in the last {time}"
        if each is None
        else f"{shown(each, currency)} per million output tokens in the last {time}"
    ]
    if today is not None:
        used = cost["today_utilisation"]
        at = "" if used is None else f" at {used * 100:.0f} % utilisation"
        parts.append(f"today {shown(today, currency)}{at}")
    return ", ".join(parts)


def rows(status: Status, now: float, width: int | None = WIDTH) -> list[str]:
    """The table. On a narrow terminal the columns in SPARED are dropped in order, then the last cause is cut."""
    slots = status["slots"]
    several = len({slot["model"] for slot in slots}) > 1
    columns = [column for column in COLUMNS if several or column.head != "MODEL"]
    spared = iter(SPARED)
    while True:
        lines = _table(columns, slots, now)
        if width is None or max(map(len, lines)) - _spare(columns, slots) <= width:
            break
        head = next(spared, None)
        if head is None:
            break
        columns = [column for column in columns if column.head != head]
    return lines if width is None else fitted(lines, width)


def _spare(columns: list[Column], slots: list[Slot]) -> int:
    """Characters of the last causes that may be cut when they are the last column."""
    if columns[-1].head != "LAST CAUSE":
        return 0
    longest = max((len(slot["last_cause"]["name"]) for slot in slots if slot["last_cause"]), default=0)
    return max(0, longest - len("LAST CAUSE"))


def _table(columns: list[Column], slots: list[Slot], now: float) -> list[str]:
    return table(
        [[column.head for column in columns], *([c.cell(slot, now) for c in columns] for slot in slots)]
    )


def notes(status: Status, now: float) -> list[str]:
    problems = (*problems_of_daemon(status), *of_files(status, now))
    lines = [line for problem in problems for line in _note(problem)]
    lines = [*([""] * bool(lines)), *lines]
    for slot in status["slots"]:
        about = [line for problem in problems_of(slot, now) for line in _note(problem)]
        lines += [""] * bool(about) + about
    lines += [""] * bool(status["warnings"])
    return [*lines, *(f"warning: {warning}" for warning in status["warnings"])]


def _note(problem: Problem) -> Iterator[str]:
    yield problem.what if problem.slot is None else f"slot {problem.slot}: {problem.what}"
    if problem.remedy:
        yield f"  {problem.remedy}"
    yield from (f"  | {line}" for line in problem.evidence)


def _where(slot: Slot, _now: float) -> str:
    count = _count(slot["cpus"])
    return f"{count}" if slot["node"] is None else f"{count}@{slot['node']}"


def _count(cpus: str) -> int:
    """Number of cpus in a cpulist: "0-3,8" has 5."""
    ends = [part.partition("-") for part in cpus.split(",") if part]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def _zentorch(slot: Slot, _now: float) -> str:
    zentorch = slot["zentorch"]
    if zentorch["found"] is None:
        return "-"
    return {True: "on", False: "OFF", None: "?"}[zentorch["active"]]


def _requests(slot: Slot, _now: float) -> str:
    load = slot["load"]
    return f"{slot['in_flight']}/{'-' if load is None else load['waiting']}"


def _speed(slot: Slot, _now: float) -> str:
    return "-" if slot["tokens_per_s"] is None else f"{slot['tokens_per_s']:.0f}"


def _first_token(slot: Slot, _now: float) -> str:
    found = slot["first_token"]
    return "-" if found is None else f"{seconds(found['p50_s'])}/{seconds(found['p99_s'])}"


def _kv(slot: Slot, _now: float) -> str:
    load = slot["load"]
    return "-" if load is None or load["kv_usage"] is None else f"{load['kv_usage'] * 100:.0f}%"


def _hits(slot: Slot, _now: float) -> str:
    load = slot["load"]
    asked = 0 if load is None else load["prefix_queries"]
    return f"{load['prefix_hits'] / asked * 100:.0f}%" if load is not None and asked else "-"


def _resident(slot: Slot, _now: float) -> str:
    found = slot["resident"]
    if found is None or not found["total_bytes"]:
        return "-"
    size = found["on_node_bytes"] if found["share"] is not None else found["total_bytes"]
    text = f"{size / GIB:.3g}G" if size >= GIB else f"{size / MIB:.0f}M"
    return text if found["share"] is None else f"{text} {found['share'] * 100:.0f}%"


def _placement(slot: Slot, _now: float) -> str:
    verified = slot["verified"]
    return "-" if verified is None else ("verified" if verified["ok"] else "DIFFERS")


COLUMNS: Final = (
    Column("SLOT", lambda slot, _: str(slot["slot"])),
    Column("MODEL", lambda slot, _: slot["model"]),
    Column("STATE", lambda slot, _: state_of(slot)),
    Column("SINCE", lambda slot, now: duration(now - slot["since"])),
    Column("CPUS", _where),
    Column("ZEN", _zentorch),
    Column("REQ/Q", _requests),
    Column("TOK/S", _speed),
    Column("TTFT 50/99", _first_token),
    Column("KV", _kv),
    Column("HIT", _hits),
    Column("RSS ON NODE", _resident),
    Column("RST", lambda slot, _: str(slot["restarts"])),
    Column("LAST CAUSE", lambda slot, _: slot["last_cause"]["name"] if slot["last_cause"] else "-"),
    Column("PLACEMENT", _placement),
    Column("PID", lambda slot, _: str(slot["pid"] or "-")),
    Column("CPU LIST", lambda slot, _: slot["cpus"]),
)
"""docs/control.md explains them."""

SPARED: Final = (
    "CPU LIST", "PID", "PLACEMENT", "RSS ON NODE", "HIT", "KV", "ZEN", "CPUS", "RST", "TTFT 50/99", "TOK/S",
)  # fmt: skip
"""Columns dropped on a narrow terminal, in this order. At WIDTH only the first three are."""


# Cursor home and clear to the end: the output overwrites itself.
CLEAR: Final = "\x1b[H\x1b[J"
# Far above the usual milliseconds, so that only a hung daemon exceeds it.
ANSWER_S: Final = 10.0
MIN_WATCH_S: Final = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_socket(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="print JSON; docs/control-protocol.md describes every field"
    )
    form.add_argument(
        "--short", action="store_true",
        help="print one line for a monitor; exit code 0: all slots ready, 1: some, 2: none, or the daemon does not answer",
    )  # fmt: skip
    form.add_argument("--slots", action="store_true", help="print only the slot numbers, one per line")
    form.add_argument(
        "--wide", action="store_true", help="print every column, regardless of the terminal's width"
    )
    parser.add_argument(
        "--watch", type=options.seconds, nargs="?", const=2.0, metavar="S",
        help="print again every S seconds (default: 2) until Ctrl-C",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the state. Exit code 1 when no slot is ready."""
    client = options.client_of(args)
    try:
        status = client.get("/status", ANSWER_S)
    except LauncherError as error:
        if not args.short:
            raise
        print(f"DOWN {error.message}")  # a monitor reads standard output
        return 2
    if args.slots:
        print("\n".join(str(slot["slot"]) for slot in status["slots"]))
        return 0
    if args.watch is None:
        print(_shown(args, status))
        return level(status) if args.short else int(level(status) == 2)
    text = _shown(args, status)
    while True:
        print(text if args.json or not sys.stdout.isatty() else CLEAR + text, flush=True)
        time.sleep(max(MIN_WATCH_S, args.watch))
        try:
            text = _shown(args, client.get("/status", ANSWER_S))
        except LauncherError as error:  # the daemon may be restarting
            text = json.dumps({"error": error.message}) if args.json else error.message


def _shown(args: argparse.Namespace, status: dict[str, Any]) -> str:
    if args.json:
        return json.dumps(status, indent=2)
    if args.short:
        return summary(status, time.time())
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    return to_text(status, time.time(), None if args.wide else width)
