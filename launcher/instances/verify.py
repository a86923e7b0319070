"""Compares the threads and pages of a running instance with the plan. Pure; host.placement observes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import force_setattr

from launcher.base.cpuset import CpuSet
from launcher.engines.base import Expected
from launcher.machine.placement import Bystander, ProcessFacts
from launcher.plan.plan import Placement

# Least share of an instance's anonymous memory (weights, KV cache, heap) on its nodes, where it is strictly
# bound. A bound process allocates nowhere else; what may lie elsewhere are pages shared with the parent that
# started it and pages the kernel could not move. A worker whose weights were loaded on a wrong node is far
# below, and every percent there is read over the sockets' link for each token.
MIN_BOUND_SHARE: Final = 0.95
# Thread names shown of one process, most frequent first.
_NAMES_SHOWN: Final = 3


NOTHING: Final = Expected()


class Difference(Struct, frozen=True):
    what: str
    planned: str
    found: str

    def __str__(self) -> str:
        return f"{self.what}: {self.found}, planned: {self.planned}"


class RankFound(Struct, frozen=True):
    """Threads and pages of one tensor-parallel rank."""

    rank: int
    pid: int | None
    """The process with the most threads that are bound to cpus of the rank's list; None: there is none."""
    name: str
    cpus: str
    """Cpus of the list that have a thread of that process bound to them, or to the list."""
    planned_cpus: str
    node: int | None
    """The node that its memory is planned on; None without NUMA."""
    policies: tuple[str, ...]
    node_bytes: Mapping[int, int]
    """Its anonymous memory by node."""
    bound_share: float | None
    """Share of it on the planned node; None where it can't be read."""


class Verification(Struct, frozen=True, kw_only=True):
    """The result of a comparison. `status` shows it unchanged. `ok` and `problems` follow from the differences, whatever the
    constructor is given."""

    ok: bool = True
    """Whether the instance is placed as planned."""
    processes: int
    threads: int
    cpus: str
    """Union of the threads' allowed cpus, as a cpulist."""
    bound_cpus: str
    """Cpus that have a thread bound to them alone: OpenMP's."""
    policies: tuple[str, ...]
    """Memory policies seen, e.g. ("bind:0",)."""
    node_bytes: Mapping[int, int]
    """Anonymous memory by node."""
    bound_share: float | None
    """Share of it on the planned nodes; None where it can't be read."""
    libraries: tuple[str, ...]
    problems: tuple[str, ...] = ()
    """The differences, one line each."""
    differences: tuple[Difference, ...]
    foreign: tuple[str, ...]
    """Other processes that are pinned to this slot's cpus; they do not affect `ok`."""
    misplaced_threads: int = 0
    """Threads that may run outside the slot's cpus."""
    ranks: tuple[RankFound, ...] = ()
    """The place of each rank of an instance with several; empty for one."""

    def __post_init__(self) -> None:
        force_setattr(self, "ok", not self.differences)
        force_setattr(self, "problems", tuple(map(str, self.differences)))


def verify(
    placement: Placement,
    facts: Sequence[ProcessFacts],
    *,
    expected: Expected = NOTHING,
    others: Sequence[Bystander] = (),
) -> Verification:
    """Compare with the placement, and with what else the launch says is `expected`.

    1. Every thread's allowed cpus lie inside the slot's set.
    2. With strict binding, every process's mappings are bound to the slot's nodes and to no other, and
       MIN_BOUND_SHARE of the anonymous memory lies there.
    3. On every cpu of each rank's OpenMP list a thread is bound, to it or to the list. Several ranks have a process each,
       of which 2. holds with the rank's own node.
    4. The libraries that were asked for are mapped.
    5. Other processes pinned to the slot's cpus are reported, but are no difference."""
    node_bytes: Counter[int] = Counter()
    for process in facts:
        node_bytes.update(dict(process.node_bytes))
    total = node_bytes.total()
    inside = sum(size for node, size in node_bytes.items() if node in placement.membind)
    share = inside / total if total and placement.membind else None
    mapped = frozenset[str]().union(*(process.libraries for process in facts))
    ranks = tuple(_ranks(placement, expected.omp_cpus, facts)) if len(expected.omp_cpus) > 1 else ()
    differences = (
        [
            *_threads(placement, facts),
            *(_of_ranks(ranks) if ranks else _openmp(expected.omp_cpus, facts)),
            *(_memory(placement, facts, ranks, node_bytes, share) if expected.binds_memory else ()),
            *_libraries(expected.libraries, mapped),
        ]
        if facts
        else [Difference("processes", "at least one", "no process")]
    )
    return Verification(
        processes=len(facts),
        threads=sum(process.threads for process in facts),
        cpus=str(CpuSet(cpu for process in facts for cpu in process.cpus)),
        bound_cpus=str(_single(facts)),
        policies=tuple(sorted({policy for process in facts for policy in process.policies})),
        node_bytes=dict(sorted(node_bytes.items())),
        bound_share=share,
        libraries=tuple(sorted(mapped)),
        differences=tuple(differences),
        misplaced_threads=sum(_stray(placement, process)[0].total() for process in facts),
        foreign=tuple(_foreign(placement.cpus, others)),
        ranks=ranks,
    )


def _threads(placement: Placement, facts: Sequence[ProcessFacts]) -> Iterator[Difference]:
    for process in facts:
        names, cpus = _stray(placement, process)
        if names:
            stray = names.total()
            yield Difference(
                f"threads of {process.name} (pid {process.pid})",
                f"on cpus {placement.cpus}",
                f"{stray} of {process.threads} may run on cpus {cpus}: {_collapsed(names)}",
            )


def _stray(placement: Placement, process: ProcessFacts) -> tuple[Counter[str], CpuSet]:
    """Names of the threads that may run outside the slot's cpus, and where they may run."""
    names: Counter[str] = Counter()
    cpus = CpuSet()
    for group in process.groups:
        if not group.cpus <= placement.cpus:
            names.update(dict(group.names))
            cpus |= group.cpus
    return names, cpus


def _collapsed(names: Counter[str]) -> str:
    """ "VLLM::Worker x 62, python x 2, ... (3 more names)"."""
    shown = [name if count == 1 else f"{name} x {count}" for name, count in names.most_common(_NAMES_SHOWN)]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f", ... ({more} more names)" if more else "")


def _memory(
    placement: Placement,
    facts: Sequence[ProcessFacts],
    ranks: Sequence[RankFound],
    node_bytes: Mapping[int, int],
    share: float | None,
) -> Iterator[Difference]:
    """Each process is bound to the slot's nodes; the process of a rank, to the node of that rank."""
    owners: dict[int, tuple[RankFound, CpuSet]] = {}
    for rank in ranks:
        if rank.pid is not None and rank.node is not None:
            owners.setdefault(rank.pid, (rank, CpuSet((rank.node,))))
    for process in facts:
        what, nodes = f"{process.name} (pid {process.pid})", placement.membind
        if (owner := owners.get(process.pid)) is not None:
            what, nodes = f"rank {owner[0].rank}, {what}", owner[1]
        yield from _policy(what, process, nodes)
        if owner is not None:
            yield from _share(f"memory of {what}", nodes, owner[0].node_bytes, owner[0].bound_share)
    yield from _share("memory", placement.membind, node_bytes, share)


def _policy(what: str, process: ProcessFacts, nodes: CpuSet) -> Iterator[Difference]:
    if process.allowed_nodes and process.allowed_nodes <= nodes:
        return  # its cpuset binds it, as a container's does, whatever its policy is
    if foreign := _foreign_policies(process.policies, nodes):
        yield Difference(f"memory policy of {what}", f"bind:{nodes}", ", ".join(foreign))


def _share(
    what: str, nodes: CpuSet, node_bytes: Mapping[int, int], share: float | None
) -> Iterator[Difference]:
    if share is not None and share < MIN_BOUND_SHARE:
        found = f"{share:.0%} there ({_lie(node_bytes)})"
        yield Difference(what, f"at least {MIN_BOUND_SHARE:.0%} on node {nodes}", found)


def _lie(node_bytes: Mapping[int, int]) -> str:
    return ", ".join(f"{size >> 20} MiB on node {node}" for node, size in sorted(node_bytes.items()) if size)


def _foreign_policies(policies: Iterable[str], nodes: CpuSet) -> list[str]:
    """Policies of a process that do not bind it to `nodes`. A mapping without a policy of its own shows the task's, so a
    bound process shows nothing else, but for buffers of OpenBLAS, numpy's, which are "local" (driver/others/memory.c,
    my_mbind): of two pages, and on the node of their thread, whose cpus are compared as well."""
    its = set(policies)
    foreign = sorted(policy for policy in its if not _binds_inside(policy, nodes))
    return [] if foreign == ["local"] and len(its) > 1 else foreign


def _binds_inside(policy: str, nodes: CpuSet) -> bool:
    """Whether a policy as numa_maps words it ("bind:0-1", "bind=static:0", "default") binds to nothing but `nodes`.

    A worker may bind itself once more, to its own node alone, so a part of `nodes` is right too."""
    mode, _, bound = policy.partition(":")
    return mode.partition("=")[0] == "bind" and CpuSet.parse(bound) <= nodes


def _single(facts: Sequence[ProcessFacts]) -> CpuSet:
    return CpuSet(
        cpu
        for process in facts
        for group in process.groups
        if len(group.cpus) == 1
        for cpu in group.cpus
    )  # fmt: skip


def _openmp(lists: Sequence[CpuSet], facts: Sequence[ProcessFacts]) -> Iterator[Difference]:
    """An engine binds one thread to each cpu (GOMP_CPU_AFFINITY, KMP_AFFINITY), or all to the list as one place
    (OMP_PLACES)."""
    single = _single(facts)
    whole = {group.cpus for process in facts for group in process.groups}
    for rank, cpus in enumerate(lists):
        if not cpus <= single and cpus not in whole:
            yield Difference(
                f"OpenMP threads of rank {rank}",
                f"one on each of cpus {cpus}",
                f"bound to cpus {single & cpus or 'none of them'}",
            )


def _ranks(
    placement: Placement, lists: Sequence[CpuSet], facts: Sequence[ProcessFacts]
) -> Iterator[RankFound]:
    """The process of each rank: the one that has the most of the rank's cpus."""
    nodes = placement.rank_nodes if placement.membind and len(placement.rank_nodes) == len(lists) else ()
    for rank, cpus in enumerate(lists):
        process = max(facts, key=lambda its: len(_bound_to(cpus, its)), default=None)
        bound = CpuSet() if process is None else _bound_to(cpus, process)
        node = nodes[rank] if nodes else None
        if process is None or not bound:
            yield RankFound(rank, None, "", "", str(cpus), node, (), {}, None)
            continue
        node_bytes = dict(sorted(process.node_bytes))
        total = sum(node_bytes.values())
        yield RankFound(
            rank, process.pid, process.name, str(bound), str(cpus), node, tuple(sorted(process.policies)), node_bytes,
            node_bytes.get(node, 0) / total if total and node is not None else None,
        )  # fmt: skip


def _bound_to(cpus: CpuSet, process: ProcessFacts) -> CpuSet:
    """Cpus of an OpenMP list that have a thread of the process: bound to one of them, or to the list as one place."""
    if any(group.cpus == cpus for group in process.groups):
        return cpus
    return cpus & _single((process,))


def _of_ranks(ranks: Sequence[RankFound]) -> Iterator[Difference]:
    owners: dict[int, int] = {}
    for its in ranks:
        if its.cpus != its.planned_cpus:
            yield Difference(
                f"OpenMP threads of rank {its.rank}",
                f"one on each of cpus {its.planned_cpus}, all of one process",
                "none is bound to one of them"
                if its.pid is None
                else f"those of {its.name} (pid {its.pid}) are bound to cpus {its.cpus}",
            )
        if its.pid is None:
            continue
        if (other := owners.setdefault(its.pid, its.rank)) != its.rank:
            yield Difference(
                f"process of rank {its.rank}",
                "one of its own",
                f"{its.name} (pid {its.pid}), as rank {other}",
            )


def _libraries(wanted: Sequence[frozenset[str]], mapped: frozenset[str]) -> Iterator[Difference]:
    for libraries in wanted:
        if not libraries & mapped:
            name = " or ".join(sorted(libraries))
            yield Difference("libraries", f"{name} mapped", f"only {', '.join(sorted(mapped)) or 'none'}")


def _foreign(cpus: CpuSet, others: Sequence[Bystander]) -> Iterator[str]:
    """Who is pinned: narrower than the widest that anybody here may use, which in a container is its cpuset."""
    everything = CpuSet(cpu for other in others for group in other.groups for cpu in group.cpus) | cpus
    for other in others:
        pinned = CpuSet(cpu for group in other.groups if group.cpus != everything for cpu in group.cpus)
        if pinned & cpus:
            yield f"{other.name} (pid {other.pid}) is pinned to cpus {pinned}, of which {pinned & cpus} are this slot's"
