"""The values of the lifecycle: states, intents, events (past tense) and actions (imperative)."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Self

from msgspec import Struct

from launcher.config.schema import Config
from launcher.engines.causes import Cause


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    FAILED = "failed"
    STOPPED = "stopped"
    HELD = "held"


class Intent(StrEnum):
    """The state that the operator wants the slot to reach."""

    RUN = "run"
    DRAIN = "drain"
    """Running, but out of rotation until `resume`."""
    QUARANTINE = "quarantine"
    """Running for inspection whatever its health, and out of rotation until `release`."""
    STOP = "stop"
    HOLD = "hold"
    """Stopped until `release`: no other command starts it."""


class SlotState(Struct, frozen=True):
    """The whole state of one slot. Times are monotonic."""

    state: State = State.STOPPED
    intent: Intent = Intent.STOP
    generation: int = 0
    """Number of the current or last instance; 0 before the first."""
    since: float = 0.0
    """When `state` was entered."""
    deadline: float | None = None
    """When `DeadlinePassed` is due."""
    restarting: bool = False
    """A start follows the current drain or stop."""
    cut: bool = False
    """The deadline of a drain has passed: its requests were ended, and the proxy no longer has the instance."""
    crash: Cause | None = None
    """Set while the instance is stopped because it failed: its exit counts as a crash."""
    crashes: tuple[float, ...] = ()
    """Times of crashes within the window."""
    restarts: int = 0
    """Starts after the first one."""
    last_cause: Cause | None = None
    """Why an instance last ended unrequested."""
    cause_at: float = 0.0
    """When that happened."""
    cause_generation: int = 0
    """The generation that it ended."""


# --- events: past tense ------------------------------------------------------------------


class StartRequested(Struct, frozen=True): ...


class RestartRequested(Struct, frozen=True):
    """`restart`: drain, stop, start. A start in progress is stopped and repeated."""


class DrainRequested(Struct, frozen=True):
    """`drain`: out of rotation, kept running."""

    deadline_s: float | None = None
    """Requests in flight are ended after it; None: wait for them."""


class ResumeRequested(Struct, frozen=True):
    """`resume`: back into rotation; calls off a drain, stop or restart that has not stopped it yet."""


class StopRequested(Struct, frozen=True): ...


class HoldRequested(Struct, frozen=True):
    """`hold`: drain, stop, stay stopped until `release`."""


class QuarantineRequested(Struct, frozen=True):
    """`quarantine`: out of rotation and kept running, whatever its probes find, until `release`."""


class ReleaseRequested(Struct, frozen=True):
    """`release`: ends a hold or a quarantine."""


class KillRequested(Struct, frozen=True):
    """Stop at once, on the second signal to the daemon. Requests in flight end with an error."""


class ProcessAdopted(Struct, frozen=True):
    """The running instance of an earlier daemon was adopted."""

    generation: int


class ProbeSucceeded(Struct, frozen=True):
    """Healthy, and one real completion came back."""

    generation: int


class ProbeFailed(Struct, frozen=True):
    """A probe found that the instance has failed."""

    generation: int
    cause: Cause


class WentIdle(Struct, frozen=True):
    """A draining instance has no request in flight."""

    generation: int


class ProcessExited(Struct, frozen=True):
    """The main process and its tree have ended."""

    generation: int
    cause: Cause
    jitter: float
    """Uniform in [0, 1), drawn by the caller: spreads restarts."""


class DeadlinePassed(Struct, frozen=True): ...


Event = (
    StartRequested | RestartRequested | DrainRequested | ResumeRequested | StopRequested | HoldRequested
    | QuarantineRequested | ReleaseRequested | KillRequested | ProcessAdopted | ProbeSucceeded | ProbeFailed
    | WentIdle | ProcessExited | DeadlinePassed
)  # fmt: skip
InstanceReport = ProbeSucceeded | ProbeFailed | WentIdle | ProcessExited
"""Events about one generation: out of date as soon as the slot has a later one."""


# --- actions: imperative -----------------------------------------------------------------


class Action(StrEnum):
    """What the slot controller does, in the order given."""

    SPAWN = "spawn"
    """Start the instance `slot.generation` and probe it until it is ready."""
    ANNOUNCE_READY = "announce-ready"
    ANNOUNCE_DRAINING = "announce-draining"
    ANNOUNCE_GONE = "announce-gone"
    """A planned end: a stop, or a drain deadline."""
    ANNOUNCE_FAILED = "announce-failed"
    """The instance has exited unrequested, or is killed because it failed."""
    TERMINATE = "terminate"
    """SIGTERM to the main process."""
    KILL = "kill"
    """SIGKILL to the whole tree."""


# --- How often an instance is probed, and when a probe or its silence counts against it. ---

# Between two probes of a loading instance.
READY_POLL_S: Final = 0.5
# Added to the interval and to the probes' own limits: a probe this late is missing, not slow.
UNWATCHED_S: Final = 30.0
# Between the first and the second negative answer of the health path.
RECHECK_S: Final = 0.5
# Between two looks at where the threads may run; one takes about 5 us for each thread.
THREADS_INTERVAL_S: Final = 5.0


class ProbeSettings(Struct, frozen=True):
    """Times in seconds."""

    probe_interval_s: float
    tail_lines: int
    """Lines of output kept for each slot."""
    ready_poll_s: float = READY_POLL_S
    recheck_s: float = RECHECK_S
    stall_timeout_s: float = 120.0
    canary_interval_s: float = 300.0
    verify_interval_s: float = 300.0
    threads_interval_s: float = THREADS_INTERVAL_S
    probe_timeout_s: float = 10.0

    @classmethod
    def of(cls, config: Config) -> Self:
        supervision = config.supervision
        return cls(
            supervision.probe_interval_s, config.logging.tail_lines,
            stall_timeout_s=supervision.stall_timeout_s, canary_interval_s=supervision.canary_interval_s,
            verify_interval_s=supervision.verify_interval_s, probe_timeout_s=supervision.probe_timeout_s,
        )  # fmt: skip

    @property
    def unwatched_s(self) -> float:
        """An instance whose last successful probe is older than this is not being watched."""
        return self.probe_interval_s + 2 * self.probe_timeout_s + UNWATCHED_S
