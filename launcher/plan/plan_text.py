"""A plan as JSON (`plan --json`) and as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap
from typing import Any, Final

from launcher.base.cpuset import CpuSet
from launcher.base.text import counted, format_size, table
from launcher.machine.topology import Topology
from launcher.plan.needs import needs_json, needs_text
from launcher.plan.plan import EffectiveConfig, Finding, LedgerRow, Plan, Slot

_WIDTH: Final = 116


def slot_json(slot: Slot) -> dict[str, Any]:
    placement = slot.placement
    return {
        "slot": slot.id, "model": slot.model.name, "socket": placement.socket, "node": placement.node,
        "cpus": placement.cpus.format(), "omp_cpus": omp_text(slot), "membind": placement.membind.format(),
        "kv_cache_bytes": slot.kv_cache_bytes, **_effective_json(slot.effective),
    }  # fmt: skip


def _effective_json(its: EffectiveConfig) -> dict[str, Any]:
    return {
        "dtype": its.dtype, "tensor_parallel_size": its.tensor_parallel_size, "max_model_len": its.max_model_len,
        "max_num_seqs": its.max_num_seqs, "max_num_batched_tokens": its.max_num_batched_tokens,
    }  # fmt: skip


def omp_text(slot: Slot) -> str:
    """The OpenMP lists of all ranks as VLLM_CPU_OMP_THREADS_BIND takes them."""
    return "|".join(cpus.format() for cpus in slot.placement.omp_cpus)


def plan_json(plan: Plan, extra: Mapping[int, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """The form of `plan --json`. `extra` holds more keys by slot id, e.g. argv and env."""
    more = extra or {}
    return {
        "strategy": plan.strategy.value,
        "slots": [{**slot_json(slot), **more.get(slot.id, {})} for slot in plan.slots],
        "reserved": plan.reserved.format(),
        "usable": plan.usable.format(),
        "warnings": [_finding_json(finding) for finding in plan.warnings],
        "violations": [_finding_json(finding) for finding in plan.violations],
        "findings": [
            {"severity": finding.severity} | _finding_json(finding)
            for finding in (*plan.violations, *plan.warnings)
        ],
        "models": [needs_json(its) for its in plan.needs],
        "chosen_ranks": [
            {"model": its.model, "tensor_parallel_size": its.ranks, "why": its.why}
            for its in plan.chosen_ranks
        ],
        "ledger": [_row_json(row) for row in plan.ledger],
        "start_order": [list(group) for group in plan.start_order],
    }


def _finding_json(finding: Finding) -> dict[str, str]:
    return {"code": finding.code, "message": finding.message, "remedy": finding.remedy}


def _row_json(row: LedgerRow) -> dict[str, Any]:
    return {
        "node": row.node,
        "total_bytes": row.total_bytes,
        "available_bytes": row.available_bytes,
        "reserve_bytes": row.reserve_bytes,
        "weights_bytes": row.weights_bytes,
        "overhead_bytes": row.overhead_bytes,
        "kv_bytes": row.kv_bytes,
        "left_bytes": row.left_bytes,
        "slots": list(row.slots),
        "peak_bytes": row.peak_bytes,
        "page_cache_bytes": row.page_cache_bytes,
        "lines": [
            {"what": line.what, "slot": line.slot, "size_bytes": line.size_bytes, "source": line.source}
            for line in row.lines
        ],
    }


def to_text(plan: Plan, topology: Topology) -> str:
    """The plan as text: slots, memory of each node, reserved cores and findings."""
    lines = [
        f"{plan.strategy.value}: {counted(len(plan.slots), 'instance')} on {counted(len(topology.sockets), 'socket')}"
    ]
    lines.append("")
    head = ["slot", "model", "socket", "node", "cores", "cpus", "openmp", "membind", "KV"]
    lines += table([head, *(_slot_row(slot, topology) for slot in plan.slots)])
    for chosen in (each for each in plan.chosen_ranks if not each.on_one_node):
        lines += wrap(
            f"tensor_parallel_size of {chosen.model}: {chosen.ranks}, as {chosen.why}", width=_WIDTH
        )
    lines += ["", f"reserved for proxy and OS: {plan.reserved or 'none'}", ""]
    head = ["node", "memory", "reserve", "cache", "weights", "peak", "overhead", "KV", "left", "slots"]
    lines += table([head, *(_ledger_row(row) for row in plan.ledger)])
    for its in plan.needs:
        lines += ["", *needs_text(its)]
    lines += sources_text(plan)
    if len(plan.start_order) > 1:
        order = ", then ".join(",".join(map(str, group)) for group in plan.start_order)
        lines += ["", f"starts: slots {order}: less memory is free now than they will need"]
    for finding in (*plan.violations, *plan.warnings):
        prefix = "" if finding.severity == "violation" else "warning: "
        lines += ["", f"{prefix}{finding.message}", f"  {finding.remedy}"]
    return "\n".join(lines)


def sources_text(plan: Plan) -> list[str]:
    """Sources of the ledger's figures: each once, with its slots and nodes."""
    places: dict[tuple[str, int, str], tuple[list[int], list[int]]] = {}
    for row in plan.ledger:
        for line in row.lines:
            slots, nodes = places.setdefault((line.what, line.size_bytes, line.source), ([], []))
            if line.slot is not None:
                slots.append(line.slot)
            elif row.node is not None:
                nodes.append(row.node)
    lines = ["", "sources of the figures:"] if places else []
    for (what, size, source), (slots, nodes) in places.items():
        where = f" (slot {CpuSet(slots)})" if slots else f" (node {CpuSet(nodes)})" if nodes else ""
        text = f"{what} {format_size(size)}{where}: {source}"
        lines += wrap(text, width=_WIDTH, initial_indent="  ", subsequent_indent="    ")
    return lines


def _slot_row(slot: Slot, topology: Topology) -> list[str]:
    placement = slot.placement
    cores = sum(not core.cpus.isdisjoint(placement.cpus) for core in topology.cores)
    return [
        str(slot.id),
        slot.model.name,
        sockets_text(slot, topology),
        nodes_text(slot),
        str(cores),
        short_list(placement.cpus.format()),
        "|".join(short_list(cpus.format()) for cpus in placement.omp_cpus),
        placement.membind.format() or "-",
        "-" if slot.kv_cache_bytes is None else format_size(slot.kv_cache_bytes),
    ]


def sockets_text(slot: Slot, topology: Topology) -> str:
    """Sockets of its cpus, as a list."""
    cpus = slot.placement.cpus
    return CpuSet(core.key.socket for core in topology.cores if not core.cpus.isdisjoint(cpus)).format()


def nodes_text(slot: Slot) -> str:
    """The node of its lowest cpu; "0|1" where its ranks have nodes of their own."""
    placement = slot.placement
    nodes = placement.rank_nodes if len(set(placement.rank_nodes)) > 1 else (placement.node,)
    return "|".join("-" if node is None else str(node) for node in nodes)


def short_list(cpulist: str, width: int = 28) -> str:
    """A cpulist shortened to fit a column: 0,2,4,6,...,126."""
    if len(cpulist) <= width:
        return cpulist
    parts = cpulist.split(",")
    head = parts[:1]
    while len(",".join([*head, parts[len(head)], "...", parts[-1]])) <= width:
        head.append(parts[len(head)])
    return ",".join([*head, "...", parts[-1]])


def _ledger_row(row: LedgerRow) -> list[str]:
    sizes = (
        row.total_bytes, row.reserve_bytes, row.page_cache_bytes, row.weights_bytes, row.peak_bytes,
        row.overhead_bytes, row.kv_bytes, row.left_bytes,
    )  # fmt: skip
    return [
        "-" if row.node is None else str(row.node),
        *map(format_size, sizes),
        ",".join(map(str, row.slots)),
    ]
