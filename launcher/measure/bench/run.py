"""`run`: a warm-up, then each point with a load generator of its own; what was measured, as a BenchResult."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from launcher.base.errors import LauncherError
from launcher.base.text import counted
from launcher.measure.bench import endpoint
from launcher.measure.bench.endpoint import Observed, Observer
from launcher.measure.bench.generator_process import Generator
from launcher.measure.bench.load_generator import (
    DriverError,
    Job,
    Phase,
    Progress,
    Target,
    VllmDriver,
)
from launcher.measure.bench.offered_load import (
    SWEEP_START,
    Load,
    Slo,
    best_rate,
    format_slo,
    good_requests,
    in_order,
    is_burst,
    keeps_up,
    meets,
    next_rate,
    requests_for,
)
from launcher.measure.bench.outcomes import Figures, disagreement
from launcher.measure.bench.result import BenchResult, ClientCost, Point, Totals
from launcher.measure.bench.workloads import Workload

# Of each list of latencies in a Point: enough for a distribution and an interval.
MAX_SAMPLES: Final = 4000
# The seed of the warm-up is far from those of the points: its prompts must not warm the prefix cache for them.
WARM_UP_SEED: Final = 1_000_003


Watch = Callable[[Progress], None]


def silent(_progress: Progress) -> None:
    """No live line."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: the points measured so far."""

    def __init__(self, result: BenchResult) -> None:
        super().__init__()
        self.result = result


class PartialError(LauncherError):
    """The load generator failed after some points: these are kept."""

    def __init__(self, error: LauncherError, result: BenchResult) -> None:
        super().__init__(error.message, error.remedy)
        self.result = result


def run(
    target: Target, workload: Workload, *, driver: VllmDriver, folder: Path, loads: Sequence[Load] = (),
    sweep: bool = False, requests: int | None = None, repeats: int = 1, seed: int = 0, keep_cache: bool = False,
    slo: Slo | None = None, warm_up: bool = True, watch: Watch = silent,
) -> BenchResult:  # fmt: skip
    """Measure `target`. Blocks; the load generators run in sessions of their own and end with this process.

    `folder` (created) gets the load generators' files; its name is the result's id. Without `loads` the workload's own
    concurrency is used. The points of one run have seeds `seed`, `seed` + 1, ..., unless `keep_cache`.
    Raises LauncherError when the endpoint or the driver cannot be used at all, PartialError when the load generator
    fails later, Interrupted for Ctrl-C. Requests that failed are counted in the points."""
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_too_long(workload, target, endpoint.check(target))
    chosen = tuple(loads) or (Load(concurrency=workload.concurrency),)
    first = Job(
        target=target,
        workload=workload,
        load=chosen[0],
        requests=requests or 0,
        seed=seed,
        folder=folder,
        name="",
        opening=endpoint.opening_events(target, workload.api),
    )
    bench = _Bench(first, driver, slo or {}, watch, keep_cache=keep_cache)
    try:
        if warm_up or sweep:
            bench.warm_up()
        if sweep:
            bench.search()
        else:
            bench.all_of(in_order(chosen, repeats))
    except KeyboardInterrupt:
        raise Interrupted(bench.result(complete=False)) from None
    except DriverError as error:
        if not bench.points:
            raise
        raise PartialError(error, bench.result(complete=False)) from None
    return bench.result(complete=True)


def _refuse_too_long(workload: Workload, target: Target, longest: int | None) -> None:
    needed = workload.longest
    if longest is not None and needed is not None and needed > longest:
        raise LauncherError(
            f"cannot run workload '{workload.name}': it needs {needed:,} tokens of context, model '{target.model}' has "
            f"{longest:,}",
            "choose another --workload, or raise max_model_len of the model",
        )


class _Bench(Struct):
    first: Job
    driver: VllmDriver
    slo: Slo
    watch: Watch
    keep_cache: bool
    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    started_at: str = field(
        default_factory=lambda: dt.datetime.now(dt.UTC).astimezone().isoformat("T", "seconds")
    )
    warm_rate: float = 1.0
    """Requests per second that the warm-up completed."""

    def warm_up(self) -> None:
        """Code paths, allocators and the compiler's shapes. Raises LauncherError when no request completes."""
        load = self.first.load
        at_once = load.concurrency or self.first.workload.concurrency
        job = replace(
            self.first, name="warm-up", load=Load(concurrency=at_once),
            requests=min(2 * at_once, self.first.requests or 2 * at_once),
            seed=self.first.seed + WARM_UP_SEED,
        )  # fmt: skip
        figures, _, _ = self._drive(job, 0, None)
        if not figures.completed:
            raise LauncherError(
                f"cannot measure {job.target.url}: all {figures.failed} requests of the warm-up failed: "
                f"{figures.error or 'no reason given'}",
                f"choose a --workload that the model can answer, or see {job.log_file}",
            )
        self.warm_rate = figures.requests_per_s

    def all_of(self, loads: Sequence[Load]) -> None:
        for load in loads:
            self._measure(load, len(loads))

    def search(self) -> None:
        """The highest rate that meets the SLO and that the endpoint keeps up with."""
        tried: list[tuple[float, bool]] = []
        limits = format_slo(self.slo)
        while (rate := next_rate(tried, self.warm_rate * SWEEP_START)) is not None:
            self._measure(Load(rate=rate), None)
            point = self.points[-1]
            requests = point.completed + point.failed
            lowest = min(self.points, key=lambda each: each.rate or 0.0)
            latency_s = 0.0 if lowest.e2e_s is None else lowest.e2e_s.p99
            met = meets(point, self.slo)
            if met and is_burst(rate, requests, latency_s):
                self.notes.append(
                    f"{rate:.4g} requests/s still met {limits}, and starts all {requests} requests at once: a higher rate "
                    "is the same load; raise --requests"
                )
                return
            tried.append((rate, met and keeps_up(rate, requests, point.duration_s, latency_s)))
        best = best_rate(tried)
        self.notes.append(
            f"no rate met {limits}"
            if best is None
            else f"highest rate that met {limits}: {best:.4g} requests/s"
        )

    def _measure(self, load: Load, points: int | None) -> None:
        index = len(self.points)
        job = replace(
            self.first, name=f"{index + 1:03d}", load=load,
            requests=self.first.requests or requests_for(load, self.first.workload.requests),
            seed=self.first.seed + (0 if self.keep_cache else index),
        )  # fmt: skip
        figures, cost, observer = self._drive(job, index + 1, points)
        observed = observer.end()
        self.points.append(_point(job, figures, cost, observed, self.slo))
        if figures.error is not None:
            failed = counted(figures.failed, "request")
            self.notes.append(f"{job.load.label}: {failed} failed: {figures.error}")

    def _drive(self, job: Job, point: int, points: int | None) -> tuple[Figures, ClientCost, Observer]:
        shown = Progress(
            what=job.load.label if point else "warm-up", point=point, points=points, done=0, requests=job.requests,
            measuring=False, elapsed_s=0.0,
        )  # fmt: skip
        self.watch(shown)
        began: float | None = None

        def on_progress(progress: Phase) -> None:
            nonlocal began
            now = time.monotonic()
            if progress.measuring and began is None:
                began = now
            elapsed = 0.0 if began is None else now - began
            self.watch(replace(shown, measuring=progress.measuring, done=progress.done, elapsed_s=elapsed))

        observer = Observer(lambda: endpoint.metrics_page(job.target))
        generator = Generator(self.driver, job)
        if (
            generator.unpinned is not None
            and (note := f"load generator not pinned: {generator.unpinned}") not in self.notes
        ):
            self.notes.append(note)
        cost = generator.watch(on_progress, lambda measuring: observer.sample(measuring=measuring))
        return self.driver.read(job), cost, observer

    def result(self, *, complete: bool) -> BenchResult:
        target, workload = self.first.target, self.first.workload
        options: dict[str, Any] = msgspec.to_builtins(workload)
        return BenchResult(
            id=self.first.folder.name, started_at=self.started_at, url=target.url, model=target.model,
            workload=workload.name, workload_options=options, driver=self.driver.name,
            driver_version=self.driver.version, slo=dict(self.slo), cores=target.cores, hardware=target.hardware,
            software=target.software, plan=target.plan, picture_svg=target.picture_svg, points=list(self.points),
            notes=list(self.notes), complete=complete,
        )  # fmt: skip


def _point(job: Job, figures: Figures, cost: ClientCost, observed: Observed, slo: Slo) -> Point:
    goodput = good_requests(figures.requests, slo) / figures.duration_s if slo and figures.requests else None
    if slo and not figures.completed:
        goodput = 0.0
    return Point(
        **{name: getattr(figures, name) for name in Totals.__struct_fields__},
        concurrency=job.load.concurrency, rate=job.load.rate, seed=job.seed,
        goodput_per_s=goodput, kv_use_max=observed.kv_use_max, prefix_hit_share=observed.prefix_hit_share,
        requests_by_instance=observed.requests_by_instance, client=cost,
        ttft_samples_s=_thinned([request.ttft for request in figures.requests if request.ttft is not None]),
        itl_samples_s=_thinned([gap for request in figures.requests for gap in request.itl]),
        e2e_samples_s=_thinned([request.e2e for request in figures.requests]),
        driver_file=f"{job.folder.name}/{job.result_file.name}",
        fault=disagreement(figures, observed.failed_at_endpoint),
    )  # fmt: skip


def _thinned(values: list[float]) -> list[float]:
    """Every n-th value, in the order of the requests."""
    return values[:: -(-len(values) // MAX_SAMPLES)] if values else []
