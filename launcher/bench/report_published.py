"""The report's part on published results: a chart of total tokens/s per core and a table of every row. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from launcher.bench.charts import Axis, Row, mark_key, marks_in_rows
from launcher.bench.figures import OUTPUT_TOKENS, number, tick_numbers
from launcher.bench.markup import Markup, joined, tag
from launcher.bench.published import PublishedResult, Source, published, same_model, size_in_billions
from launcher.bench.report_subject import Subject
from launcher.bench.report_tables import small, table
from launcher.text_table import counted

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
