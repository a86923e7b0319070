"""Reads the machine's load for ``GET /v1/machine``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from launcher.daemon.deployment import Deployment
from launcher.daemon.machine_status import Disk, MachineStatus, Resident, busy_list, node_uses, slot_places
from launcher.host.cpu_busy import CpuBusy
from launcher.host.disks import DiskSpace
from launcher.host.oom import NodeMemory, node_memory
from launcher.instances.slot_controller import SlotController


class MachineReader:
    """`deployment`: the one in force; `controllers`: of the slots; `drift`: how the machine differs from the plan;
    `disks`: as last sampled."""

    def __init__(
        self,
        busy: CpuBusy,
        *,
        deployment: Callable[[], Deployment],
        controllers: Callable[[], Mapping[int, SlotController]],
        drift: Callable[[], tuple[str, ...]],
        disks: Callable[[], Iterable[tuple[Path, DiskSpace]]],
        read_memory: Callable[[Iterable[int]], tuple[NodeMemory, ...]] = node_memory,
    ) -> None:
        self._busy = busy
        self._deployment = deployment
        self._controllers = controllers
        self._drift = drift
        self._disks = disks
        self._read_memory = read_memory

    async def status(self) -> MachineStatus:
        """The load now. What blocks is read in a thread."""
        shares = await self._busy.shares()
        topology, plan = self._deployment().topology, self._deployment().plan
        nodes = [node.id for node in topology.numa_nodes]
        memory = await asyncio.to_thread(self._read_memory, nodes if topology.has_numa else ())
        residents = {slot: _resident(controller) for slot, controller in self._controllers().items()}
        return MachineStatus(
            time=time.time(),
            busy=busy_list(shares),
            nodes=node_uses(memory, plan, residents, nodes[0]),
            slots=tuple(slot_places(slot, resident) for slot, resident in residents.items()),
            drift=self._drift(),
            disks=tuple(
                Disk(path=str(path), free_bytes=space.free_bytes, total_bytes=space.size_bytes)
                for path, space in self._disks()
            ),
        )


def _resident(controller: SlotController) -> Resident:
    instance = controller.instance
    if instance.process is None:
        return Resident(controller.slot.placement, {})
    found = instance.verification
    return Resident(controller.slot.placement, {} if found is None else found.node_bytes, instance.misplaced)
