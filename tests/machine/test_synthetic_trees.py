"""Reading a written tree gives what was described."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.budgets import bound
from support.synthetic import Machine

from launcher.base.cpuset import CpuSet
from launcher.machine import sysfs

MACHINES = {
    "laptop": Machine(cores=4, smt=2, adjacent=True),
    "epyc-9755-2p": Machine(sockets=2, l3=16, cores=8, smt=2),
    "nps4": Machine(sockets=2, nodes=4, l3=2, cores=8),
    "cxl": Machine(sockets=2, l3=2, cores=4, memory_only=2),
    "offline": Machine(sockets=2, cores=4, smt=2, offline=frozenset({1, 9, 14})),
    "no-l3-vm": Machine(cores=24, has_l3=False),
    "memoryless": Machine(nodes=2, cores=4, memoryless=frozenset({1})),
    "cpuset": Machine(l3=2, cores=4, allowed=CpuSet.parse("2-5")),
}


@pytest.mark.parametrize("name", MACHINES)
def test_tree_is_read_as_described(name: str, tmp_path: Path) -> None:
    machine = MACHINES[name]
    assert sysfs.read(machine.write(tmp_path)) == machine.topology()


@pytest.mark.bounded
def test_256_cpus_are_read_within_the_budget(tmp_path: Path) -> None:
    root = Machine(sockets=2, nodes=4, l3=2, cores=8, smt=2).write(tmp_path)
    sysfs.read(root)
    took = []  # of this process: other jobs may have the cpus
    for _ in range(5):
        begin = time.process_time()
        topology = sysfs.read(root)
        took.append(time.process_time() - begin)
    assert len(topology.online) == 256
    assert min(took) <= bound(0.1)
