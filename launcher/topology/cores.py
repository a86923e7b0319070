"""Cpus to physical cores: the topology/ folder of each cpu, and the rules for kernels that say less.

Source: Documentation/admin-guide/cputopology.rst.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.cpuset import CpuSet
from launcher.topology.files import Root
from launcher.topology.model import Core, CoreKey


@dataclass(frozen=True, slots=True)
class Cpu:
    """One online cpu as its topology folder has it; None and -1 of the kernel are both None here."""

    id: int
    socket: int
    die: int | None
    core_id: int
    siblings: CpuSet | None
    """Online cpus of the same core."""
    has_core_id: bool = True
    """False when the kernel does not say, and `core_id` is the default."""


def read_cpu(files: Root, folder: str, cpu: int, online: CpuSet, socket: int) -> Cpu:
    """Read one cpu's topology folder. Raises LauncherError for one that contradicts itself.

    1. core_id missing or -1: the lowest of the core's cpus.
    2. die_id is missing before 5.2, and -1 where the architecture has no dies.
    3. The core's cpus: core_cpus (5.2+), else thread_siblings.
    """
    core_id = files.number(f"{folder}/core_id")
    siblings = files.cpus(f"{folder}/core_cpus", f"{folder}/core_cpus_list", online)
    if siblings is None:
        siblings = files.cpus(f"{folder}/thread_siblings", f"{folder}/thread_siblings_list", online)
    if siblings is not None and cpu not in siblings:
        its = files.present(f"{folder}/core_cpus", f"{folder}/thread_siblings")
        raise files.broken(its, f"{siblings} does not hold cpu {cpu} itself")
    has_core_id = core_id is not None and core_id >= 0
    if siblings is None and not has_core_id:
        siblings = CpuSet((cpu,))
    die = files.number(f"{folder}/die_id")
    return Cpu(
        cpu,
        socket=socket,
        die=None if die is None or die < 0 else die,
        core_id=core_id if core_id is not None and core_id >= 0 else (siblings or CpuSet((cpu,))).first,
        siblings=siblings,
        has_core_id=has_core_id,
    )


def check_cpus(files: Root, base: str, cpus: list[Cpu], node_of: Mapping[int, int]) -> None:
    """Raises LauncherError where cpus tell different things of a core.

    1. What one cpu has and another lacks: core_id, the map of its siblings.
    2. Siblings that do not list each other, or that have not the same socket, die or NUMA node.
    """
    by_id = {cpu.id: cpu for cpu in cpus}
    for file, lacking in (
        ("core_id", [cpu for cpu in cpus if not cpu.has_core_id]),
        ("core_cpus", [cpu for cpu in cpus if cpu.siblings is None]),
    ):
        if lacking and len(lacking) < len(cpus):
            raise files.broken(
                f"{base}/cpu{lacking[0].id}/topology/{file}", "missing or -1, yet other cpus have one"
            )
    for cpu in cpus:
        for other in (by_id[i] for i in cpu.siblings or () if i != cpu.id):
            folder = f"{base}/cpu{other.id}/topology"
            if other.siblings != cpu.siblings:
                raise files.broken(
                    files.present(f"{folder}/core_cpus", f"{folder}/thread_siblings"),
                    f"{other.siblings} contradicts {cpu.siblings} of cpu {cpu.id}",
                )
            if other.socket != cpu.socket:
                raise files.broken(
                    f"{folder}/physical_package_id", f"not that of its core's other cpu {cpu.id}"
                )
            if other.die != cpu.die:
                raise files.broken(f"{folder}/die_id", f"not that of its core's other cpu {cpu.id}")
            if node_of.get(cpu.id, node_of.get(other.id)) != node_of.get(other.id, node_of.get(cpu.id)):
                raise files.broken(
                    f"sys/devices/system/node/node{node_of[other.id]}/cpumap",
                    f"it has cpu {other.id}, yet cpu {cpu.id} of the same core is in node {node_of[cpu.id]}",
                )


def group_cores(
    cpus: list[Cpu], node_of: Mapping[int, int], *, compute_units: bool, notes: list[str]
) -> tuple[Core, ...]:
    """Join cpus to cores, with keys that are unique on the machine.

    1. Cpus that list each other as siblings are one core; where no sibling file exists, those with
       the same (socket, die, core_id).
    2. With AMD compute units, siblings that have different core_ids are cores of their own.
    3. The key is (socket, die or 0, core_id). Old kernels repeat core_ids on each die of a socket and
       have no die_id: then the die is the rank of the core's NUMA node within the socket.
    4. Where keys still repeat, core_id is the core's lowest cpu.
    """
    odd = CpuSet(cpu.id for cpu in cpus if not cpu.has_core_id)
    if odd:
        notes.append(f"core_id of cpus {odd} is missing or -1: the core's lowest cpu is taken")
    groups: dict[tuple[object, ...], list[Cpu]] = defaultdict(list)
    for cpu in cpus:
        identity: tuple[object, ...] = (cpu.socket, cpu.die, cpu.core_id)
        if cpu.siblings is not None:
            identity = (cpu.siblings, cpu.core_id) if compute_units else (cpu.siblings,)
        groups[identity].append(cpu)
    members = sorted(groups.values(), key=lambda group: group[0].id)
    keys = [CoreKey(group[0].socket, group[0].die or 0, group[0].core_id) for group in members]
    if len(set(keys)) < len(keys):
        keys = _unique_keys(members, keys, node_of, notes)
    cores = [
        Core(key=key, cpus=CpuSet(cpu.id for cpu in group), node=_node(group, node_of))
        for key, group in zip(keys, members, strict=True)
    ]
    return tuple(sorted(cores, key=lambda core: core.key))


def _unique_keys(
    members: list[list[Cpu]], keys: list[CoreKey], node_of: Mapping[int, int], notes: list[str]
) -> list[CoreKey]:
    if all(group[0].die is None for group in members):
        nodes: dict[int, set[int]] = defaultdict(set)
        for group in members:
            nodes[group[0].socket].add(node_of.get(group[0].id, 0))
        rank = {socket: {node: i for i, node in enumerate(sorted(its))} for socket, its in nodes.items()}
        keys = [
            key._replace(die=rank[key.socket][node_of.get(group[0].id, 0)])
            for key, group in zip(keys, members, strict=True)
        ]
        notes.append(
            "core_id repeats within a socket and there is no die_id: the NUMA node is taken as the die"
        )
    if len(set(keys)) < len(keys):
        keys = [CoreKey(key.socket, key.die, group[0].id) for key, group in zip(keys, members, strict=True)]
        notes.append("core_id is not unique within its die: the core's lowest cpu is taken instead")
    return keys


def _node(group: list[Cpu], node_of: Mapping[int, int]) -> int | None:
    """The node of the core's cpus: `check_cpus` saw that they share it."""
    return next((node_of[cpu.id] for cpu in group if cpu.id in node_of), None)
