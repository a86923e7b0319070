"""The memory ledger: weights, overhead and KV cache of all instances against each NUMA node's memory. Pure.

1. A node has MemTotal less its pools of huge pages, limited to its share of the cgroup's memory limit (in
   proportion to the nodes in use).
2. Of it the reserve stays free for the kernel and page tables, and a share for the page cache of weight files.
3. Each tensor-parallel rank takes its share of the weights, with the peak while they are converted, and its overhead;
   the first also that of the instance's other processes: the engine's `Planning.demand`. A rank is charged to the node
   of its first cpu (`Placement.rank_nodes`), also where the instance spans nodes.
4. An explicit KV cache is taken as given, per rank. "auto" divides the remaining memory of the node evenly over
   the ranks on it, never more than max_num_seqs requests of max_model_len can fill, in steps of 128 MiB, or of
   1 GiB where the engine takes no other.
5. A KV cache below one request of max_model_len is a violation: vLLM would refuse to start.
6. An engine that reserves whole requests (`Planning.whole_requests`) runs as many at once as the KV cache holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from launcher.base.cpuset import CpuSet
from launcher.base.text import GIB, counted, format_size
from launcher.config.schema import Config
from launcher.machine.topology import Topology
from launcher.models.profile import UNKNOWN, ModelProfile
from launcher.plan.plan import (
    NO_FACTS,
    Accepts,
    Demand,
    Facts,
    Finding,
    LedgerLine,
    LedgerRow,
    Planning,
    Slot,
    untried,
    violation,
    warning,
)

MAX_RESERVE_BYTES: Final = 8 * GIB
RESERVE_SHARE: Final = Fraction(5, 100)


class Filled(Struct, frozen=True):
    """Slots with their KV cache sizes, the ledger by node, and findings."""

    slots: tuple[Slot, ...]
    ledger: tuple[LedgerRow, ...]
    findings: tuple[Finding, ...]
    too_large: Mapping[str, str]
    """Models of which one instance, with one of each other model there and the KV cache of one request for each, does not
    fit on one of its nodes; each with the figures. The largest comes first."""


def fill_memory(
    topology: Topology,
    config: Config,
    slots: Sequence[Slot],
    profiles: Mapping[str, ModelProfile],
    facts: Facts = NO_FACTS,
    *,
    planning: Planning | None,
    accepts: Accepts = untried,
) -> Filled:
    """The slots with their memory. `planning` is the engine's. Without it, and for an engine whose memory is not planned,
    nothing is needed and no KV cache sized.

    Raises LauncherError for a size in [memory] that cannot be read."""
    findings: list[Finding] = []
    demand_of = None if planning is None else planning.demand
    planned = demand_of is not None
    demands = []
    for slot in slots:
        ranks, profile = slot.placement.rank_nodes, profiles.get(slot.model.name, UNKNOWN)
        demands.append(
            Demand(slot, ranks[:1]) if demand_of is None else demand_of(slot, ranks, config, profile, facts)
        )
    nodes = sorted({node for demand in demands for node in demand.nodes})
    totals = _totals(topology, nodes)
    reserves = {node: _reserve(config, totals[node], planned=planned) for node in nodes}
    kv: dict[int, int | None] = dict.fromkeys((slot.id for slot in slots), None)
    if planned:
        findings.extend(_unchecked(topology, demands, nodes))
        free = {node: totals[node] - reserves[node] - _page_cache(node, demands) for node in nodes}
        kv = dict(_size_kv(demands, free))
    ledger = tuple(
        _row(topology, node, demands, kv, config, total_bytes=totals[node], reserve_bytes=reserves[node])
        for node in nodes
    )
    short = [row for row in ledger if row.left_bytes < 0 and topology.node(row.node or 0).memory_known]
    findings.extend(_do_not_fit(short, demands, topology, config, accepts))
    findings.extend(_too_small(demands))
    sized = tuple(replace(slot, kv_cache_bytes=kv[slot.id]) for slot in slots)
    if planning is not None and planning.whole_requests:
        needs = {demand.slot.id: demand.need_bytes for demand in demands}
        sized = tuple(_limited(slot, needs[slot.id]) for slot in sized)
    if not topology.has_numa:
        ledger = tuple(replace(row, node=None) for row in ledger)
    return Filled(sized, ledger, tuple(findings), _larger_than_node(short, demands))


def _larger_than_node(short: Sequence[LedgerRow], demands: Sequence[Demand]) -> dict[str, str]:
    """`Filled.too_large`; the reason is read of a model that has one rank."""
    found: dict[str, str] = {}
    for row in short:
        node, available = row.node or 0, _available(row)
        sizes = {its.slot.model.name: its.least_on(node) for its in demands if its.slot.id in row.slots}
        together = sum(sizes.values())
        for name in sorted(sizes, key=lambda name: -sizes[name]) if together > available else ():
            others = together - sizes[name]
            beside = f" beside {format_size(others)} of other models" if others else ""
            need = f"an instance needs {format_size(sizes[name])} with the KV cache of one request{beside}"
            found.setdefault(name, f"{need}, and node {node} has {format_size(available)}")
    return found


def _available(row: LedgerRow) -> int:
    """Memory of a node for instances."""
    return row.total_bytes - row.reserve_bytes - row.page_cache_bytes


def _limited(slot: Slot, need_bytes: int) -> Slot:
    """The slot with no more requests at once than its KV cache holds; unchanged where a request's size is not known."""
    if not need_bytes or slot.kv_cache_bytes is None:
        return slot
    most = max(1, slot.kv_cache_bytes // need_bytes)
    limit = min(slot.effective.max_num_seqs, most)
    return replace(slot, effective=replace(slot.effective, max_num_seqs=limit))


def _totals(topology: Topology, nodes: Sequence[int]) -> dict[int, int]:
    here = [topology.node(node) for node in nodes]
    totals = {node.id: max(0, node.memory_bytes - node.hugepages_bytes) for node in here}
    limit, machine = topology.memory_limit_bytes, sum(totals.values())
    if limit is None or limit >= machine:
        return totals
    return {node: total * limit // machine for node, total in totals.items()}


def _reserve(config: Config, total: int, *, planned: bool) -> int:
    text = config.memory.reserve
    if not planned and text == "auto":
        return 0
    return (
        min(MAX_RESERVE_BYTES, int(total * RESERVE_SHARE))
        if text == "auto"
        else config.memory.size_of("reserve")
    )


def _size_kv(demands: Sequence[Demand], budgets: Mapping[int, int]) -> Mapping[int, int]:
    """KV bytes of one rank of each slot.

    Ranks with the smallest demand come first, so that their unused share goes to the others. A slot whose ranks are
    on several nodes gets the smallest of the shares, because vLLM takes one size for all ranks."""
    left = dict(budgets)
    waiting: dict[int, int] = defaultdict(int)
    for demand in demands:
        for node in set(demand.nodes):
            left[node] -= demand.overhead_on(node)
        for node in demand.nodes:
            left[node] -= demand.weights_bytes + demand.peak_bytes + (demand.given_bytes or 0)
            waiting[node] += demand.given_bytes is None
    sizes = {demand.slot.id: demand.given_bytes for demand in demands if demand.given_bytes is not None}
    for demand in sorted((d for d in demands if d.given_bytes is None), key=lambda d: d.cap_bytes):
        share = min(left[node] // waiting[node] for node in demand.nodes)
        size = min(demand.cap_bytes, max(share, 0) // demand.step_bytes * demand.step_bytes)
        sizes[demand.slot.id] = size = max(size, demand.need_bytes)
        for node in demand.nodes:
            left[node] -= size
            waiting[node] -= 1
    return sizes


def _row(
    topology: Topology,
    node: int,
    demands: Sequence[Demand],
    kv: Mapping[int, int | None],
    config: Config,
    *,
    total_bytes: int,
    reserve_bytes: int,
) -> LedgerRow:
    here = [demand for demand in demands if node in demand.nodes]
    available, limit = topology.node(node).available_bytes, topology.memory_limit_bytes
    cache = _page_cache(node, here)
    auto = config.memory.reserve == "auto"
    own = [
        LedgerLine("reserve", reserve_bytes, "5 %, at most 8 GiB" if auto else "memory.reserve"),
        LedgerLine("page cache", cache, next((dict(d.sources)["page cache"] for d in here if d.sources), "")),
    ]
    lines = (*own, *(line for demand in here for line in _lines(node, demand, kv[demand.slot.id] or 0)))
    sums: dict[str, int] = defaultdict(int)
    for line in lines:
        sums[line.what] += line.size_bytes
    return LedgerRow(
        node=node, total_bytes=total_bytes,
        available_bytes=available if limit is None else min(available, limit), reserve_bytes=reserve_bytes,
        weights_bytes=sums["weights"], overhead_bytes=sums["overhead"], kv_bytes=sums["KV"],
        slots=tuple(demand.slot.id for demand in here), peak_bytes=sums["peak"], page_cache_bytes=cache,
        lines=tuple(line for line in lines if line.size_bytes),
    )  # fmt: skip


def _lines(node: int, demand: Demand, kv_bytes: int) -> Iterator[LedgerLine]:
    ranks, sources = demand.nodes.count(node), dict(demand.sources)
    sizes = {
        "weights": demand.weights_bytes * ranks,
        "peak": demand.peak_bytes * ranks,
        "overhead": demand.overhead_on(node),
        "KV": kv_bytes * ranks,
    }
    for what, size in sizes.items():
        if what in sources:
            yield LedgerLine(what, size, sources[what], demand.slot.id)


def _page_cache(node: int, demands: Sequence[Demand]) -> int:
    """One file per model: instances that load it concurrently share its pages."""
    return max((demand.page_cache_bytes for demand in demands if node in demand.nodes), default=0)


def _unchecked(topology: Topology, demands: Sequence[Demand], nodes: Sequence[int]) -> list[Finding]:
    """Findings for what cannot be planned: models without local files, nodes with unknown memory."""
    auto = any(demand.given_bytes is None for demand in demands)
    own = {f"model {d.slot.model.path!r}": d.unknown_remedy for d in demands if d.unknown_remedy}
    read = {d.slot.model.path for d in demands if d.weights_bytes}
    unknown = {f"model {d.slot.model.path!r}": d.unknown_why for d in demands if not d.known}
    unknown |= {
        f"node {node}": "its meminfo could not be read"
        for node in nodes
        if not topology.node(node).memory_known
    }
    if auto:
        remedy = 'set memory.kv_cache to a size such as "4GiB"'
        remedy += (
            ""
            if all(d.known or d.slot.model.path in read for d in demands)
            else ", or download the model first"
        )
        return [
            violation("memory-unknown", f"cannot size the KV cache for {what}: {why}", own.get(what, remedy))
            for what, why in unknown.items()
        ]
    remedy = "check the log of the first start: the engine may end with too little memory"
    return [
        warning("memory-unchecked", f"the memory of {what} was not checked: {why}", own.get(what, remedy))
        for what, why in unknown.items()
    ]


def _do_not_fit(
    short: Sequence[LedgerRow],
    demands: Sequence[Demand],
    topology: Topology,
    config: Config,
    accepts: Accepts,
) -> Iterator[Finding]:
    """One finding for all nodes that lack the same for the same models, with the figures of the worst."""
    alike: dict[tuple[object, ...], list[LedgerRow]] = defaultdict(list)
    for row in short:
        here = [demand for demand in demands if demand.slot.id in row.slots]
        alike[_lacks_room_for_one(row, here), frozenset(d.slot.model.name for d in here)].append(row)
    for rows in alike.values():
        worst = min(rows, key=lambda row: row.left_bytes)
        here = [demand for demand in demands if demand.slot.id in worst.slots]
        others = CpuSet(row.node for row in rows if row.node is not None and row is not worst)
        yield violation(
            "out-of-memory",
            f"cannot fit {counted(len(worst.slots), 'instance')} on node {worst.node}"
            + (f", nor those of nodes {others}" if others else "")
            + f": {_figures(worst)}; short by {-worst.left_bytes / GIB:.2f} GiB",
            _whole_node(worst, topology)
            + "".join(_within_limit(worst, topology, config, accepts))
            + (
                _larger_node(worst, here, topology, config, accepts)
                if _lacks_room_for_one(worst, here)
                else _less_on_node(worst, here)
            ),
        )


def _whole_node(row: LedgerRow, topology: Topology) -> str:
    """The first remedy of a node that the kernel emulates."""
    group = topology.emulated_with(row.node or 0)
    if not group:
        return ""
    size = sum(topology.node(node).memory_bytes for node in group)
    return (
        f"boot without numa=fake (numa=off on the kernel's command line): nodes {group} are then one of "
        f"{format_size(size)}; or "
    )


def _within_limit(row: LedgerRow, topology: Topology, config: Config, accepts: Accepts) -> Iterator[str]:
    """The first remedies where the cgroup's limit is less than the machine has: nodes in use share it."""
    if (limit := _binding_limit(topology)) is None:
        return
    yield f"raise the memory limit of this cgroup, {format_size(limit)} (MemoryMax=, --memory, limits.memory of a pod), or "
    if len(config.models) == 1 and row.node is not None:
        model = replace(config.models[0], nodes=(row.node,))
        if accepts(replace(config, models=(model,))):
            yield f"set models.nodes = [{row.node}], which then has all of it, or "


def _binding_limit(topology: Topology) -> int | None:
    limit = topology.memory_limit_bytes
    machine = sum(node.memory_bytes for node in topology.numa_nodes)
    return None if limit is None or limit >= machine else limit


def _lacks_room_for_one(row: LedgerRow, here: Sequence[Demand]) -> bool:
    """Whether the largest instance does not fit alone and without KV cache."""
    return max(_without_kv(demand, row) for demand in here) > _available(row)


def _without_kv(demand: Demand, row: LedgerRow) -> int:
    node = row.node or 0
    return (demand.weights_bytes + demand.peak_bytes) * demand.nodes.count(node) + demand.overhead_on(node)


def _figures(row: LedgerRow) -> str:
    return (
        f"weights {format_size(row.weights_bytes)} and {format_size(row.peak_bytes)} to convert them, overhead "
        f"{format_size(row.overhead_bytes)}, KV {format_size(row.kv_bytes)}, reserve and page cache "
        f"{format_size(row.reserve_bytes + row.page_cache_bytes)} are "
        f"{format_size(row.total_bytes - row.left_bytes)} of its {format_size(row.total_bytes)}"
    )


def _less_on_node(row: LedgerRow, here: Sequence[Demand]) -> str:
    """KV cache or a number of instances is missing."""
    largest = max(here, key=lambda demand: demand.need_bytes)
    if largest.given_bytes is not None:
        lower = ["memory.kv_cache"]
    else:
        need = format_size(largest.need_bytes)
        lower = [f"max_model_len (one request of full length needs {need} of KV cache)"]
    lower += ["instances_per_socket"] * (len(row.slots) > 1)
    lower += ["memory.reserve"] * (largest.given_bytes is None and row.reserve_bytes > 0)
    first, last = ", ".join(lower[:-1]), lower[-1]
    return f"lower {f'{first} or {last}' if first else last}, or use a smaller model"


def _larger_node(
    row: LedgerRow, here: Sequence[Demand], topology: Topology, config: Config, accepts: Accepts
) -> str:
    """A whole instance is larger than the node: ranks on several nodes, or larger nodes."""
    socket = topology.node(row.node or 0).socket
    nodes = [node for node in topology.numa_nodes if node.cpus and node.socket == socket]
    need = max(_without_kv(demand, row) + demand.need_bytes for demand in here)
    wide = sum(node.memory_bytes - node.hugepages_bytes for node in nodes)
    limited = _binding_limit(topology) is not None
    found = [*_ranks_over(config, accepts)]
    if not limited and len(nodes) > 1 and need < wide - row.reserve_bytes - row.page_cache_bytes:
        found.append(
            f"let the firmware (BIOS) make one node of the socket's {len(nodes)}: NPS1, no L3 as NUMA, no sub-NUMA "
            "clusters"
        )
    return ", or ".join([*found, "use a smaller or quantized model" + (", or add memory" * (not limited))])


def _ranks_over(config: Config, accepts: Accepts) -> Iterator[str]:
    """As many nodes for an instance as it needs, if the plan is then accepted."""
    if len(config.models) != 1:
        return
    model = replace(config.models[0], tensor_parallel_size="auto")
    layout = replace(config.layout, instances_per_socket="auto")
    if accepts(replace(config, models=(model,), layout=layout)):
        keys = ['tensor_parallel_size = "auto"'] * (config.models[0].tensor_parallel_size != "auto")
        keys += ['layout.instances_per_socket = "auto"'] * (config.layout.instances_per_socket != "auto")
        yield f"set {' and '.join(keys)}: an instance then has ranks on as many nodes as it needs"


def _too_small(demands: Sequence[Demand]) -> Iterator[Finding]:
    """vLLM refuses a KV cache that cannot hold one request of max_model_len (kv_cache_utils.py,
    _check_enough_kv_cache_memory)."""
    told: set[str] = set()
    for demand in demands:
        given, name = demand.given_bytes, demand.slot.model.name
        if given is not None and given < demand.need_bytes and name not in told:
            told.add(name)
            remedy = (
                f"set memory.kv_cache to at least {-(-demand.need_bytes // 2**20)}MiB, or lower max_model_len"
            )
            if demand.guessed:
                yield warning(
                    "kv-too-small",
                    f"one request of max_model_len may need {format_size(demand.need_bytes)} of KV cache, more than the "
                    f"{format_size(given)} of {name!r}: its config.json leaves out sizes, which the plan guesses",
                    remedy,
                )
                continue
            yield violation(
                "kv-too-small",
                f"cannot start {name!r} with {format_size(given)} of KV cache: one request of max_model_len needs "
                f"{format_size(demand.need_bytes)}",
                remedy,
            )
