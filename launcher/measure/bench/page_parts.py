"""The report's tables: throughput, latency and resources by load, instances of the plan. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from launcher.base.intervals import Interval
from launcher.base.text import counted, format_size
from launcher.measure.bench.charts import (
    Axis,
    Content,
    Line,
    Mark,
    Markup,
    Row,
    distributions,
    joined,
    line_key,
    lines,
    mark_key,
    marks_in_rows,
    tag,
)
from launcher.measure.bench.figures import (
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
    tick_durations,
    tick_numbers,
)
from launcher.measure.bench.page_style import SERIES
from launcher.measure.bench.published import PublishedResult, Source, published, same_model, size_in_billions
from launcher.measure.bench.result import BenchResult
from launcher.measure.bench.setting import cpu_count

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


# --- What the report is about: a result, its loads, and the load that its headline figures are of. ---


class Subject(msgspec.Struct, frozen=True):
    """A result on the page."""

    letter: str
    """"" where the page has one result."""
    result: BenchResult
    loads: list[Runs]

    @property
    def best(self) -> Runs | None:
        """The load of most goodput, or without an SLO of most output tokens (of embeddings: of all tokens); of those at
        which the workload was measured."""
        usable = [runs for runs in self.loads if not runs.unranked]
        if not usable:
            return None
        order = GOODPUT, OUTPUT_TOKENS, TOTAL_TOKENS
        return max(usable, key=lambda runs: tuple(runs.value(figure) or 0 for figure in order))

    @property
    def total(self) -> float:
        """Total tokens a second at the best load; 0 without one."""
        return (self.best.value(TOTAL_TOKENS) or 0.0) if self.best else 0.0

    @property
    def per_core(self) -> float | None:
        return self.total / self.result.cores if self.result.cores else None


# --- The report's charts of latency: over throughput, and as distributions. ---


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


# --- The report's part on published results: a chart of total tokens/s per core and a table of every row.

_MAX_NAME: Final = 20


def published_results(measured: Sequence[Subject]) -> Markup | None:
    measured = [each for each in measured if each.total]
    if not measured:
        return None
    names = [source.name for source in published().sources] + ["measured here"]
    axis = Axis("total tokens/s per core (Rackspace: per vCPU)", number, tick_numbers)
    chart = marks_in_rows("Total tokens/s per core, by model", axis, list(_rows(measured)), names)
    legend = [tag("li", mark_key(index), name) for index, name in enumerate(names)]
    return joined(
        tag("h2", "Beside published results"),
        tag(
            "p",
            "Total tokens/s are prompt and output tokens. None of the published figures was measured with this program; "
            "machines, stacks, loads and most models differ: they show the order of magnitude and rank nothing. AMD's are "
            "offline runs of vllm bench throughput with all prompts at once, Rackspace's of a server with 4 requests at "
            "once.",
        ),
        tag(
            "figure",
            tag("figcaption", "Total tokens/s per core, by model", tag("span", "logarithmic axis")),
            chart,
            tag("ul", *legend, class_="legend"),
            class_="wide",
        ),
        _table(measured),
        tag(
            "p",
            "AMD's ratios are those of several pinned instances with ZenDNN over one instance without: part of them is "
            "ZenDNN's, part the instances'. AMD publishes no figure that separates the two.",
            class_="note",
        ),
        tag("ul", *_references(), class_="note"),
    )


def _rows(measured: Sequence[Subject]) -> Iterator[Row]:
    """What was measured here first, with the published marks of the same model; then the other models by size."""
    sources = published().sources
    by_model: dict[str, dict[int, float]] = {}
    for index, source in enumerate(sources):
        for its in source.results:
            by_model.setdefault(its.model, {})[index] = its.total_tokens_per_s / source.cores
    of_measured = {
        model: values
        for model, values in by_model.items()
        if any(same_model(model, each.result.model) for each in measured)
    }
    for each in measured:
        if each.per_core:
            others = (values for model, values in of_measured.items() if same_model(model, each.result.model))
            name = f"{each.letter} {each.result.model.rsplit('/', 1)[-1]}".strip()
            short = name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…"
            yield Row(name=short, values={**next(others, {}), len(sources): each.per_core}, strong=True)
    for model in sorted(
        by_model.keys() - of_measured.keys(), key=lambda model: (size_in_billions(model), model)
    ):
        yield Row(name=model, values=by_model[model])


def _table(measured: Sequence[Subject]) -> Markup:
    """A row per model, a column per source: total tokens/s, below it output tokens/s and per core."""
    sources, (one_socket,) = published().sources, published().ratios
    amd = tag("th", "AMD, 2 × EPYC 9755 (ZD-060)", scope="colgroup", colspan="4")
    rackspace = tag("th", "Rackspace, 24 vCPUs", scope="colgroup", colspan="2")
    heads = [
        "model",
        "several, ZenDNN",
        "one, no ZenDNN",
        "ratio",
        "1 socket (ZD-059)",
        "ZenTorch",
        "no ZenTorch",
    ]
    models = {its.model for source in sources for its in source.results}
    rows = [_measured_row(each, len(heads) - 1) for each in measured]
    for model in sorted(models, key=lambda model: (size_in_billions(model), model)):
        cells = [_published_cell(source, model) for source in sources]
        ratio = next((f"{its.ratio:.2f}" for its in one_socket.results if its.model == model), None)
        ratios = [tag("td", _ratio(sources[0], sources[1], model)), tag("td", ratio)]
        same = any(same_model(model, each.result.model) for each in measured)
        head = tag("th", model, small("the model measured here") if same else None, scope="row")
        rows.append(tag("tr", head, *cells[:2], *ratios, *cells[2:], class_="here" if same else None))
    above = tag("tr", tag("td"), amd, rackspace)
    return table("Published throughputs in total tokens/s", heads, rows, above=above)


def _measured_row(each: Subject, columns: int) -> Markup:
    runs = each.best
    output = runs.value(OUTPUT_TOKENS) if runs else None
    here = f"measured here, {counted(each.result.cores, 'core')}" if each.result.cores else "measured here"
    load = f"{each.result.workload}, {runs.label}" if runs else each.result.workload
    return tag(
        "tr",
        tag("th", f"{each.letter} {each.result.model}".strip(), small(here), small(load), scope="row"),
        tag(
            "td",
            number(each.total),
            small(_more(output, each.per_core, "core")),
            colspan=columns,
            class_="left",
        ),
        class_="here",
    )


def _published_cell(source: Source, model: str) -> Markup:
    its = _of_model(source, model)
    if its is None:
        return tag("td")
    more = _more(its.output_tokens_per_s, its.total_tokens_per_s / source.cores, source.core)
    return tag("td", number(its.total_tokens_per_s), small(more))


def _more(output: float | None, per_core: float | None, core: str) -> str:
    parts = [
        f"{number(output)} output" if output else "",
        f"{number(per_core)} per {core}" if per_core else "",
    ]
    return " · ".join(filter(None, parts))


def _ratio(several: Source, one: Source, model: str) -> str | None:
    over, under = _of_model(several, model), _of_model(one, model)
    return f"{over.total_tokens_per_s / under.total_tokens_per_s:.2f}" if over and under else None


def _of_model(source: Source, model: str) -> PublishedResult | None:
    return next((its for its in source.results if its.model == model), None)


def _references() -> Iterator[Markup]:
    for source in published().sources:
        link = tag("a", source.reference, href=source.url) if source.url else source.reference
        yield tag("li", f"{source.name}: ", link, f". {source.machine}; {source.stack}; {source.driver}.")
    for ratios in published().ratios:
        yield tag("li", f"{ratios.reference}. {ratios.machine}; published as ratios only.")
