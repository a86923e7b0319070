"""The plan: which slot runs on which cpus and memory, and what speaks against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.config.schema import Model, Strategy
from launcher.cpuset import CpuSet


@dataclass(frozen=True, slots=True)
class Placement:
    """The cpus and memory nodes of one slot."""

    socket: int
    node: int | None
    """Home node: that of its lowest cpu, where vLLM's worker binds its memory. None without NUMA.

    A node without memory of its own is never in `membind`; its nearest node with memory is."""
    cpus: CpuSet
    """numactl's set: every thread of the instance stays inside."""
    membind: CpuSet
    """Memory nodes; empty without NUMA."""
    omp_cpus: tuple[CpuSet, ...]
    """One list per tensor-parallel rank; together a subset of `cpus`."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A stable position in the plan; successive instances run in it."""

    id: int
    model: Model
    placement: Placement
    kv_cache_bytes: int | None
    """KV cache of each tensor-parallel rank, as --kv-cache-memory-bytes counts it: every worker takes that
    much (vllm/v1/worker/cpu_worker.py, determine_available_memory). None where the engine takes none
    (engine.kind = "command")."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to say about a plan. A violation refuses to start; a warning does not."""

    severity: Literal["violation", "warning"]
    code: str
    """Stable kebab-case name, for machines and docs."""
    message: str
    """`cannot X: why` for violations; a plain statement for warnings."""
    remedy: str


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One figure of the ledger, with where it came from."""

    what: str
    """weights, peak, overhead, KV, page cache, reserve or total."""
    size_bytes: int
    source: str
    """A file's header, a key of config.json, a measurement, or a key of the configuration."""
    slot: int | None = None
    """The slot that takes it; None for the node's own."""


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """Memory of one NUMA node: what it has, and what each instance on it is planned to take."""

    node: int | None
    total_bytes: int
    available_bytes: int
    reserve_bytes: int
    weights_bytes: int
    """Of all instances on the node; none of it is shared."""
    overhead_bytes: int
    kv_bytes: int
    slots: tuple[int, ...]
    peak_bytes: int = 0
    """What freezing and packing the weights adds."""
    page_cache_bytes: int = 0
    """For the weight files, which all instances of the node read through one cache."""
    lines: tuple[LedgerLine, ...] = ()
    """Every figure above, by slot, with its source; they add up to what is not left."""

    @property
    def left_bytes(self) -> int:
        """What the plan leaves free; negative when it does not fit."""
        return self.total_bytes - self.reserve_bytes - self.page_cache_bytes - self.planned_bytes

    @property
    def is_tight(self) -> bool:
        """Less is free now than the instances are planned to take."""
        return self.planned_bytes > self.available_bytes

    @property
    def planned_bytes(self) -> int:
        """What the instances take."""
        return self.weights_bytes + self.peak_bytes + self.overhead_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """What would run where. Nothing starts while `violations` is not empty."""

    strategy: Strategy
    slots: tuple[Slot, ...]
    reserved: CpuSet
    """Cpus kept for the proxy and the OS, with their SMT siblings."""
    usable: CpuSet
    """Allowed cpus less the reserved ones."""
    ledger: tuple[LedgerRow, ...]
    findings: tuple[Finding, ...]

    @property
    def violations(self) -> tuple[Finding, ...]:
        """Findings that refuse to start."""
        return tuple(f for f in self.findings if f.severity == "violation")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings that are only said."""
        return tuple(f for f in self.findings if f.severity == "warning")

    @property
    def start_order(self) -> tuple[tuple[int, ...], ...]:
        """Waves of slots: those of one wave may start together, the next wave when all of them are ready.

        vLLM looks at its node's free memory once when it starts and once before it takes its KV cache, and
        refuses when another instance was faster (vllm/v1/worker/cpu_worker.py).

        1. Where a node has free now what all its slots are planned to take, nobody can be too late: they
           start together.
        2. On any other node no two slots of a wave take memory of it: the first ones get what is there, and
           the one that does not fit says so.
        3. Each slot, by id, joins the first wave after which its nodes are free.
        """
        nodes: dict[int, list[int]] = {}
        for index, row in enumerate(self.ledger):
            for slot_id in row.slots if row.is_tight else ():
                nodes.setdefault(slot_id, []).append(index)
        next_wave: dict[int, int] = {}
        waves: list[list[int]] = []
        for slot in self.slots:
            its = nodes.get(slot.id, [])
            wave = max((next_wave.get(node, 0) for node in its), default=0)
            next_wave.update(dict.fromkeys(its, wave + 1))
            waves.extend([] for _ in range(wave + 1 - len(waves)))
            waves[wave].append(slot.id)
        return tuple(tuple(wave) for wave in waves)
