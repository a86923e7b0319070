"""Results as text: the table at the end, the live line, and one line per stored result. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Final

from launcher.bench.load import Load
from launcher.bench.progress import Progress
from launcher.bench.result import BenchResult, Percentiles, Point
from launcher.text_table import counted, table

LIMITED: Final = "CLIENT-LIMITED"
NONE_COMPLETED: Final = "ALL FAILED"
_ABSENT: Final = "-"
_LATENCIES: Final = (
    ("TTFT", "ttft_s"),
    ("time per output token", "tpot_s"),
    ("inter-token", "itl_s"),
    ("whole request", "e2e_s"),
)


def to_text(result: BenchResult) -> list[str]:
    """Two tables with one row per load, and notes. With repeats, each figure is the median over them."""
    rows = _by_load(result.points)
    lines = [
        f"{result.workload} on {result.url}, model {result.model}, {result.driver} {result.driver_version}",
        "",
        *table([_head(result), *(_row(load, points, result) for load, points in rows)]),
    ]
    latencies = [_latency_row(load, points) for load, points in rows if _usable(points)]
    if latencies:
        head = ("p50 / p95 / p99 in ms", *(name for name, _ in _LATENCIES))
        lines += ["", *table([head, *latencies])]
    lines += ["", *_notes(result, rows)]
    return lines


def _by_load(points: Iterable[Point]) -> list[tuple[Load, list[Point]]]:
    rows: dict[Load, list[Point]] = {}
    for point in points:
        rows.setdefault(Load(concurrency=point.concurrency, rate=point.rate), []).append(point)
    return list(rows.items())


def _usable(points: Sequence[Point]) -> list[Point]:
    """Points whose figures are the endpoint's."""
    return [point for point in points if point.completed and not point.client.limited]


def _head(result: BenchResult) -> tuple[str, ...]:
    goodput = ("good/s",) if result.slo else ()
    return (
        "load", "requests", "failed", "req/s", *goodput, "output tok/s", "total tok/s", "output tok/s/core",
        "KV max", "prefix hits", "instances",
    )  # fmt: skip


def _row(load: Load, points: list[Point], result: BenchResult) -> tuple[str, ...]:
    completed, failed = (
        f"{sum(getattr(point, name) for point in points):,}" for name in ("completed", "failed")
    )
    usable = _usable(points)
    if not usable:
        why = LIMITED if any(point.completed for point in points) else NONE_COMPLETED
        blank = ("",) * (len(_head(result)) - 4)
        return (load.label, completed, failed, why, *blank)
    cores = result.cores
    goodput = (_middle(usable, lambda point: point.goodput_per_s),) if result.slo else ()
    per_core = _ABSENT if not cores else _middle(usable, lambda point: point.output_tokens_per_s / cores)
    return (
        load.label, completed, failed, _middle(usable, lambda point: point.requests_per_s), *goodput,
        _middle(usable, lambda point: point.output_tokens_per_s),
        _middle(usable, lambda point: point.total_tokens_per_s), per_core,
        _share(usable, lambda point: point.kv_use_max), _share(usable, lambda point: point.prefix_hit_share),
        _spread(usable),
    )  # fmt: skip


def _latency_row(load: Load, points: list[Point]) -> tuple[str, ...]:
    return (load.label, *(_latency(_usable(points), name) for _, name in _LATENCIES))


def _latency(points: Sequence[Point], name: str) -> str:
    found: list[Percentiles] = [value for point in points if (value := getattr(point, name)) is not None]
    if not found:
        return _ABSENT
    middles = (median(getattr(value, which) for value in found) for which in ("p50", "p95", "p99"))
    return " / ".join(figure(value * 1000) for value in middles)


def _middle(points: Sequence[Point], of: Callable[[Point], float | None]) -> str:
    values = [value for point in points if (value := of(point)) is not None]
    return figure(median(values)) if values else _ABSENT


def _share(points: Sequence[Point], of: Callable[[Point], float | None]) -> str:
    values = [value for point in points if (value := of(point)) is not None]
    return f"{median(values):.0%}" if values else _ABSENT


def _spread(points: Sequence[Point]) -> str:
    """Requests that each instance ended, in the order of the slots."""
    sums: dict[str, int] = {}
    for point in points:
        for slot, count in (point.requests_by_instance or {}).items():
            sums[slot] = sums.get(slot, 0) + count
    return " ".join(f"{slot}:{count}" for slot, count in sorted(sums.items(), key=_slot_order)) or _ABSENT


def _slot_order(item: tuple[str, int]) -> tuple[int, str]:
    return len(item[0]), item[0]


def figure(value: float) -> str:
    """Three significant digits or more: 0.123, 12.3, 1,234."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _notes(result: BenchResult, rows: Sequence[tuple[Load, list[Point]]]) -> list[str]:
    notes = list(result.notes)
    repeats = max((len(points) for _, points in rows), default=0)
    if repeats > 1:
        notes.append(f"figures are medians of {counted(repeats, 'repeat')}")
    for load, points in rows:
        limited = [point.client for point in points if point.client.limited]
        if limited:
            worst = max(limited, key=lambda client: client.share + client.wait_share)
            notes.append(
                f"{LIMITED}: {load.label}: the load generator used {worst.share:.0%} of a core and waited for a cpu "
                f"{worst.wait_share:.0%} of the time; its figures would not be the endpoint's. Reserve cores for it "
                "(layout.reserve_cores), or measure from another machine"
            )
    if not result.complete:
        notes.append("the run did not end: these are the points measured before")
    return notes


def list_lines(results: Sequence[BenchResult]) -> list[str]:
    """One line per stored result."""
    head = ("id", "model", "workload", "points", "best output tok/s", "url")
    return table([head, *(_list_row(result) for result in results)])


def _list_row(result: BenchResult) -> tuple[str, ...]:
    usable = _usable(result.points)
    best = max((point.output_tokens_per_s for point in usable), default=None)
    shown = _ABSENT if best is None else figure(best)
    points = f"{len(result.points)}" + ("" if result.complete else ", not complete")
    return (result.id, result.model, result.workload, points, shown, result.url)


def live_line(progress: Progress, earlier_s: Sequence[float]) -> str:
    """`earlier_s`: what each earlier point took, the load generator's start included."""
    of = "" if progress.points is None else f"/{progress.points}"
    place = f"point {progress.point}{of}, {progress.what}" if progress.point else "warm-up"
    if not progress.measuring:
        return f"{place}: load generator starting"
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
