"""Writes results as one HTML page that needs nothing else: no script, no font, no request. Pure."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from string import ascii_uppercase
from typing import Final

from launcher.base.text import counted
from launcher.measure.bench.charts import Markup, joined, tag
from launcher.measure.bench.figures import (
    GOODPUT,
    LATENCIES,
    OUTPUT_TOKENS,
    Runs,
    by_load,
    duration,
    number,
    runs_of,
)
from launcher.measure.bench.page_parts import (
    Subject,
    between,
    instances,
    latency,
    latency_distributions,
    latency_over_throughput,
    published_results,
    resources,
    scrolling,
    throughput,
)
from launcher.measure.bench.page_style import style_sheet
from launcher.measure.bench.result import BenchResult
from launcher.measure.bench.setting import (
    hardware_facts,
    plan_in_words,
    plan_slots,
    slo_in_words,
    software_facts,
    workload_in_words,
)

# Bytes of all pictures of machines on a page, so that the page stays below 300 KB.
MAX_PICTURES: Final = 190_000
# Nothing is loaded and nothing runs, whatever a result holds.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def html_page(results: Sequence[BenchResult]) -> str:
    """The page of one result, or of several beside each other."""
    subjects = [
        Subject(_letter_of(index) if len(results) > 1 else "", result, by_load(result.points))
        for index, result in enumerate(results)
    ]
    title = results[0].model if len(results) == 1 else f"{len(results)} results"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title}: numa-launcher bench"),
        tag("style", Markup(style_sheet())),
    )
    body = tag(
        "body",
        _header(title, subjects),
        tag(
            "main",
            *(_summary(each) for each in subjects),
            *_plans(subjects),
            *(_figures(each) for each in subjects),
            latency_over_throughput(subjects),
            latency_distributions(subjects),
            published_results(subjects),
            *(_method(each) for each in subjects),
        ),
        tag(
            "footer",
            tag("p", "Written by numa-launcher bench report. This page loads nothing and runs no script."),
        ),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _letter_of(index: int) -> str:
    """A to Z, A2 to Z2, A3…"""
    round_, place = divmod(index, len(ascii_uppercase))
    return ascii_uppercase[place] + (str(round_ + 1) if round_ else "")


def _header(title: str, subjects: Sequence[Subject]) -> Markup:
    return tag(
        "header",
        tag("p", "numa-launcher bench", class_="kind"),
        tag("h1", title),
        *(tag("p", _letter(each), _one_line(each)) for each in subjects),
    )


def _one_line(subject: Subject) -> str:
    result, hardware = subject.result, subject.result.hardware
    sockets = f"{hardware.sockets} × " if hardware and hardware.sockets > 1 else ""
    machine = f"{sockets}{hardware.cpu_model}" if hardware else result.url
    model = f"{result.model}, " if subject.letter else ""
    return f"{model}workload {result.workload} on {machine}, {_minute(result.started_at)}"


def _minute(started_at: str) -> str:
    """2026-11-22 17:12 UTC; as it is where it is no time with a zone."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)[\d:.]*(Z|[+-]\d\d:\d\d)", started_at)
    if match is None:
        return started_at
    zone = "UTC" if match[3] in {"Z", "+00:00"} else f"UTC{match[3]}"
    return f"{match[1]} {match[2]} {zone}"


def _letter(subject: Subject) -> Markup | None:
    return tag("strong", f"{subject.letter} ") if subject.letter else None


def _heading(text: str, subject: Subject) -> Markup:
    return tag("h2", f"{text}: {subject.letter}" if subject.letter else text)


def _summary(subject: Subject) -> Markup:
    best = subject.best
    if best is None:
        why = ", ".join(f"{runs.label}: {runs.unranked}" for runs in subject.loads) or "nothing was measured"
        return joined(
            tag("p", _letter(subject), f"No figures: {why}.", class_="alert"),
            *_notes(subject.result),
        )
    by = "goodput" if best.value(GOODPUT) is not None else "output tokens/s"
    which = (
        f"the most {by} of {counted(len(subject.loads), 'load')}"
        if len(subject.loads) > 1
        else "the only load"
    )
    return joined(
        tag("p", _letter(subject), f"Load: {best.label}, {which}."),
        tag("dl", *_tiles(subject, best), class_="tiles"),
        *_others(subject),
        *_notes(subject.result),
    )


def _others(subject: Subject) -> Iterator[Markup]:
    """The loads whose figures are not those of the workload."""
    for runs in subject.loads:
        if runs.unranked not in {"", runs.unusable}:
            yield tag(
                "p", f"{runs.label}: not the workload: {runs.unranked}; it is ranked nowhere.", class_="alert"
            )


def _notes(result: BenchResult) -> Iterator[Markup]:
    if not result.complete:
        yield tag("p", "Incomplete: the measurement ended before its last load.", class_="alert")
    yield from (tag("p", note, class_="note") for note in result.notes)


def _tiles(subject: Subject, best: Runs) -> Iterator[Markup]:
    output, goodput, cores = best.value(OUTPUT_TOKENS), best.value(GOODPUT), subject.result.cores
    if goodput is not None:
        yield _tile("goodput, requests/s", number(goodput), slo_in_words(subject.result))
    interval = best.interval(OUTPUT_TOKENS)
    sure = "one run: no interval" if interval is None else f"{between(interval)} (95%, {runs_of(best)})"
    if output:
        yield _tile("output tokens/s", number(output), sure)
        if cores:
            yield _tile(
                "output tokens/s per core",
                number(output / cores),
                f"{counted(cores, 'core')} of the instances",
            )
    for name, words in (
        ("TTFT", "time to first token"),
        ("ITL", "inter-token latency"),
        ("e2e", "whole request"),
    ):
        p50, p99 = (best.value(LATENCIES[f"{name} {part}"]) for part in ("p50", "p99"))
        if p50 is not None and p99 is not None and (name != "e2e" or not output):
            yield _tile(f"{words}, p50", duration(p50), f"p99 {duration(p99)}")
    failed = sum(point.failed for point in best.points)
    every = failed + sum(point.completed for point in best.points)
    yield _tile("failed requests", f"{failed:,}", f"of {every:,}")


def _tile(name: str, value: str, more: str) -> Markup:
    return tag(
        "div", tag("dt", name), tag("dd", tag("div", value, class_="value"), tag("div", more, class_="more"))
    )


def _figures(subject: Subject) -> Markup:
    result = subject.result
    return joined(
        _heading("Figures", subject),
        throughput(result),
        latency(result),
        resources(result),
        tag("p", f"SLO: {slo_in_words(result)}.", class_="note") if result.slo else None,
    )


class _Pictures:
    """Embeds pictures of machines until their budget is used up."""

    def __init__(self) -> None:
        self._left = MAX_PICTURES

    def embed(self, svg: str, alt: str) -> Markup:
        # As an image, an SVG cannot run scripts, load files or show tooltips.
        data = b64encode(re.sub(r"<title>[^<]*</title>\n?", "", svg).encode()).decode()
        if len(data) > self._left:
            return tag(
                "p",
                "Picture left out to keep this page small: numa-launcher plan --svg draws it.",
                class_="note",
            )
        self._left -= len(data)
        width = re.search(r'<svg[^>]* width="(\d+)', svg)
        # Not larger than it is drawn, nor so small that cpus' numbers cannot be read.
        style = f"max-width:{width[1]}px;min-width:min({width[1]}px,620px)" if width else None
        image = tag("img", src=f"data:image/svg+xml;base64,{data}", alt=alt, style=style)
        return scrolling("Picture of the machine", tag("div", image, class_="picture"))


def _plans(subjects: Sequence[Subject]) -> Iterator[Markup]:
    """A part for each machine and plan; results that share one share its part."""
    pictures = _Pictures()
    seen: list[tuple[object, object]] = []
    for subject in subjects:
        its = subject.result.plan, subject.result.picture_svg
        if not any(its) or its in seen:
            continue
        seen.append(its)
        letters = [each.letter for each in subjects if (each.result.plan, each.result.picture_svg) == its]
        yield _plan(" and ".join(letters), subject.result, pictures)


def _plan(letters: str, result: BenchResult, pictures: _Pictures) -> Markup:
    plan = plan_in_words(result)
    return joined(
        tag("h2", f"Machine and plan: {letters}" if letters else "Machine and plan"),
        tag("p", f"{plan}."),
        pictures.embed(result.picture_svg, f"The machine's cores by instance: {plan}")
        if result.picture_svg
        else None,
        instances(slots) if (slots := plan_slots(result)) else None,
    )


def _facts(facts: dict[str, str]) -> Markup | None:
    if not facts:
        return None
    entries = [part for name, value in facts.items() for part in (tag("dt", name), tag("dd", value))]
    return tag("dl", *entries, class_="facts")


def _asked_and_came(result: BenchResult) -> dict[str, str]:
    """Of a workload whose answers have an exact length."""
    asked = [point.asked_tokens for point in result.points if point.asked_tokens is not None]
    if len(asked) < len(result.points) or not asked:
        return {}
    came = sum(point.output_tokens for point in result.points)
    return {"output tokens": f"{came:,} of completed requests, {sum(asked):,} asked for"}


def _method(subject: Subject) -> Markup:
    result = subject.result
    took_s = sum(point.duration_s for point in result.points)
    seeds = sorted({point.seed for point in result.points})
    facts = {
        "result": result.id,
        "endpoint": result.url,
        "workload": workload_in_words(result),
        **_asked_and_came(result),
        "load generator": f"{result.driver} {result.driver_version}".strip(),
        "seeds": ", ".join(map(str, seeds)),
        "measured": f"{duration(took_s)} in all, from {_minute(result.started_at)}",
    }
    software = tag("div", _facts(facts), _facts(software_facts(result)))
    columns = tag("div", software, _facts(hardware_facts(result)), class_="columns")
    return joined(_heading("How it was measured", subject), columns)
