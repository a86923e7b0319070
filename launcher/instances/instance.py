"""One instance: its launch, its process, and what has been observed of them."""

from __future__ import annotations

from msgspec import Struct, field

from launcher.base.address import Address
from launcher.engines.base import Launch
from launcher.instances.ports import Process
from launcher.instances.progress import Progress, started
from launcher.instances.slot_state import Intent, SlotState, State
from launcher.instances.verify import Verification
from launcher.machine.oom import NodeMemory, OomWatch
from launcher.machine.placement import MisplacedThread


class Instance(Struct):
    """A slot's current instance; the default has no process and no address. Times are monotonic."""

    generation: int = 0
    launch: Launch | None = None
    phase: str = "starting"
    adopted: bool = False
    """An earlier daemon started it."""
    process: Process | None = None
    """None before the process exists and after it has ended."""
    started_at: float = 0.0
    ready_at: float | None = None
    start_failed_at: float | None = None
    """When the engine printed that its start has failed."""
    served: bool = False
    """It was ready once."""
    cache_kept: bool = False
    """Siblings may copy what it has compiled."""
    responsive: bool | None = None
    """The last probe was answered in time; None before the first."""
    probed_at: float | None = None
    """When the last probe succeeded; None before the first."""
    watched_until: float = 0.0
    """When the next probe must have succeeded, or the instance is not being watched."""
    verification: Verification | None = None
    misplaced: tuple[MisplacedThread, ...] = ()
    """Its threads outside the slot's cpus, as last seen."""
    zentorch: bool | None = None
    progress: Progress = field(default_factory=Progress)
    pids: frozenset[int] = frozenset()
    """Processes of it that were seen."""
    tree: frozenset[int] = frozenset()
    """Its processes, as last seen."""
    nodes: tuple[NodeMemory, ...] = ()
    """Free memory of its NUMA nodes, as last sampled."""
    oom: OomWatch | None = None

    @property
    def address(self) -> Address | None:
        return None if self.launch is None else self.launch.address

    @property
    def start_s(self) -> float | None:
        return None if self.ready_at is None or self.adopted else self.ready_at - self.started_at

    def launched(self, launch: Launch) -> None:
        self.launch = launch

    def spawned(self, process: Process, oom: OomWatch, now: float, unwatched_s: float) -> None:
        self.process, self.oom = process, oom
        self.pids = frozenset() if process.pid is None else frozenset({process.pid})
        self.started_at, self.watched_until = now, now + unwatched_s

    def reached(self, phase: str) -> None:
        self.phase = phase

    def start_failed(self, now: float) -> None:
        if self.start_failed_at is None and not self.served:
            self.start_failed_at = now

    def became_ready(self, now: float) -> None:
        self.phase, self.served, self.responsive = "serving", True, True
        self.ready_at, self.progress = now, started(now)

    def probed(self, now: float, watched_until: float) -> None:
        self.probed_at, self.watched_until = now, watched_until

    def answered(self, *, responsive: bool) -> None:
        self.responsive = responsive

    def progressed(self, progress: Progress) -> None:
        self.progress = progress

    def sampled(self, nodes: tuple[NodeMemory, ...], pids: frozenset[int]) -> None:
        """Free memory and processes, kept for the diagnosis of its exit."""
        self.nodes, self.tree = nodes, pids
        self.pids |= pids

    def verified(self, verification: Verification, pids: frozenset[int], *, zentorch: bool | None) -> None:
        self.verification, self.zentorch, self.tree = verification, zentorch, pids
        self.pids |= pids

    def misplaced_now(self, threads: tuple[MisplacedThread, ...]) -> None:
        self.misplaced = threads

    def kept_cache(self) -> None:
        self.cache_kept = True

    def exited(self) -> None:
        self.process = None


# --- When the current transition of a slot will likely end. ---


def eta(slot: SlotState, *, in_flight: int, start_s: float | None) -> float | None:
    """The time, on the slot's clock; None without a transition, or where it is unknown.

    `start_s`: duration of the slot's last start, None before the first. A drain with requests in flight is assumed to
    last until its deadline: the duration of requests is unknown."""
    match slot.state:
        case State.STARTING:
            return None if start_s is None else slot.since + start_s
        case State.BACKOFF:
            return None if start_s is None or slot.deadline is None else slot.deadline + start_s
        case State.STOPPING:
            return _then_start(slot, slot.deadline, start_s)
        case State.DRAINING if slot.intent not in {Intent.DRAIN, Intent.QUARANTINE}:
            return _then_start(slot, slot.deadline if in_flight else slot.since, start_s)
        case State.DRAINING if in_flight:
            return slot.deadline
        case _:
            return None


def _then_start(slot: SlotState, ends: float | None, start_s: float | None) -> float | None:
    """A restart ends when the next instance is ready."""
    if slot.intent in {Intent.STOP, Intent.HOLD}:
        return ends
    return None if ends is None or start_s is None else ends + start_s
