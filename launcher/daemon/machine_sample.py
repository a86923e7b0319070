"""Free memory of the NUMA nodes and free disk space, sampled for the metrics page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from launcher.background import Failures, attempt
from launcher.host.disks import DiskSpace, disk_space
from launcher.host.oom import NodeMemory, node_memory
from launcher.telemetry import machine_metrics
from launcher.telemetry.spec import Values

log = logging.getLogger("launcher.daemon")

# As often as Prometheus usually scrapes.
SAMPLE_INTERVAL_S: Final = 15.0


class MachineSample:
    """`nodes` returns the NUMA nodes to look at, `folders` those to watch by name. A disk that does not answer holds a
    thread, never the event loop."""

    def __init__(
        self,
        nodes: Callable[[], Iterable[int]],
        folders: Mapping[str, Path],
        *,
        memory: Callable[[Iterable[int]], tuple[NodeMemory, ...]] = node_memory,
        disk: Callable[[Path], DiskSpace | None] = disk_space,
    ) -> None:
        self._nodes = nodes
        self._folders = dict(folders)
        self._read_memory = memory
        self._read_disk = disk
        self._memory: tuple[NodeMemory, ...] = ()
        self._disks: dict[str, DiskSpace] = {}

    async def run(self) -> None:
        failures = Failures(log, "sample memory and disks")
        while True:
            await attempt(self.sample, failures)
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    async def sample(self) -> None:
        self._memory, self._disks = await asyncio.to_thread(self._read, tuple(self._nodes()))

    def _read(self, nodes: tuple[int, ...]) -> tuple[tuple[NodeMemory, ...], dict[str, DiskSpace]]:
        disks = {name: self._read_disk(folder) for name, folder in self._folders.items()}
        found = {name: space for name, space in disks.items() if space is not None}
        return self._read_memory(nodes), found

    @property
    def disks(self) -> list[tuple[Path, DiskSpace]]:
        """The folders that could be read."""
        return [(self._folders[name], space) for name, space in self._disks.items()]

    def values(self) -> Values:
        """For the metrics page."""
        memory = {("" if each.node is None else str(each.node),): each for each in self._memory}
        disks = {(name,): space for name, space in self._disks.items()}
        return {
            machine_metrics.NODE_MEMORY: {labels: each.total_bytes for labels, each in memory.items()},
            machine_metrics.NODE_MEMORY_FREE: {labels: each.free_bytes for labels, each in memory.items()},
            machine_metrics.DISK_SIZE: {labels: space.size_bytes for labels, space in disks.items()},
            machine_metrics.DISK_FREE: {labels: space.free_bytes for labels, space in disks.items()},
        }
