"""The report's tables: throughput, latency and resources by load, instances of the plan. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from launcher.bench.figures import (
    GOODPUT,
    LATENCIES,
    OUTPUT_TOKENS,
    REQUESTS,
    TOTAL_TOKENS,
    Figure,
    Runs,
    by_load,
    duration,
    number,
)
from launcher.bench.markup import Content, Markup, joined, tag
from launcher.bench.result import BenchResult
from launcher.bench.setting import cpu_count
from launcher.intervals import Interval
from launcher.sizes import format_size

ABSENT: Final = "–"


def scrolling(label: str, *content: Content) -> Markup:
    """A part that scrolls sideways on narrow screens; focusable, so that it scrolls without a pointer."""
    return tag("div", *content, class_="scroll", tabindex="0", role="region", aria_label=label)


def throughput(result: BenchResult) -> Markup:
    """Rates by load; with more than one run, their mean and its interval."""
    figures = [REQUESTS, OUTPUT_TOKENS, TOTAL_TOKENS]
    if any(point.goodput_per_s is not None for point in result.points):
        figures.append(GOODPUT)
    heads = ["load", "runs", *(figure.name for figure in figures)]
    if result.cores:
        heads += ["output tokens/s per core", "total tokens/s per core"]
    rows = []
    for runs in by_load(result.points):
        cells = [_rate(runs, figure) for figure in figures]
        if result.cores:
            cells += [_rate(runs, figure, result.cores) for figure in (OUTPUT_TOKENS, TOTAL_TOKENS)]
        rows.append(_row(runs, cells))
    if any(len(runs.usable) > 1 for runs in by_load(result.points)):
        said = "Means over runs; below each its 95% interval."
    else:
        said = "One run of each load: no intervals."
    return joined(note(said), table("Throughput by load", heads, rows))


def latency(result: BenchResult) -> Markup:
    rows = [
        _row(runs, [_time(runs, LATENCIES[name]) for name in LATENCIES]) for runs in by_load(result.points)
    ]
    names = list(dict.fromkeys(name.split()[0] for name in LATENCIES))
    above = tag(
        "tr", tag("td"), tag("td"), *(tag("th", name, scope="colgroup", colspan="3") for name in names)
    )
    heads = ["load", "runs", *(name.split()[1] for name in LATENCIES)]
    return joined(
        note(
            "TTFT: time to first token. TPOT: time per output token after the first. ITL: inter-token latency. "
            "e2e: whole request. Each is the mean over runs of the runs' percentiles."
        ),
        table("Latency by load", heads, rows, above=above, class_="threes"),
    )


def resources(result: BenchResult) -> Markup:
    """Failures, KV cache, prefix cache, spread over instances, and the load generator's own share of a core."""
    rows = []
    for runs in by_load(result.points):
        points = runs.points
        failed, completed = sum(point.failed for point in points), sum(point.completed for point in points)
        rows.append(
            _row(
                runs,
                [
                    tag("td", f"{failed:,} of {failed + completed:,}", class_="alert" if failed else None),
                    tag("td", _percent(_greatest(point.kv_use_max for point in points))),
                    tag("td", _percent(_average(point.prefix_hit_share for point in points))),
                    tag("td", _spread(runs)),
                    tag("td", _percent(_greatest(point.client.share for point in points))),
                ],
                limited=False,
            )
        )
    heads = [
        "load",
        "runs",
        "failed",
        "KV cache, most",
        "prefix hits",
        "requests by instance",
        "client, of one core",
    ]
    return table("Requests and resources by load", heads, rows)


def instances(slots: Sequence[dict[str, Any]]) -> Markup:
    rows = []
    for slot in slots:
        kv = slot.get("kv_cache_bytes")
        rows.append(
            tag(
                "tr",
                tag("th", f"instance {slot.get('slot')}", scope="row"),
                tag("td", str(slot.get("socket", ABSENT))),
                tag("td", str(slot.get("membind") or ABSENT)),
                tag("td", str(cpu_count(str(slot.get("cpus") or "")))),
                tag("td", format_size(kv) if isinstance(kv, int) else ABSENT),
                tag("td", _abridged(str(slot.get("cpus") or "")), class_="left"),
            )
        )
    heads = ["", "socket", "memory node", "cpus", "KV cache", "list of cpus"]
    return table("Instances of the plan", heads, rows, left=("list of cpus",))


def table(
    label: str,
    heads: Sequence[str],
    rows: Sequence[Markup],
    *,
    left: Sequence[str] = (),
    above: Markup | None = None,
    class_: str | None = None,
) -> Markup:
    """`left` are the columns of text; `above` is a row above the heads."""
    head = tag(
        "tr", *(tag("th", name, scope="col", class_="left" if name in left else None) for name in heads)
    )
    return scrolling(label, tag("table", tag("thead", above, head), tag("tbody", *rows), class_=class_))


def note(content: str) -> Markup:
    return tag("p", content, class_="note")


def small(content: str) -> Markup:
    return tag("small", content)


def between(interval: Interval, divisor: float = 1.0) -> str:
    low, high = max(0.0, interval.low) / divisor, interval.high / divisor
    return f"{number(low)} to {number(high)}"


def _row(runs: Runs, cells: Sequence[Markup], *, limited: bool = True) -> Markup:
    why = runs.unusable if limited else ""
    figures: Sequence[Markup] = (
        [tag("td", why, colspan=str(len(cells)), class_="alert left")] if why else cells
    )
    usable, every = len(runs.usable), len(runs.points)
    return tag(
        "tr",
        tag("th", runs.label, scope="row"),
        tag("td", str(every) if usable == every else f"{usable} of {every}"),
        *figures,
    )


def _rate(runs: Runs, figure: Figure, divisor: float = 1.0) -> Markup:
    value, interval = runs.value(figure), runs.interval(figure)
    if value is None:
        return tag("td", ABSENT)
    return tag("td", number(value / divisor), small(between(interval, divisor)) if interval else None)


def _time(runs: Runs, figure: Figure) -> Markup:
    value = runs.value(figure)
    return tag("td", ABSENT if value is None else duration(value))


def _abridged(cpulist: str) -> str:
    """`0,2,4,…,124`: a long list's first three entries and its last."""
    entries = cpulist.split(",")
    return cpulist if len(cpulist) <= 40 else f"{','.join(entries[:3])},…,{entries[-1]}"


def _spread(runs: Runs) -> Markup:
    total: dict[str, int] = {}
    for point in runs.points:
        for name, count in (point.requests_by_instance or {}).items():
            total[name] = total.get(name, 0) + count
    return joined(" · ".join(f"{name}: {count:,}" for name, count in total.items()) or ABSENT)


def _greatest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _average(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _percent(share: float | None) -> str:
    return ABSENT if share is None else f"{share * 100:.3g} %"
