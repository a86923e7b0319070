"""The words of the lifecycle: a slot's states, what its operator wants, events (past tense) and actions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from launcher.instances.causes import Cause


class State(StrEnum):
    """Where a slot is."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    FAILED = "failed"
    STOPPED = "stopped"
    HELD = "held"


class Intent(StrEnum):
    """What the operator wants of the slot in the end."""

    RUN = "run"
    DRAIN = "drain"
    """Alive, but out of rotation until `resume`."""
    QUARANTINE = "quarantine"
    """Alive for a look, whatever its health, and out of rotation until `release`."""
    STOP = "stop"
    HOLD = "hold"
    """Stopped until `release`: no other verb starts it."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """All that is remembered of one slot."""

    state: State = State.STOPPED
    intent: Intent = Intent.STOP
    generation: int = 0
    """Number of the current or last process life; 0 before the first."""
    since: float = 0.0
    """When `state` was entered."""
    deadline: float | None = None
    """When `DeadlinePassed` is due."""
    restarting: bool = False
    """The drain or stop under way ends in a new start."""
    cut: bool = False
    """A drain's deadline has passed: what was in flight is ended, and the proxy has forgotten it."""
    crash: Cause | None = None
    """Set while stopping because the instance failed: its exit counts as a crash."""
    crashes: tuple[float, ...] = ()
    """Times of crashes within the window."""
    restarts: int = 0
    """Starts after the first one."""
    last_cause: Cause | None = None
    """Why the last unrequested end came about."""
    cause_at: float = 0.0
    """When that was."""
    cause_generation: int = 0
    """The life that it ended."""


# --- events: past tense ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartRequested:
    """`start`."""


@dataclass(frozen=True, slots=True)
class RestartRequested:
    """`restart`: drain, stop, start."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """`drain`: out of rotation, kept alive."""

    deadline_s: float | None = None
    """What is still in flight then is ended; None: it is waited for."""


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """`resume`: back into rotation; calls off a drain, stop or restart that has not stopped it yet."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """`stop`: drain, stop, stay stopped."""


@dataclass(frozen=True, slots=True)
class HoldRequested:
    """`hold`: drain, stop, stay stopped until `release`."""


@dataclass(frozen=True, slots=True)
class QuarantineRequested:
    """`quarantine`: out of rotation and kept alive, whatever its probes say, until `release`."""


@dataclass(frozen=True, slots=True)
class ReleaseRequested:
    """`release`: ends a hold or a quarantine."""


@dataclass(frozen=True, slots=True)
class KillRequested:
    """Stop at once: the second signal to the daemon. What is in flight ends with an error."""


@dataclass(frozen=True, slots=True)
class ProcessAdopted:
    """The running instance of an earlier daemon was adopted."""

    generation: int


@dataclass(frozen=True, slots=True)
class ProbeSucceeded:
    """Healthy, and one real completion came back."""

    generation: int


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """The instance said that it is not healthy, or refused to answer."""

    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class WentIdle:
    """A draining instance has no request in flight."""

    generation: int


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """The main process is gone, and its tree with it."""

    generation: int
    cause: Cause
    jitter: float
    """Uniform in [0, 1), drawn by the caller: spreads restarts."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """`SlotState.deadline` is over."""


Event = (
    StartRequested
    | RestartRequested
    | DrainRequested
    | ResumeRequested
    | StopRequested
    | HoldRequested
    | QuarantineRequested
    | ReleaseRequested
    | KillRequested
    | ProcessAdopted
    | ProbeSucceeded
    | ProbeFailed
    | WentIdle
    | ProcessExited
    | DeadlinePassed
)
InstanceReport = ProbeSucceeded | ProbeFailed | WentIdle | ProcessExited
"""Events about one generation: out of date as soon as the slot has a later one."""


# --- actions: imperative -----------------------------------------------------------------


class Action(StrEnum):
    """What the supervisor is to do, in the order given."""

    SPAWN = "spawn"
    """Start generation `slot.generation` and probe it until it is ready."""
    ANNOUNCE_READY = "announce-ready"
    ANNOUNCE_DRAINING = "announce-draining"
    ANNOUNCE_GONE = "announce-gone"
    TERMINATE = "terminate"
    """SIGTERM to the main process."""
    KILL = "kill"
    """SIGKILL to the whole tree."""
