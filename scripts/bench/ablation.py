"""What each mechanism of the balancer is worth: the same runs with one of them switched off, in model time.

usage: scripts/sim-balance ablate [--seeds N,...] [--requests N] [--json FILE] [--write]

Each figure is TTFT p99 without the mechanism ÷ with it, the geometric mean over the seeds; above 1 the mechanism helps.
A mechanism that moves no figure by 5 % and prevents no failure has no place in the balancer.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.balancers import Ours
from bench.engine_model import Shape
from bench.sim import Start, quantile, simulate
from bench.workloads import WORKLOADS, Mix, Request, workload
from launcher.balancing.upstreams import Ending
from launcher.config.schema import Policy

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "balancing.md"
BEGIN: Final = "<!-- ablation begins: written by scripts/sim-balance ablate --write -->"
END: Final = "<!-- ablation ends -->"
FAILS_AFTER_S: Final = 0.05

SwitchOff = Callable[[Any], None]


def _only_open(balancer: Any) -> None:
    choose = balancer._policy.choose
    balancer._policy.choose = lambda ticket, _all, opened, now: choose(ticket, opened, opened, now)


def _replace(path: str, by: Callable[..., object]) -> SwitchOff:
    """Replace a method of the balancer, its policy or its cost model."""

    def switch_off(balancer: Any) -> None:
        owner = balancer
        *parts, name = path.split(".")
        for part in parts:
            owner = getattr(owner, part)
        assert hasattr(owner, name), path  # noqa: S101
        setattr(owner, name, by)

    return switch_off


def _without_sharing(balancer: Any) -> None:
    balancer._policy._sharing = {}


# The mechanisms that the balancer has.
MECHANISMS: Final[Mapping[str, SwitchOff]] = {
    "wait for a busy instance that has the prefix": _only_open,
    "cost of a copy": _replace("_policy._copy_s", lambda *_: 0.0),
    "requests that a copy delays": _replace("costs.delayed", lambda *_: 0.0),
    "queued requests share a copy": _without_sharing,
    "late binding": _replace("costs.prefills_enough", lambda *_: False),
    "small prompts first": _replace("costs.head_start_s", lambda *_: 0.0),
    "stragglers": _replace("_judge_straggler", lambda *_: None),
    "learned cache size": _replace("costs.seen_cached", lambda *_: None),
    "misjudged prompts": _replace("costs._misjudged", lambda *_: False),
    "ejection": _replace("failed", lambda *_: False),
}


class Failing(Ours):
    """The proxy's balancer in front of an engine 0 that fails every request for a while."""

    def __init__(self, instances: int, max_num_seqs: int, seed: int, span: tuple[float, float]) -> None:
        super().__init__(Policy.PREFIX_AWARE, instances, max_num_seqs, seed)
        self._span = span
        self._now = 0.0
        self._failing: list[tuple[float, Request]] = []
        self.failures = 0

    def attach(self, start: Start) -> None:
        """See sim.Balancer."""
        self._really = start
        self._start = self._route

    def _route(self, request: Request, engine: int) -> None:
        if engine == 0 and self._span[0] <= self._now < self._span[1]:
            self.failures += 1
            self._failing.append((self._now + FAILS_AFTER_S, request))
        else:
            self._really(request, engine)

    def arrived(self, request: Request, body: bytes, now: float) -> None:
        """See sim.Balancer."""
        self._now = now
        super().arrived(request, body, now)

    def tick(self, now: float) -> float | None:
        """See sim.Balancer."""
        self._now = now
        due = [request for at, request in self._failing if at <= now]
        self._failing = [(at, request) for at, request in self._failing if at > now]
        for request in due:
            self._retry(request, now)
        times = [at for at, _ in self._failing]
        wanted = super().tick(now)
        times += [] if wanted is None else [wanted]
        return min(times, default=None)

    def _retry(self, request: Request, now: float) -> None:
        ticket = self._tickets[request.id]
        failed = ticket.upstream
        assert failed is not None  # noqa: S101
        self.scheduler.release(ticket, now, Ending.BROKEN)
        self.scheduler.failed(failed, now)
        ticket.tried.add(failed.key)
        upstream = self.scheduler.offer(ticket, now)
        if upstream is not None:
            self._route(request, upstream.slot)


@dataclass(frozen=True, slots=True)
class Condition:
    """Under what the mechanisms are compared."""

    name: str
    mix: Mix
    shape: Shape = Shape()  # noqa: RUF009 - frozen
    kv_known: bool = True
    slow: bool = False  # engine 0 is half as fast
    fails: bool = False  # engine 0 fails for a while


def conditions(requests: int) -> list[Condition]:
    """The usual one, and others in which a mechanism should show its worth."""
    mix = Mix(requests=requests)
    return [
        Condition("as usual", mix),
        Condition("95 % load", replace(mix, load=0.95)),
        Condition("one engine half as fast", replace(mix, load=0.7), slow=True),
        Condition("one engine fails for a third", replace(mix, load=0.6), fails=True),
        Condition("a quarter of the cache, not told", mix, Shape(cache_tokens=15_000), kv_known=False),
        Condition("chunked prefill", mix, Shape(mixed=True)),
    ]


def play(condition: Condition, name: str, seed: int, switch_off: SwitchOff | None) -> tuple[float, int]:
    """TTFT p99 in seconds, and how many attempts failed."""
    mix, shape = condition.mix, condition.shape
    requests = workload(name, seed, mix, shape)
    kv_tokens = shape.cache_tokens if condition.kv_known else None
    ours = Ours(Policy.PREFIX_AWARE, mix.instances, shape.max_num_seqs, seed, kv_tokens=kv_tokens)
    if condition.fails:
        last = max(request.at_s or 0.0 for request in requests)
        ours = Failing(mix.instances, shape.max_num_seqs, seed, (last / 3, 2 * last / 3))
    if switch_off is not None:
        switch_off(ours.scheduler)
    shapes = [shape] * mix.instances
    if condition.slow:
        shapes[0] = replace(
            shape,
            prefill_tokens_per_s=shape.prefill_tokens_per_s / 2,
            step_s=shape.step_s * 2,
            step_per_seq_s=shape.step_per_seq_s * 2,
        )
    run = simulate(requests, ours, shapes)
    p99 = quantile([outcome.ttft_s for outcome in run.outcomes], 0.99)
    return p99, ours.failures if isinstance(ours, Failing) else 0


def measure(seeds: Sequence[int], requests: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Mechanism → condition → workload → a ratio for each seed; under "failed attempts" the counts of both."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for condition in conditions(requests):
        for name in WORKLOADS:
            for seed in seeds:
                whole, failures = play(condition, name, seed, None)
                for mechanism, switch_off in MECHANISMS.items():
                    without, more = play(condition, name, seed, switch_off)
                    cells = found.setdefault(mechanism, {}).setdefault(condition.name, {})
                    cells.setdefault(name, []).append(without / whole)
                    cells.setdefault("failed attempts", []).append(float(more - failures))
    return found


def table(found: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> str:
    """A row for each mechanism; for each workload the least and the greatest of the conditions' means."""
    lines = [
        "| without | " + " | ".join(WORKLOADS) + " | greatest in | more attempts that fail |",
        "| --- |" + " ---: |" * len(WORKLOADS) + " --- | ---: |",
    ]
    for mechanism, by_condition in found.items():
        cells, greatest = [], (0.0, "")
        for name in WORKLOADS:
            means = {c: statistics.geometric_mean(cells[name]) for c, cells in by_condition.items()}
            where = max(means, key=means.__getitem__)
            greatest = max(greatest, (means[where], where))
            cells.append(f"{min(means.values()):.2f}–{means[where]:.2f}")
        more = sum(sum(cells["failed attempts"]) for cells in by_condition.values())
        where = greatest[1] if greatest[0] >= 1.05 else "-"
        lines.append(f"| {mechanism} | {' | '.join(cells)} | {where} | {more:+.0f} |")
    return "\n".join(lines)


def run(argv: Sequence[str]) -> int:
    """0."""
    parser = argparse.ArgumentParser(
        prog="scripts/sim-balance ablate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", default="71,72,73,74,75")
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--json", type=Path, help="write all ratios to FILE")
    parser.add_argument("--write", action="store_true", help="put the table into docs/balancing.md")
    args = parser.parse_args(argv)
    found = measure([int(seed) for seed in args.seeds.split(",")], args.requests)
    text = table(found)
    print(text)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if args.write:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return 0
