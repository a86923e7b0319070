"""The plan: cpus and memory of each slot, the memory ledger, and findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal

from msgspec import Struct, field

from launcher.base.cpuset import CpuSet
from launcher.config.schema import Config, Model, Strategy
from launcher.machine.topology import CpuInfo, Topology
from launcher.models.identity import ModelFiles
from launcher.models.layers import KvLayers
from launcher.models.profile import UNKNOWN, ModelProfile

DEFAULT_MAX_MODEL_LEN: Final = 2048
"""vLLM's when config.json has none (vllm/config/model.py)."""


class Placement(Struct, frozen=True):
    """The cpus and memory nodes of one slot."""

    socket: int
    node: int | None
    """Node of its lowest cpu, where vLLM's worker binds its memory. None without NUMA.

    A node without memory of its own is never in `membind`; its nearest node with memory is."""
    cpus: CpuSet
    """numactl's set: the cpus of all threads of the instance."""
    membind: CpuSet
    """Memory nodes; empty without NUMA."""
    omp_cpus: tuple[CpuSet, ...]
    """One list per tensor-parallel rank; together a subset of `cpus`."""
    remote: bool = False
    """Some of `cpus` are on a node whose memory cannot be used: the engine must be told `membind`."""
    rank_nodes: tuple[int, ...] = ()
    """Memory node of each rank, in the order of `omp_cpus`: that of its lowest cpu, or the node that it is bound to
    instead."""


class EffectiveConfig(Struct, frozen=True):
    """What the instances of one model run with: [[models]] and [memory], where engine.args and engine.env do not
    override them.

    Decided once, by the engine's `Planning.settings`. Planner, findings, proxy, tuner, rollout and status read it;
    none of them reads a limit or a type from [[models]] or engine.args."""

    name: str
    dtype: str
    quantization: str | None
    """None: as the checkpoint says."""
    tensor_parallel_size: int
    max_model_len: int | None
    """Tokens of the longest prompt and response together; None: not known."""
    max_num_seqs: int
    """Requests that an instance runs at once: its concurrency limit."""
    max_num_batched_tokens: int | None
    """As asked for; None: the engine's default."""
    step_tokens: int
    """Tokens of one engine step."""
    block_size: int
    """Tokens of a KV block, before the pool of a hybrid model raises it."""
    kv_cache_dtype: str | None
    """As asked for; None: the checkpoint's."""
    kv_element_bytes: int
    kv_bytes: int | None
    """The explicit KV cache of one rank; None for "auto"."""
    kv_source: str
    eager: bool
    """No compilation, so no frozen weights."""
    hybrid: bool
    """Sliding layers keep their window only."""
    ubatch_tokens: int = 0
    """Tokens that llama.cpp computes together, which sliding layers keep beside their window."""
    assumes_length: bool = False
    """`max_model_len` is the plan's assumption, which the engine is told: it could derive another."""

    @property
    def planned_len(self) -> int:
        """`max_model_len`, or vLLM's default where config.json has none."""
        return self.max_model_len or DEFAULT_MAX_MODEL_LEN


class Slot(Struct, frozen=True):
    """A stable position in the plan; successive instances run in it."""

    id: int
    model: Model
    effective: EffectiveConfig
    placement: Placement
    kv_cache_bytes: int | None
    """KV cache of each tensor-parallel rank, as --kv-cache-memory-bytes counts it: every worker takes that
    much (vllm/v1/worker/cpu_worker.py, determine_available_memory). None where the engine takes none
    (engine.kind = "command")."""
    files: ModelFiles | None = None
    """Those of its model, as they were when this was planned or started; None: unknown."""


class Finding(Struct, frozen=True):
    severity: Literal["violation", "warning"]
    code: str
    """Stable name in kebab case."""
    message: str
    """`cannot X: why` for violations; a plain statement for warnings."""
    remedy: str


def violation(code: str, message: str, remedy: str) -> Finding:
    return Finding("violation", code, message, remedy)


def warning(code: str, message: str, remedy: str) -> Finding:
    return Finding("warning", code, message, remedy)


class LedgerLine(Struct, frozen=True):
    """One figure of the ledger, with its source."""

    what: str
    """weights, peak, overhead, KV, page cache, reserve or total."""
    size_bytes: int
    source: str
    """A file's header, a key of config.json, a measurement, or a key of the configuration."""
    slot: int | None = None
    """The slot that needs it; None for figures of the node."""


class LedgerRow(Struct, frozen=True):
    """Memory of one NUMA node, and the planned memory of its instances."""

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
    """Added by freezing and packing the weights."""
    page_cache_bytes: int = 0
    """For the weight files, which all instances of the node read through one cache."""
    lines: tuple[LedgerLine, ...] = ()
    """All figures above, by slot, with their sources."""

    @property
    def left_bytes(self) -> int:
        """Memory left free; negative when the plan does not fit."""
        return self.total_bytes - self.reserve_bytes - self.page_cache_bytes - self.planned_bytes

    @property
    def is_tight(self) -> bool:
        """Whether less is free now than the instances are planned to need."""
        return self.planned_bytes > self.available_bytes

    @property
    def planned_bytes(self) -> int:
        return self.weights_bytes + self.peak_bytes + self.overhead_bytes + self.kv_bytes


class Demand(Struct, frozen=True):
    """Memory that each rank of a slot needs, and the nodes of the ranks."""

    slot: Slot
    nodes: tuple[int, ...]
    """Node of each rank; a node appears once for each rank on it."""
    weights_bytes: int = 0
    """Of one rank."""
    peak_bytes: int = 0
    """Of one rank: temporary memory for converting the weights."""
    overhead_bytes: int = 0
    """The first rank's, and that of the processes that are no rank's; charged to the first rank's node."""
    rank_overhead_bytes: int = 0
    """Each further rank's."""
    page_cache_bytes: int = 0
    """Of the weight files, shared by the instances of a node."""
    need_bytes: int = 0
    """KV of one request of max_model_len, on one rank."""
    cap_bytes: int = 0
    """KV of max_num_seqs such requests, on one rank."""
    given_bytes: int | None = None
    """The explicit kv_cache; None for "auto"."""
    known: bool = True
    """The model's files could be read."""
    guessed: bool = False
    """The KV of a token is a guess: sizes that the model's files do not give."""
    unknown_why: str = ""
    """The reason why the figures are not known."""
    unknown_remedy: str = ""
    """The remedy, where the usual one does not help."""
    step_bytes: int = 1
    """An automatic KV cache is a multiple of this."""
    sources: tuple[tuple[str, str], ...] = ()
    """Sources of the figures: weights, peak, overhead, page cache, KV."""

    def overhead_on(self, node: int) -> int:
        """Overhead of its ranks on a node."""
        further = self.nodes[1:].count(node)
        return (self.overhead_bytes if self.nodes[0] == node else 0) + further * self.rank_overhead_bytes

    def least_on(self, node: int) -> int:
        """Memory of its ranks on a node with the explicit KV cache, else with that of one request."""
        kv = self.need_bytes if self.given_bytes is None else self.given_bytes
        ranks = self.nodes.count(node)
        return ranks * (self.weights_bytes + self.peak_bytes + kv) + self.overhead_on(node)


class ChosenRanks(Struct, frozen=True):
    """The number of ranks of a model with tensor_parallel_size = "auto"."""

    model: str
    ranks: int
    why: str
    on_one_node: bool
    """An instance fits on one node."""


class ModelNeeds(Struct, frozen=True):
    """The reading of one model's files, and the memory of one request of full length."""

    name: str
    heads: int | None
    latent: bool
    quantization: str | None
    max_model_len: int
    kv_bytes_per_token: int
    """Bytes of all ranks, in the type of the KV cache; sliding layers too."""
    state_bytes: int
    """Recurrent states of one request."""
    request_bytes: int
    """KV cache that one request of `max_model_len` holds at most, over all ranks."""
    weights_bytes: int
    layers: tuple[KvLayers, ...]
    sources: tuple[str, ...]
    """engine, config, defaults, headers, assumed."""


class Plan(Struct, frozen=True):
    """What runs where. Nothing starts while `violations` is not empty."""

    strategy: Strategy
    slots: tuple[Slot, ...]
    reserved: CpuSet
    """Cpus reserved for the proxy and the OS, with their SMT siblings."""
    usable: CpuSet
    """Allowed cpus less the reserved ones."""
    ledger: tuple[LedgerRow, ...]
    findings: tuple[Finding, ...]
    models: tuple[EffectiveConfig, ...] = ()
    """Of each `[[models]]` entry, in the order of the file; also of those without slots."""
    needs: tuple[ModelNeeds, ...] = ()
    """One entry for each model whose files are here and can be read."""
    chosen_ranks: tuple[ChosenRanks, ...] = ()
    """One entry for each model that leaves its ranks open and whose files are known, where the engine has ranks."""

    @property
    def violations(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "violation")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "warning")

    @property
    def start_order(self) -> tuple[tuple[int, ...], ...]:
        """Groups of slots: those of one group may start together, the next group when all of them are ready.

        vLLM looks at its node's free memory once when it starts and once before it takes its KV cache, and refuses
        when another instance was faster (vllm/v1/worker/cpu_worker.py).

        1. Where a node's free memory suffices for all its slots, their order does not matter: they
           start together.
        2. On any other node no two slots of a group take memory of it: the first ones get what is there, and
           the one that does not fit reports it.
        3. Each slot, by id, joins the first group after which its nodes are free."""
        nodes: dict[int, list[int]] = {}
        for index, row in enumerate(self.ledger):
            for slot_id in row.slots if row.is_tight else ():
                nodes.setdefault(slot_id, []).append(index)
        next_group: dict[int, int] = {}
        groups: list[list[int]] = []
        for slot in self.slots:
            its = nodes.get(slot.id, [])
            group = max((next_group.get(node, 0) for node in its), default=0)
            next_group.update(dict.fromkeys(its, group + 1))
            groups.extend([] for _ in range(group + 1 - len(groups)))
            groups[group].append(slot.id)
        return tuple(tuple(group) for group in groups)


# --- Facts about the host and the engine's software that the rules need, as arguments. ---


class Facts(Struct, frozen=True):
    """None means unknown: rules that need the fact are skipped."""

    transparent_hugepages: str | None = None
    """The mode between brackets in /sys/kernel/mm/transparent_hugepage/enabled: always, madvise or never."""
    numa_balancing: bool | None = None
    governors: frozenset[str] | None = None
    """cpufreq governors in use; None where the kernel leaves the frequency to the firmware or hypervisor."""
    ld_preload: str | None = None
    """LD_PRELOAD as the instances will have it."""
    engine: Mapping[str, str] = field(default_factory=dict)
    """Versions and variables of the engine's software, by names that its own rules know."""


NO_FACTS: Final = Facts()


# --- Input and output of lint rules. ---

Accepts = Callable[[Config], bool]
"""Whether the plan of another configuration has no violations: a remedy is advice that the next run accepts."""


def untried(_: Config) -> bool:
    """An `Accepts` that tries nothing: no configuration is advised."""
    return False


class Subject(Struct, frozen=True):
    plan: Plan
    topology: Topology
    config: Config
    profiles: Mapping[str, ModelProfile]
    facts: Facts = NO_FACTS
    accepts: Accepts = untried
    """Tries what a remedy would advise."""

    def models(self) -> Iterator[tuple[EffectiveConfig, ModelProfile]]:
        for model in self.plan.models:
            yield model, self.profiles.get(model.name, UNKNOWN)


Rule = Callable[[Subject], Iterator[Finding]]


class Planning(Struct, frozen=True, kw_only=True):
    """An engine's answers to planning; pure functions."""

    settings: Callable[[Model, Config, ModelProfile, CpuInfo | None], EffectiveConfig]
    """The settings that instances of a model run with. Raises LauncherError for arguments that cannot be used."""
    rules: tuple[Rule, ...]
    """Those about this engine, in their order, beside those about any plan."""
    binds_itself: bool = False
    """Each of its ranks takes memory of one node only, whatever it is bound to."""
    far_memory: str = ""
    """The reason why its instances do not start on the cpus of a node without memory, for a message; empty where they do."""
    demand: Callable[[Slot, tuple[int, ...], Config, ModelProfile, Facts], Demand] | None = None
    """The memory of one slot, by the memory node of each rank. Raises LauncherError for a size that cannot be read. None for
    an engine that is not told how much memory it takes: nothing is planned then."""
    needs: Callable[[EffectiveConfig, ModelProfile], ModelNeeds] | None = None
    """The needs of a model whose files are known."""
    divides: Callable[[ModelProfile, int], bool] | None = None
    """Whether the engine can split a model over a number of ranks. None: its instances have no ranks."""
    other_processes: bool = False
    """Its instances have processes besides those of the OpenMP threads: one core is left to them."""
    whole_requests: bool = False
    """Its instances reserve KV cache for whole requests of full length: they run no more at once than theirs holds."""
