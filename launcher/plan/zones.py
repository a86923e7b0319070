"""Usable cores, reserved cores, cores within the cpu time limit, and the number of instances of each zone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from launcher.config.schema import Layout, Model, Strategy
from launcher.machine.topology import Core, Topology
from launcher.plan.plan import Finding, violation, warning

# AMD's documentation runs two instances on 128 cores; its benchmarks use 32 to 128 cores each.
CORES_PER_INSTANCE: Final = 64
CORES_PER_RESERVED: Final = 64
MIN_CORES_TO_RESERVE: Final = 16
# An instance of more ranks has more than 4 cpus with two threads per core, and then keeps a core for its API server.
_RANKS_WITHOUT_SPARE: Final = 2


class Part(Struct, frozen=True, order=True):
    """The usable cores of one NUMA node on one socket, by lowest cpu."""

    socket: int
    node: int
    cores: tuple[Core, ...]

    def __hash__(self) -> int:
        return hash((self.socket, self.node))  # that of all cores takes long


class InstanceKey(NamedTuple):
    """Identity of an instance before it has cores."""

    model: int
    """Index of its model."""
    number: int
    """Among those of the model."""


class Zone(Struct, frozen=True):
    """Cores that are divided among instances: one part, or several where an instance spans nodes with ranks that do not
    have nodes of their own."""

    parts: tuple[Part, ...]
    instances: tuple[InstanceKey, ...]
    """In order. One whose ranks have nodes of their own is in the zone of each node."""


def usable_cores(topology: Topology) -> tuple[Core, ...]:
    """Cores with a node and at least one allowed cpu, with only their allowed cpus, by lowest cpu."""
    allowed = topology.allowed
    cores = (
        core if core.cpus <= allowed else replace(core, cpus=core.cpus & allowed)
        for core in topology.cores if core.node is not None
    )  # fmt: skip
    return tuple(sorted((core for core in cores if core.cpus), key=lambda core: core.cpus.first))


def quota_cpus(topology: Topology) -> int | None:
    """Cpus that the cgroup's limit on cpu time lets run all the time, at least 1; None without a limit."""
    return None if topology.cpu_quota is None else max(1, int(topology.cpu_quota))


def threads_of(cores: Iterable[Core], layout: Layout) -> int:
    """Cpus that instances on these cores use."""
    return sum(len(core.cpus) if layout.use_smt else 1 for core in cores)


def within_quota(
    cores: Sequence[Core],
    limit: int,
    topology: Topology,
    layout: Layout,
    models: Sequence[tuple[Model, int, int]],
) -> tuple[Core, ...]:
    """The cores for instances where they may run on `limit` cpus at once. `models`: each with its ranks, and with the
    nodes that these are spread over.

    OpenMP threads wait for each other in busy loops: with one thread more than the quota the kernel stops all of
    them for a part of every period (Documentation/scheduler/sched-bwc.rst).

    1. layout.cpus is taken as given; `rules_placement.cpu_quota` reports the excess.
    2. Instances per socket, per-node, sockets and nodes that are configured are kept: the nodes share the limit.
       Otherwise one node after the other is filled, those with memory first: few large instances need less memory. The
       nodes of one instance's ranks are filled together.
    3. A node keeps a core for each rank of its instances, and one for their API servers, also beyond the limit.
    4. interleaved takes cores at equal distances, from all L3 caches; the other strategies take neighbours."""
    parts = [part for part in parts_of(cores) if any(takes(model, part) for model, *_ in models)]
    if (
        layout.cpus is not None
        or threads_of((core for part in parts for core in part.cores), layout) <= limit
    ):
        return tuple(cores)
    shares = _shares(parts, limit, topology, layout, models)
    return tuple(
        core
        for part, count in zip(parts, shares, strict=True)
        for core in _some(part.cores, count, spread=layout.strategy is Strategy.INTERLEAVED)
    )


def takes(model: Model, part: Part) -> bool:
    """Whether a model's `sockets` and `nodes` have a part."""
    return (model.sockets is None or part.socket in model.sockets) and (
        model.nodes is None or part.node in model.nodes
    )


def _shares(
    parts: Sequence[Part],
    limit: int,
    topology: Topology,
    layout: Layout,
    models: Sequence[tuple[Model, int, int]],
) -> list[int]:
    """Cores of each part."""
    smt = max(len(core.cpus) for part in parts for core in part.cores) if layout.use_smt else 1
    left = limit // smt
    width = max(width for *_, width in models)
    asked = (
        isinstance(layout.instances_per_socket, int)
        or layout.strategy is Strategy.PER_NODE
        or any(model.sockets is not None or model.nodes is not None for model, *_ in models)
    )
    # So many nodes share what is left; the next ones get what these cannot use.
    together = len(parts) if asked else width
    order = sorted(
        range(len(parts)),
        key=lambda i: len(parts[i].cores) if asked else topology.node(parts[i].node).memory_bytes == 0,
    )
    if not asked and width > 1:
        groups = groups_of(parts_for_ranks(parts, topology), width)
        grouped = [
            parts.index(part) for group in groups for part in sorted(group, key=lambda its: len(its.cores))
        ]
        order = [*grouped, *(i for i in order if i not in grouped)]
    least = [_least(part, parts, layout, models) for part in parts]
    shares = [0] * len(parts)
    for done, i in enumerate(order):
        sharing = min(together - done % together, len(parts) - done)
        if done and done % together == 0:
            needed = sum(least[j] for j in order[done : done + together])
            if left <= 0 or (together > 1 and left < needed):
                break
        shares[i] = min(len(parts[i].cores), max(-(-left // sharing), least[i]))
        left = max(0, left - shares[i])
    return shares


def _least(
    part: Part, parts: Sequence[Part], layout: Layout, models: Sequence[tuple[Model, int, int]]
) -> int:
    """Cores without which the instances of a part cannot be placed."""
    wanted, least = layout.instances_per_socket, 0
    for model, all_ranks, width in models:
        if takes(model, part):
            ranks = all_ranks // width
            sharing = sum(takes(model, each) and each.socket == part.socket for each in parts)
            count = -(-wanted // sharing) if isinstance(wanted, int) else 1
            least += count * (ranks + (ranks > _RANKS_WITHOUT_SPARE))
    return least


def _some(cores: Sequence[Core], count: int, *, spread: bool) -> Sequence[Core]:
    fast = [core for core in cores if core.speed == max(each.speed for each in cores)]
    if count > len(fast):
        return sorted(cores, key=lambda core: -core.speed)[:count]
    return [fast[i * len(fast) // count] for i in range(count)] if spread else fast[:count]


def reserve(cores: Sequence[Core], wanted: int | str, *, limit: int | None = None) -> tuple[Core, ...] | None:
    """The cores reserved for proxy and OS; None when too few are usable.

    1. "auto" is one per 64 usable cores, rounded up, and none on machines with fewer than 16; of these as many count
       as the cpu time limit allows to run.
    2. The last cores of the nodes are taken in turn, starting with the lowest node; of several kinds the slowest.
    3. A node's last usable core is never taken; such a node is skipped."""
    count = wanted if isinstance(wanted, int) else 0
    running = len(cores) if limit is None else min(len(cores), limit)
    if not isinstance(wanted, int) and running >= MIN_CORES_TO_RESERVE:
        count = -(-running // CORES_PER_RESERVED)
    left: dict[int | None, list[Core]] = defaultdict(list)
    for core in sorted(cores, key=lambda core: -core.speed):  # stable
        left[core.node].append(core)
    nodes = sorted(left, key=lambda node: -1 if node is None else node)
    taken: list[Core] = []
    while len(taken) < count:
        givers = [node for node in nodes if len(left[node]) > 1][: count - len(taken)]
        if not givers:
            return None
        taken.extend(left[node].pop() for node in givers)
    return tuple(taken)


def parts_of(cores: Iterable[Core]) -> tuple[Part, ...]:
    """Cores that have a node by (socket, node), sorted."""
    groups: dict[tuple[int, int], list[Core]] = defaultdict(list)
    for node, core in ((node, core) for core in cores if (node := core.node) is not None):
        groups[core.key.socket, node].append(core)
    return tuple(Part(socket, node, tuple(groups[socket, node])) for socket, node in sorted(groups))


def zones_of(
    parts: Sequence[Part],
    models: Sequence[Model],
    layout: Layout,
    topology: Topology,
    findings: list[Finding],
    *,
    ranks: Sequence[int],
    widths: Sequence[int],
) -> tuple[Zone, ...]:
    """The zones, each with its instances. `ranks` and `widths`: for each model, the ranks of an instance, and the nodes that
    they are spread over; 1 where the layout decides. Problems are added to `findings`.

    1. A model's parts are those in its `sockets` and `nodes`; unknown ids are violations.
    2. instances_per_socket "auto": each part gets one instance per 64 cores, rounded up, at least one;
       models that share a part divide that among them.
    3. A number N: the socket's parts get N / parts each; if that is uneven the lower nodes get one
       more, with a finding. Fewer than one per part needs span_nodes; the parts are then joined into N zones.
    4. per-node: one instance of each model on each part, instead of "auto".
    5. A width above 1, instead of 2. to 4.: one instance on each group of so many nodes (`groups_of`). These are not
       joined: each rank takes its cores where the instances of other models take theirs. Nor are nodes with as many
       ranks each.
    6. A zone shared by models is divided once, in the order of the file: n is the sum of their
       instances. Zones that overlap without being equal are a violation."""
    chosen = [_select(model, parts, topology, findings) for model in models]
    grouped = [
        groups_of(parts_for_ranks(its, topology), width) if width > 1 else [tuple(its)]
        for its, width in zip(chosen, widths, strict=True)
    ]
    used = Counter(part for groups in grouped for group in groups for part in group)
    counts: list[list[tuple[tuple[Part, ...], int]]] = []
    for index, its in enumerate(chosen):
        counted: list[tuple[tuple[Part, ...], int]] = []
        counts.append(counted)
        if widths[index] > 1:
            idle = {part.node for part in its} - {part.node for part in used}
            findings.extend(_idle(models[index], idle, widths[index]))
            counted.extend((group, 1) for group in grouped[index])
        else:
            for socket in sorted({part.socket for part in its}):
                in_socket = [part for part in its if part.socket == socket]
                counted.extend(_count(models[index], in_socket, layout, used, findings))
    joined = {
        part
        for index, counted in enumerate(counts)
        for zone, _ in counted if ranks[index] % len(zone)
        for part in zone
    }  # fmt: skip
    members: dict[tuple[Part, ...], list[InstanceKey]] = defaultdict(list)
    for index, counted in enumerate(counts):
        for number, zone in enumerate(zone for zone, count in counted for _ in range(count)):
            # Where another model's instances span these nodes, both are divided in the same way.
            apart = ranks[index] % len(zone) == 0 and (widths[index] > 1 or joined.isdisjoint(zone))
            for each in ((part,) for part in zone) if apart else [zone]:
                members[each].append(InstanceKey(index, number))
    zones = [Zone(parts=zone, instances=tuple(members[zone])) for zone in sorted(members)]
    findings.extend(_overlaps(zones))
    return tuple(zones)


def _select(model: Model, parts: Sequence[Part], topology: Topology, findings: list[Finding]) -> list[Part]:
    known: Mapping[str, tuple[tuple[int, ...] | None, set[int], set[int]]] = {
        "sockets": (model.sockets, {s.id for s in topology.sockets}, {part.socket for part in parts}),
        "nodes": (model.nodes, {n.id for n in topology.numa_nodes}, {part.node for part in parts}),
    }
    for key, (wanted, existing, usable) in known.items():
        for bad in [i for i in wanted or () if i not in usable]:
            what = f"{key[:-1]} {bad}"
            why = "it has no usable cpus" if bad in existing else f"the machine has {key} {_ids(existing)}"
            findings.append(
                violation(
                    f"unknown-{key[:-1]}",
                    f"cannot place model {model.name!r} on {what}: {why}",
                    f"set {key} of that [[models]] entry to some of {_ids(usable)}",
                )
            )
    its = [part for part in parts if takes(model, part)]
    if not its and parts:
        findings.append(
            violation(
                "no-cpus",
                f"cannot place model {model.name!r}: its sockets and nodes have no usable cpus in common",
                "set sockets and nodes of that [[models]] entry so that they overlap",
            )
        )
    return its


def _count(
    model: Model, parts: list[Part], layout: Layout, sharers: Mapping[Part, int], findings: list[Finding]
) -> Iterator[tuple[tuple[Part, ...], int]]:
    wanted, socket = layout.instances_per_socket, parts[0].socket
    if layout.strategy is Strategy.PER_NODE:
        if isinstance(wanted, int) and wanted != len(parts):
            findings.append(_per_node_clash(wanted, parts))
        yield from (((part,), 1) for part in parts)
    elif not isinstance(wanted, int):
        for part in parts:
            yield (part,), max(1, -(-len(part.cores) // (CORES_PER_INSTANCE * sharers[part])))
    elif wanted >= len(parts):
        each, more = divmod(wanted, len(parts))
        if more:
            findings.append(_uneven_instances(wanted, parts))
        yield from (((part,), each + (i < more)) for i, part in enumerate(parts))
    elif layout.span_nodes:
        yield from (
            (tuple(parts[i * len(parts) // wanted : (i + 1) * len(parts) // wanted]), 1)
            for i in range(wanted)
        )
    else:
        findings.append(
            violation(
                "spans-nodes",
                f"cannot place {wanted} instances of {model.name!r} on socket {socket}: its cpus are on "
                f"{len(parts)} NUMA nodes ({_ids(part.node for part in parts)}), so an instance would span nodes",
                f"set layout.instances_per_socket to {len(parts)} or a multiple; span_nodes = true allows it "
                "at the cost of memory bandwidth",
            )
        )


def parts_for_ranks(parts: Iterable[Part], topology: Topology) -> list[Part]:
    """Those on which a rank has memory of its own, the first of each node: a rank uses the memory of its cpus' node."""
    found: dict[int, Part] = {}
    for part in parts:
        node = topology.node(part.node)
        if node.id in topology.allowed_nodes and (node.memory_bytes > 0 or not node.memory_known):
            found.setdefault(part.node, part)
    return list(found.values())


def possible_widths(parts: Sequence[Part], model: Model, layout: Layout) -> list[int]:
    """Numbers of nodes above 1 that an instance of a model may span, each with a rank on every node: as many as the model
    has; with a number of instances per socket only the one that makes so many."""
    its = [part for part in parts if takes(model, part)]
    wanted = layout.instances_per_socket
    if not isinstance(wanted, int):
        return list(range(2, len(its) + 1))
    sizes = {sum(part.socket == socket for part in its) for socket in {part.socket for part in its}}
    return [width for width in range(2, len(its) + 1) if sizes == {width * wanted}]


def groups_of(parts: Sequence[Part], width: int) -> list[tuple[Part, ...]]:
    """Groups of `width` nodes for the ranks of an instance: neighbours of one socket first; what is left of the sockets is
    joined, and so are sockets with fewer nodes. Nodes may be left over."""
    groups: list[tuple[Part, ...]] = []
    rest: list[Part] = []
    for socket in sorted({part.socket for part in parts}):
        its = [part for part in parts if part.socket == socket]
        whole = len(its) // width * width
        groups += (tuple(its[i : i + width]) for i in range(0, whole, width))
        rest += its[whole:]
    groups += (tuple(rest[i : i + width]) for i in range(0, len(rest) // width * width, width))
    return sorted(groups)


def _idle(model: Model, nodes: Collection[int], width: int) -> Iterator[Finding]:
    if nodes:
        yield warning(
            "idle-nodes",
            f"no instance of {model.name!r} is on {'node' if len(nodes) == 1 else 'nodes'} {_ids(nodes)}: its ranks take "
            f"{width} nodes at once",
            "let another model use them (nodes of its [[models]] entry)",
        )


def _per_node_clash(wanted: int, parts: Sequence[Part]) -> Finding:
    return violation(
        "per-node-count",
        f"cannot place {wanted} instances on socket {parts[0].socket}: per-node means one on each of its "
        f"{len(parts)} nodes",
        'set layout.instances_per_socket to "auto", or another layout.strategy',
    )


def _uneven_instances(wanted: int, parts: Sequence[Part]) -> Finding:
    return warning(
        "uneven-instances",
        f"{wanted} instances cannot be distributed evenly over the {len(parts)} nodes of socket {parts[0].socket}: the "
        "lower nodes get one more, with fewer cores and less memory each",
        f"set layout.instances_per_socket to a multiple of {len(parts)}",
    )


def _overlaps(zones: Sequence[Zone]) -> Iterator[Finding]:
    for i, one in enumerate(zones):
        for other in zones[i + 1 :]:
            shared = set(one.parts) & set(other.parts)
            if shared:
                yield violation(
                    "models-overlap",
                    f"cannot share node {_ids(part.node for part in shared)} between models: one model's instances "
                    "span more nodes than the other's",
                    "give the models the same nodes, or separate nodes (nodes of their [[models]] entries)",
                )


def _ids(ids: Iterable[int]) -> str:
    return ",".join(str(i) for i in sorted(set(ids))) or "none"
