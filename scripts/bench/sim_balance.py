"""Compares balancing policies in model time: ours, models of other routers, one ideal queue, and a bound.

usage: scripts/sim-balance [--workloads NAME,...] [--seeds N,...] [--vary] [--json FILE] [--write] ...

Four engines (prefill 1,500 tok/s, step 60 ms + 0.8 ms per sequence, 32 sequences, 60k tokens of prefix cache in
blocks of 128), load 85 % of saturation, the same requests for all at each seed; each of these can be set. --vary
repeats it with other lengths, loads, numbers of engines, cache sizes and engines, and prints the ratios only.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from bench.balancers import EXTRAS, RIVALS, IdealQueue, OneCache, Ours
from bench.engine_model import Shape
from bench.sim import Balancer, quantile, simulate
from bench.workloads import WORKLOADS, Mix, chosen, workload
from launcher.config.schema import Policy
from launcher.config.values import REMOVED_POLICIES

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "balancing.md"
BEGIN: Final = "<!-- sim-balance begins: written by scripts/sim-balance --write -->"
END: Final = "<!-- sim-balance ends -->"
GOOD_S: Final = 2.0  # a first token within this time is good
DEFAULT: Final = Policy.PREFIX_AWARE.value
BOUND: Final = "one cache for all"


@dataclass(frozen=True, slots=True)
class Case:
    """What is simulated: the engines, and what they are asked."""

    name: str
    shape: Shape
    mix: Mix
    kv_known: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """One run. Seconds; parts of 1."""

    case: str
    workload: str
    seed: int
    setting: str
    ttft_p50_s: float
    ttft_p99_s: float
    settled_p99_s: float  # of the last three quarters: caches are warm by then
    whole_p99_s: float
    hit_rate: float
    goodput: float


def variations(case: Case) -> list[Case]:
    """The case itself, and others that differ in one thing each."""
    shape, mix = case.shape, case.mix
    return [
        case,
        replace(case, name="70 % load", mix=replace(mix, load=0.7)),
        replace(case, name="95 % load", mix=replace(mix, load=0.95)),
        replace(case, name="8 engines", mix=replace(mix, instances=8, requests=2 * mix.requests)),
        replace(case, name="2 engines", mix=replace(mix, instances=2)),
        replace(case, name="half as long prompts", mix=replace(mix, prompt_scale=0.5)),
        replace(case, name="answers twice as long", mix=replace(mix, output_scale=2.0)),
        replace(case, name="prompts a third as long, none missed", mix=replace(
            mix, prompt_scale=mix.prompt_scale / 3, missed=0.0)),
        replace(case, name="flatter Zipf (0.6)", mix=replace(mix, zipf=0.6)),
        replace(case, name="max_tokens 4 times the answer", mix=replace(mix, asked=4.0)),
        replace(case, name="half the cache", shape=replace(shape, cache_tokens=shape.cache_tokens // 2)),
        replace(case, name="cache size not told", kv_known=False),
        replace(case, name="chunked prefill", shape=replace(shape, mixed=True)),
        replace(case, name="10 times faster", shape=replace(
            shape, prefill_tokens_per_s=15_000, step_s=0.006, step_per_seq_s=0.00008)),
    ]  # fmt: skip


def balancers(case: Case, seed: int, policies: Sequence[str], *, rivals: bool) -> dict[str, Balancer]:
    """All that are compared."""
    count, shape = case.mix.instances, case.shape
    found: dict[str, Balancer] = {}
    if rivals:
        found |= {name: make(count, seed) for name, make in (RIVALS | EXTRAS).items()}
        found["ideal single queue"] = IdealQueue(count, seed, shape.max_num_seqs)
        found[BOUND] = OneCache(count, seed, shape)
    kv_tokens = shape.cache_tokens if case.kv_known else None
    for name in policies:
        found[name] = Ours(Policy(name), count, shape.max_num_seqs, seed, kv_tokens=kv_tokens)
    return found


def play(case: Case, name: str, seed: int, policies: Sequence[str], *, rivals: bool = True) -> list[Row]:
    """One workload at one seed."""
    requests = workload(name, seed, case.mix, case.shape)
    rows = []
    for setting, balancer in balancers(case, seed, policies, rivals=rivals).items():
        cache = balancer.cache if isinstance(balancer, OneCache) else None
        run = simulate(requests, balancer, [case.shape] * case.mix.instances, cache)
        first = [outcome.ttft_s for outcome in run.outcomes]
        rows.append(
            Row(
                case.name,
                name,
                seed,
                setting,
                quantile(first, 0.5),
                quantile(first, 0.99),
                quantile(first[len(first) // 4 :], 0.99),
                quantile([outcome.total_s for outcome in run.outcomes], 0.99),
                run.hit_rate,
                sum(ttft <= GOOD_S for ttft in first) / len(first),
            )
        )
    return rows


def of(rows: Sequence[Row], setting: str, field: str) -> float:
    """Median over the seeds."""
    return float(statistics.median(getattr(row, field) for row in rows if row.setting == setting))


def ratio(rows: Sequence[Row], field: str, setting: str = DEFAULT) -> tuple[str, float]:
    """The best rival, and ours over it: seed by seed, the median."""
    best = min(RIVALS, key=lambda name: of(rows, name, field))
    theirs = {row.seed: getattr(row, field) for row in rows if row.setting == best}
    return best, statistics.median(getattr(r, field) / theirs[r.seed] for r in rows if r.setting == setting)


def table(rows: Sequence[Row], name: str) -> str:
    """One workload, all settings."""
    lines = [
        f"**{name}**\n",
        "| | TTFT p50 | TTFT p99 | p99, warm | whole p99 | hits | ≤ 2 s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for setting in dict.fromkeys(row.setting for row in rows):
        p50, p99, warm, whole, hits, good = (
            of(rows, setting, field)
            for field in ("ttft_p50_s", "ttft_p99_s", "settled_p99_s", "whole_p99_s", "hit_rate", "goodput")
        )
        bold = "**" if setting == DEFAULT else ""
        lines.append(
            f"| {bold}{setting}{bold} | {p50:.2f} | {p99:.2f} | {warm:.2f} | {whole:.2f} | {hits:.0%} | {good:.0%} |"
        )
    return "\n".join(lines)


def ratios(rows: Sequence[Row]) -> str:
    """Ours over the best rival, per case and workload."""
    names = list(dict.fromkeys(row.workload for row in rows))
    lines = [
        "| TTFT p99 (warm) · whole p99 | " + " | ".join(names) + " |",
        "| --- |" + " --- |" * len(names),
    ]
    cases = list(dict.fromkeys(row.case for row in rows))
    for case, setting in [(case, DEFAULT) for case in cases] + [(cases[0], BOUND)]:
        cells = []
        for name in names:
            some = [row for row in rows if row.case == case and row.workload == name]
            fields = ("ttft_p99_s", "settled_p99_s", "whole_p99_s")
            first, warm, whole = (ratio(some, field, setting)[1] for field in fields)
            cells.append(f"{first:.2f} ({warm:.2f}) · {whole:.2f}")
        lines.append(f"| {case if setting == DEFAULT else setting} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(tables: Mapping[str, str], text: str, seeds: Sequence[int]) -> str:
    """What goes into the docs."""
    head = f"Medians over the seeds {', '.join(map(str, seeds))}; model seconds."
    ours = "Ours (`prefix-aware`) ÷ the best of the rivals, seed by seed, the median:"
    return "\n\n".join([head, *tables.values(), ours, text])


def run(argv: Sequence[str]) -> int:
    """0, or 2 when something is asked that is not there."""
    parser = argparse.ArgumentParser(prog="scripts/sim-balance", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--policies", default=",".join(p.value for p in Policy if p not in REMOVED_POLICIES))
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--load", type=float, default=0.85, help="of saturation")
    parser.add_argument(
        "--missed", type=float, default=0.1, help="part of shared prompts missed at saturation"
    )
    parser.add_argument("--prompt-scale", type=float, default=1.0, help="length of prompts")
    parser.add_argument("--cache-tokens", type=int, default=60_000)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--mixed", action="store_true", help="chunked prefill, as vLLM does it")
    parser.add_argument("--vary", action="store_true", help="other lengths, loads, engines too: ratios")
    parser.add_argument("--json", type=Path, help="all runs go there")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/balancing.md")
    args = parser.parse_args(argv)
    shape = Shape(cache_tokens=args.cache_tokens, max_num_seqs=args.max_num_seqs, mixed=args.mixed)
    mix = Mix(args.instances, args.load, args.requests, args.prompt_scale, missed=args.missed)
    case = Case("as above", shape, mix)
    names = chosen(args.workloads, WORKLOADS)
    if names is None:
        return 2
    seeds = [int(seed) for seed in args.seeds.split(",")]
    rows: list[Row] = []
    tables = {}
    for each in variations(case) if args.vary else [case]:
        policies = args.policies.split(",") if each is case else [DEFAULT]
        for name in names:
            found = [row for seed in seeds for row in play(each, name, seed, policies)]
            rows += found
            if each is case:
                tables[name] = table(found, name)
                print(tables[name] + "\n", flush=True)
    text = ratios(rows)
    print(text)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    if args.write:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        after = rest.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{report(tables, text, seeds)}\n{END}{after}", encoding="utf-8")
    return 0
