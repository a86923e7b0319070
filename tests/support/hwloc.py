"""What hwloc says of a sysfs tree, and comparing a topology with it.

The oracle is `lstopo-no-graphics --input DIR --if fsroot --of xml`.
"""

from __future__ import annotations

import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher.base.cpuset import CpuSet
from launcher.machine.kernel_files import parse_cpumap
from launcher.machine.topology import Topology


@dataclass(frozen=True)
class Oracle:
    """What hwloc says, within its allowed cpus."""

    cpus: CpuSet
    nodes: CpuSet
    packages: dict[int, CpuSet]
    node_cpus: dict[int, CpuSet]
    node_bytes: dict[int, int | None]
    l3: dict[CpuSet, int]
    cores: set[CpuSet]


def bitmap(text: str) -> CpuSet:
    """hwloc's mask: 0x words joined by commas, empty words are 0."""
    return parse_cpumap(",".join(word.removeprefix("0x") or "0" for word in text.split(",")))


def parse_oracle(xml: str) -> Oracle:
    machine = next(ET.fromstring(xml).iter("object"))  # noqa: S314 - lstopo's own output
    objects = list(machine.iter("object"))

    def sets(kind: str) -> list[tuple[ET.Element, CpuSet]]:
        return [(o, bitmap(o.attrib["cpuset"])) for o in objects if o.get("type") == kind]

    memory = {int(o.attrib["os_index"]): o.get("local_memory") for o, _ in sets("NUMANode")}
    return Oracle(
        cpus=bitmap(machine.attrib["cpuset"]),
        nodes=bitmap(machine.attrib["allowed_nodeset"]),
        packages={int(o.get("os_index", "-1")): cpus for o, cpus in sets("Package") if cpus},
        node_cpus={int(o.attrib["os_index"]): cpus for o, cpus in sets("NUMANode")},
        node_bytes={node: int(size) if size else None for node, size in memory.items()},
        l3={cpus: int(o.attrib["cache_size"]) for o, cpus in sets("L3Cache") if cpus},
        cores={cpus for _, cpus in sets("Core") if cpus},
    )


def lstopo(root: Path) -> str:
    command = shutil.which("lstopo-no-graphics")
    if command is None:
        pytest.fail("lstopo-no-graphics is not installed: apt install hwloc-nox (scripts/test does it)")
    done = subprocess.run(
        [command, "--input", str(root), "--if", "fsroot", "--of", "xml"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def compare(topology: Topology, oracle: Oracle) -> None:
    allowed = topology.allowed
    assert allowed == oracle.cpus
    packages = {socket.id: socket.cpus & allowed for socket in topology.sockets if socket.cpus & allowed}
    assert packages == oracle.packages
    assert {core.cpus & allowed for core in topology.cores if core.cpus & allowed} == oracle.cores
    assert {
        domain.cpus & allowed: domain.size_bytes for domain in topology.l3_domains if domain.cpus & allowed
    } == oracle.l3
    compare_nodes(topology, oracle)


def compare_nodes(topology: Topology, oracle: Oracle) -> None:
    for node in topology.numa_nodes:
        if node.id not in topology.allowed_nodes:
            continue
        if node.id not in oracle.node_cpus:
            assert node.memory_bytes == 0, "hwloc drops nodes without memory only"
            continue
        size = oracle.node_bytes[node.id]
        assert node.memory_bytes == (size or 0)
        assert node.memory_known == (size is not None)
        if node.cpus:  # hwloc gives a node without cpus those that are near it
            assert node.cpus & topology.allowed == oracle.node_cpus[node.id]
    assert set(oracle.node_cpus) <= {node.id for node in topology.numa_nodes}
    # hwloc lists no node without memory as allowed, the kernel does.
    assert oracle.nodes <= topology.allowed_nodes
