"""The report's charts of latency: over throughput, and as distributions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from launcher.bench.charts import Axis, Line, Mark, distributions, line_key, lines
from launcher.bench.figures import (
    LATENCIES,
    OUTPUT_TOKENS,
    Figure,
    Runs,
    duration,
    number,
    tick_durations,
    tick_numbers,
)
from launcher.bench.markup import Markup, joined, tag
from launcher.bench.page_style import SERIES
from launcher.bench.report_subject import Subject


def latency_over_throughput(subjects: Sequence[Subject]) -> Markup | None:
    if not any(runs.value(LATENCIES["TTFT p50"]) for each in subjects for runs in each.loads):
        return None
    limits = (
        subjects[0].result.slo if all(each.result.slo == subjects[0].result.slo for each in subjects) else {}
    )
    charts = [
        _curve(subjects, "TTFT", "Time to first token", limits.get("ttft_p99")),
        _curve(subjects, "ITL", "Inter-token latency", limits.get("itl_p99")),
        _curve(subjects, "e2e", "Whole request", limits.get("e2e_p99")),
    ]
    return joined(
        tag("h2", "Latency over throughput"),
        tag(
            "p",
            "Each point is a load, named by its requests at once or started per second. "
            "Small points are its runs, large ones their mean.",
            class_="note",
        ),
        tag("div", *charts, class_="charts"),
        _letters_legend(subjects),
    )


def _curve(subjects: Sequence[Subject], short: str, title: str, limit: float | None) -> Markup | None:
    drawn = []
    for index, each in enumerate(subjects):
        for dash, part in enumerate(("p50", "p99")):
            marks = [
                mark
                for runs in each.loads
                if (mark := _mark(runs, LATENCIES[f"{short} {part}"], part == "p50"))
            ]
            if marks:
                drawn.append(
                    Line(
                        name=f"{each.letter} {part}".strip(),
                        marks=sorted(marks, key=lambda mark: mark.x),
                        colour=index if len(subjects) > 1 else dash,
                        dash=dash,
                    )
                )
    if not drawn:
        return None
    chart = lines(
        f"{title} over output tokens/s",
        Axis("output tokens/s", number, tick_numbers),
        Axis("", duration, partial(tick_durations, one_unit=True)),
        drawn,
        (limit, f"limit {duration(limit)}") if limit else None,
    )
    return tag("figure", tag("figcaption", title, tag("span", "p50 and p99 over output tokens/s")), chart)


def _mark(runs: Runs, latency: Figure, labelled: bool) -> Mark | None:
    x, y = runs.value(OUTPUT_TOKENS), runs.value(latency)
    if not x or y is None:
        return None
    rate, concurrency = runs.load.rate, runs.load.concurrency
    load = f"{concurrency:,}" if rate is None and concurrency else f"{rate:.4g}/s" if rate else ""
    rates, latencies = runs.values(OUTPUT_TOKENS), runs.values(latency)
    spread = tuple(zip(rates, latencies, strict=True)) if rates and latencies else ()
    return Mark(x=x, y=y, label=load if labelled else "", runs=spread)


def _letters_legend(subjects: Sequence[Subject]) -> Markup | None:
    if len(subjects) < 2:
        return None
    items = [
        tag("li", line_key(index, 0), f"{each.letter}: {each.result.model}")
        for index, each in enumerate(subjects)
    ]
    return tag("ul", *items, class_="legend across")


def latency_distributions(subjects: Sequence[Subject]) -> Markup | None:
    """Of one result its loads, of several results the best load of each."""
    if len(subjects) == 1:
        shown = [(runs.label, runs) for runs in subjects[0].loads if runs.usable][-SERIES:]
    else:
        shown = [(f"{each.letter}, {each.best.label}", each.best) for each in subjects if each.best][:SERIES]
    charts = [
        chart
        for name, title in (
            ("TTFT", "Time to first token"),
            ("ITL", "Inter-token latency"),
            ("e2e", "Whole request"),
        )
        if (chart := _distribution(title, name, shown))
    ]
    if not charts:
        return None
    legend = [tag("li", line_key(index, index), label) for index, (label, _) in enumerate(shown)]
    return joined(
        tag("h2", "Distributions"),
        tag("div", *charts, class_="charts"),
        tag("ul", *legend, class_="legend across"),
    )


def _distribution(title: str, name: str, shown: Sequence[tuple[str, Runs]]) -> Markup | None:
    p50 = LATENCIES[f"{name} p50"]
    drawn = [
        (label, samples, index) for index, (label, runs) in enumerate(shown) if (samples := runs.samples(p50))
    ]
    if not drawn:
        return None
    axis = Axis("", duration, partial(tick_durations, one_unit=False))
    return tag(
        "figure",
        tag("figcaption", title, tag("span", "share within a time, of all runs (log axis)")),
        distributions(f"Distribution of the {title.lower()}", axis, drawn),
    )
