"""The lifecycle of a slot as a pure state machine: `advance(slot, event, now, limits) -> (slot, actions)`.

TRANSITIONS names every transition, transitions.py describes them, slot_state.py has the states, events and actions. The slot
controller performs the actions and feeds the events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from launcher.instances import transitions
from launcher.instances.backoff import Limits
from launcher.instances.slot_state import (
    DeadlinePassed,
    DrainRequested,
    Event,
    HoldRequested,
    InstanceReport,
    KillRequested,
    ProbeFailed,
    ProbeSucceeded,
    ProcessAdopted,
    ProcessExited,
    QuarantineRequested,
    ReleaseRequested,
    RestartRequested,
    ResumeRequested,
    SlotState,
    StartRequested,
    State,
    StopRequested,
    WentIdle,
)
from launcher.instances.transitions import Step


def advance(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    """The next state and the actions. An event of an older generation, or one without a transition, changes nothing."""
    if isinstance(event, InstanceReport) and event.generation != slot.generation:
        return slot, ()
    handler = TRANSITIONS.get((slot.state, type(event)))
    return (slot, ()) if handler is None else handler(slot, event, now, limits)


Handler = Callable[[SlotState, Event, float, Limits], Step]

TRANSITIONS: Final[Mapping[tuple[State, type], Handler]] = {
    (State.STOPPED, StartRequested): transitions.start_fresh,
    (State.STOPPED, RestartRequested): transitions.start_fresh,
    (State.STOPPED, HoldRequested): transitions.settle,
    (State.STOPPED, ProcessAdopted): transitions.adopt,
    (State.HELD, ReleaseRequested): transitions.start_fresh,
    (State.STARTING, ProbeSucceeded): transitions.became_ready,
    (State.STARTING, ProcessExited): transitions.crashed,
    (State.STARTING, ProbeFailed): transitions.start_failed,
    (State.STARTING, DeadlinePassed): transitions.not_ready_in_time,
    (State.STARTING, RestartRequested): transitions.restart_starting,
    (State.STARTING, StartRequested): transitions.return_to_rotation,
    (State.STARTING, ResumeRequested): transitions.return_to_rotation,
    (State.STARTING, ReleaseRequested): transitions.return_to_rotation,
    (State.STARTING, StopRequested): transitions.stop_starting,
    (State.STARTING, HoldRequested): transitions.stop_starting,
    (State.STARTING, DrainRequested): transitions.leave_rotation,
    (State.STARTING, QuarantineRequested): transitions.leave_rotation,
    (State.STARTING, KillRequested): transitions.kill_now,
    (State.READY, DrainRequested): transitions.begin_drain,
    (State.READY, RestartRequested): transitions.begin_drain,
    (State.READY, StopRequested): transitions.begin_drain,
    (State.READY, HoldRequested): transitions.begin_drain,
    (State.READY, QuarantineRequested): transitions.begin_drain,
    (State.READY, ProbeFailed): transitions.unhealthy,
    (State.READY, ProcessExited): transitions.crashed,
    (State.READY, KillRequested): transitions.kill_now,
    (State.DRAINING, WentIdle): transitions.went_idle,
    (State.DRAINING, DeadlinePassed): transitions.drain_timed_out,
    (State.DRAINING, ResumeRequested): transitions.resume,
    (State.DRAINING, StartRequested): transitions.resume,
    (State.DRAINING, ReleaseRequested): transitions.resume,
    (State.DRAINING, StopRequested): transitions.change_drain,
    (State.DRAINING, HoldRequested): transitions.change_drain,
    (State.DRAINING, RestartRequested): transitions.change_drain,
    (State.DRAINING, DrainRequested): transitions.keep_drained,
    (State.DRAINING, QuarantineRequested): transitions.keep_drained,
    (State.DRAINING, ProbeFailed): transitions.unhealthy,
    (State.DRAINING, ProcessExited): transitions.crashed,
    (State.DRAINING, KillRequested): transitions.kill_now,
    (State.STOPPING, ProcessExited): transitions.stopped,
    (State.STOPPING, DeadlinePassed): transitions.insist,
    (State.STOPPING, StopRequested): transitions.stop_while_stopping,
    (State.STOPPING, HoldRequested): transitions.stop_while_stopping,
    (State.STOPPING, StartRequested): transitions.start_while_stopping,
    (State.STOPPING, RestartRequested): transitions.start_while_stopping,
    (State.STOPPING, ReleaseRequested): transitions.start_while_stopping,
    (State.STOPPING, DrainRequested): transitions.drain_while_stopping,
    (State.STOPPING, ResumeRequested): transitions.resume_while_stopping,
    (State.STOPPING, KillRequested): transitions.kill_now,
    (State.BACKOFF, DeadlinePassed): transitions.retry,
    (State.BACKOFF, StartRequested): transitions.start_fresh,
    (State.BACKOFF, RestartRequested): transitions.start_fresh,
    (State.BACKOFF, StopRequested): transitions.settle,
    (State.BACKOFF, HoldRequested): transitions.settle,
    (State.BACKOFF, DrainRequested): transitions.leave_rotation,
    (State.BACKOFF, ResumeRequested): transitions.return_to_rotation,
    (State.BACKOFF, KillRequested): transitions.settle,
    (State.FAILED, StartRequested): transitions.start_fresh,
    (State.FAILED, RestartRequested): transitions.start_fresh,
    (State.FAILED, StopRequested): transitions.settle,
    (State.FAILED, HoldRequested): transitions.settle,
    (State.FAILED, KillRequested): transitions.settle,
}
"""(state, event) -> handler. A pair that is absent changes nothing, so each command but `restart` is idempotent."""
