"""Rules on how vLLM's worker takes memory and binds itself, against the placement. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from launcher.base.cpuset import CpuSet
from launcher.base.text import format_size
from launcher.plan.plan import Finding, Rule, Slot, Subject, warning


def emulated_nodes(subject: Subject) -> Iterator[Finding]:
    """Memory of one node, cut by the kernel. The worker binds to one of them (v1/worker/cpu_worker.py, 0.32,
    init_cpu_memory_env)."""
    for group in subject.topology.emulated:
        used = subject.plan.slots and {node for slot in subject.plan.slots for node in slot.placement.membind}
        idle = CpuSet(node for node in group if used and node not in used)
        if idle:
            size = sum(subject.topology.node(node).memory_bytes for node in idle)
            yield warning(
                "emulated-nodes",
                f"the kernel emulates nodes {group} (numa=fake): they are one node with the same cpus, but vLLM binds an "
                f"instance to one of them, so that {format_size(size)} of nodes {idle} are not used",
                "boot without numa=fake: numa=off on the kernel's command line makes one node of them",
            )


def free_memory(subject: Subject) -> Iterator[Finding]:
    """vLLM compares its KV cache with the free memory at start, not with the node's total."""
    for row in subject.plan.ledger:
        planned = row.planned_bytes
        if planned and row.available_bytes < planned <= row.total_bytes:
            yield warning(
                "free-memory",
                f"node {row.node} has {format_size(row.available_bytes)} free now, the plan needs "
                f"{format_size(planned)}",
                "stop other processes on the node, or lower memory.kv_cache; running instances of this daemon count, too",
            )


def huge_pages(subject: Subject) -> Iterator[Finding]:
    """Only explicit huge page mappings can use a hugetlb pool; vLLM's allocators make none."""
    nodes = [subject.topology.node(row.node or 0) for row in subject.plan.ledger]
    pools = [
        f"{format_size(node.hugepages_bytes)} of node {node.id}" for node in nodes if node.hugepages_bytes
    ]
    if pools:
        yield warning(
            "huge-pages",
            f"{' and '.join(pools)} are reserved as huge pages, which instances cannot use: the plan excludes them",
            "set vm.nr_hugepages = 0 (or hugepages= of the kernel's command line) unless another program uses them",
        )


def spans_nodes(subject: Subject) -> Iterator[Finding]:
    """The worker binds to the node of its first cpu, so an instance that spans k nodes uses one node's memory channels."""
    node_of = {cpu: node.id for node in subject.topology.numa_nodes for cpu in node.cpus}
    for slot in subject.plan.slots:
        nodes = sorted({node_of[cpu] for cpu in slot.placement.cpus})
        bound = sorted({node_of[cpus.first] for cpus in slot.placement.omp_cpus})
        if len(nodes) > len(bound):
            lost = 100 * (len(nodes) - len(bound)) // len(nodes)
            yield warning(
                "spans-nodes",
                f"slot {slot.id} spans nodes {','.join(map(str, nodes))}, but vLLM binds a worker's memory to the node "
                f"of its first cpu ({','.join(map(str, bound))}): {lost} % of the memory channels are unused",
                _on_all_nodes(subject, slot, len(nodes)),
            )


def _on_all_nodes(subject: Subject, slot: Slot, nodes: int) -> str:
    """Advice that the next run accepts: an instance on each node, or a rank, if the heads can be divided so."""
    config = subject.config
    layout = msgspec.structs.replace(config.layout, instances_per_socket=nodes)
    found = []
    if subject.accepts(msgspec.structs.replace(config, layout=layout)):
        found.append(f"layout.instances_per_socket to the number of nodes, {nodes}")
    for ranks in range(nodes, slot.effective.tensor_parallel_size, -1):
        models = tuple(
            msgspec.structs.replace(model, tensor_parallel_size=ranks)
            if model.name == slot.model.name
            else model
            for model in config.models
        )
        if subject.accepts(msgspec.structs.replace(config, models=models)):
            found.append(f"tensor_parallel_size to {ranks}")
            break
    if found:
        return f"set {', or '.join(found)}"
    return "let the firmware (BIOS) make fewer nodes per socket: NPS1, no L3 as NUMA, no sub-NUMA clusters"


def ranks_and_nodes(subject: Subject) -> Iterator[Finding]:
    """Ranks on one node share its memory channels and add communication."""
    for model, _ in subject.models():
        nodes = {
            len(slot.placement.membind)
            for slot in subject.plan.slots
            if slot.model.name == model.name and slot.placement.membind
        }
        if nodes and model.tensor_parallel_size > max(nodes):
            yield warning(
                "ranks-share-node",
                f"{model.name!r} has {model.tensor_parallel_size} ranks on {max(nodes)} memory node: they share its "
                "memory channels and add communication",
                "use tensor_parallel_size = 1 and more instances, unless the model needs several nodes' memory",
            )


BINDING_RULES: Final[tuple[Rule, ...]] = (
    emulated_nodes,
    free_memory,
    huge_pages,
    spans_nodes,
    ranks_and_nodes,
)
