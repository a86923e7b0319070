"""Whether a demand fits the SLO that `bench` measured: the output tokens a second at which the limits held. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from launcher.bench.figures import OUTPUT_TOKENS, Runs, by_load, number
from launcher.bench.result import BenchResult
from launcher.bench.slo import format_slo, meets
from launcher.usage.estimate import Demand, Estimate

# Lengths that differ by more than this factor are another workload.
_ALIKE = 1.25


class SloFit(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and what a demand needs of it."""

    result: str | None
    """Id of the result; None: nothing usable was measured."""
    slo: dict[str, float]
    load: str | None
    """The highest load that met the limits; None: none did."""
    output_tokens_per_s: float | None
    """At that load."""
    fits: bool | None
    """Whether the demand's mean needs no more; None: not known."""
    lines: tuple[str, ...]
    """The same for a person."""


def slo_fit(results: Sequence[BenchResult], limits: Mapping[str, float], estimate: Estimate) -> SloFit:
    """`results`: oldest first; the last that has points (and an SLO, where `limits` has none) is taken."""
    result = next((each for each in reversed(results) if each.points and (limits or each.slo)), None)
    if result is None:
        return _unknown(results, limits)
    slo = dict(limits or result.slo)
    met = [runs for runs in by_load(result.points) if runs.usable and all(meets(p, slo) for p in runs.usable)]
    best = max(met, key=lambda runs: runs.value(OUTPUT_TOKENS) or 0.0, default=None)
    source = f"SLO {format_slo(slo)}, measured by bench {result.id} ({result.model}, {_lengths(result)})"
    if best is None:
        return SloFit(
            result=result.id,
            slo=slo,
            load=None,
            output_tokens_per_s=None,
            fits=None if estimate.month is None else False,
            lines=(f"{source}: no load met it",),
        )
    return _fit(result, slo, best, estimate, source)


def _unknown(results: Sequence[BenchResult], limits: Mapping[str, float]) -> SloFit:
    what = (
        "no result of `numa-launcher bench` has an SLO" if results and not limits else "nothing was measured"
    )
    line = f"SLO: {what}; run `numa-launcher bench --sweep --slo ttft_p99=2s` on this machine"
    return SloFit(
        result=None, slo=dict(limits), load=None, output_tokens_per_s=None, fits=None, lines=(line,)
    )


def _fit(result: BenchResult, slo: dict[str, float], best: Runs, estimate: Estimate, source: str) -> SloFit:
    speed = best.value(OUTPUT_TOKENS) or 0.0
    lines = [f"{source}: met up to {number(speed)} output tokens/s, at {best.label}"]
    if speed < estimate.tokens_per_s:
        lines.append(
            f"  at {number(estimate.tokens_per_s)} output tokens/s, which this estimate takes, it was not met"
        )
    needed, demand = _needed(estimate), None if estimate.month is None else estimate.month.demand
    fits = None if needed is None else needed <= speed
    if needed is not None:
        lines.append(
            f"  the requests need {number(needed)} output tokens/s on average: "
            + (
                f"fits; peaks of {number(speed / needed)} times the mean still meet it"
                if fits
                else "does not fit"
            )
        )
    if demand is not None and not _alike(demand, result):
        lines.append("  it was measured with other lengths than yours: measure with yours")
    return SloFit(
        result=result.id, slo=slo, load=best.label, output_tokens_per_s=speed, fits=fits, lines=tuple(lines)
    )


def _needed(estimate: Estimate) -> float | None:
    return None if estimate.month is None else estimate.month.demand.output_tokens_per_s


def _mean_lengths(result: BenchResult) -> tuple[float, float]:
    completed = sum(point.completed for point in result.points) or 1
    return (
        sum(point.input_tokens for point in result.points) / completed,
        sum(point.output_tokens for point in result.points) / completed,
    )


def _lengths(result: BenchResult) -> str:
    prompt, output = _mean_lengths(result)
    return f"{prompt:.0f} input and {output:.0f} output tokens a request"


def _alike(demand: Demand, result: BenchResult) -> bool:
    pairs = zip((demand.input, demand.output), _mean_lengths(result), strict=True)
    return all(1 / _ALIKE <= (asked + 1) / (measured + 1) <= _ALIKE for asked, measured in pairs)
