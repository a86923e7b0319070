"""Makes the plan from topology, configuration and model profiles; the entry point is `make_plan`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.config.schema import Config, Strategy
from launcher.machine.topology import Core, Topology
from launcher.models.profile import UNKNOWN, ModelProfile
from launcher.plan.memory import Filled, fill_memory
from launcher.plan.plan import (
    NO_FACTS,
    Accepts,
    ChosenRanks,
    EffectiveConfig,
    Facts,
    Finding,
    ModelNeeds,
    Placement,
    Plan,
    Planning,
    Slot,
    Subject,
    untried,
    violation,
    warning,
)
from launcher.plan.ranks import choose_ranks
from launcher.plan.rules_host import SECRETS_RULES
from launcher.plan.rules_placement import PLACEMENT_RULES
from launcher.plan.strategies import Cut, CutError, cutter, kinds_of, runs
from launcher.plan.zones import (
    InstanceKey,
    Part,
    Zone,
    parts_for_ranks,
    parts_of,
    possible_widths,
    quota_cpus,
    reserve,
    takes,
    usable_cores,
    within_quota,
    zones_of,
)

# --- Checks a plan against the engine's actual behaviour: a table of small rules. ---
#
# Each rule is a generator of findings about the finished plan. A rule whose fact is unknown (Facts) is skipped.


def lint(
    plan: Plan,
    topology: Topology,
    config: Config,
    profiles: Mapping[str, ModelProfile],
    facts: Facts = NO_FACTS,
    *,
    planning: Planning,
    accepts: Accepts = untried,
) -> tuple[Finding, ...]:
    """Findings of all applicable rules, in the order of the tables."""
    subject = Subject(plan, topology, config, profiles, facts, accepts)
    rules = SECRETS_RULES + PLACEMENT_RULES + planning.rules
    return tuple(finding for rule in rules for finding in rule(subject))


# Weights and processes take more than this of a node beside the KV cache.
_NEARLY = 0.9

# Above this many cpus an instance keeps one core out of its OpenMP lists for API server and
# EngineCore, which would otherwise share a cpu with a spinning worker thread (vllm#25818, #43240).
_CPUS_TO_SPARE_ONE = 4


def make_plan(
    topology: Topology,
    config: Config,
    profiles: Mapping[str, ModelProfile],
    facts: Facts = NO_FACTS,
    *,
    planning: Planning,
    cpus_only: bool = False,
    advise: bool = True,
) -> Plan:
    """The plan. `profiles` by model name: the memory of a model without one cannot be checked. `facts` describes the
    host and the engine's software; unknown facts are not judged. `planning` is the configured engine's.

    `cpus_only` plans no memory, with a finding that says so: for trying layouts without a model. `advise` tries
    other configurations for remedies.

    1. Usable cores have a NUMA node and allowed cpus (within layout.cpus, if set). An instance uses the
       lowest allowed cpu of a core, or with use_smt all of them.
    2. Reserved cores are removed (`zones.reserve`), with all their allowed siblings, and those beyond the cgroup's
       limit on cpu time (`zones.within_quota`).
    3. The other cores are grouped by (socket, node), instances are counted (`zones.zones_of`), and zones
       are divided (`strategies`).
    4. Slots are numbered by model, then socket, then node, then order within the zone.
    5. Memory is added (`memory`). Steps 2 to 5 are repeated where tensor_parallel_size is "auto" (`ranks`).
    6. The plan is checked (`lint`).

    Raises LauncherError for a size in [memory] or a value in engine.args that cannot be read."""

    def accepts(other: Config) -> bool:
        if not advise:
            return False
        try:
            tried = make_plan(
                topology, other, profiles, facts, planning=planning, cpus_only=cpus_only, advise=False
            )
        except LauncherError:  # the engine cannot follow it
            return False
        return not tried.violations

    chosen, its = ((), None) if cpus_only else _choose_ranks(topology, config, profiles, facts, planning)
    if its is None:
        its = _draft(
            topology, config, profiles, facts, ranks={each.model: each.ranks for each in chosen}, planning=planning,
            accepts=accepts, cpus_only=cpus_only,
        )  # fmt: skip
    plan = Plan(
        strategy=config.layout.strategy, slots=its.filled.slots, reserved=its.reserved,
        usable=its.topology.allowed - its.reserved, ledger=its.filled.ledger,
        findings=(*its.findings, *its.filled.findings), models=its.models,
        needs=tuple(_needs(planning, its.models, profiles)), chosen_ranks=chosen,
    )  # fmt: skip
    found = lint(plan, its.topology, config, profiles, facts, planning=planning, accepts=accepts)
    return replace(plan, findings=(*plan.findings, *found))


class _Draft(Struct, frozen=True):
    """A plan that is not checked yet."""

    topology: Topology
    """With the cpus of layout.cpus only."""
    models: tuple[EffectiveConfig, ...]
    reserved: CpuSet
    filled: Filled
    findings: tuple[Finding, ...]
    """Those on the cpus."""


def _draft(
    topology: Topology,
    config: Config,
    profiles: Mapping[str, ModelProfile],
    facts: Facts,
    *,
    ranks: Mapping[str, int],
    planning: Planning,
    accepts: Accepts,
    cpus_only: bool,
) -> _Draft:
    """Steps 1 to 5 of `make_plan`, with the chosen `ranks` of models that leave them open."""
    findings: list[Finding] = []
    topology = _narrow(topology, config, findings)
    cores = usable_cores(topology)
    models = tuple(
        planning.settings(
            replace(model, tensor_parallel_size=ranks[model.name])
            if model.name in ranks
            else model,
            config, profiles.get(model.name, UNKNOWN), topology.cpu,
        )
        for model in config.models
    )  # fmt: skip
    widths = _widths(config, models, ranks, parts_for_ranks(parts_of(cores), topology))
    reserved, cores = _divide(cores, topology, config, models, findings, widths=widths)
    parts = parts_of(cores)
    if not parts:
        findings.append(_no_cpus(topology))
    zones = zones_of(
        parts,
        config.models,
        config.layout,
        topology,
        findings,
        ranks=[its.tensor_parallel_size for its in models],
        widths=widths,
    )
    targets = memory_nodes(topology, (part for zone in zones for part in zone.parts))
    placed = [
        (model, _place(models[model], areas, topology, config, findings, targets=targets, planning=planning))
        for model, areas in _areas(zones, topology, config, models, findings)
    ]
    placed.sort(key=lambda entry: entry[0])  # stable: socket, node and order stay within a model
    if planning.binds_itself:
        placed = _over_emulated_nodes(placed, topology)
    node_of = {cpu: node.id for node in topology.numa_nodes for cpu in node.cpus}
    slots = tuple(
        Slot(
            i, config.models[model], models[model],
            replace(placement, rank_nodes=_rank_nodes(placement, node_of)), kv_cache_bytes=None,
        )
        for i, (model, placement) in enumerate(placed)
    )  # fmt: skip
    filled = fill_memory(
        topology, config, slots, profiles, facts, planning=None if cpus_only else planning, accepts=accepts
    )
    if cpus_only:
        findings.append(_MEMORY_NOT_PLANNED)
    return _Draft(topology, models, _union(core.cpus for core in reserved), filled, tuple(findings))


def _choose_ranks(
    topology: Topology,
    config: Config,
    profiles: Mapping[str, ModelProfile],
    facts: Facts,
    planning: Planning,
) -> tuple[tuple[ChosenRanks, ...], _Draft | None]:
    """The ranks of each model that leaves them open and whose files are known: 1 where that makes a plan without violations,
    which is then returned, too.

    Else instances_per_socket does not count for whether an instance fits on a node: fewer than nodes are placed only with
    ranks on each (`zones.possible_widths`), or with span_nodes."""
    divides, candidates = planning.divides, {}
    if divides is None or planning.demand is None:
        return (), None
    its = _narrow(topology, config, [])
    parts = parts_for_ranks(parts_of(usable_cores(its)), its)
    for model in config.models:
        profile = profiles.get(model.name, UNKNOWN)
        if model.tensor_parallel_size == "auto" and profile.known:
            # engine.args may give a number of their own.
            free = all(
                planning.settings(
                    replace(model, tensor_parallel_size=ranks), config, profile, topology.cpu
                ).tensor_parallel_size
                == ranks
                for ranks in (1, 2)
            )
            if free:
                numbers = possible_widths(parts, model, config.layout)
                candidates[model.name] = [ranks for ranks in numbers if divides(profile, ranks)]
    if not candidates:
        return (), None

    def drafted(its: Config, ranks: Mapping[str, int]) -> _Draft:
        return _draft(
            topology, its, profiles, facts, ranks=ranks, planning=planning, accepts=untried, cpus_only=False
        )

    single = drafted(config, dict.fromkeys(candidates, 1))
    if not any(finding.severity == "violation" for finding in (*single.findings, *single.filled.findings)):
        return choose_ranks(candidates, lambda _ranks: {}), single
    layout = replace(config.layout, instances_per_socket="auto")
    tried = replace(config, layout=layout)
    return choose_ranks(candidates, lambda ranks: drafted(tried, ranks).filled.too_large), None


def _widths(
    config: Config, models: Sequence[EffectiveConfig], chosen: Mapping[str, int], parts: Sequence[Part]
) -> list[int]:
    """Nodes that the ranks of one instance are spread over, for each model; 1: the layout decides. Ranks that the operator
    set are spread by layout.span_nodes, over the most nodes that their number can be divided by."""
    layout, widths = config.layout, []
    spread = layout.span_nodes and layout.instances_per_socket == "auto"
    for model, its in zip(config.models, models, strict=True):
        ranks = its.tensor_parallel_size
        if model.name in chosen:
            widths.append(ranks)
        elif spread and ranks > 1:
            nodes = sum(takes(model, part) for part in parts)
            widths.append(max((n for n in range(1, min(ranks, nodes) + 1) if ranks % n == 0), default=1))
        else:
            widths.append(1)
    return widths


def _rank_nodes(placement: Placement, node_of: Mapping[int, int]) -> tuple[int, ...]:
    """`node_of`: of each cpu."""
    membind = placement.membind
    nodes = (node_of[cpus.first] for cpus in placement.omp_cpus)
    return tuple(node if node in membind or not membind else membind.first for node in nodes)


def _needs(
    planning: Planning, models: Iterable[EffectiveConfig], profiles: Mapping[str, ModelProfile]
) -> Iterator[ModelNeeds]:
    """The needs of each model with a known profile."""
    if (needs_of := planning.needs) is None:
        return
    for model in models:
        if (profile := profiles.get(model.name, UNKNOWN)).known:
            yield needs_of(model, profile)


def _divide(
    cores: tuple[Core, ...],
    topology: Topology,
    config: Config,
    models: Sequence[EffectiveConfig],
    findings: list[Finding],
    *,
    widths: Sequence[int],
) -> tuple[tuple[Core, ...], tuple[Core, ...]]:
    """The reserved cores, and those for instances."""
    layout, limit = config.layout, quota_cpus(topology)
    reserved = reserve(cores, layout.reserve_cores, limit=limit)
    if reserved is None:
        findings.append(_cannot_reserve(config, len(cores)))
        reserved = ()
    kept = set(reserved)
    rest = tuple(core for core in cores if core not in kept)
    if limit is None:
        return reserved, rest
    ranks = [model.tensor_parallel_size for model in models]
    asks = list(zip(config.models, ranks, widths, strict=True))
    return reserved, within_quota(rest, max(0, limit - len(reserved)), topology, layout, asks)


def _narrow(topology: Topology, config: Config, findings: list[Finding]) -> Topology:
    """The topology with only layout.cpus allowed; cpus that are not allowed are a violation."""
    if config.layout.cpus is None:
        return topology
    wanted = CpuSet.parse(config.layout.cpus)
    missing = wanted - topology.allowed
    if missing:
        findings.append(
            violation(
                "cpus-not-allowed",
                f"cannot use cpus {missing} of layout.cpus: allowed here are {topology.allowed}",
                "set layout.cpus to some of those, or widen the daemon's affinity and cpuset",
            )
        )
    return replace(topology, allowed=topology.allowed & wanted)


_MEMORY_NOT_PLANNED: Final = warning(
    "memory-not-planned",
    "no model given: this plan covers cpus only, memory was not checked",
    "give a configuration with -c FILE, or a model with --model DIR",
)


def _areas(
    zones: Sequence[Zone],
    topology: Topology,
    config: Config,
    models: Sequence[EffectiveConfig],
    findings: list[Finding],
) -> Iterator[tuple[int, list[Sequence[Core]]]]:
    """The model of each instance, and its cores in each of its zones; an instance without cores is left out."""
    spans = Counter(instance for zone in zones for instance in zone.instances)
    found: dict[InstanceKey, list[Sequence[Core]]] = defaultdict(list)
    for zone in zones:
        least = 1
        for instance in zone.instances:
            ranks = models[instance.model].tensor_parallel_size
            # With more than 4 cpus one core is no rank's.
            spare = ranks > 1 and ranks * (2 if config.layout.use_smt else 1) >= _CPUS_TO_SPARE_ONE
            least = max(least, ranks // spans[instance] + spare)
        cut = _cut(zone, topology, config.layout.strategy, findings, least=least)
        for instance, cores in zip(zone.instances, cut, strict=False):
            found[instance].append(cores)
    yield from ((instance.model, areas) for instance, areas in found.items() if len(areas) == spans[instance])


def _place(
    model: EffectiveConfig,
    areas: Sequence[Sequence[Core]],
    topology: Topology,
    config: Config,
    findings: list[Finding],
    *,
    targets: Mapping[int, int | None],
    planning: Planning,
) -> Placement:
    use_smt = config.layout.use_smt
    cores = sorted((core for area in areas for core in area), key=lambda core: core.cpus.first)
    omp = _omp_lists(areas, model.tensor_parallel_size, use_smt=use_smt, spares=planning.other_processes)
    if omp is None:
        findings.append(_too_many_ranks(model, cores))
        omp = (_cpus(cores, use_smt=use_smt),)
    node, nodes = cores[0].node, {core.node for core in cores if core.node is not None}
    return Placement(
        socket=cores[0].key.socket,
        node=node if topology.has_numa else None,
        cpus=_cpus(cores, use_smt=use_smt),
        membind=_membind(nodes, topology, targets, findings, planning=planning),
        omp_cpus=omp,
        remote=topology.has_numa and any(targets[its] != its for its in nodes),
    )


def _cut(zone: Zone, topology: Topology, strategy: Strategy, findings: list[Finding], *, least: int) -> Cut:
    cores = sorted((core for part in zone.parts for core in part.cores), key=lambda core: core.cpus.first)
    n = len(zone.instances)
    where = f"node {','.join(str(part.node) for part in zone.parts)}"
    if n > len(cores):
        findings.append(
            violation(
                "more-instances-than-cores",
                f"cannot divide {where} of socket {zone.parts[0].socket} among {n} instances: it has "
                f"{len(cores)} usable cores",
                "lower layout.instances_per_socket or layout.reserve_cores",
            )
        )
        return ()
    kinds = kinds_of(cores, n)
    if any(len(its) // count < least for its, count in kinds):
        kinds = [(tuple(cores), n)]
    findings.extend(_several_kinds(where, cores, kinds))
    try:
        cuts = [cutter(strategy)(its, topology.l3_domains, count) for its, count in kinds]
    except CutError as error:
        findings.append(violation("cannot-cut", f"cannot divide {where}: {error}", error.remedy))
        return ()
    cut = tuple(its for of_kind in cuts for its in of_kind)
    sizes = [len(its) for its in cut]
    if any(len({len(its) for its in of_kind}) > 1 for of_kind in cuts):
        findings.append(
            warning(
                "uneven-cores",
                f"the cores of {where} do not divide evenly: instances get {'-'.join(map(str, sizes))}",
                "for equal instances change reserve_cores or instances_per_socket",
            )
        )
    return cut


def _several_kinds(
    where: str, cores: Sequence[Core], kinds: Sequence[tuple[Sequence[Core], int]]
) -> Iterator[Finding]:
    """Cores that are idle, or are of several kinds in one instance."""
    speeds = sorted({core.speed for core in cores}, reverse=True)
    idle = _union(core.cpus for core in cores) - _union(core.cpus for its, _ in kinds for core in its)
    mixed = any(len({core.speed for core in its}) > 1 for its, _ in kinds)
    if not idle and not mixed:
        return
    what = ", ".join(
        f"cpus {_union(core.cpus for core in cores if core.speed == speed)} of speed {speed:g}"
        for speed in speeds
    )
    yield warning(
        "core-kinds",
        f"{where} has cores of {len(speeds)} kinds ({what}), and all threads of an instance wait for the slowest: "
        + (
            "no kind has enough cores for the ranks, so they are mixed"
            if mixed
            else f"instances get cores of one kind, and cpus {idle} none"
        ),
        "lower tensor_parallel_size"
        if mixed
        else "raise layout.instances_per_socket to use all kinds, or leave them to other programs",
    )


def _omp_lists(
    areas: Sequence[Sequence[Core]], ranks: int, *, use_smt: bool, spares: bool
) -> tuple[CpuSet, ...] | None:
    """One OpenMP list per rank, runs of neighbouring cores; None when there are more ranks than cores. `areas`: the cores
    of an instance on each node that has ranks of its own.

    1. With more than 4 cpus the highest core is left out of the lists where `spares`; numactl's set still contains it.
    2. Ranks wait for each other in every layer: all areas give as many cores as the smallest, and the others stay out
       of the lists as well."""
    each = min(map(len, areas))
    even = all(len(area) == each for area in areas)
    cpus = sum(len(_cpus(area, use_smt=use_smt)) for area in areas)
    if spares and cpus > _CPUS_TO_SPARE_ONE and each > 1 and even:
        each -= 1
    of_area = ranks // len(areas)
    if of_area > each:
        return None
    return tuple(_cpus(its, use_smt=use_smt) for area in areas for its in runs(area[:each], of_area))


def _membind(
    nodes: set[int],
    topology: Topology,
    targets: Mapping[int, int | None],
    findings: list[Finding],
    *,
    planning: Planning,
) -> CpuSet:
    """The memory nodes for cores of `nodes`: each node itself, or the one that `memory_nodes` found; all nodes that the
    kernel emulates with it, but for an engine that binds itself to one (`binds_itself`)."""
    if not topology.has_numa:
        return CpuSet()
    bound: set[int] = set()
    for node in sorted(nodes):
        target = targets[node]
        if target is None:
            finding = violation(
                "no-memory-node",
                f"cannot bind the memory of node {node}: no node with memory is allowed "
                f"(allowed: {topology.allowed_nodes or 'none'})",
                "let AllowedMemoryNodes= of the service and of its instances' slice, or the container's cpuset.mems, have a "
                "node with memory in common",
            )
        elif target != node:
            finding = _remote(node, target, topology, planning.far_memory)
        else:
            finding = None
        if target is not None:
            bound.add(target)
            if not planning.binds_itself:
                bound |= set(topology.emulated_with(target) & topology.allowed_nodes)
        if finding is not None and finding not in findings:
            findings.append(finding)
    return CpuSet(bound)


def _remote(node: int, target: int, topology: Topology, far_memory: str) -> Finding:
    empty = topology.node(node).memory_bytes == 0
    if empty and far_memory:
        return warning(
            "remote-memory",
            f"node {node} has no memory: its instances are bound to node {target}, the nearest node with memory, but "
            f"{far_memory}",
            f"exclude node {node} with models.nodes or layout.cpus, or add memory to it",
        )
    return warning(
        "remote-memory",
        f"node {node} has no {'memory' if empty else 'memory that may be used here'}: its instances are bound to node "
        f"{target}, the nearest node with memory",
        f"exclude node {node} with models.nodes or layout.cpus, or "
        + (
            "add memory to it"
            if empty
            else "let AllowedMemoryNodes= of service and slice, or cpuset.mems, have it"
        ),
    )


def _over_emulated_nodes(
    placed: list[tuple[int, Placement]], topology: Topology
) -> list[tuple[int, Placement]]:
    """Instances on the cpus of emulated nodes, each bound to one of these; the lowest node takes none.

    vLLM's worker binds itself to a single node. Wherever that is, vLLM 0.32 compares its KV cache with the free memory of
    the cpus' node, which is the lowest of those that list them (lscpu(1); v1/worker/cpu_worker.py): kept free, it allows
    each instance as much as its own node has, also one that is started again beside others."""
    found = list(placed)
    for group in topology.emulated:
        its = [index for index, (_, placement) in enumerate(placed) if placement.membind <= group]
        most = topology.node(group.first).memory_bytes / _NEARLY
        others = [
            node
            for node in (group & topology.allowed_nodes) - CpuSet((group.first,))
            if 0 < topology.node(node).memory_bytes <= most
        ]
        if len(its) < 2 or len(others) < 2:
            continue
        for number, index in enumerate(its):
            model, placement = found[index]
            bound = CpuSet((others[number % len(others)],))
            found[index] = (model, replace(placement, membind=bound, remote=True))
    return found


def memory_nodes(topology: Topology, parts: Iterable[Part]) -> dict[int, int | None]:
    """The node whose memory the instances on each node use; None where no node's can be used.

    1. The node itself, if it has memory that this process may use.
    2. Else the nearest node that has; of equally near ones that with the most memory for each core that uses it, then
       the lowest."""
    cores: dict[int, int] = defaultdict(int)
    for part in parts:
        cores[part.node] += len(part.cores)
    usable = {
        node.id: node.memory_bytes
        for node in topology.numa_nodes
        if node.id in topology.allowed_nodes and (node.memory_bytes > 0 or not node.memory_known)
    }
    found: dict[int, int | None] = {node: node for node in cores if node in usable}
    served = {node: cores.get(node, 0) for node in usable}
    for node in sorted(cores.keys() - found):
        distances = topology.node(node).distances
        far = max(distances.values(), default=0) + 1
        order = [
            (distances.get(each, far), -memory / (served[each] + cores[node]), each)
            for each, memory in usable.items()
        ]
        target = min(order)[2] if order else None
        found[node] = target
        if target is not None:
            served[target] += cores[node]
    return found


def _cpus(cores: Sequence[Core], *, use_smt: bool) -> CpuSet:
    return _union(core.cpus for core in cores) if use_smt else CpuSet(core.cpus.first for core in cores)


def _union(sets: Iterable[CpuSet]) -> CpuSet:
    return CpuSet(cpu for cpus in sets for cpu in cpus)


def _cannot_reserve(config: Config, cores: int) -> Finding:
    return violation(
        "reserve-too-large",
        f"cannot reserve {config.layout.reserve_cores} cores: {cores} cores are usable, and each node keeps one",
        "lower layout.reserve_cores",
    )


def _no_cpus(topology: Topology) -> Finding:
    if topology.apart is not None:
        return violation("no-usable-cpus", f"cannot place anything: {topology.apart}", topology.apart.remedy)
    return violation(
        "no-usable-cpus",
        f"cannot place anything: no allowed cpu is on a NUMA node (allowed: {topology.allowed or 'none'})",
        "widen the affinity mask, AllowedCPUs= or cpuset.cpus of the service",
    )


def _too_many_ranks(model: EffectiveConfig, cores: Sequence[Core]) -> Finding:
    return violation(
        "more-ranks-than-cores",
        f"cannot give each of {model.tensor_parallel_size} ranks of {model.name!r} a core: the instance has "
        f"{len(cores)} cores, less one for its API server if it has more than 4 cpus",
        "lower tensor_parallel_size, or instances_per_socket",
    )
