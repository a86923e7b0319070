"""The lifecycle of a slot as a pure state machine: `advance(slot, event, now, limits) -> (slot, actions)`.

TRANSITIONS names every transition, transitions.py describes them, slot_state.py has the states, events and actions. The slot
controller performs the actions and feeds the events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from launcher.config.schema import Supervision
from launcher.engines.causes import Cause, Retry
from launcher.instances.diagnosis import EXITED
from launcher.instances.slot_state import (
    Action,
    DeadlinePassed,
    DrainRequested,
    Event,
    HoldRequested,
    InstanceReport,
    Intent,
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

# --- How long to wait before the next start, and when to stop trying. ---


class Limits(Struct, frozen=True):
    """The times and counts that the lifecycle obeys; all in seconds but `crash_limit`."""

    ready_timeout_s: float
    drain_timeout_s: float
    stop_timeout_s: float
    backoff_initial_s: float
    backoff_max_s: float
    crash_window_s: float
    crash_limit: int

    @classmethod
    def of(cls, config: Supervision) -> Limits:
        return cls(
            config.ready_timeout_s, config.drain_timeout_s, config.stop_timeout_s, config.backoff_initial_s,
            config.backoff_max_s, config.crash_window_s, config.crash_limit,
        )  # fmt: skip


# Between two tries of a start for which the daemon itself lacks descriptors, memory or threads.
SHORTAGE_DELAY_S: Final = 5.0
# Up to a fifth is taken off the delay, so that slots that died together do not load together.
JITTER: Final = 0.2


def restart_delay(crash_count: int, jitter: float, limits: Limits) -> float:
    """Seconds before the start after the `crash_count`-th crash (1, 2, …) in the window.

    Doubles from `backoff_initial_s` to `backoff_max_s`; `jitter` in [0, 1) shortens it by up to 20 %."""
    delay = min(limits.backoff_max_s, limits.backoff_initial_s * 2.0 ** min(crash_count - 1, 30))
    return delay * (1 - JITTER * jitter)


# --- What each event does to a slot in each state. Pure; the table in lifecycle.py says which handler applies.
#
# A handler takes the slot's state, the event, the time and the limits; it returns the next state and the actions.

Step = tuple[SlotState, tuple[Action, ...]]

# A loading instance has no requests; this lets it end its compiler processes.
STARTING_STOP_S: Final = 5.0
_OUT_OF_ROTATION: Final = frozenset({Intent.DRAIN, Intent.QUARANTINE})
# The state of a slot without a process, by intent.
_WITHOUT_PROCESS: Final = {Intent.STOP: State.STOPPED, Intent.HOLD: State.HELD}


def _enter(slot: SlotState, state: State, now: float, deadline: float | None = None) -> SlotState:
    return replace(slot, state=state, since=now, deadline=deadline)


def _is_upstream(slot: SlotState) -> bool:
    """Whether the proxy has the instance."""
    return slot.state in {State.READY, State.DRAINING} and not slot.cut


def _announce_failed(slot: SlotState) -> tuple[Action, ...]:
    return (Action.ANNOUNCE_FAILED,) if _is_upstream(slot) else ()


def _without_process(slot: SlotState, intent: Intent, now: float) -> SlotState:
    slot = replace(slot, intent=intent, restarting=False, crash=None, cut=False)
    return _enter(slot, _WITHOUT_PROCESS[intent], now)


def _with_cause(slot: SlotState, cause: Cause, now: float) -> SlotState:
    return replace(slot, last_cause=cause, cause_at=now, cause_generation=slot.generation)


def _spawn(slot: SlotState, now: float, limits: Limits) -> Step:
    slot = replace(
        slot, generation=slot.generation + 1, restarts=slot.restarts + (slot.generation > 0),
        restarting=False, cut=False, crash=None,
    )  # fmt: skip
    return _enter(slot, State.STARTING, now, now + limits.ready_timeout_s), (Action.SPAWN,)


def start_fresh(slot: SlotState, _event: Event, now: float, limits: Limits) -> Step:
    """An operator asked: earlier crashes no longer count."""
    return _spawn(replace(slot, intent=Intent.RUN, crashes=()), now, limits)


def adopt(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    """An adopted instance is probed like a new one: its requests may have ended with the daemon before."""
    assert isinstance(event, ProcessAdopted)  # noqa: S101  narrows the table's type
    slot = replace(slot, intent=Intent.RUN, generation=event.generation)
    return _enter(slot, State.STARTING, now, now + limits.ready_timeout_s), ()


def retry(slot: SlotState, _event: Event, now: float, limits: Limits) -> Step:
    return _spawn(slot, now, limits)


def _stop(slot: SlotState, now: float, deadline: float) -> Step:
    return _enter(replace(slot, crash=None), State.STOPPING, now, deadline), (Action.TERMINATE,)


def _kill(slot: SlotState, now: float, limits: Limits, crash: Cause) -> Step:
    """SIGKILL: the instance has failed, and its exit counts as a crash."""
    slot = replace(slot, crash=crash)
    return _enter(slot, State.STOPPING, now, now + limits.stop_timeout_s), (Action.KILL,)


def became_ready(slot: SlotState, _event: Event, now: float, _limits: Limits) -> Step:
    if slot.intent in _OUT_OF_ROTATION:
        # Without the announcement the proxy would never report WentIdle, and a later stop would wait for its deadline.
        return _enter(slot, State.DRAINING, now), (Action.ANNOUNCE_READY, Action.ANNOUNCE_DRAINING)
    return _enter(slot, State.READY, now), (Action.ANNOUNCE_READY,)


def not_ready_in_time(slot: SlotState, _event: Event, now: float, limits: Limits) -> Step:
    if slot.intent is Intent.QUARANTINE:  # the operator inspects it
        return replace(slot, deadline=None), ()
    cause = Cause(
        "not-ready-in-time",
        f"not ready within {limits.ready_timeout_s:.0f} s",
        "read `numa-launcher logs SLOT`; a large model may need a longer supervision.ready_timeout_s",
        Retry.BACKOFF,
    )
    return _kill(slot, now, limits, cause)


def start_failed(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    """The engine printed that its start failed, and does not exit."""
    assert isinstance(event, ProbeFailed)  # noqa: S101  narrows the table's type
    if slot.intent is Intent.QUARANTINE:
        return _with_cause(slot, event.cause, now), ()
    return _kill(slot, now, limits, event.cause)


def stop_starting(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    slot = replace(slot, intent=_intent_of(event), restarting=False)
    return _stop(slot, now, now + min(STARTING_STOP_S, limits.stop_timeout_s))


def restart_starting(slot: SlotState, _event: Event, now: float, limits: Limits) -> Step:
    """Only a later start has a configuration that was changed meanwhile."""
    if slot.intent is Intent.QUARANTINE:
        return slot, ()
    slot = replace(slot, intent=Intent.RUN, restarting=True)
    return _stop(slot, now, now + min(STARTING_STOP_S, limits.stop_timeout_s))


def _intent_of(event: Event) -> Intent:
    return Intent.HOLD if isinstance(event, HoldRequested) else Intent.STOP


def leave_rotation(slot: SlotState, event: Event, _now: float, _limits: Limits) -> Step:
    """The instance stays out of rotation once it is ready. Only `release` ends a quarantine."""
    if slot.intent is Intent.QUARANTINE:
        return slot, ()
    wanted = Intent.QUARANTINE if isinstance(event, QuarantineRequested) else Intent.DRAIN
    return replace(slot, intent=wanted), ()


def return_to_rotation(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    quarantined, release = slot.intent is Intent.QUARANTINE, isinstance(event, ReleaseRequested)
    if quarantined != release:
        return slot, ()
    if slot.state is State.STARTING and slot.deadline is None:  # removed by the quarantine
        slot = replace(slot, deadline=now + limits.ready_timeout_s)
    return replace(slot, intent=Intent.RUN), ()


def begin_drain(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    """No new requests; what follows depends on the command."""
    deadline: float | None = now + limits.drain_timeout_s
    match event:
        case DrainRequested():
            slot = replace(slot, intent=Intent.DRAIN, restarting=False)
            deadline = None if event.deadline_s is None else now + event.deadline_s
        case QuarantineRequested():
            slot, deadline = replace(slot, intent=Intent.QUARANTINE, restarting=False), None
        case RestartRequested():
            slot = replace(slot, intent=Intent.RUN, restarting=True)
        case _:
            slot = replace(slot, intent=_intent_of(event), restarting=False)
    if slot.cut:  # no request is in flight, and the proxy would not report that again
        return _stop(slot, now, now + limits.stop_timeout_s)
    # Announced also when it drains already: the proxy must report WentIdle again.
    return _enter(slot, State.DRAINING, now, deadline), (Action.ANNOUNCE_DRAINING,)


def change_drain(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    """Another command while the slot drains; the same command changes nothing."""
    restart = isinstance(event, RestartRequested)
    wanted = (Intent.RUN, True) if restart else (_intent_of(event), False)
    if (slot.intent, slot.restarting) == wanted or (restart and slot.intent is Intent.QUARANTINE):
        return slot, ()
    return begin_drain(slot, event, now, limits)


def keep_drained(slot: SlotState, event: Event, now: float, _limits: Limits) -> Step:
    """Keep the instance running instead of stopping it. A repeated drain only changes its deadline."""
    assert isinstance(event, DrainRequested | QuarantineRequested)  # noqa: S101  narrows the table's type
    if isinstance(event, QuarantineRequested):
        return replace(slot, intent=Intent.QUARANTINE, restarting=False, deadline=None), ()
    if slot.intent is Intent.QUARANTINE:
        return slot, ()
    deadline = slot.deadline if slot.intent is Intent.DRAIN else None
    if event.deadline_s is not None:
        deadline = now + event.deadline_s
    return replace(slot, intent=Intent.DRAIN, restarting=False, deadline=deadline), ()


def went_idle(slot: SlotState, _event: Event, now: float, limits: Limits) -> Step:
    if slot.intent in _OUT_OF_ROTATION:
        return replace(slot, deadline=None), ()
    return _stop_drained(slot, now, limits)


def drain_timed_out(slot: SlotState, _event: Event, now: float, limits: Limits) -> Step:
    """The remaining requests end. A drained slot's instance keeps running, hidden from the proxy until `resume`."""
    if slot.intent in _OUT_OF_ROTATION:
        return replace(slot, deadline=None, cut=True), (Action.ANNOUNCE_GONE,)
    return _stop_drained(slot, now, limits)


def _stop_drained(slot: SlotState, now: float, limits: Limits) -> Step:
    stopping, actions = _stop(slot, now, now + limits.stop_timeout_s)
    return stopping, (Action.ANNOUNCE_GONE, *actions)


def resume(slot: SlotState, event: Event, now: float, _limits: Limits) -> Step:
    needs_release = slot.intent in {Intent.QUARANTINE, Intent.HOLD}
    release = isinstance(event, ReleaseRequested)
    if needs_release != release:
        return slot, ()
    slot = replace(slot, intent=Intent.RUN, restarting=False, cut=False)
    return _enter(slot, State.READY, now), (Action.ANNOUNCE_READY,)


def unhealthy(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    assert isinstance(event, ProbeFailed)  # noqa: S101  narrows the table's type
    if slot.intent is Intent.QUARANTINE:
        return _with_cause(slot, event.cause, now), ()
    stopping, actions = _kill(slot, now, limits, event.cause)
    return stopping, (*_announce_failed(slot), *actions)


def crashed(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    """An exit that was not requested, also with code 0 (vllm#48966)."""
    assert isinstance(event, ProcessExited)  # noqa: S101  narrows the table's type
    announce = _announce_failed(slot)
    cause = event.cause if slot.crash is None or slot.crash.name == EXITED else slot.crash
    crashes = tuple(t for t in slot.crashes if now - t < limits.crash_window_s)
    if cause.retry is not Retry.SOON:
        crashes = (*crashes, now)
    elif cause == slot.last_cause:
        cause = slot.last_cause  # the same shortage: not logged again
    slot = _with_cause(replace(slot, crashes=crashes, crash=None, restarting=False, cut=False), cause, now)
    if slot.intent in _WITHOUT_PROCESS:
        return _without_process(slot, slot.intent, now), announce
    if slot.intent is Intent.QUARANTINE:  # only its output is left to inspect
        return _without_process(slot, Intent.HOLD, now), announce
    if cause.retry is Retry.SOON:
        return _enter(slot, State.BACKOFF, now, now + SHORTAGE_DELAY_S), announce
    if cause.retry is Retry.NEVER or len(crashes) >= limits.crash_limit:
        return _enter(slot, State.FAILED, now), announce
    at_once = cause.retry is Retry.NOW and len(crashes) == 1
    delay = 0.0 if at_once else restart_delay(len(crashes), event.jitter, limits)
    return _enter(slot, State.BACKOFF, now, now + delay), announce


def stopped(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    if slot.crash is not None:
        return crashed(slot, event, now, limits)
    if slot.intent in _WITHOUT_PROCESS:
        return _without_process(slot, slot.intent, now), ()
    return _spawn(slot, now, limits)


def insist(slot: SlotState, _event: Event, now: float, limits: Limits) -> Step:
    """SIGTERM had no effect in time."""
    return replace(slot, deadline=now + limits.stop_timeout_s), (Action.KILL,)


def stop_while_stopping(slot: SlotState, event: Event, _now: float, _limits: Limits) -> Step:
    return replace(slot, intent=_intent_of(event), restarting=False), ()


def start_while_stopping(slot: SlotState, event: Event, _now: float, _limits: Limits) -> Step:
    held, release = slot.intent is Intent.HOLD, isinstance(event, ReleaseRequested)
    if held != release:
        return slot, ()
    return replace(slot, intent=Intent.RUN, restarting=True), ()


def drain_while_stopping(slot: SlotState, _event: Event, _now: float, _limits: Limits) -> Step:
    """The next instance, where there will be one, stays out of rotation."""
    return (slot if slot.intent in _WITHOUT_PROCESS else replace(slot, intent=Intent.DRAIN)), ()


def resume_while_stopping(slot: SlotState, _event: Event, _now: float, _limits: Limits) -> Step:
    """Undo `drain_while_stopping`; a stop can no longer be called off."""
    return (replace(slot, intent=Intent.RUN) if slot.intent is Intent.DRAIN else slot), ()


def kill_now(slot: SlotState, _event: Event, now: float, limits: Limits) -> Step:
    announce = (Action.ANNOUNCE_GONE,) if _is_upstream(slot) else ()
    slot = replace(slot, intent=Intent.STOP, restarting=False)
    return _enter(slot, State.STOPPING, now, now + limits.stop_timeout_s), (*announce, Action.KILL)


def settle(slot: SlotState, event: Event, now: float, _limits: Limits) -> Step:
    return _without_process(slot, _intent_of(event), now), ()


def advance(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    """The next state and the actions. An event of an older generation, or one without a transition, changes nothing."""
    if isinstance(event, InstanceReport) and event.generation != slot.generation:
        return slot, ()
    handler = TRANSITIONS.get((slot.state, type(event)))
    return (slot, ()) if handler is None else handler(slot, event, now, limits)


Handler = Callable[[SlotState, Event, float, Limits], Step]

TRANSITIONS: Final[Mapping[tuple[State, type], Handler]] = {
    (State.STOPPED, StartRequested): start_fresh,
    (State.STOPPED, RestartRequested): start_fresh,
    (State.STOPPED, HoldRequested): settle,
    (State.STOPPED, ProcessAdopted): adopt,
    (State.HELD, ReleaseRequested): start_fresh,
    (State.STARTING, ProbeSucceeded): became_ready,
    (State.STARTING, ProcessExited): crashed,
    (State.STARTING, ProbeFailed): start_failed,
    (State.STARTING, DeadlinePassed): not_ready_in_time,
    (State.STARTING, RestartRequested): restart_starting,
    (State.STARTING, StartRequested): return_to_rotation,
    (State.STARTING, ResumeRequested): return_to_rotation,
    (State.STARTING, ReleaseRequested): return_to_rotation,
    (State.STARTING, StopRequested): stop_starting,
    (State.STARTING, HoldRequested): stop_starting,
    (State.STARTING, DrainRequested): leave_rotation,
    (State.STARTING, QuarantineRequested): leave_rotation,
    (State.STARTING, KillRequested): kill_now,
    (State.READY, DrainRequested): begin_drain,
    (State.READY, RestartRequested): begin_drain,
    (State.READY, StopRequested): begin_drain,
    (State.READY, HoldRequested): begin_drain,
    (State.READY, QuarantineRequested): begin_drain,
    (State.READY, ProbeFailed): unhealthy,
    (State.READY, ProcessExited): crashed,
    (State.READY, KillRequested): kill_now,
    (State.DRAINING, WentIdle): went_idle,
    (State.DRAINING, DeadlinePassed): drain_timed_out,
    (State.DRAINING, ResumeRequested): resume,
    (State.DRAINING, StartRequested): resume,
    (State.DRAINING, ReleaseRequested): resume,
    (State.DRAINING, StopRequested): change_drain,
    (State.DRAINING, HoldRequested): change_drain,
    (State.DRAINING, RestartRequested): change_drain,
    (State.DRAINING, DrainRequested): keep_drained,
    (State.DRAINING, QuarantineRequested): keep_drained,
    (State.DRAINING, ProbeFailed): unhealthy,
    (State.DRAINING, ProcessExited): crashed,
    (State.DRAINING, KillRequested): kill_now,
    (State.STOPPING, ProcessExited): stopped,
    (State.STOPPING, DeadlinePassed): insist,
    (State.STOPPING, StopRequested): stop_while_stopping,
    (State.STOPPING, HoldRequested): stop_while_stopping,
    (State.STOPPING, StartRequested): start_while_stopping,
    (State.STOPPING, RestartRequested): start_while_stopping,
    (State.STOPPING, ReleaseRequested): start_while_stopping,
    (State.STOPPING, DrainRequested): drain_while_stopping,
    (State.STOPPING, ResumeRequested): resume_while_stopping,
    (State.STOPPING, KillRequested): kill_now,
    (State.BACKOFF, DeadlinePassed): retry,
    (State.BACKOFF, StartRequested): start_fresh,
    (State.BACKOFF, RestartRequested): start_fresh,
    (State.BACKOFF, StopRequested): settle,
    (State.BACKOFF, HoldRequested): settle,
    (State.BACKOFF, DrainRequested): leave_rotation,
    (State.BACKOFF, ResumeRequested): return_to_rotation,
    (State.BACKOFF, KillRequested): settle,
    (State.FAILED, StartRequested): start_fresh,
    (State.FAILED, RestartRequested): start_fresh,
    (State.FAILED, StopRequested): settle,
    (State.FAILED, HoldRequested): settle,
    (State.FAILED, KillRequested): settle,
}
"""(state, event) -> handler. A pair that is absent changes nothing, so each command but `restart` is idempotent."""
