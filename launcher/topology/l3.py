"""L3 domains and sockets as sets of cores. Source: Documentation/ABI/testing/sysfs-devices-system-cpu."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from launcher.cpuset import CpuSet
from launcher.sizes import KIB
from launcher.topology.conflicts import cutting, first_come
from launcher.topology.files import CPU_FOLDER, Root
from launcher.topology.model import Core, L3Domain, Socket
from launcher.topology.numa_nodes import common

_UNIFIED_L3: Final = 3
_SIZES: Final = {"K": KIB, "M": KIB**2, "G": KIB**3}


def sockets_of(cores: tuple[Core, ...]) -> tuple[Socket, ...]:
    members: dict[int, list[int]] = defaultdict(list)
    for core in cores:
        members[core.key.socket].extend(core.cpus)
    return tuple(Socket(id=socket, cpus=CpuSet(members[socket])) for socket in sorted(members))


def l3_domains_of(
    files: Root, cores: tuple[Core, ...], node_of: Mapping[int, int], notes: list[str], conflicts: list[str]
) -> tuple[L3Domain, ...]:
    """Sets of online cpus that share a level-3 cache; none for cpus that have no L3.

    An empty mask (ia64) means that the core shares the cache with no other, as in hwloc. Of overlapping masks the
    lowest cpu's is used and the other ignored, as in hwloc; a mask that splits a core or socket is ignored, too. Cpus
    that are only in ignored masks are in no L3 domain."""
    core_of = {cpu: core.cpus for core in cores for cpu in core.cpus}
    online = CpuSet(core_of)
    folders: dict[int, str] = {}
    maps: dict[int, CpuSet] = {}
    odd: list[int] = []
    for cpu in online:
        index = _l3_index(files, cpu)
        if index is None:
            continue
        mask, listed = files.twins(f"{index}/shared_cpu_map", f"{index}/shared_cpu_list", online)
        if mask is not None and listed is not None and mask != listed:
            odd.append(cpu)
        shared = listed if mask is None else mask
        if shared is None:
            raise files.broken(f"{index}/shared_cpu_map", "it and shared_cpu_list are missing")
        folders[cpu], maps[cpu] = index, shared or core_of[cpu]
    if odd:
        notes.append(
            f"shared_cpu_list of the L3 of cpus {CpuSet(odd)} differs from shared_cpu_map: the map is used"
        )
    socket_of = {cpu: socket.cpus for socket in sockets_of(cores) for cpu in socket.cpus}
    cut = cutting(maps.values(), core_of) | cutting(maps.values(), socket_of)
    taken, dropped = first_come({cpu: its for cpu, its in maps.items() if its not in cut})
    dropped |= CpuSet(cpu for cpu, its in maps.items() if its in cut)
    if dropped:
        without = CpuSet(maps) - CpuSet(taken)
        conflicts.append(
            f"the L3 maps (shared_cpu_map) of cpus {dropped} contradict those of other cpus, or split a core or a socket: "
            "they are ignored" + (f", and cpus {without} are in no L3 domain" if without else "")
        )
    return tuple(
        L3Domain(
            cpus=cpus,
            size_bytes=_cache_size(files, f"{folders[cpus.first]}/size"),
            node=common(node_of.get(cpu) for cpu in cpus),
        )
        for cpus in sorted(set(taken.values()), key=lambda cpus: cpus.first)
    )


def _l3_index(files: Root, cpu: int) -> str | None:
    """The folder of the cpu's L3. index3 on most machines, so it is tried first."""
    base = f"{CPU_FOLDER}/cpu{cpu}/cache"
    if files.text(f"{base}/index3/level") == "3":
        return f"{base}/index3"
    for index in files.ids(base, "index") or ():
        folder = f"{base}/index{index}"
        if files.number(f"{folder}/level") == _UNIFIED_L3 and files.text(f"{folder}/type") != "Instruction":
            return folder
    return None


def _cache_size(files: Root, path: str) -> int | None:
    """Bytes in a cache's `size`, e.g. "32768K"; None where the firmware reports none."""
    text = files.text(path)
    if not text:
        return None
    number, factor = (text[:-1], _SIZES[text[-1]]) if text[-1] in _SIZES else (text, 1)
    if not (number.isascii() and number.isdigit()):
        raise files.broken(path, f"{text[:40]!r} is not a cache size")
    return int(number) * factor or None
