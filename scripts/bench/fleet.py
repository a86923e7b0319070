"""Simulates ways to balance requests across hosts, against one host that has all their instances.

usage: scripts/sim-balance fleet [--hosts N,...] [--workloads NAME,...] [--ways NAME,...] [--seeds N,...]
                                 [--requests N] [--per-host N] [--json FILE] [--write FILE...]

Four instances a host, as scripts/sim-balance has them, load 85 % of saturation. Each way gets the same requests as one
balancer over all the instances (with more than 64 of them it asks a waiting request again each 0.1 s, not at every
event). Figures are ratios to that, seed by seed: the median, and in brackets the least and the most. --write puts
the tables of JSON files that --json made into docs/fleet.md and simulates nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

from bench.balancers import Ours
from bench.engine_model import Shape
from bench.figures import figure
from bench.fleet_model import (
    TAKE_OVER_S,
    Bounded,
    Failure,
    Hosts,
    LeastConnections,
    Picked,
    Predicted,
    RoundRobin,
)
from bench.sim import Run, quantile, simulate
from bench.workloads import WORKLOADS, Mix, chosen, workload
from launcher.balancing.cells import MOST_INSTANCES
from launcher.config.schema import Policy
from launcher.fleet.picker import ASK_AGAIN_S

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "fleet.md"
BEGIN: Final = "<!-- sim-balance fleet begins: written by scripts/sim-balance fleet --write -->"
END: Final = "<!-- sim-balance fleet ends -->"

Make = Callable[
    [int, int, Shape, int, float], Hosts
]  # hosts, instances of each, shape, seed, seconds of arrivals
PICKER: Final = "picker"
WAYS: Final[Mapping[str, Make]] = {
    PICKER: lambda hosts, per, shape, seed, _: Picked(hosts, per, shape, seed),
    "picker, taken over in the middle": lambda hosts, per, shape, seed, whole_s: Picked(
        hosts, per, shape, seed, Failure(whole_s / 2, TAKE_OVER_S)
    ),
    "picker, none for a tenth of the time": lambda hosts, per, shape, seed, whole_s: Picked(
        hosts, per, shape, seed, Failure(whole_s / 2, whole_s / 10)
    ),
    "least connections": lambda hosts, per, shape, seed, _: LeastConnections(hosts, per, shape, seed),
    "round robin": lambda hosts, per, shape, seed, _: RoundRobin(hosts, per, shape, seed),
    "hash of the prompt": lambda hosts, per, shape, seed, _: Bounded(hosts, per, shape, seed),
    "hash of the prompt, shed": lambda hosts, per, shape, seed, _: Bounded(
        hosts, per, shape, seed, shed=True
    ),
    "hash of the session": lambda hosts, per, shape, seed, _: Bounded(hosts, per, shape, seed, session=True),
    "exact prediction of each host": lambda hosts, per, shape, seed, _: Predicted(hosts, per, shape, seed),
}


@dataclass(frozen=True, slots=True)
class Case:
    """What is simulated."""

    hosts: int
    per_host: int
    workload: str
    seed: int
    requests: int  # for each instance

    @property
    def instances(self) -> int:
        return self.hosts * self.per_host


@dataclass(frozen=True, slots=True)
class Row:
    """One run. Seconds; parts of 1; against the ideal host with the same requests."""

    way: str
    hosts: int
    workload: str
    seed: int
    requests: int
    ttft_p50_s: float
    ttft_p99_s: float
    hit_rate: float
    p99_ratio: float
    hit_ratio: float | None  # None: the ideal host has no hits
    picker_us: float | None  # CPU time of the picker's decisions per request


def ratio(ours: float, theirs: float) -> float | None:
    """None: theirs is 0."""
    return ours / theirs if theirs else None


def play(case: Case, ways: Sequence[str]) -> list[Row]:
    """One workload at one seed."""
    shape, count = Shape(), case.instances
    asked = workload(case.workload, case.seed, Mix(instances=count, requests=case.requests * count), shape)
    whole_s = max(request.at_s or 0.0 for request in asked)
    again_s = ASK_AGAIN_S if count > MOST_INSTANCES else 0.0
    best = Ours(
        Policy.PREFIX_AWARE, count, shape.max_num_seqs, case.seed, kv_tokens=shape.cache_tokens,
        ask_again_s=again_s,
    )  # fmt: skip
    one = simulate(asked, best, [shape] * count)
    rows = [row(case, "one host", one, one)]
    for way in ways:
        balancer = WAYS[way](case.hosts, case.per_host, shape, case.seed, whole_s)
        run = simulate(asked, balancer, [shape] * count)
        us = balancer.spent_ns / 1e3 / len(asked) if isinstance(balancer, Picked) else None
        rows.append(row(case, way, run, one, us))
    return rows


def row(case: Case, way: str, run: Run, one: Run, us: float | None = None) -> Row:
    """What a run comes to, against that of one host."""
    first, theirs = ([outcome.ttft_s for outcome in each.outcomes] for each in (run, one))
    p99_s = quantile(first, 0.99)
    return Row(
        way, case.hosts, case.workload, case.seed, len(first), quantile(first, 0.5), p99_s, run.hit_rate,
        p99_s / quantile(theirs, 0.99), ratio(run.hit_rate, one.hit_rate), us,
    )  # fmt: skip


def table(rows: Sequence[Row], hosts: int) -> str:
    """One size of the fleet: a line for each way."""
    some = [each for each in rows if each.hosts == hosts and each.way != "one host"]
    names = list(dict.fromkeys(each.workload for each in some))
    runs = sorted({(each.workload, each.seed, each.requests) for each in some})
    seeds = ", ".join(str(seed) for seed in sorted({seed for _, seed, _ in runs}))
    lines = [
        f"**{hosts} {'host' if hosts == 1 else 'hosts'}** (seeds {seeds}; {min(n for *_, n in runs):,} requests a run)\n",
        "| TTFT p99 ÷ one host's · hits ÷ one host's | " + " | ".join(names) + " |",
        "| --- |" + " --- |" * len(names),
    ]
    for way in dict.fromkeys(each.way for each in some):
        cells = [cell([each for each in some if each.way == way and each.workload == name]) for name in names]
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(rows: Sequence[Row]) -> str:
    """1.05 (1.01-1.10) · 0.98."""
    found = figure([each.p99_ratio for each in rows])
    if found is None:
        return "–"
    hits = [each.hit_ratio for each in rows if each.hit_ratio is not None]
    return found.text(2) + (f" · {median(hits):.2f}" if hits else "")


def cost(rows: Sequence[Row]) -> str:
    """The picker's CPU time, by the number of instances."""
    some = [each for each in rows if each.way == PICKER and each.picker_us is not None]
    names = list(dict.fromkeys(each.workload for each in some))
    lines = [
        "| picker's CPU µs per request | " + " | ".join(names) + " |",
        "| --- |" + " ---: |" * len(names),
    ]
    for hosts in sorted({each.hosts for each in some}):
        cells = []
        for name in names:
            us = [each.picker_us or 0.0 for each in some if each.hosts == hosts and each.workload == name]
            cells.append(f"{median(us):.0f}" if us else "–")
        lines.append(f"| {hosts} {'host' if hosts == 1 else 'hosts'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(rows: Sequence[Row]) -> str:
    """All tables."""
    return "\n\n".join([*(table(rows, hosts) for hosts in sorted({r.hosts for r in rows})), cost(rows)])


def write(files: Sequence[Path]) -> None:
    """The tables of kept runs go into the page."""
    rows = [Row(**each) for file in files for each in json.loads(file.read_text(encoding="utf-8"))]
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{report(rows)}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def run(argv: Sequence[str]) -> int:
    """0, or 2 when something is asked that is not there."""
    parser = argparse.ArgumentParser(prog="scripts/sim-balance fleet", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--hosts", default="1,4,16")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--ways", default=",".join(way.replace(", ", "+") for way in WAYS),
                        help="a comma within a name is written as +")  # fmt: skip
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--requests", type=int, default=100, help="for each instance")
    parser.add_argument("--per-host", type=int, default=4, help="instances")
    parser.add_argument("--json", type=Path, help="all runs go there")
    parser.add_argument(
        "--write", type=Path, nargs="+", help="files of --json whose tables go into docs/fleet.md"
    )
    args = parser.parse_args(argv)
    if args.write:
        write(args.write)
        return 0
    names, ways = chosen(args.workloads, WORKLOADS), args.ways.split(",")
    if names is None:
        return 2
    known = {way.replace(", ", "+"): way for way in WAYS}
    if unknown := [way for way in ways if way not in known]:
        print(f"cannot simulate '{unknown[0]}': there is no such way\n  choose from {', '.join(known)}")
        return 2
    rows: list[Row] = []
    for hosts in map(int, args.hosts.split(",")):
        for name in names:
            for seed in map(int, args.seeds.split(",")):
                case = Case(hosts, args.per_host, name, seed, args.requests)
                rows += play(case, [known[way] for way in ways])
                if args.json:
                    args.json.write_text(
                        json.dumps([asdict(each) for each in rows], indent=1), encoding="utf-8"
                    )
        print(table(rows, hosts) + "\n", flush=True)
    print(cost(rows))
    return 0
