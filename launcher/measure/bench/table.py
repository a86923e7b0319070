"""Results as text: the table at the end, the live line, and one line per stored result. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import mean
from typing import Final

from launcher.base.text import counted, table
from launcher.measure.bench.figures import (
    GOODPUT,
    LATENCIES,
    OUTPUT_TOKENS,
    REQUESTS,
    TOTAL_TOKENS,
    Figure,
    Runs,
    by_load,
    number,
)
from launcher.measure.bench.load_generator import Progress
from launcher.measure.bench.outcomes import NONE_COMPLETED
from launcher.measure.bench.result import BenchResult, Point

_ABSENT: Final = "-"
_LATENCIES: Final = ("TTFT", "TPOT", "ITL", "e2e")
_PERCENTILES: Final = ("p50", "p95", "p99")


def to_text(result: BenchResult) -> list[str]:
    """Two tables with one row per load, and notes. With repeats, each figure is the mean over them."""
    loads = by_load(result.points)
    lines = [
        f"{result.workload} on {result.url}, model {result.model}, {result.driver} {result.driver_version}",
        "",
        *table([_head(result), *(_row(runs, result) for runs in loads)]),
    ]
    latencies = [_latency_row(runs) for runs in loads if runs.usable]
    if latencies:
        lines += ["", *table([("p50 / p95 / p99 in ms", *_LATENCIES), *latencies])]
    notes = list(_notes(result, loads))
    return [*lines, "", *notes] if notes else lines


def _head(result: BenchResult) -> tuple[str, ...]:
    goodput = ("good/s",) if result.slo else ()
    return (
        "load", "requests", "failed", "requests/s", *goodput, "output tok/s", "total tok/s", "output tok/s/core",
        "KV max", "prefix hits", "instances",
    )  # fmt: skip


def _row(runs: Runs, result: BenchResult) -> tuple[str, ...]:
    completed, failed = (
        f"{sum(getattr(point, name) for point in runs.points):,}" for name in ("completed", "failed")
    )
    if not runs.usable:
        blank = ("",) * (len(_head(result)) - 4)
        return (runs.label, completed, failed, runs.unusable, *blank)
    output = runs.value(OUTPUT_TOKENS)
    per_core = _ABSENT if not result.cores or output is None else number(output / result.cores)
    goodput = (_shown(runs, GOODPUT),) if result.slo else ()
    return (
        runs.label, completed, failed, _shown(runs, REQUESTS), *goodput, _shown(runs, OUTPUT_TOKENS),
        _shown(runs, TOTAL_TOKENS), per_core,
        _share([point.kv_use_max for point in runs.usable], max),
        _share([point.prefix_hit_share for point in runs.usable], mean), _spread(runs.usable),
    )  # fmt: skip


def _shown(runs: Runs, figure: Figure) -> str:
    value = runs.value(figure)
    return _ABSENT if value is None else number(value)


def _latency_row(runs: Runs) -> tuple[str, ...]:
    return (runs.label, *(_latency(runs, name) for name in _LATENCIES))


def _latency(runs: Runs, name: str) -> str:
    values = [runs.value(LATENCIES[f"{name} {part}"]) for part in _PERCENTILES]
    found = [number(value * 1000) for value in values if value is not None]
    return " / ".join(found) or _ABSENT


def _share(values: Iterable[float | None], of: Callable[[list[float]], float]) -> str:
    found = [value for value in values if value is not None]
    return f"{of(found):.0%}" if found else _ABSENT


def _spread(points: Sequence[Point]) -> str:
    """Requests that each instance ended, in the order of the slots."""
    sums: dict[str, int] = {}
    for point in points:
        for slot, count in (point.requests_by_instance or {}).items():
            sums[slot] = sums.get(slot, 0) + count
    return " ".join(f"{slot}:{count}" for slot, count in sorted(sums.items(), key=_slot_order)) or _ABSENT


def _slot_order(item: tuple[str, int]) -> tuple[int, str]:
    return len(item[0]), item[0]


def _notes(result: BenchResult, loads: Sequence[Runs]) -> Iterator[str]:
    yield from result.notes
    repeats = max((len(runs.points) for runs in loads), default=0)
    if repeats > 1:
        yield f"figures are means of {counted(repeats, 'repeat')}"
    for runs in loads:
        if runs.unusable != NONE_COMPLETED and runs.unranked not in {"", runs.unusable}:
            yield f"{runs.label}: NOT THE WORKLOAD: {runs.unranked}: its figures are ranked nowhere"
        limited = [point.client for point in runs.points if point.client.limited]
        if limited:
            worst = max(limited, key=lambda client: client.share + client.wait_share)
            yield (
                f"CLIENT-LIMITED: {runs.label}: {worst}; its figures would not be the endpoint's. Reserve cores for it "
                "(layout.reserve_cores), or measure from another machine"
            )
    if not result.complete:
        yield "the run did not end: these are the points measured before"


def list_lines(results: Sequence[BenchResult]) -> list[str]:
    """One line per stored result."""
    head = ("id", "model", "workload", "points", "best output tok/s", "url")
    return table([head, *(_list_row(result) for result in results)])


def _list_row(result: BenchResult) -> tuple[str, ...]:
    values = [
        value
        for runs in by_load(result.points)
        if not runs.unranked and (value := runs.value(OUTPUT_TOKENS)) is not None
    ]
    shown = number(max(values)) if values else _ABSENT
    points = f"{len(result.points)}" + ("" if result.complete else ", not complete")
    return (result.id, result.model, result.workload, points, shown, result.url)


def live_line(progress: Progress, earlier_s: Sequence[float]) -> str:
    """`earlier_s`: what each earlier point took, the load generator's start included."""
    of = "" if progress.points is None else f"/{progress.points}"
    place = f"point {progress.point}{of}, {progress.what}" if progress.point else "warm-up"
    if not progress.measuring:
        return f"{place}: load generator starting"
    if progress.done is None:
        return f"{place}: {progress.requests} requests"
    left = None if progress.points is None or not progress.point else progress.points - progress.point
    remaining = eta_s(progress.done, progress.requests, progress.elapsed_s, earlier_s, left)
    eta = "" if remaining is None else f", about {_duration(remaining)} left"
    return f"{place}: {progress.done}/{progress.requests} requests{eta}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def eta_s(
    done: int, requests: int, elapsed_s: float, earlier_s: Sequence[float], left: int | None
) -> float | None:
    """Seconds until the end: of the point at its own pace, and of the points after it as long as the earlier ones took
    (or this one will). None while unknown."""
    if not done or left is None:
        return None
    this = elapsed_s * requests / done
    each = sum(earlier_s) / len(earlier_s) if earlier_s else this
    return this - elapsed_s + left * each
