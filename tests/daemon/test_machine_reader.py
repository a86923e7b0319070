"""What is read of the machine, and of which instances."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.fakes import a_slot
from support.synthetic import Machine

from launcher.base.cpuset import CpuSet
from launcher.daemon.machine import MachineReader
from launcher.machine.load import CpuBusy, DiskSpace
from launcher.machine.oom import NodeMemory
from launcher.machine.placement import MisplacedThread

TOPOLOGY = Machine(sockets=2, cores=2).topology()


def controller(*, runs: bool = True) -> Any:
    found = SimpleNamespace(node_bytes={0: 4096, 1: 8192})
    thread = MisplacedThread(7, "worker", CpuSet.parse("0-9"))
    instance = SimpleNamespace(process=object() if runs else None, verification=found, misplaced=(thread,))
    return SimpleNamespace(instance=instance, slot=a_slot())


@dataclass
class Host:
    ticks: int = 0
    asked: tuple[int, ...] | None = None

    def times(self) -> dict[int, tuple[int, int]]:
        self.ticks += 1
        return dict.fromkeys((0, 1, 3), (25 * self.ticks, 100 * self.ticks))

    def memory(self, nodes: Iterable[int]) -> tuple[NodeMemory, ...]:
        self.asked = tuple(nodes)
        return tuple(NodeMemory(node, 1 << 20, 2 << 20) for node in self.asked or (None,))

    def reader(self, topology: Any = TOPOLOGY, **slots: Any) -> MachineReader:
        deployment: Any = SimpleNamespace(topology=topology, plan=SimpleNamespace(ledger=()))
        return MachineReader(
            CpuBusy(self.times), deployment=lambda: deployment, drift=lambda: ("cpus 2 are offline",),
            controllers=lambda: {int(slot[1:]): each for slot, each in slots.items()},
            disks=lambda: [(Path("/var/lib/x"), DiskSpace(3, 4))], read_memory=self.memory,
        )  # fmt: skip


async def test_the_machine_now() -> None:
    host = Host()
    found = await host.reader(s0=controller()).status()
    assert found.busy == [0.25, 0.25, None, 0.25]
    assert [(node.node, node.foreign_bytes) for node in found.nodes] == [(0, 0), (1, 8192)]
    (slot,) = found.slots
    assert (slot.node_bytes, slot.off_node_bytes) == ({"0": 4096, "1": 8192}, 8192)
    assert [(it.thread, it.cpus) for it in slot.misplaced] == [(7, "0-9")]
    assert found.drift == ("cpus 2 are offline",)
    assert [(disk.path, disk.free_bytes, disk.total_bytes) for disk in found.disks] == [("/var/lib/x", 3, 4)]
    assert host.asked == (0, 1)


async def test_an_instance_that_has_ended_is_nowhere() -> None:
    found = await Host().reader(s0=controller(runs=False)).status()
    assert (found.slots[0].node_bytes, found.slots[0].misplaced) == ({}, ())
    assert [node.foreign_bytes for node in found.nodes] == [0, 0]


async def test_a_kernel_without_numa_is_asked_for_the_whole_machine() -> None:
    host = Host()
    topology: Any = SimpleNamespace(numa_nodes=TOPOLOGY.numa_nodes[:1], has_numa=False)
    found = await host.reader(topology).status()
    assert host.asked == ()
    assert [(node.node, node.total_bytes) for node in found.nodes] == [(0, 2 << 20)]
