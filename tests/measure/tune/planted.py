"""Planted machines: the throughput of a layout from a model of memory, cores and synchronisation, and measurements of it
with noise, drift, neighbours and failures. The model's parameters are drawn by seed; nothing in it knows the search."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from support.plans import make_plan

from launcher.base.cpuset import CpuSet
from launcher.config.schema import Config, Model
from launcher.engines.vllm.arguments import overriding
from launcher.machine.named import find_topology
from launcher.machine.topology import Topology
from launcher.measure.tune.layout import find_candidates, with_layout
from launcher.measure.tune.model import (
    Candidate,
    Candidates,
    Layout,
    Measurement,
    Settings,
    Verdict,
    Visit,
    VisitResult,
)
from launcher.measure.tune.search import Search
from launcher.plan.plan_text import plan_json

# From 1 x 64 to 2 x 128 cores.
MACHINES = (
    "epyc-7763-1p", "epyc-7763-2p", "epyc-7763-2p-nps4", "epyc-9454-2p", "epyc-9654-1p", "epyc-9654-2p",
    "epyc-9654-1p-nps4", "epyc-9755-1p", "epyc-9755-2p", "epyc-9755-2p-nps4", "epyc-9755-1p-nps2", "xeon-6972p-2p-snc3",
)  # fmt: skip
CONFIG = Config(models=(Model(name="model", path="model"),))


def plan_of_layout(topology: Topology, config: Config, layout: Layout) -> dict[str, Any]:
    chosen = with_layout(config, layout, overriding)
    # Remedies are not asked for.
    return plan_json(make_plan(topology, chosen, {}, cpus_only=True, advise=False))


@functools.cache
def candidates_of(machine: str) -> tuple[Topology, Candidates]:
    topology = find_topology(machine)
    return topology, find_candidates(topology, CONFIG, functools.partial(plan_of_layout, topology, CONFIG))


@dataclass(frozen=True)
class Physics:
    """Seconds, bytes and bytes a second."""

    weights: float
    kv_per_request: float
    """KV cache that a step reads for each request."""
    requests: int
    """In flight, over all instances."""
    node_bandwidth_per_core: float
    core_bandwidth: float
    core_flops: float
    flops_per_token: float
    barriers: int
    """Parallel regions of a step."""
    barrier_base: float
    barrier_per_thread: float
    barrier_per_l3: float
    step_overhead: float
    """Scheduling and sampling of one step, on one core."""
    remote_share_cost: float
    l3_sharing_cost: float
    busy_cores: float
    """Cores that proxy, tokenizers and the kernel use."""
    step_tokens_best: float
    step_tokens_cost: float

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Physics:
        def between(low: float, high: float) -> float:
            return float(math.exp(rng.uniform(math.log(low), math.log(high))))

        weights = between(1e9, 4e10)
        return cls(
            weights=weights, kv_per_request=between(1e7, 3e8), requests=int(between(4, 512)),
            node_bandwidth_per_core=between(3e9, 7e9), core_bandwidth=between(6e9, 2e10), core_flops=between(3e10, 2e11),
            flops_per_token=weights, barriers=int(between(100, 600)), barrier_base=between(5e-7, 3e-6),
            barrier_per_thread=between(2e-8, 3e-7), barrier_per_l3=between(1e-7, 2e-6), step_overhead=between(3e-4, 6e-3),
            remote_share_cost=rng.uniform(0.1, 1.0), l3_sharing_cost=rng.uniform(0.0, 0.08),
            busy_cores=between(0.3, 12), step_tokens_best=between(1024, 8192), step_tokens_cost=rng.uniform(0.0, 0.03),
        )  # fmt: skip

    def tokens_per_s(self, candidate: Candidate, geometry: Geometry) -> float:
        total, instances = 0.0, len(geometry.instances)
        for its in geometry.instances:
            # vLLM's worker binds its memory to the node of its first cpu: the other nodes' cores read across.
            bandwidth = min(
                its.node_cores * self.node_bandwidth_per_core / its.neighbours,
                its.threads * self.core_bandwidth,
            )
            bandwidth /= 1 + self.remote_share_cost * its.remote
            batch = min(self.requests / instances, candidate.layout.max_num_seqs or 64)
            read = (self.weights + batch * self.kv_per_request) / bandwidth
            compute = batch * self.flops_per_token / (its.threads * self.core_flops)
            barrier = self.barrier_base * math.log2(its.threads + 1) + self.barrier_per_thread * its.threads
            barrier += self.barrier_per_l3 * its.l3_domains
            step = (
                max(read, compute) + 0.3 * min(read, compute) + self.barriers * barrier + self.step_overhead
            )
            total += batch / (step * (1 + self.l3_sharing_cost * its.shared_l3))
        threads = sum(its.threads for its in geometry.instances)
        missing = max(0.0, self.busy_cores - geometry.reserved) / threads
        step_tokens = candidate.layout.max_num_batched_tokens or 2048
        distance = abs(math.log2(step_tokens / self.step_tokens_best))
        return total * (1 - min(0.5, 2 * missing)) * (1 - self.step_tokens_cost * min(distance, 4))


@dataclass(frozen=True)
class Placed:
    """Where an instance of a layout is."""

    threads: int
    remote: float
    """Share of its CPUs that are not on its node."""
    node_cores: int
    """Of its node, whoever has them."""
    neighbours: int
    """Instances on its node, itself included."""
    l3_domains: int
    shared_l3: float
    """Share of its L3 domains that others use, too."""


@dataclass(frozen=True)
class Geometry:
    instances: tuple[Placed, ...]
    reserved: int
    """CPUs."""


@functools.cache
def geometry_of(machine: str, number: int) -> Geometry:
    """Of a candidate: the same for every seed."""
    topology, found = candidates_of(machine)
    plan = found.entered[number].plan
    slots = plan["slots"]
    cpus = [CpuSet.parse(slot["cpus"]) for slot in slots]
    node_of = {cpu: node.id for node in topology.numa_nodes for cpu in node.cpus}
    touched = [[i for i, l3 in enumerate(topology.l3_domains) if l3.cpus & its] for its in cpus]
    users = Counter(domain for its in touched for domain in its)
    instances = tuple(
        Placed(
            threads=sum(len(CpuSet.parse(rank)) for rank in slot["omp_cpus"].split("|")),
            remote=sum(node_of[cpu] != slot["node"] for cpu in its) / len(its),
            node_cores=sum(core.node == slot["node"] for core in topology.cores),
            neighbours=sum(slot["node"] == other["node"] for other in slots),
            l3_domains=len(l3s),
            shared_l3=float(np.mean([users[domain] > 1 for domain in l3s])) if l3s else 0.0,
        )
        for slot, its, l3s in zip(slots, cpus, touched, strict=True)
    )
    return Geometry(instances, reserved=len(CpuSet.parse(plan["reserved"])))


@dataclass(frozen=True)
class Noise:
    measurement: float
    """Standard deviation of one measurement's logarithm."""
    start: float
    """Standard deviation between starts of one layout."""
    drift: float
    """Amplitude of a slow wave, and total of a trend over 12 hours."""
    period_s: float
    outliers: float
    """Share of measurements that another job slows by 20 % to 50 %, in episodes of two on average."""
    failing: float
    """Share of the layouts that never start, except the default."""
    transient: float
    """Share of the starts that fail once."""

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Noise:
        return cls(
            measurement=rng.uniform(0.01, 0.08), start=rng.uniform(0.002, 0.015), drift=rng.uniform(0, 0.04),
            period_s=rng.uniform(1, 12) * 3600, outliers=0.02, failing=0.05, transient=0.01,
        )  # fmt: skip


class PlantedMachine:
    def __init__(
        self, seed: int, *, machine: str | None = None, flat: bool = False, noise: float | None = None
    ) -> None:
        """`noise`: of one measurement; None: drawn. `flat`: all layouts are equal."""
        self._rng = np.random.default_rng(seed)
        self.machine = machine or MACHINES[int(self._rng.integers(len(MACHINES)))]
        _, found = candidates_of(self.machine)
        self.candidates = found.entered
        physics = Physics.drawn(self._rng)
        self.noise = Noise.drawn(self._rng)
        if noise is not None:
            self.noise = replace(self.noise, measurement=noise)
        self._truth: dict[int, float] = {}
        self._flat = flat
        self._true_of = lambda i: physics.tokens_per_s(self.candidates[i], geometry_of(self.machine, i))
        self.layouts = [i for i, each in enumerate(self.candidates) if each.refines is None]
        self.failing = {
            i
            for i in self.layouts
            if not self.candidates[i].is_default and self._rng.random() < self.noise.failing
        }
        self.failing |= {i for i, each in enumerate(self.candidates) if each.refines in self.failing}
        self._start_s, self._measure_s = self._rng.uniform(40, 240), self._rng.uniform(10, 60)
        self._phase, self._trend = self._rng.uniform(0, 2 * math.pi), self._rng.uniform(-1, 1)
        self.now_s = 0.0
        self._neighbour = False

    def truth(self, candidate: int) -> float:
        if self._flat:
            return 1000.0
        if candidate not in self._truth:
            self._truth[candidate] = self._true_of(candidate)
        return self._truth[candidate]

    @property
    def default(self) -> int:
        return next(i for i, each in enumerate(self.candidates) if each.is_default)

    def visit(self, visit: Visit) -> VisitResult:
        rng, noise = self._rng, self.noise
        start_s = self._start_s * math.exp(rng.normal(0, 0.1))
        self.now_s += start_s
        failed = visit.candidate in self.failing or rng.random() < noise.transient
        luck = rng.normal(0, noise.start)
        begin_s, measurements = self.now_s, []
        for _ in range(0 if failed else visit.repeats):
            self.now_s += self._measure_s
            log = luck + rng.normal(0, noise.measurement) + self._drift() + self._slowed()
            figure = self.truth(visit.candidate) * math.exp(log)
            measurements.append(Measurement(output_tokens_per_s=figure))
        return VisitResult(
            visit=visit, started_at="", start_s=start_s, measure_s=self.now_s - begin_s, measurements=measurements,
            cause="exited with code 1" if failed else None,
        )  # fmt: skip

    def _drift(self) -> float:
        wave = math.sin(2 * math.pi * self.now_s / self.noise.period_s + self._phase)
        return self.noise.drift * (wave + self._trend * self.now_s / (12 * 3600))

    def _slowed(self) -> float:
        """The logarithm of what another job leaves."""
        ends, begins = 0.5, 0.5 * self.noise.outliers / (1 - self.noise.outliers)
        self._neighbour = self._rng.random() > ends if self._neighbour else self._rng.random() < begins
        return math.log(1 - self._rng.uniform(0.2, 0.5)) if self._neighbour else 0.0


def searched(machine: PlantedMachine, settings: Settings) -> tuple[Verdict, list[VisitResult]]:
    return run_search(machine.candidates, settings, machine.visit)


def run_search(
    candidates: Sequence[Candidate], settings: Settings, measured: Callable[[Visit], VisitResult]
) -> tuple[Verdict, list[VisitResult]]:
    """The whole search: as `next_step` would, without replaying the history at every step."""
    steps, history = Search(candidates, settings).run(), list[VisitResult]()
    try:
        step = next(steps)
        while True:
            history.append(measured(step))
            step = steps.send(history[-1])
    except StopIteration as end:
        return end.value, history
