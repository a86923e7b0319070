"""Memory and disks, as sampled for the metrics page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from launcher.daemon.machine import MachineSample
from launcher.machine.load import DiskSpace
from launcher.machine.oom import NodeMemory
from launcher.telemetry import machine_metrics as names


def memory(nodes: Iterable[int]) -> tuple[NodeMemory, ...]:
    return tuple(NodeMemory(node, 10 + node, 100) for node in nodes)


def disk(folder: Path) -> DiskSpace | None:
    return DiskSpace(3, 4) if folder == Path("/usage") else None


async def test_values() -> None:
    folders = {"usage": Path("/usage"), "audit": Path("/unreadable")}
    sample = MachineSample(lambda: (0, 2), folders, memory=memory, disk=disk)
    assert not any(sample.values().values())  # nothing is said before the first sample
    await sample.sample()
    assert sample.values() == {
        names.NODE_MEMORY: {("0",): 100, ("2",): 100},
        names.NODE_MEMORY_FREE: {("0",): 10, ("2",): 12},
        names.DISK_SIZE: {("usage",): 4},
        names.DISK_FREE: {("usage",): 3},
    }


async def test_a_machine_without_nodes_has_an_empty_label() -> None:
    sample = MachineSample(lambda: (), {}, memory=lambda _: (NodeMemory(None, 1, 2),))
    await sample.sample()
    assert sample.values()[names.NODE_MEMORY_FREE] == {("",): 1}


async def test_this_machine() -> None:
    sample = MachineSample(lambda: (0,), {"usage": Path("/")})
    await sample.sample()
    values = sample.values()
    [free], [size] = values[names.NODE_MEMORY_FREE].values(), values[names.NODE_MEMORY].values()
    assert 0 < free <= size
    assert values[names.DISK_SIZE]["usage",] > 0


async def test_disks_are_known_by_their_folder() -> None:
    sample = MachineSample(
        lambda: (), {"usage": Path("/usage"), "audit": Path("/x")}, memory=memory, disk=disk
    )
    assert sample.disks == []
    await sample.sample()
    assert sample.disks == [(Path("/usage"), DiskSpace(3, 4))]
