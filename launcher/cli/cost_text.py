"""Costs and estimates as text. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from typing import Final
from zoneinfo import ZoneInfo

from launcher.accounts.cost import HOUR_S, MONTH_HOURS, CostReport, OverflowCost, PerMillion
from launcher.accounts.estimate import Estimate, Month
from launcher.accounts.references import Comparison
from launcher.base.money import shown
from launcher.base.text import counted, table

_ABSENT: Final = "-"
LEFT_OUT: Final = (
    "not in these figures: people, network, cooling, spare capacity, taxes, model quality (docs/cost.md)"
)


def report_lines(report: CostReport, zone: ZoneInfo) -> list[str]:
    return [
        *_head(report, zone),
        "",
        *_costs(report),
        "",
        *_comparison(report.references, report.currency, report.references_note),
        *_rate(report),
        *([""] if report.overflow is not None else []),
        *_overflow(report.overflow, report.currency),
        "",
        LEFT_OUT,
    ]


def _head(report: CostReport, zone: ZoneInfo) -> Iterator[str]:
    begin, end = (
        dt.datetime.fromtimestamp(at, zone).strftime("%Y-%m-%d %H:%M") for at in (report.begin, report.end)
    )
    yield f"{begin} to {end} {zone.key}, {_length(report.end - report.begin)}"
    yield f"bill         {shown(report.bill, report.currency)}: {_parts(report)}"
    yield (
        f"served here  {counted(report.requests, 'request')}, {report.prompt_tokens:,} prompt tokens{_cached(report)}, "
        f"{report.output_tokens:,} output tokens"
    )
    if report.utilisation is None:
        yield "utilisation  not known: the ledger has no times of slots"
    else:
        yield f"utilisation  {_percent(report.utilisation)} of the time of {counted(report.slots, 'slot')}"


def _length(seconds: int) -> str:
    return f"{seconds / HOUR_S:,.1f} hours" if seconds >= HOUR_S else counted(-(-seconds // 60), "minute")


def _cached(report: CostReport) -> str:
    if not report.cached_tokens:
        return ""
    share = _percent(report.cached_tokens / report.prompt_tokens)
    return f", of which {report.cached_tokens:,} ({share}) cached"


def _parts(report: CostReport) -> str:
    parts = []
    if report.rent or not (report.purchase or report.energy):
        parts.append(f"rent {shown(report.rent, report.currency)}")
    if report.purchase:
        parts.append(f"share of the purchase {shown(report.purchase, report.currency)}")
    measured = report.kwh_measured_share
    if report.energy or report.kwh or measured is not None:
        how = "" if measured is None else f", measured in {_percent(measured)} of the time"
        parts.append(f"energy {shown(report.energy, report.currency)} ({report.kwh:,.1f} kWh{how})")
    return ", ".join(parts)


def _costs(report: CostReport) -> Iterator[str]:
    if not report.prompt_tokens + report.output_tokens:
        yield "no tokens were served: there is no cost of a token"
        return
    rows = [(f"{report.currency} per million", "allocated", "used")]
    for label, name in (
        ("output tokens", "output"),
        ("tokens in all", "total"),
        ("prompt tokens, not cached", "input_part"),
        ("output tokens, without prompts", "output_part"),
    ):
        rows.append((label, _of(report.allocated, name), _of(report.used, name)))
    yield from table(rows)
    if report.input_share is None:
        yield "prompts and output cannot be told apart: that takes the times of streams, and there were none"
    else:
        yield (
            f"the last two rows split the bill by the measured time of streams: {_percent(report.input_share)} before the "
            "first token; cached prompt tokens take no part of it"
        )
    yield "allocated: the whole bill over what was served; used: the bill of the busy time alone"


def _of(costs: PerMillion | None, name: str) -> str:
    value = None if costs is None else getattr(costs, name)
    return _ABSENT if value is None else shown(value)


def _comparison(rows: Sequence[Comparison], currency: str, note: str) -> Iterator[str]:
    if rows and any(row.amount for row in rows):
        yield from table(
            [
                (
                    "the same tokens at",
                    currency,
                    f"{currency} per million in all",
                    "this machine is cheaper from",
                ),
                *((row.name, shown(row.amount), _each(row), _break_even(row)) for row in rows),
            ]
        )
        yield "compared with the allocated cost: the used cost leaves out hours that are paid for"
    yield note


def _each(row: Comparison) -> str:
    return _ABSENT if row.per_million is None else shown(row.per_million)


def _break_even(row: Comparison) -> str:
    if row.break_even_tokens is None:
        return "never"
    if not row.break_even_tokens:
        return "the first token"
    return f"{_millions(row.break_even_tokens)} tokens a month"


def _rate(report: CostReport) -> Iterator[str]:
    if report.month_tokens:
        yield (
            f"served at a rate of {_millions(report.month_tokens)} tokens a month ({MONTH_HOURS} h), "
            f"for {shown(report.month_bill, report.currency)}"
        )


def _overflow(overflow: OverflowCost | None, currency: str) -> Iterator[str]:
    if overflow is None:
        return
    tokens = f"{overflow.prompt_tokens:,} prompt and {overflow.output_tokens:,} output tokens"
    yield f"overflow     {counted(overflow.requests, 'request')}, {tokens}: {shown(overflow.amount, currency)}"
    if not overflow.priced:
        yield "             its endpoint has no prices: set them in [[proxy.overflow]]"
        return
    word = "saved" if overflow.saved >= 0 else "lost"
    yield (
        f"             {word} {shown(abs(overflow.saved), currency)} against the least that would have served them "
        f"here: one more machine, {shown(overflow.second_machine, currency)}"
    )


def estimate_lines(estimate: Estimate, slo: Sequence[str]) -> list[str]:
    """`slo`: what was measured, as launcher.cli.cost_estimate says it."""
    speed = f"{estimate.tokens_per_s:,.6g} output tokens/s"
    each = f"{shown(estimate.per_million_output, estimate.currency)} per million output tokens"
    price = f"{shown(estimate.hourly, estimate.currency)} an hour"
    if estimate.month is None:
        return [
            f"{each}: {price}, {speed} without a pause",
            "a machine that is idle half of the time costs twice that; give --requests, --input and --output",
            *slo,
        ]
    return [*_month(estimate, estimate.month, speed, each, price), "", *slo, LEFT_OUT]


def _month(estimate: Estimate, month: Month, speed: str, each: str, price: str) -> Iterator[str]:
    demand, currency = month.demand, estimate.currency
    yield (
        f"{counted(demand.requests, 'request')} a month of {demand.input:,} input and {demand.output:,} output tokens: "
        f"{_millions(month.prompt_tokens)} input and {_millions(month.output_tokens)} output tokens"
    )
    yield f"bill         {shown(month.bill, currency)} a month: {_machines(month)}{price}, {MONTH_HOURS} h"
    yield f"utilisation  {_percent(month.utilisation)}: {month.busy_hours:,.1f} of {MONTH_HOURS} h at {speed}"
    if not month.fits:
        yield f"             does not fit: it takes {counted(month.machines, 'machine')}"
    elif month.utilisation > 0.5:
        yield f"             {_percent(1 - month.utilisation)} is left for peaks; requests in a peak above that wait"
    yield (
        f"allocated    {shown(month.per_million_output, currency)} per million output tokens, "
        f"{shown(month.per_million_total, currency)} per million tokens in all"
    )
    yield f"never idle   {each}"
    yield ""
    yield from _comparison(month.references, currency, month.references_note)


def _machines(month: Month) -> str:
    return "" if month.fits else f"{month.machines:,} machines, each "


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _millions(tokens: int) -> str:
    """Millions from one million on."""
    return f"{tokens / 1e6:,.1f} million" if tokens >= 10**6 else f"{tokens:,}"
