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
from launcher.machine import sysfs


def test_there_are_trees() -> None:
    assert len(ARCHIVES) >= 3


@pytest.mark.parametrize("archive", ARCHIVES, ids=title)
def test_tree_agrees_with_hwloc(archive: Path, tree: Callable[[Path], Path]) -> None:
    root = tree(archive)
    compare(sysfs.read(root), parse_oracle(lstopo(root)))


RECORDED = [pytest.param(one, id=title(one)) for one in ARCHIVES if (one.parent / "lstopo.xml").exists()]
NONE = pytest.param(
    None, marks=pytest.mark.skip(reason="no virtual machine is recorded beside this checkout")
)


@pytest.mark.parametrize("archive", RECORDED or [NONE])
def test_virtual_machine_agrees_with_what_it_recorded(archive: Path, tree: Callable[[Path], Path]) -> None:
    """The VM ran lstopo, lscpu and numactl itself, with its procfs and cgroups at hand."""
    topology = sysfs.read(tree(archive))
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
