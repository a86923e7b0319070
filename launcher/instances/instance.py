"""What is known of a slot's running instance, and how often it is looked at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from launcher.address import Address
from launcher.engines.base import Launch
from launcher.host.oom import NodeMemory, OomWatch
from launcher.instances.ports import Process
from launcher.instances.progress import Progress
from launcher.instances.verify import Verification

# Between two looks at a loading instance.
READY_POLL_S: Final = 0.5
# Beyond the pause before the next look and the probes' own limits: so late a look is missing, not slow.
UNWATCHED_S: Final = 30.0
# A /health that says no is asked once more after this before the instance is killed.
RECHECK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """How often a slot is looked at, and how long it may stand still. In seconds."""

    probe_interval_s: float
    tail_lines: int
    ready_poll_s: float = READY_POLL_S
    recheck_s: float = RECHECK_S
    stall_timeout_s: float = 120.0
    canary_interval_s: float = 300.0
    verify_interval_s: float = 300.0
    probe_timeout_s: float = 10.0

    @property
    def unwatched_s(self) -> float:
        """An instance whose last successful look is older than this is not being watched."""
        return self.probe_interval_s + 2 * self.probe_timeout_s + UNWATCHED_S


@dataclass(slots=True)
class Instance:
    """What is known of the running instance."""

    launch: Launch | None = None
    address: Address | None = None
    process: Process | None = None
    phase: str = "starting"
    taken_over: bool = False
    """An earlier daemon started it."""
    began: float = 0.0
    """When its process was there."""
    doomed_at: float | None = None
    """When the engine said that its start has failed."""
    served: bool = False
    """It was ready once."""
    compiled: bool = False
    """What it has compiled lies in its cache, for others to copy."""
    responsive: bool | None = None
    """The last probe got an answer in time; None before the first."""
    looked_at: float | None = None
    """When the last look succeeded; None before the first."""
    watched_until: float = 0.0
    """When the next look has succeeded at the latest, or nobody watches. A completion may take long."""
    verification: Verification | None = None
    zentorch: bool | None = None
    progress: Progress = field(default_factory=Progress)
    pids: frozenset[int] = frozenset()
    """Processes of it that were seen."""
    nodes: tuple[NodeMemory, ...] = ()
    """Free memory of its nodes when it was last looked at."""
    oom: OomWatch | None = None
