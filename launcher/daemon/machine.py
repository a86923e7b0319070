"""The types of ``GET /v1/machine``, and how they are filled from plan, instances and kernel. Pure."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from launcher.base.background import Failures, attempt
from launcher.daemon.deployment import Deployment
from launcher.instances.slot_controller import SlotController
from launcher.machine.load import CpuBusy, DiskSpace, disk_space
from launcher.machine.oom import NodeMemory, node_memory
from launcher.machine.placement import MisplacedThread
from launcher.plan.plan import Placement, Plan
from launcher.telemetry import machine_metrics
from launcher.telemetry.machine_metrics import Values

log = logging.getLogger("launcher.daemon")

# Entries of one slot: where all threads of an instance are misplaced, some stand for all.
MAX_MISPLACED: Final = 16
# Decimals of a busy share: a per mille is finer than a picture.
_DIGITS: Final = 3


class NodeUse(Struct, frozen=True, kw_only=True):
    """Memory of one NUMA node. `total_bytes` is the sum of all others."""

    node: int
    """Number of the node."""
    total_bytes: int
    """Memory that the kernel manages."""
    free_bytes: int
    """Available without swapping: free memory and unused page cache."""
    weights_bytes: int
    """Memory of the instances that are planned here, up to their planned weights."""
    kv_cache_bytes: int
    """Memory of these instances above their weights, up to their planned KV cache."""
    foreign_bytes: int
    """Memory of instances that are planned on other nodes."""
    other_bytes: int
    """The rest: other memory of instances, other processes, page cache in use, the kernel."""


class Misplaced(Struct, frozen=True, kw_only=True):
    """A thread of an instance that may run outside its slot's CPUs."""

    thread: int
    """Its id."""
    name: str
    """Its name."""
    cpus: str
    """Where it may run."""
    planned: str
    """The slot's CPUs."""


class SlotPlaces(Struct, frozen=True, kw_only=True):
    """Where the instance of one slot is."""

    slot: int
    """Number of the slot."""
    node_bytes: dict[str, int]
    """Anonymous memory by node, when the slot was last verified; empty before."""
    off_node_bytes: int
    """The part of it that is not on the planned nodes; 0 where memory is not bound."""
    misplaced: tuple[Misplaced, ...]
    """Threads outside the slot's CPUs, at most 16, looked at every few seconds."""
    misplaced_threads: int
    """Number of all of them."""


class Disk(Struct, frozen=True, kw_only=True):
    """A file system that the daemon writes to."""

    path: str
    """A path on it."""
    free_bytes: int
    """Available to the daemon."""
    total_bytes: int
    """Its size."""


class MachineStatus(Struct, frozen=True, kw_only=True):
    """``GET /v1/machine``: the load of the machine now."""

    time: float
    """Seconds since the epoch."""
    busy: list[float | None]
    """Busy share (0 to 1) of each CPU by its number, since the reading before; null: offline or unknown."""
    nodes: tuple[NodeUse, ...]
    """Memory by NUMA node."""
    slots: tuple[SlotPlaces, ...]
    """Placement of the instances, by slot."""
    drift: tuple[str, ...]
    """How the machine differs from the one that was planned with, one line each."""
    disks: tuple[Disk, ...]
    """The file systems of ledger with history, and audit trail."""


class Resident(Struct, frozen=True):
    """What is known of one slot's instance."""

    placement: Placement
    node_bytes: Mapping[int, int]
    """Anonymous memory by node; empty before the first verification, and without an instance."""
    misplaced: Sequence[MisplacedThread] = ()


def busy_list(shares: Mapping[int, float]) -> list[float | None]:
    """Shares by cpu number, from 0 to the highest known."""
    known = {cpu: round(share, _DIGITS) for cpu, share in shares.items()}
    return [known.get(cpu) for cpu in range(max(known, default=-1) + 1)]


def slot_places(slot: int, of: Resident) -> SlotPlaces:
    nodes = of.placement.membind
    off = sum(size for node, size in of.node_bytes.items() if node not in nodes) if nodes else 0
    planned = of.placement.cpus.format()
    return SlotPlaces(
        slot=slot,
        node_bytes={str(node): size for node, size in of.node_bytes.items()},
        off_node_bytes=off,
        misplaced=tuple(
            Misplaced(thread=it.thread, name=it.name, cpus=it.cpus.format(), planned=planned)
            for it in of.misplaced[:MAX_MISPLACED]
        ),
        misplaced_threads=len(of.misplaced),
    )


def node_uses(
    memory: Iterable[NodeMemory], plan: Plan, residents: Mapping[int, Resident], first_node: int
) -> tuple[NodeUse, ...]:
    """The memory of each node. `first_node`: the number of the only node of a kernel without NUMA."""
    return tuple(_use(row, plan, residents, first_node) for row in memory)


def _use(row: NodeMemory, plan: Plan, residents: Mapping[int, Resident], first_node: int) -> NodeUse:
    """The kernel does not tell weights from KV cache: an instance's memory is divided as the plan has it. Verified
    memory may be minutes old, so that each part takes no more than what is in use now."""
    node = first_node if row.node is None else row.node
    weights = kv_cache = foreign = 0
    for slot, resident in residents.items():
        size, nodes = resident.node_bytes.get(node, 0), resident.placement.membind
        if nodes and node not in nodes:
            foreign += size
            continue
        planned = _planned(plan, row.node, slot)
        its_weights = min(size, planned.get("weights", 0))
        weights += its_weights
        kv_cache += min(size - its_weights, planned.get("KV", 0))
    used = max(0, row.total_bytes - row.free_bytes)
    foreign = min(foreign, used)
    weights = min(weights, used - foreign)
    kv_cache = min(kv_cache, used - foreign - weights)
    return NodeUse(
        node=node, total_bytes=row.total_bytes, free_bytes=row.total_bytes - used, weights_bytes=weights,
        kv_cache_bytes=kv_cache, foreign_bytes=foreign, other_bytes=used - foreign - weights - kv_cache,
    )  # fmt: skip


def _planned(plan: Plan, node: int | None, slot: int) -> Mapping[str, int]:
    """Planned bytes of a slot on a node, by the ledger's words."""
    return {
        line.what: line.size_bytes
        for row in plan.ledger
        if row.node == node
        for line in row.lines
        if line.slot == slot
    }


# --- Reads the machine's load for ``GET /v1/machine``. ---


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


# --- Free memory of the NUMA nodes and free disk space, sampled for the metrics page. ---

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
