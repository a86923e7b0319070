"""The figures of a result: their names, units and directions, and the runs that repeat one load. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from launcher.base.intervals import Interval, mean
from launcher.base.text import counted
from launcher.measure.bench.offered_load import Load
from launcher.measure.bench.outcomes import FAILED_RUN, LIMITED, NONE_COMPLETED, other_work, without_figures
from launcher.measure.bench.result import Point

_UNITS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One column of the table."""

    name: str
    unit: str
    """"/s" of rates, "s" of times."""
    higher_is_better: bool
    of: Callable[[Point], float | None]
    samples: Callable[[Point], list[float]] | None = None
    """What it is a quantile of."""
    share: float = 0.5

    def shown(self, value: float) -> str:
        return duration(value) if self.unit == "s" else number(value)


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one load."""

    load: Load
    points: tuple[Point, ...]

    @property
    def label(self) -> str:
        return self.load.label

    @property
    def usable(self) -> tuple[Point, ...]:
        """Runs that have figures, and the endpoint's own."""
        return tuple(point for point in self.points if not without_figures(point))

    @property
    def unusable(self) -> str:
        """Why there are no figures, where there are none."""
        if self.usable:
            return ""
        found = {without_figures(point) for point in self.points}
        return next((why for why in (FAILED_RUN, LIMITED) if why in found), NONE_COMPLETED)

    @property
    def unranked(self) -> str:
        """Why its figures are ranked by nobody: it has none, or not what was asked for was measured. "": they may be."""
        return other_work(self.points) or self.unusable

    def value(self, figure: Figure) -> float | None:
        """The mean of its runs' figures; None where no run has it."""
        found = self._values(figure)
        return sum(found) / len(found) if found else None

    def interval(self, figure: Figure) -> Interval | None:
        """Of the mean over runs; None for one run."""
        return mean(self._values(figure))

    def values(self, figure: Figure) -> list[float] | None:
        """One figure per run; None for a single run, or where a run lacks it."""
        found = self._values(figure)
        return found if len(found) == len(self.usable) > 1 else None

    def samples(self, figure: Figure) -> list[float]:
        """The requests of all runs, in the order of the runs."""
        return [sample for point in self.usable for sample in (figure.samples or _no_samples)(point)]

    def _values(self, figure: Figure) -> list[float]:
        return [value for point in self.usable if (value := figure.of(point)) is not None]


def by_load(points: Iterable[Point]) -> list[Runs]:
    """Points of the same load are repeats, in the order in which the loads were first run."""
    loads: dict[Load, list[Point]] = {}
    for point in points:
        loads.setdefault(Load(concurrency=point.concurrency, rate=point.rate), []).append(point)
    return [Runs(load=load, points=tuple(its)) for load, its in loads.items()]


def _no_samples(_: Point) -> list[float]:
    return []


def _latency(name: str, field: str, part: str) -> Figure:
    def of(point: Point) -> float | None:
        found = getattr(point, f"{field}_s")
        return None if found is None else getattr(found, part)

    def samples(point: Point) -> list[float]:
        found: list[float] = getattr(point, f"{field}_samples_s", [])
        return found

    return Figure(
        name=f"{name} {part}",
        unit="s",
        higher_is_better=False,
        of=of,
        samples=samples,
        share=int(part[1:]) / 100,
    )


REQUESTS: Final = Figure(
    name="requests/s", unit="/s", higher_is_better=True, of=lambda point: point.requests_per_s
)
OUTPUT_TOKENS: Final = Figure(
    name="output tokens/s", unit="/s", higher_is_better=True, of=lambda point: point.output_tokens_per_s
)
TOTAL_TOKENS: Final = Figure(
    name="total tokens/s", unit="/s", higher_is_better=True, of=lambda point: point.total_tokens_per_s
)
GOODPUT: Final = Figure(
    name="goodput requests/s", unit="/s", higher_is_better=True, of=lambda point: point.goodput_per_s
)
LATENCIES: Final = {
    f"{name} {part}": _latency(name, field, part)
    for name, field in (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("e2e", "e2e"))
    for part in ("p50", "p95", "p99")
}


def number(value: float) -> str:
    """At least three significant digits, thousands with commas: 0.125, 12.3, 1,234."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}" if value else "0"


def duration(seconds: float) -> str:
    """Three significant digits in s, ms or µs."""
    scale, unit = next((each for each in _UNITS if abs(seconds) >= each[0] * 0.9995), _UNITS[-1])
    return f"{number(seconds / scale)} {unit}" if seconds else "0 s"


def tick_numbers(ticks: Sequence[float]) -> list[str]:
    """As short as they are: 0, 2.5, 5, 1,000."""
    return [f"{tick:,.6g}" for tick in ticks]


def tick_durations(ticks: Sequence[float], *, one_unit: bool) -> list[str]:
    """In the largest tick's unit, or each in its own."""
    units = [next((each for each in _UNITS if tick >= each[0] * 0.9995), _UNITS[-1]) for tick in ticks]
    if one_unit:
        units = [units[-1]] * len(ticks)
    return [
        "0" if not tick else f"{tick / scale:.6g} {unit}"
        for tick, (scale, unit) in zip(ticks, units, strict=True)
    ]


def runs_of(runs: Runs) -> str:
    """`3 runs`, `2 of 3 runs`."""
    usable, every = len(runs.usable), len(runs.points)
    return counted(every, "run") if usable == every else f"{usable} of {counted(every, 'run')}"
