"""Whether result B differs from result A: a ratio with an interval for each figure of each load. Pure.

Two runs or more on both sides: the runs are the samples, so the interval covers what varies between runs. One run:
throughput has no interval, latencies have that of the requests within the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import groupby
from typing import Final

import msgspec

from launcher.base.intervals import LEVEL, Interval, mean_ratio, quantile_needs, quantile_ratio
from launcher.base.text import counted, quoted, table
from launcher.measure.bench.figures import (
    GOODPUT,
    LATENCIES,
    OUTPUT_TOKENS,
    REQUESTS,
    TOTAL_TOKENS,
    Figure,
    Runs,
    by_load,
    runs_of,
)
from launcher.measure.bench.outcomes import LIMITED, TOLERANCE, per_answer
from launcher.measure.bench.result import BenchResult
from launcher.measure.bench.setting import Difference, conditions_that_differ, versions_that_differ

COMPARED: Final = (
    OUTPUT_TOKENS, TOTAL_TOKENS, REQUESTS, GOODPUT,
    *(LATENCIES[name] for name in ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "e2e p50", "e2e p99")),
)  # fmt: skip


class Finding(StrEnum):
    """What the interval of a ratio says."""

    BETTER = "better"
    WORSE = "worse"
    NONE = "no difference seen"
    UNKNOWN = "no interval"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure at one load."""

    load: str
    figure: Figure
    a: float
    b: float
    ratio: float
    interval: Interval | None
    why_no_interval: str = ""
    one_run: bool = False
    """It has no interval because a side has one run."""

    @property
    def finding(self) -> Finding:
        if self.interval is None:
            return Finding.UNKNOWN
        if self.interval.contains(1.0):
            return Finding.NONE
        return Finding.BETTER if (self.interval.low > 1) == self.figure.higher_is_better else Finding.WORSE

    def exceeds(self, tolerance: float) -> bool:
        """The whole interval is worse than the tolerance allows."""
        if self.interval is None:
            return False
        if self.figure.higher_is_better:
            return self.interval.high < 1 - tolerance
        return self.interval.low > 1 + tolerance


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `bench compare A B`."""

    a: BenchResult
    b: BenchResult
    conditions: list[Difference]
    """What makes the figures those of different things."""
    versions: list[Difference]
    loads: list[tuple[str, list[Row]]]
    """Rows by load, headed by the load and its runs."""
    without: list[str]
    """Loads that cannot be compared, and why."""
    failures: list[str]
    """Loads at which more requests of B failed than the tolerance allows."""
    others: list[str]
    """Loads at which A measured its workload and B did not."""
    tolerance: float | None

    @property
    def rows(self) -> list[Row]:
        return [row for _, rows in self.loads for row in rows]

    @property
    def exceeding(self) -> list[Row]:
        return [] if self.tolerance is None else [row for row in self.rows if row.exceeds(self.tolerance)]

    @property
    def worse(self) -> bool:
        """Exit code 1: B is worse than the tolerance allows."""
        return self.tolerance is not None and bool(self.exceeding or self.failures or self.others)

    def lines(self) -> Iterator[str]:
        yield f"A  {_title(self.a)}"
        yield f"B  {_title(self.b)}"
        for text, differences in (
            ("not the same thing was measured:", self.conditions),
            ("what else differs:", self.versions),
        ):
            if differences:
                yield ""
                yield text
                yield from (f"  {difference}" for difference in differences)
        for title, rows in self.loads:
            yield ""
            yield title
            yield from (f"  {line}" for line in table(list(_cells(rows))))
        if self.without:
            yield ""
            yield from self.without
        yield ""
        yield from self._verdict()

    def _verdict(self) -> Iterator[str]:
        yield from self.failures
        yield from self.others
        judged = [row for row in self.rows if row.interval is not None]
        differing = [row for row in judged if row.finding is not Finding.NONE]
        for finding in (Finding.WORSE, Finding.BETTER):
            for load, rows in _grouped([row for row in differing if row.finding is finding]):
                figures = (f"{row.figure.name} ({_ratio(row.ratio)})" for row in rows)
                yield f"{load}: {finding}: {', '.join(figures)}"
        if judged and not differing:
            yield "no difference seen between A and B"
            yield _reach(judged)
        if differing:
            yield f"by chance alone about 1 in {1 / (1 - LEVEL):.0f} intervals excludes 1; here are {len(judged)}"
        if any(row.one_run for row in self.rows):
            yield "throughput has no interval with one run: measure A and B with --repeats 3 or more"
        if self.tolerance is not None:
            yield self._against(self.tolerance)

    def _against(self, tolerance: float) -> str:
        limit = f"{tolerance * 100:.3g} %"
        if not self.worse and not self.rows:
            return "no figure of B was compared with A's"
        if not self.worse:
            return f"no figure of B is shown to be worse than A's by more than {limit}"
        found = [
            f"{load}: {', '.join(row.figure.name for row in rows)}" for load, rows in _grouped(self.exceeding)
        ]
        found += ["failed requests"] * bool(self.failures)
        found += ["not the same measurement"] * bool(self.others)
        return f"B is worse than A by more than {limit} ({'; '.join(found)})"


def compare(a: Sequence[BenchResult], b: Sequence[BenchResult], tolerance: float | None) -> Comparison:
    """Compares the results on each side, which share machine, plan and workload, load by load.

    `tolerance` is a share: 0.03 for 3 %."""
    of_a, of_b = (by_load(point for result in side for point in result.points) for side in (a, b))
    others = {runs.load: runs for runs in of_b}
    loads: list[tuple[str, list[Row]]] = []
    without: list[str] = []
    failures: list[str] = []
    others_of_b: list[str] = []
    for runs in of_a:
        other = others.pop(runs.load, None)
        if other is None:
            without.append(f"{runs.label}: measured in A only")
            continue
        failures += _failures(runs, other, tolerance or 0)
        others_of_b += _others(runs, other)
        if why := _not_compared(runs, other):
            without.append(f"{runs.label}: {why}")
            continue
        title = f"{runs.label} (A: {runs_of(runs)}, B: {runs_of(other)})"
        loads.append((title, list(_rows(runs, other))))
    without += [f"{runs.label}: measured in B only" for runs in others.values()]
    return Comparison(
        a=a[0],
        b=b[0],
        conditions=conditions_that_differ(a[0], b[0]),
        versions=versions_that_differ(a[0], b[0]),
        loads=loads,
        without=without,
        failures=failures,
        others=others_of_b,
        tolerance=tolerance,
    )


def _rows(a: Runs, b: Runs) -> Iterator[Row]:
    for figure in COMPARED:
        of_a, of_b = a.value(figure), b.value(figure)
        if not of_a or of_b is None:
            continue
        interval, why_none = _interval(figure, a, b)
        ratio = of_b / of_a if interval is None else interval.estimate
        yield Row(
            load=a.label,
            figure=figure,
            a=of_a,
            b=of_b,
            ratio=ratio,
            interval=interval,
            why_no_interval=why_none,
            one_run=interval is None and figure.samples is None,
        )


def _interval(figure: Figure, a: Runs, b: Runs) -> tuple[Interval | None, str]:
    """The interval, or why there is none."""
    runs_of_a, runs_of_b = a.values(figure), b.values(figure)
    if runs_of_a is not None and runs_of_b is not None:
        return mean_ratio(runs_of_b, runs_of_a), ""
    single = "A and B have" if runs_of_a is runs_of_b is None else "A has" if runs_of_a is None else "B has"
    if figure.samples is None:
        return None, f"{single} one run"
    of_a, of_b = a.samples(figure), b.samples(figure)
    found = quantile_ratio(of_b, of_a, figure.share)
    if found is None:
        return None, _too_few(min(len(of_a), len(of_b)), figure.share)
    return found, ""


def _too_few(samples: int, share: float) -> str:
    needed = quantile_needs(share)
    if samples < needed:
        return f"{counted(samples, 'sample')}, a p{share * 100:.0f} needs {needed}"
    return f"{counted(samples, 'sample')}, which depend on each other too much"


def _failures(a: Runs, b: Runs, tolerance: float) -> Iterator[str]:
    shares = [_failed(runs) for runs in (a, b)]
    if shares[1] > shares[0] + tolerance:
        yield f"{a.label}: failed requests: {shares[0]:.1%} in A, {shares[1]:.1%} in B"


def _others(a: Runs, b: Runs) -> Iterator[str]:
    if b.unranked not in {"", LIMITED} and not a.unranked:
        yield f"{a.label}: B is not a measurement of the workload: {b.unranked}"


def _failed(runs: Runs) -> float:
    failed = sum(point.failed for point in runs.points)
    return failed / max(1, failed + sum(point.completed for point in runs.points))


def _not_compared(a: Runs, b: Runs) -> str:
    """Why no figure is compared; "": they are those of the same work."""
    sides = ("A", a), ("B", b)
    if why := "; ".join(f"{runs.unusable} in {name}" for name, runs in sides if runs.unusable):
        return f"no figures: {why}"
    if why := "; ".join(f"{runs.unranked} in {name}" for name, runs in sides if runs.unranked):
        return f"not the same measurement: {why}"
    answers = per_answer(a.points), per_answer(b.points)
    if answers[0] is None or answers[1] is None or abs(answers[1] - answers[0]) <= TOLERANCE * answers[0]:
        return ""
    return (
        f"not the same measurement: {answers[0]:,.1f} output tokens for an answer in A, {answers[1]:,.1f} in B; "
        "measure both with the same --seed"
    )


def _cells(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    yield "figure", "A", "B", "B/A", f"{LEVEL:.0%} interval", "finding"
    for row in rows:
        finding = f"{row.finding}: {row.why_no_interval}" if row.interval is None else str(row.finding)
        between = "-" if row.interval is None else _between(row.interval)
        shown = row.figure.shown(row.a), row.figure.shown(row.b)
        yield row.figure.name, *shown, _ratio(row.ratio), between, finding


def _title(result: BenchResult) -> str:
    return quoted(f"{result.id}: {result.model}, {result.workload}, {result.started_at}")


def _reach(rows: Sequence[Row]) -> str:
    """How large a difference would have to be: the widest interval of the first figure that has one."""
    its = [row for row in rows if row.figure.name == rows[0].figure.name]
    widest = max(
        (row.interval for row in its if row.interval), key=lambda interval: interval.high / interval.low
    )
    return f"these runs cannot show a difference of {rows[0].figure.name} within {_between(widest)} times"


def _grouped(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """By load; the rows of a load follow each other."""
    for load, its in groupby(rows, key=lambda row: row.load):
        yield load, list(its)


def _ratio(value: float) -> str:
    return f"{value:.3f}" if value < 9.9995 else f"{value:.1f}"


def _between(interval: Interval) -> str:
    return f"{_ratio(interval.low)} to {_ratio(interval.high)}"
