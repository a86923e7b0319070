"""A topology as JSON and as text for a terminal."""

from __future__ import annotations

from typing import Any

from launcher.base.cpuset import CpuSet
from launcher.base.text import counted, format_size
from launcher.machine.topology import Core, NumaNode, Topology


def to_json(topology: Topology) -> dict[str, Any]:
    """The form that `numa-launcher topology --json` prints: cpu sets as cpulists, lists sorted by id."""
    return {
        "online": topology.online.format(),
        "offline": topology.offline.format(),
        "allowed": topology.allowed.format(),
        "allowed_nodes": topology.allowed_nodes.format(),
        "memory_limit_bytes": topology.memory_limit_bytes,
        "cpu_quota": None if topology.cpu_quota is None else float(topology.cpu_quota),
        "sockets": [{"id": socket.id, "cpus": socket.cpus.format()} for socket in topology.sockets],
        "numa_nodes": [_node_json(node) for node in topology.numa_nodes],
        "l3_domains": [
            {"cpus": domain.cpus.format(), "size_bytes": domain.size_bytes, "node": domain.node}
            for domain in topology.l3_domains
        ],
        "cores": [
            {**core.key._asdict(), "cpus": core.cpus.format(), "node": core.node, **_speed_json(core)}
            for core in topology.cores
        ],
        "cpu": {
            "vendor": topology.cpu.vendor,
            "model": topology.cpu.model,
            "family": topology.cpu.family,
            "flags": sorted(topology.cpu.flags),
        },
        "conflicts": list(topology.conflicts),
        "notes": list(topology.notes),
    }


def _speed_json(core: Core) -> dict[str, float]:
    return {} if core.speed == 1 else {"speed": core.speed}


def _node_json(node: NumaNode) -> dict[str, Any]:
    channels = {} if node.memory_channels is None else {"memory_channels": node.memory_channels}
    return {
        "id": node.id,
        "socket": node.socket,
        "cpus": node.cpus.format(),
        "memory_bytes": node.memory_bytes,
        "memory_known": node.memory_known,
        "available_bytes": node.available_bytes,
        "hugepages_bytes": node.hugepages_bytes,
        **channels,
        "distances": {str(other): distance for other, distance in sorted(node.distances.items())},
    }


def layout_json(topology: Topology, reserved: CpuSet) -> dict[str, Any]:
    """The form of `GET /v1/topology`: sockets, nodes and cores; `l3` is a number of an L3 domain."""
    l3_of = {cpu: number for number, domain in enumerate(topology.l3_domains) for cpu in domain.cpus}
    return {
        "name": topology.cpu.model,
        "cpu_count": len(topology.online),
        "sockets": [
            {"socket": socket.id, "nodes": [node.id for node in topology.numa_nodes if node.socket == socket.id]}
            for socket in topology.sockets
        ],
        "nodes": [
            {
                "node": node.id, "socket": node.socket, "memory_bytes": node.memory_bytes,
                "cpus": node.cpus.format(),
            }
            for node in topology.numa_nodes
        ],
        "cores": [
            {
                "cpus": list(core.cpus), "socket": core.key.socket, "node": core.node,
                "l3": l3_of.get(core.cpus.first),
            }
            for core in topology.cores
        ],
        "reserved": reserved.format(),
        "allowed": topology.allowed.format(),
    }  # fmt: skip


def to_text(topology: Topology) -> str:
    cpu = topology.cpu
    smt = max((len(core.cpus) for core in topology.cores), default=1)
    counts = (
        f"{counted(len(topology.sockets), 'socket')}, {counted(len(topology.numa_nodes), 'NUMA node')}, "
        f"{counted(len(topology.l3_domains), 'L3 domain')}, {counted(len(topology.cores), 'core')}, "
        f"{counted(len(topology.online), 'cpu')} ({smt} per core)"
    )
    lines = [cpu.model or "unknown cpu", counts, f"online {topology.online}   allowed {topology.allowed}"]
    kinds = sorted({core.speed for core in topology.cores}, reverse=True)
    for speed in kinds if len(kinds) > 1 else ():
        its = CpuSet(cpu for core in topology.cores if core.speed == speed for cpu in core.cpus)
        lines.append(f"cores of speed {speed:g}: cpus {its}")
    if topology.offline:
        lines.append(f"offline {topology.offline}")
    if topology.memory_limit_bytes is not None:
        lines.append(f"cgroup memory limit {format_size(topology.memory_limit_bytes)}")
    if topology.cpu_quota is not None:
        lines.append(f"cgroup cpu time limit {float(topology.cpu_quota):g} cpus")
    for node in topology.numa_nodes:
        socket = "no socket" if node.socket is None else f"socket {node.socket}"
        memory = format_size(node.memory_bytes) if node.memory_known else "memory unknown"
        free = f", {format_size(node.available_bytes)} available" if node.memory_known else ""
        pools = f", {format_size(node.hugepages_bytes)} in huge pages" if node.hugepages_bytes else ""
        denied = "" if node.id in topology.allowed_nodes or not node.memory_bytes else ", memory not allowed"
        lines.append(f"node {node.id} ({socket}): cpus {node.cpus or 'none'}, {memory}{free}{pools}{denied}")
        domains = [domain for domain in topology.l3_domains if domain.cpus <= node.cpus]
        sizes = sorted({domain.size_bytes for domain in domains if domain.size_bytes is not None})
        if domains:
            size = f" ({', '.join(map(format_size, sizes))} each)" if sizes else ""
            lines.append(f"  L3{size}: {'  '.join(domain.cpus.format() for domain in domains)}")
        if node.distances:
            lines.append(
                "  distance " + "  ".join(f"{to}:{far}" for to, far in sorted(node.distances.items()))
            )
    for domain in (domain for domain in topology.l3_domains if domain.node is None):
        size = "" if domain.size_bytes is None else f" ({format_size(domain.size_bytes)})"
        lines.append(f"L3{size} spans nodes: cpus {domain.cpus}")
    lines += [f"WARNING: {conflict}" for conflict in topology.conflicts]
    lines += [f"note: {note}" for note in topology.notes]
    return "\n".join(lines)
