"""Tables of a live comparison of balancing."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.pages import machine, table
from bench.rivals import OURS, SETTINGS

BEGIN: Final = "<!-- bench-balance begins: written by scripts/bench-balance --write -->"
END: Final = "<!-- bench-balance ends -->"

Row = Mapping[str, Any]
__all__ = ["BEGIN", "END", "line", "machine", "text", "write"]


def line(row: Row) -> str:
    """One run, for someone who watches."""
    return (
        f"{row['workload']:<11} seed {row['seed']} {row['setting']:<13} TTFT p50 {row['ttft_p50_s']:6.2f} p99 "
        f"{row['ttft_p99_s']:6.2f}  whole p99 {row['whole_p99_s']:6.2f}  hits {row['hit_rate']:4.0%}  goodput "
        f"{row['goodput']:5.0f}/s  back {row['back_ms']:5.1f} ms  failed {row['failed']}  cpus {row['busy']:4.0%}"
    )


def _median(rows: Sequence[Row], of: str) -> float:
    return statistics.median(float(row[of]) for row in rows)


def _by(rows: Sequence[Row], workload: str, setting: str) -> list[Row]:
    return [row for row in rows if row["workload"] == workload and row["setting"] == setting]


def best_rival(rows: Sequence[Row], workload: str, of: str) -> str | None:
    """The setting but ours with the lowest median."""
    names = {row["setting"] for row in rows if row["workload"] == workload and row["setting"] != OURS}
    return min(names, key=lambda name: _median(_by(rows, workload, name), of), default=None)


def ratio(rows: Sequence[Row], workload: str, of: str) -> float | None:
    """Ours over the best rival of this workload, seed by seed; the median."""
    rival = best_rival(rows, workload, of)
    if rival is None:
        return None
    theirs = {row["seed"]: row[of] for row in _by(rows, workload, rival)}
    found = [row[of] / theirs[row["seed"]] for row in _by(rows, workload, OURS) if theirs.get(row["seed"])]
    return statistics.median(found) if found else None


def text(result: Mapping[str, Any]) -> str:
    """One table per workload, and one of ratios."""
    rows: Sequence[Row] = result["rows"]
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    parts = [_table(rows, name) for name in workloads]
    if any(row["setting"] == OURS for row in rows):
        parts.append(_ratios(rows, workloads))
    return "\n\n".join(parts)


def _ratios(rows: Sequence[Row], workloads: Sequence[str]) -> str:
    head = ["workload", "TTFT p99 ÷ best rival", "which", "whole p99 ÷ best rival", "which", "failed"]
    body = []
    for name in workloads:
        first, whole = ratio(rows, name, "ttft_p99_s"), ratio(rows, name, "whole_p99_s")
        body.append(
            [
                name,
                "" if first is None else f"{first:.2f}",
                best_rival(rows, name, "ttft_p99_s") or "",
                "" if whole is None else f"{whole:.2f}",
                best_rival(rows, name, "whole_p99_s") or "",
                str(sum(row["failed"] for row in _by(rows, name, OURS))),
            ]
        )
    return table(head, body)


def _table(rows: Sequence[Row], workload: str) -> str:
    head = [workload, "TTFT p50 s", "TTFT p99 s", "whole p99 s", "hit rate", "goodput tok/s", "failed"]
    body = []
    for name in SETTINGS:
        if not (found := _by(rows, workload, name)):
            continue
        body.append(
            [
                name,
                f"{_median(found, 'ttft_p50_s'):.2f}",
                _spread([row["ttft_p99_s"] for row in found]),
                _spread([row["whole_p99_s"] for row in found]),
                f"{_median(found, 'hit_rate'):.0%}",
                f"{_median(found, 'goodput'):.0f}",
                str(sum(row["failed"] for row in found)),
            ]
        )
    return table(head, body)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def write(result: Mapping[str, Any], docs: Path) -> None:
    """Into performance.md between the markers. Raises ValueError without markers."""
    page = docs / "performance.md"
    before, rest = page.read_text().split(BEGIN)
    after = rest.split(END)[1]
    rows: Sequence[Row] = result["rows"]
    seeds = sorted({row["seed"] for row in rows})
    requests = max((row["requests"] for row in rows), default=0)
    busiest = max((row["busy"] for row in rows), default=0.0)
    how = (
        f"Measured on {result['machine']}: four simulated engines (prefill 1,500 tok/s, step 60 ms + "
        f"0.8 ms per sequence, 32 sequences, 60k tokens of prefix cache), {requests} requests per run at "
        f"{result['load']:.0%} of saturation, open loop, seeds {', '.join(map(str, seeds))}, the same requests for "
        f"all. Time runs {result['speed']:g} times faster; all figures are model time. Cells: median (minimum–maximum) "
        f"of the seeds. CPUs were at most {busiest:.0%} busy. Goodput counts tokens of requests whose first token came "
        "within 2 s. Repeat with `scripts/bench-balance --write`."
    )
    there = {row["setting"] for row in rows}
    known = "; ".join(f"{name}: {setting.what}" for name, setting in SETTINGS.items() if name in there)
    page.write_text(before + "\n\n".join([BEGIN, how, known + ".", text(result), END]) + after)
