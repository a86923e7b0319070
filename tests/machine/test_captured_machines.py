"""Every captured machine against hwloc, and every virtual one against the output it recorded itself.

The trees are in ../shared/topologies beside the checkout; tests/machines/ has some of our own for a
checkout without it. The oracle is `lstopo-no-graphics --input DIR --if fsroot --of xml`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.hwloc import compare, lstopo, parse_oracle
from support.trees import ARCHIVES, title

from launcher.base.cpuset import CpuSet
from launcher.machine.hardware import read_hardware
from launcher.machine.snapshot import capture, read_snapshot
from launcher.machine.topology import Topology


def test_there_are_trees() -> None:
    assert len(ARCHIVES) >= 3


@pytest.mark.parametrize("archive", ARCHIVES, ids=title)
def test_tree_agrees_with_hwloc_and_with_its_snapshot(
    archive: Path, tree: Callable[[Path], Path], captured: Callable[[Path], Topology], tmp_path: Path
) -> None:
    root, topology = tree(archive), captured(archive)
    compare(topology, parse_oracle(lstopo(root)))
    taken = capture(root, date="2026-01-02", version="1")
    assert taken.error is None
    (tmp_path / "snap.tar.gz").write_bytes(taken.data)
    assert read_snapshot(tmp_path / "snap.tar.gz") == topology
    hardware = read_hardware(topology, root)
    assert hardware.sockets * hardware.nodes_per_socket <= hardware.numa_nodes
    assert 1 <= hardware.allowed_cpus <= hardware.cpus
    assert hardware.memory_modules is None, "captures are made without the firmware's tables"


RECORDED = [pytest.param(one, id=title(one)) for one in ARCHIVES if (one.parent / "lstopo.xml").exists()]
NONE = pytest.param(
    None, marks=pytest.mark.skip(reason="no virtual machine is recorded beside this checkout")
)


@pytest.mark.parametrize("archive", RECORDED or [NONE])
def test_virtual_machine_agrees_with_what_it_recorded(
    archive: Path, captured: Callable[[Path], Topology]
) -> None:
    """The VM ran lstopo, lscpu and numactl itself, with its procfs and cgroups at hand."""
    topology = captured(archive)
    compare(topology, parse_oracle((archive.parent / "lstopo.xml").read_text()))
    lscpu = dict(
        (part.strip() for part in line.split(":", 1))
        for line in (archive.parent / "lscpu.txt").read_text().splitlines()
        if ":" in line
    )
    assert topology.online == CpuSet.parse(lscpu["On-line CPU(s) list"])
    assert len(topology.sockets) == int(lscpu["Socket(s)"])
    for node in topology.numa_nodes:
        assert node.cpus == CpuSet.parse(lscpu[f"NUMA node{node.id} CPU(s)"])
    rows = [line.split() for line in (archive.parent / "numactl-H.txt").read_text().splitlines()]
    distances = {
        int(row[0].rstrip(":")): list(map(int, row[1:]))
        for row in rows
        if row[0].endswith(":") and row[0] != "available:"
    }
    assert {node.id: list(node.distances.values()) for node in topology.numa_nodes} == distances
