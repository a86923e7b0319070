"""How well the balancer predicts first tokens, in model time, and what overflow decided by its predictions does.

usage: scripts/sim-balance predict [--workloads NAME,...] [--seeds N,...] [--loads 0.5,...] [--json FILE] [--write]

A prediction is good if it is within 25 % or 100 ms of the measured time to the first token. Engines prefill beside their
decode steps ("apart") or within them ("chunked", as vLLM does). At 130 % load it is also shown what becomes of the
requests if those whose first token is predicted to come after 4 s go to an endpoint that never waits. The first requests
of a run, which nothing can be predicted from, are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench.balancers import Ours
from bench.engine_model import Shape
from bench.sim import quantile, simulate
from bench.workloads import PREDICTED, Mix, Request, chosen, predicted_workload
from launcher.balancing.upstreams import LateError, Ticket
from launcher.config.schema import Policy

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "balancing.md"
BEGIN: Final = "<!-- predictions begin: written by scripts/sim-balance predict --write -->"
END: Final = "<!-- predictions end -->"
ENGINES: Final = ("apart", "chunked")
GOOD_PART: Final = 0.25
GOOD_S: Final = 0.1
LIMIT_S: Final = 4.0
OVERLOAD: Final = 1.3
# The overload's excess and a tenth of it: part of all requests.
MOST_OVERFLOW: Final = 1.1 * (OVERLOAD - 1.0) / OVERLOAD
ELSEWHERE: Final = Shape(prefill_tokens_per_s=1e5, step_s=0.01, step_per_seq_s=0.0, max_num_seqs=1_000_000)


@dataclass(frozen=True, slots=True)
class Sample:
    """A request that ran here. Seconds."""

    predicted_s: float
    ttft_s: float

    @property
    def good(self) -> bool:
        """Whether the prediction came true."""
        return abs(self.predicted_s - self.ttft_s) <= max(GOOD_PART * self.ttft_s, GOOD_S)


class Predicting(Ours):
    """The proxy's balancer, and one engine more that stands for an overflow endpoint."""

    def __init__(self, mix: Mix, shape: Shape, seed: int, limit_s: float | None) -> None:
        super().__init__(
            Policy.PREFIX_AWARE, mix.instances, shape.max_num_seqs, seed, kv_tokens=shape.cache_tokens
        )
        self._limit_s = limit_s
        self._elsewhere = mix.instances
        self.samples: list[Sample] = []
        self.unpredicted = 0
        self.overflowed: list[Request] = []

    def offer(self, request: Request, ticket: Ticket, now: float) -> None:
        """See Ours."""
        ticket.limit_s = self._limit_s
        try:
            super().offer(request, ticket, now)
        except LateError:
            self.overflowed.append(request)
            self.forget(request)
            self._start(request, self._elsewhere)

    def first(self, request: Request, engine: int, now: float) -> None:
        """See sim.Balancer."""
        if engine == self._elsewhere:
            return
        super().first(request, engine, now)
        ticket = self._tickets[request.id]
        if ticket.predicted_s is None:
            self.unpredicted += 1
        else:
            self.samples.append(Sample(ticket.predicted_s, now - ticket.arrived))

    def finished(self, request: Request, engine: int, now: float) -> None:
        """See sim.Balancer."""
        if engine != self._elsewhere:
            super().finished(request, engine, now)


@dataclass(frozen=True, slots=True)
class Case:
    """What is simulated."""

    workload: str
    engine: str
    load: float
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One run of a case. Parts of 1; seconds."""

    case: Case
    seed: int
    requests: int
    good: float
    bias: float  # median of predicted ÷ measured
    unpredicted: int
    ttft_p50_s: float
    ttft_p99_s: float
    met: float  # first tokens within LIMIT_S; those that overflowed count as such
    overflowed: float
    overflowed_prompt: float  # part of the prompts' tokens


def play(case: Case, seed: int, requests: int) -> Row:
    """One workload at one seed."""
    shape = Shape(mixed=case.engine == "chunked")
    mix = Mix(load=case.load, requests=requests)
    ours = Predicting(mix, shape, seed, case.limit_s)
    asked = predicted_workload(case.workload, seed, mix, shape)
    simulate(asked, ours, [shape] * mix.instances + [ELSEWHERE])
    samples = ours.samples
    return Row(
        case,
        seed,
        len(samples),
        sum(s.good for s in samples) / len(samples),
        statistics.median(s.predicted_s / s.ttft_s for s in samples),
        ours.unpredicted,
        quantile([s.ttft_s for s in samples], 0.5),
        quantile([s.ttft_s for s in samples], 0.99),
        1.0 - sum(s.ttft_s > LIMIT_S for s in samples) / len(asked),
        len(ours.overflowed) / len(asked),
        sum(len(r.prompt) for r in ours.overflowed) / sum(len(r.prompt) for r in asked),
    )


def mean(rows: Sequence[Row], field: str) -> float:
    """Over the seeds."""
    return statistics.fmean(getattr(row, field) for row in rows)


def accuracy(rows: Sequence[Row]) -> str:
    """The part of good predictions by workload, engine and load."""
    loads = list(dict.fromkeys(row.case.load for row in rows))
    lines = [
        "| good predictions at a load of | " + " | ".join(f"{load:.0%}" for load in loads) + " |",
        "| --- |" + " ---: |" * len(loads),
    ]
    for workload, engine in dict.fromkeys((row.case.workload, row.case.engine) for row in rows):
        some = [row for row in rows if (row.case.workload, row.case.engine) == (workload, engine)]
        cells = []
        for load in loads:
            at = [row for row in some if row.case.load == load]
            cells.append(f"{mean(at, 'good'):.0%} ({mean(at, 'bias'):.2f})")
        lines.append(f"| {workload}, {engine} | {' | '.join(cells)} |")
    for engine in dict.fromkeys(row.case.engine for row in rows):
        cells = [
            f"{mean([r for r in rows if (r.case.engine, r.case.load) == (engine, load)], 'good'):.0%}"
            for load in loads
        ]
        lines.append(f"| **all, {engine}** | {' | '.join(cells)} |")
    return "\n".join(lines)


def overflow(rows: Sequence[Row]) -> str:
    """What becomes of requests at OVERLOAD, with and without a limit."""
    lines = [
        f"| load {OVERLOAD:.0%} | ≤ {LIMIT_S:g} s, no overflow | with overflow | p99 here | overflowed | of tokens |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for workload, engine in dict.fromkeys((row.case.workload, row.case.engine) for row in rows):
        some = [row for row in rows if (row.case.workload, row.case.engine) == (workload, engine)]
        never = [row for row in some if row.case.limit_s is None and row.case.load == OVERLOAD]
        limited = [row for row in some if row.case.limit_s is not None]
        if never and limited:
            lines.append(
                f"| {workload}, {engine} | {mean(never, 'met'):.1%} | {mean(limited, 'met'):.1%} "
                f"| {mean(limited, 'ttft_p99_s'):.2f} s | {mean(limited, 'overflowed'):.1%} "
                f"| {mean(limited, 'overflowed_prompt'):.1%} |"
            )
    return "\n".join(lines)


def run(argv: Sequence[str]) -> int:
    """0, or 2 when something is asked that is not there."""
    parser = argparse.ArgumentParser(prog="scripts/sim-balance predict", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--workloads", default=",".join(PREDICTED))
    parser.add_argument("--loads", default="0.5,0.8,1.0,1.3", help="of saturation")
    parser.add_argument("--seeds", default="11,12,13")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="write all runs to FILE")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/balancing.md")
    args = parser.parse_args(argv)
    names = chosen(args.workloads, PREDICTED)
    if names is None:
        return 2
    loads = [float(load) for load in args.loads.split(",")]
    seeds = [int(seed) for seed in args.seeds.split(",")]
    cases = [Case(name, engine, load) for name in names for engine in ENGINES for load in loads]
    if OVERLOAD in loads:
        cases += [Case(name, engine, OVERLOAD, LIMIT_S) for name in names for engine in ENGINES]
    rows = [play(case, seed, args.requests) for case in cases for seed in seeds]
    tables = [accuracy([row for row in rows if row.case.limit_s is None])]
    if OVERLOAD in loads:
        tables.append(overflow(rows))
    text = "\n\n".join(tables)
    print(text)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    if args.write:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return 0
