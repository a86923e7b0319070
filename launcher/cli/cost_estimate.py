"""`numa-launcher cost estimate`: what a machine would cost for a throughput and a number of requests."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from launcher.accounts.estimate import Demand, Estimate
from launcher.base.errors import LauncherError
from launcher.base.files import state_folder
from launcher.base.money import picos
from launcher.cli import options
from launcher.measure.bench.figures import OUTPUT_TOKENS, Runs, by_load, number
from launcher.measure.bench.offered_load import format_slo, meets
from launcher.measure.bench.result import BenchResult

if TYPE_CHECKING:
    import datetime as dt

    from launcher.config.usage_schema import Cost

_MAX: Final = 10**12
_LEAST: Final = 0.001


def _amount(text: str) -> float:
    value = float(text)
    if picos(value) > picos(_MAX):
        raise ValueError
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not _LEAST <= value <= _MAX:
        raise ValueError
    return value


def _count(text: str) -> int:
    """Also accepts 1_000_000 and 1,000,000."""
    return options.whole(0, _MAX)(text.replace("_", "").replace(",", ""))


def _least_one(text: str) -> int:
    if (value := _count(text)) < 1:
        raise ValueError
    return value


def _currency(text: str) -> str:
    if not (text.isascii() and text.isalpha() and text.isupper() and len(text) == 3):
        raise ValueError
    return text


def _limits(text: str) -> dict[str, float]:
    from launcher.measure.bench import offered_load  # noqa: PLC0415  heavy

    return offered_load.parse(text)


_AMOUNT: Final = options.Value("an amount of 0 or more such as 0.79", _amount)
_POSITIVE: Final = options.Value("a number from 0.001 on", _positive)
_COUNT: Final = options.Value("a number of 0 or more", _count)
_LEAST_ONE: Final = options.Value("a number of 1 or more", _least_one)
_LIMITS: Final = options.Value("a list of limits such as ttft_p99=2s,itl_p99=150ms", _limits)
_CURRENCY: Final = options.Value("a currency such as USD", _currency)
# Options of the estimate -> keys of [cost].
_PRICES: Final = ("hourly", "purchase", "years", "watts", "price_per_kwh", "currency")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokens-per-second", type=_POSITIVE, required=True, metavar="N",
        help="assume this many output tokens per second of the whole machine, as `bench` measures them")  # fmt: skip
    add("--hourly", type=_AMOUNT, metavar="PRICE", help="assume this rent of the machine for an hour")
    add(
        "--purchase",
        type=_AMOUNT,
        metavar="PRICE",
        help="assume this price of the machine, spread over --years",
    )
    add("--years", type=_POSITIVE, metavar="N", help="assume this many years of use (default: 5)")
    add("--watts", type=_AMOUNT, metavar="N", help="assume this mean power of the machine")
    add("--price-per-kwh", type=_AMOUNT, metavar="PRICE", help="assume this price of a kilowatt-hour")
    add("--currency", type=_CURRENCY, metavar="CODE", help="take all prices in this currency (default: USD)")
    add("--requests", type=_LEAST_ONE, metavar="N", help="assume this many requests a month")
    add("--input", type=_COUNT, metavar="N", help="assume this many prompt tokens of each request")
    add("--output", type=_LEAST_ONE, metavar="N", help="assume this many output tokens of each request")
    add("--slo", type=_LIMITS, default={}, metavar="LIMITS",
        help="compare with results of `bench` by these limits (default: those of the latest result)")  # fmt: skip
    add("--state-dir", type=Path, metavar="DIR",
        help="look for results of `bench` under DIR (default: as `bench`)")  # fmt: skip
    add("-c", "--config", type=Path, metavar="FILE", default=argparse.SUPPRESS,
        help="use [cost] of this configuration file; the options above replace its keys")  # fmt: skip
    add("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the estimate. Exit code 1: the requests do not fit the machine, or the SLO that was measured."""
    from launcher.accounts.estimate import estimate  # noqa: PLC0415  heavy
    from launcher.accounts.references import references  # noqa: PLC0415  heavy
    from launcher.cli.cost_text import estimate_lines  # noqa: PLC0415  heavy

    cost = _prices(args)
    made = estimate(cost, args.tokens_per_second, _demand(args), references(cost, _today()))
    fit = _slo_fit(args, made)
    if args.json:
        import msgspec  # noqa: PLC0415  heavy

        print(json.dumps({**msgspec.to_builtins(made), "slo": msgspec.to_builtins(fit)}, indent=2))
    else:
        print("\n".join(estimate_lines(made, fit.lines)))
    return int(fit.fits is False or (made.month is not None and not made.month.fits))


def _today() -> dt.date:
    import datetime as dt  # noqa: PLC0415  heavy

    return dt.datetime.now(dt.UTC).date()


def _prices(args: argparse.Namespace) -> Cost:
    """[cost] of -c with the options over it. Raises LauncherError."""
    import msgspec  # noqa: PLC0415  heavy

    from launcher.accounts.cost import is_priced  # noqa: PLC0415  heavy
    from launcher.config.loading import load_config  # noqa: PLC0415  heavy
    from launcher.config.usage_schema import Cost  # noqa: PLC0415  heavy

    given = {name: value for name in _PRICES if (value := getattr(args, name)) is not None}
    base = Cost() if args.config is None else load_config(args.config, environ=os.environ).cost
    cost = msgspec.structs.replace(base, **given)
    if (cost.watts is None) != (cost.price_per_kwh is None):
        missing, there = (
            ("--watts", "--price-per-kwh") if cost.watts is None else ("--price-per-kwh", "--watts")
        )
        raise LauncherError(
            f"cannot estimate the cost of energy: {there} without {missing}", f"give {missing}, too"
        )
    if cost.watts == "measured":
        raise LauncherError(
            "cannot estimate the cost of energy: [cost] watts = 'measured', and nothing is measured here",
            "give the machine's mean power: --watts 800",
        )
    if not is_priced(cost):
        raise LauncherError(
            "cannot estimate a cost: nothing says what the machine costs",
            "give --hourly 0.79, or --purchase PRICE, or a configuration that has [cost] with -c FILE",
        )
    return cost


def _demand(args: argparse.Namespace) -> Demand | None:
    from launcher.accounts.estimate import Demand  # noqa: PLC0415  heavy

    asked = {name: getattr(args, name) for name in ("requests", "input", "output")}
    missing = [f"--{name}" for name, value in asked.items() if value is None]
    if len(missing) == len(asked):
        return None
    if missing:
        raise LauncherError(
            f"cannot estimate the cost of requests: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            "give all of --requests, --input and --output, or none",
        )
    return Demand(**asked)


def _slo_fit(args: argparse.Namespace, made: Estimate) -> SloFit:
    from launcher.measure.bench import store  # noqa: PLC0415  heavy

    results, _ = store.load_all(state_folder(args.state_dir, os.environ, os.geteuid()) / "bench")
    return slo_fit(results, args.slo, made)


# --- Whether a demand fits the SLO that `bench` measured: the output tokens a second at which the limits held.

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
    met = [
        runs
        for runs in by_load(result.points)
        if not runs.unranked and all(meets(p, slo) for p in runs.usable)
    ]
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
