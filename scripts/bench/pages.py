"""Tables and a picture of a run, for a terminal and for docs/performance.md."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.figures import Figure, Rounds, more_ms, ratio
from bench.rivals import BEFORE, DIRECT, NGINX, RIVALS
from bench.svg import bars

BEGIN: Final = "<!-- bench-proxy begins: written by scripts/bench-proxy --write -->"
END: Final = "<!-- bench-proxy ends -->"
PICTURE: Final = "performance-proxy.svg"
ROUTER: Final = "vllm-router"
ROUTER_RR: Final = "vllm-router-rr"
AS_MANY: Final = "as many as it can"

Result = Mapping[str, Any]


def machine() -> str:
    """The machine in a line."""
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{os.cpu_count()} cpus ({model}), Linux {platform.release()}, Python {platform.python_version()}"


def text(result: Result) -> str:
    """All tables."""
    rounds = Rounds(result["rows"])
    parts = [_stream_table(rounds, point) for point in rounds.points if "streams" in point]
    smalls = [point for point in rounds.points if "requests" in point and AS_MANY not in point]
    parts += [_small_table(rounds, point) for point in smalls]
    parts += [_most_table(rounds, point) for point in rounds.points if AS_MANY in point]
    notes = [str(row["failure"]) for row in result["rows"] if row["failure"]]
    if notes:
        parts.append(f"{len(notes)} measurements with failures, the first: {notes[0]}")
    return "\n\n".join(parts)


def _stream_table(rounds: Rounds, point: str) -> str:
    delays = [
        ("added TTFT p50 ms", "ttft_p50_s"), ("p99", "ttft_p99_s"),
        ("added gap p50 ms", "gap_p50_s"), ("p99", "gap_p99_s"),
    ]  # fmt: skip
    return _paced_table(rounds, point, "event", 2, delays)


def _small_table(rounds: Rounds, point: str) -> str:
    delays = [("added time p50 ms", "ttft_p50_s"), ("p99", "ttft_p99_s")]
    return _paced_table(rounds, point, "request", 1, delays)


def _paced_table(
    rounds: Rounds, point: str, unit: str, digits: int, delays: Sequence[tuple[str, str]]
) -> str:
    """`delays`: names of columns, and which measurement each shows as added to direct's."""
    others = _compared(rounds)
    head = [
        point,
        f"CPU µs per {unit}",
        *others,
        *(name for name, _ in delays),
        "memory MB",
    ]
    rows = [
        [
            proxy,
            _show(rounds.values(proxy, point, "cpu_us"), digits),
            *(_show(_ratio(rounds, proxy, other, point), 2) for other in others.values()),
            *(_added(rounds, proxy, point, measurement) for _, measurement in delays),
            _memory(rounds, proxy, point),
        ]
        for proxy in _there(rounds, point)
    ]
    return table(head, rows)


def _most_table(rounds: Rounds, point: str) -> str:
    others = _compared(rounds)
    head = [point, "CPU µs per request", *others, "requests a second"]
    rows = []
    for proxy in _there(rounds, point):
        units, seconds = rounds.values(proxy, point, "units"), rounds.values(proxy, point, "seconds")
        rows.append(
            [
                proxy,
                _show(rounds.values(proxy, point, "cpu_us"), 1),
                *(_show(_ratio(rounds, proxy, other, point), 2) for other in others.values()),
                f"{units.median / seconds.median:.0f}" if units and seconds else "",
            ]
        )
    return table(head, rows)


def _compared(rounds: Rounds) -> dict[str, str]:
    """Heads of the columns of ratios, and the proxy that each one divides by."""
    usual = {"÷ nginx": NGINX, "÷ vllm-router": ROUTER, "÷ its round_robin": ROUTER_RR}
    return ({"÷ before": BEFORE} if BEFORE in rounds.proxies else {}) | usual


def _there(rounds: Rounds, point: str) -> list[str]:
    order = [DIRECT, *RIVALS, BEFORE]
    return [name for name in order if name in rounds.proxies and rounds.values(name, point, "units")]


def _show(value: Figure | None, digits: int) -> str:
    return "" if value is None else value.text(digits)


def _ratio(rounds: Rounds, proxy: str, other: str, point: str) -> Figure | None:
    return rounds.against(proxy, other, point, "cpu_us", ratio)


def _added(rounds: Rounds, proxy: str, point: str, of: str) -> str:
    if proxy == DIRECT or DIRECT not in rounds.proxies:
        own = rounds.values(proxy, point, of)
        return "" if own is None else f"[{own.median * 1e3:.2f}]"
    return _show(rounds.against(proxy, DIRECT, point, of, more_ms), 2)


def _memory(rounds: Rounds, proxy: str, point: str) -> str:
    found = rounds.values(proxy, point, "rss_bytes")
    return "" if found is None else f"{found.most / 1e6:.0f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, columns aligned."""
    widths = [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(result: Result, docs: Path) -> None:
    """Into performance.md between the markers, and the picture beside it. Raises ValueError without markers."""
    rounds = Rounds(result["rows"])
    page = docs / "performance.md"
    before, rest = page.read_text().split(BEGIN)
    after = rest.split(END)[1]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    known = [f"{name}: {RIVALS[name].what}" for name in RIVALS if name in rounds.proxies]
    pinned = (
        "one CPU for the proxy, the other for engines and clients"
        if result["pinned"]
        else "nothing is pinned"
    )
    how = (
        f"Measured on {result['machine']}; {len(rounds.rounds)} rounds in alternating order, {pinned}. "
        "Cells: median (minimum–maximum) of the rounds. Two stub engines; streams of 129 events, 25 ms apart, each event "
        "its own packet; small requests at 1,500 per second on 64 connections. CPU time includes child processes and "
        "excludes the idle proxy's. Ratios and added times are computed per round; added times are relative to `direct`, "
        "whose own times are in […]. Memory: maximum of all rounds, shared pages counted once. "
        "Repeat with `scripts/bench-proxy --install`, then `scripts/bench-proxy --write`."
    )
    parts = [
        BEGIN,
        how,
        f"Versions: {versions}." if versions else "",
        "; ".join(known) + ".",
        f"![CPU time per event and per request]({PICTURE})",
        text(result),
        END,
    ]
    page.write_text(before + "\n\n".join(part for part in parts if part) + after)
    (docs / PICTURE).write_text(picture(rounds))


def picture(rounds: Rounds) -> str:
    """CPU time per event and per request, one bar per proxy."""
    charts = []
    for point in rounds.points:
        if point not in ("256 streams", f"1 KiB requests, {AS_MANY}"):
            continue
        values = [
            (proxy, found.median, found.least, found.most)
            for proxy in _there(rounds, point)
            if (found := rounds.values(proxy, point, "cpu_us"))
        ]
        unit = "event" if "streams" in point else "request"
        charts.append((f"CPU µs per {unit}, {point}", values))
    return bars(charts)
