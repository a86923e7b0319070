"""`plan --compare`: the four strategies side by side, on one machine with one configuration.

1. Each strategy plans with the rest of the configuration; its findings are in its column.
2. An instance touches an L3 when one of its cores is in it; instances share an L3 when both touch it.
3. Memory channels are those of the nodes that the instance's ranks allocate from: vLLM's worker binds to the
   node of its first cpu, so a set that spans nodes reaches one node's. The kernel does not report
   channels; if the machine's description does not either, the share of the nodes with cpus is shown instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from launcher.base.text import format_size
from launcher.config.schema import Config, Strategy
from launcher.machine.topology import Topology
from launcher.models.profile import ModelProfile
from launcher.plan.plan import Plan, Planning, Slot
from launcher.plan.planner import make_plan

# Sizes are listed one by one up to this many instances (43-43-42), then as a range.
_LISTED: Final = 8


class Reach(Struct, frozen=True):
    """The part of the machine that one instance uses."""

    cores: int
    l3_cores: Mapping[int, int]
    """Index of each L3 domain it touches to its cores there; empty where the kernel shows no L3."""
    nodes: tuple[int, ...]
    """Nodes that its ranks allocate from."""
    channels: int | None
    """Memory channels of those nodes; None where unknown."""
    kv_cache_bytes: int | None


class Column(Struct, frozen=True):
    plan: Plan
    reaches: tuple[Reach, ...]
    sharing: int
    """Instances that share an L3 with another."""
    most_on_one_l3: int
    """The most instances that touch one L3."""
    nodes: int
    """Nodes of the machine that have cpus."""

    @property
    def most_on_one_node(self) -> int:
        """The most instances that allocate from one node, and so share its channels."""
        nodes = [node for reach in self.reaches for node in reach.nodes]
        return max((nodes.count(node) for node in nodes), default=0)


def compare(
    topology: Topology,
    config: Config,
    profiles: Mapping[str, ModelProfile],
    *,
    planning: Planning,
    cpus_only: bool = False,
) -> tuple[Column, ...]:
    """One column per strategy, in the order of `Strategy`. Raises LauncherError as `make_plan` does."""
    configs = (replace(config, layout=replace(config.layout, strategy=strategy)) for strategy in Strategy)
    plans = (make_plan(topology, each, profiles, planning=planning, cpus_only=cpus_only) for each in configs)
    return tuple(_column(plan, topology) for plan in plans)


def _column(plan: Plan, topology: Topology) -> Column:
    domain_of = {cpu: i for i, domain in enumerate(topology.l3_domains) for cpu in domain.cpus}
    core_of = {cpu: core.key for core in topology.cores for cpu in core.cpus}
    reaches = tuple(_reach(slot, topology, domain_of, core_of) for slot in plan.slots)
    touched: dict[int, int] = {}
    for reach in reaches:
        for domain in reach.l3_cores:
            touched[domain] = touched.get(domain, 0) + 1
    return Column(
        plan=plan,
        reaches=reaches,
        sharing=sum(any(touched[domain] > 1 for domain in reach.l3_cores) for reach in reaches),
        most_on_one_l3=max(touched.values(), default=0),
        nodes=sum(bool(node.cpus) for node in topology.numa_nodes),
    )


def _reach(
    slot: Slot, topology: Topology, domain_of: Mapping[int, int], core_of: Mapping[int, object]
) -> Reach:
    firsts = {core_of[cpu]: cpu for cpu in slot.placement.cpus}
    l3_cores: dict[int, int] = {}
    for cpu in firsts.values():
        if cpu in domain_of:
            l3_cores[domain_of[cpu]] = l3_cores.get(domain_of[cpu], 0) + 1
    nodes = tuple(sorted(set(slot.placement.rank_nodes)))
    channels = [topology.node(node).memory_channels for node in nodes]
    known = [count for count in channels if count is not None]
    return Reach(
        cores=len(firsts), l3_cores=dict(sorted(l3_cores.items())), nodes=nodes,
        channels=sum(known) if len(known) == len(channels) else None, kv_cache_bytes=slot.kv_cache_bytes,
    )  # fmt: skip


def to_json(columns: Sequence[Column]) -> dict[str, Any]:
    """The form of `plan --compare --json`; lists go by slot."""
    return {"strategies": [_column_json(column) for column in columns]}


def _column_json(column: Column) -> dict[str, Any]:
    ledger = column.plan.ledger
    return {
        "strategy": column.plan.strategy.value,
        "instances": len(column.reaches),
        "cores": [reach.cores for reach in column.reaches],
        "l3_touched": [len(reach.l3_cores) for reach in column.reaches],
        "cores_per_l3": [list(reach.l3_cores.values()) for reach in column.reaches],
        "instances_sharing_an_l3": column.sharing,
        "most_instances_on_one_l3": column.most_on_one_l3,
        "memory_nodes": [list(reach.nodes) for reach in column.reaches],
        "memory_channels": [reach.channels for reach in column.reaches],
        "most_instances_on_one_node": column.most_on_one_node,
        "kv_cache_bytes": [reach.kv_cache_bytes for reach in column.reaches],
        "left_bytes": {str(row.node): row.left_bytes for row in ledger},
        "violations": [{"code": found.code, "message": found.message} for found in column.plan.violations],
        "warnings": [{"code": found.code, "message": found.message} for found in column.plan.warnings],
    }


def rows(columns: Sequence[Column]) -> list[list[str]]:
    """The table: one row per figure, one column per strategy."""
    return [[question, *(answer(column) for column in columns)] for question, answer in _QUESTIONS.items()]


def notes(columns: Sequence[Column]) -> list[str]:
    said: dict[tuple[str, str], list[str]] = {}
    for column in columns:
        for finding in column.plan.findings:
            prefix = "" if finding.severity == "violation" else "warning: "
            key = (finding.code, prefix + finding.message)
            said.setdefault(key, []).append(column.plan.strategy.value)
    return [
        f"{'all' if len(its) == len(columns) else ', '.join(its)}: {text}" for (_, text), its in said.items()
    ]


def _instances(column: Column) -> str:
    codes = sorted({finding.code for finding in column.plan.violations})
    return f"refused: {', '.join(codes)}" if codes else str(len(column.reaches))


def _each(counts: Iterable[int]) -> str:
    """7; or 43-43-42 where they differ and are few; or 42 to 43."""
    every = list(counts)
    if len(set(every)) < 2:
        return str(every[0]) if every else "-"
    return "-".join(map(str, every)) if len(every) <= _LISTED else f"{min(every)} to {max(every)}"


def _l3_touched(column: Column) -> str:
    return _each(len(reach.l3_cores) for reach in column.reaches) if column.most_on_one_l3 else "-"


def _cores_per_l3(column: Column) -> str:
    counts = sorted({cores for reach in column.reaches for cores in reach.l3_cores.values()})
    return "-" if not counts else str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _sharing(column: Column) -> str:
    if not column.most_on_one_l3:
        return "-"
    return f"{column.sharing}, by up to {column.most_on_one_l3}" if column.sharing else "none"


def _channels(column: Column) -> str:
    if not column.reaches:
        return "-"
    known = [reach.channels for reach in column.reaches if reach.channels is not None]
    if len(known) == len(column.reaches):
        text = _each(known)
    else:
        text = f"{_each(len(reach.nodes) for reach in column.reaches)} of {column.nodes} nodes'"
    return f"{text}, shared by {column.most_on_one_node}" if column.most_on_one_node > 1 else text


def _kv_cache(column: Column) -> str:
    sizes = sorted({reach.kv_cache_bytes for reach in column.reaches if reach.kv_cache_bytes is not None})
    if not sizes:
        return "-"
    least, most = format_size(sizes[0]), format_size(sizes[-1])
    return least if least == most else f"{least} to {most}"


def _left(column: Column) -> str:
    planned = any(reach.kv_cache_bytes is not None for reach in column.reaches)
    return format_size(min(row.left_bytes for row in column.plan.ledger)) if planned else "-"


_QUESTIONS: Final[Mapping[str, Callable[[Column], str]]] = {
    "instances": _instances,
    "cores each": lambda column: _each(reach.cores for reach in column.reaches),
    "L3 caches per instance": _l3_touched,
    "cores per instance in an L3": _cores_per_l3,
    "instances sharing an L3": _sharing,
    "memory channels each": _channels,
    "KV cache each": _kv_cache,
    "free memory on the fullest node": _left,
}
