"""One slot's life as a pure state machine: `advance(slot, event, now) -> (slot, actions)`.

All transitions stand in TRANSITIONS; a pair that is not there changes nothing, which makes every
operator verb idempotent. The supervisor performs the actions and feeds the events; no I/O here.
The words (states, intents, events, actions) are slot.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from launcher.instances.backoff import SHORTAGE_DELAY_S, Limits, restart_delay
from launcher.instances.causes import Cause, Retry
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

__all__ = [
    "STARTING_STOP_S",
    "TRANSITIONS",
    "Action",
    "DeadlinePassed",
    "DrainRequested",
    "Event",
    "HoldRequested",
    "Intent",
    "KillRequested",
    "ProbeFailed",
    "ProbeSucceeded",
    "ProcessAdopted",
    "ProcessExited",
    "QuarantineRequested",
    "ReleaseRequested",
    "RestartRequested",
    "ResumeRequested",
    "SlotState",
    "StartRequested",
    "State",
    "Step",
    "StopRequested",
    "WentIdle",
    "advance",
]  # fmt: skip

Step = tuple[SlotState, tuple[Action, ...]]

# A loading instance has no request to lose; this is only so that it can end its compiler cleanly.
STARTING_STOP_S: Final = 5.0

# Out of rotation, and alive.
_ASIDE: Final = frozenset({Intent.DRAIN, Intent.QUARANTINE})
# No process in the end, and where that is.
_REST: Final = {Intent.STOP: State.STOPPED, Intent.HOLD: State.HELD}


def advance(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    """The next slot and what to do. An event of an older generation, or out of place, changes nothing."""
    if isinstance(event, InstanceReport) and event.generation != slot.generation:
        return slot, ()
    handler = TRANSITIONS.get((slot.state, type(event)))
    if handler is None:
        return slot, ()
    return handler(slot, event, now, limits)


def _enter(slot: SlotState, state: State, now: float, deadline: float | None = None) -> SlotState:
    return replace(slot, state=state, since=now, deadline=deadline)


def _gone(slot: SlotState) -> tuple[Action, ...]:
    """For an instance that the proxy knows."""
    known = slot.state in {State.READY, State.DRAINING} and not slot.cut
    return (Action.ANNOUNCE_GONE,) if known else ()


def _rest(slot: SlotState, intent: Intent, now: float) -> SlotState:
    """Into the state without a process that `intent` asks for."""
    slot = replace(slot, intent=intent, restarting=False, crash=None, cut=False)
    return _enter(slot, _REST[intent], now)


def _remember(slot: SlotState, cause: Cause, now: float) -> SlotState:
    return replace(slot, last_cause=cause, cause_at=now, cause_generation=slot.generation)


def _spawn(slot: SlotState, now: float, limits: Limits) -> Step:
    """Into `starting` with a new generation."""
    slot = replace(
        slot,
        generation=slot.generation + 1,
        restarts=slot.restarts + (slot.generation > 0),
        restarting=False,
        cut=False,
        crash=None,
    )
    return _enter(slot, State.STARTING, now, now + limits.ready_timeout_s), (Action.SPAWN,)


def _start_fresh(slot: SlotState, _event: Event, now: float, limits: Limits) -> Step:
    """An operator's start forgets old crashes."""
    return _spawn(replace(slot, intent=Intent.RUN, crashes=()), now, limits)


def _adopt(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    """It is not known to be ready until it has answered us: many requests may be lost with the daemon before."""
    assert isinstance(event, ProcessAdopted)  # noqa: S101  narrows the table's type
    slot = replace(slot, intent=Intent.RUN, generation=event.generation)
    return _enter(slot, State.STARTING, now, now + limits.ready_timeout_s), ()


def _retry_now(slot: SlotState, _event: Event, now: float, limits: Limits) -> Step:
    """The back-off is over."""
    return _spawn(slot, now, limits)


def _stop(slot: SlotState, now: float, deadline: float, *, crash: Cause | None = None) -> Step:
    """Into `stopping` by SIGTERM; nothing is in flight any more."""
    return _enter(replace(slot, crash=crash), State.STOPPING, now, deadline), (Action.TERMINATE,)


def _kill(slot: SlotState, now: float, limits: Limits, crash: Cause) -> Step:
    """Into `stopping` by SIGKILL: the instance has failed and its exit will count as a crash."""
    slot = replace(slot, crash=crash)
    return _enter(slot, State.STOPPING, now, now + limits.stop_timeout_s), (Action.KILL,)


def _became_ready(slot: SlotState, _event: Event, now: float, _limits: Limits) -> Step:
    if slot.intent in _ASIDE:
        # The proxy has to know it, or a later stop would wait for an idleness that nobody reports.
        return _enter(slot, State.DRAINING, now), (Action.ANNOUNCE_READY, Action.ANNOUNCE_DRAINING)
    return _enter(slot, State.READY, now), (Action.ANNOUNCE_READY,)


def _never_ready(slot: SlotState, _event: Event, now: float, limits: Limits) -> Step:
    if slot.intent is Intent.QUARANTINE:  # somebody looks at why
        return replace(slot, deadline=None), ()
    cause = Cause(
        "not-ready-in-time",
        f"not ready within {limits.ready_timeout_s:.0f} s",
        "read `numa-launcher logs SLOT`; a large model may need a longer supervision.ready_timeout_s",
        Retry.BACKOFF,
    )
    return _kill(slot, now, limits, cause)


def _failed_start(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    """The engine has said so, and does not end."""
    assert isinstance(event, ProbeFailed)  # noqa: S101  narrows the table's type
    if slot.intent is Intent.QUARANTINE:
        return _remember(slot, event.cause, now), ()
    return _kill(slot, now, limits, event.cause)


def _stop_starting(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    slot = replace(slot, intent=_resting(event), restarting=False)
    return _stop(slot, now, now + min(STARTING_STOP_S, limits.stop_timeout_s))


def _resting(event: Event) -> Intent:
    return Intent.HOLD if isinstance(event, HoldRequested) else Intent.STOP


def _aside(slot: SlotState, event: Event, _now: float, _limits: Limits) -> Step:
    """A life that is not ready yet stays out of rotation when it is. A quarantine is only ended by its release."""
    if slot.intent is Intent.QUARANTINE:
        return slot, ()
    wanted = Intent.QUARANTINE if isinstance(event, QuarantineRequested) else Intent.DRAIN
    return replace(slot, intent=wanted), ()


def _run(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    if (slot.intent is Intent.QUARANTINE) is not isinstance(event, ReleaseRequested):
        return slot, ()
    if slot.state is State.STARTING and slot.deadline is None:  # the quarantine had taken it away
        slot = replace(slot, deadline=now + limits.ready_timeout_s)
    return replace(slot, intent=Intent.RUN), ()


def _begin_drain(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    """No new requests; what follows depends on the verb."""
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
            slot = replace(slot, intent=_resting(event), restarting=False)
    if slot.cut:  # nothing is in flight, and nobody would report it
        return _stop(slot, now, now + limits.stop_timeout_s)
    # Announced again when it already drains: idleness must be reported once more.
    return _enter(slot, State.DRAINING, now, deadline), (Action.ANNOUNCE_DRAINING,)


def _redrain(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    """A verb on a slot that already drains: the same verb changes nothing, another one takes over."""
    restart = isinstance(event, RestartRequested)
    wanted = (Intent.RUN, True) if restart else (_resting(event), False)
    if (slot.intent, slot.restarting) == wanted or (restart and slot.intent is Intent.QUARANTINE):
        return slot, ()
    return _begin_drain(slot, event, now, limits)


def _keep_drained(slot: SlotState, event: Event, now: float, _limits: Limits) -> Step:
    """Alive instead of stopped. The same verb again only moves its deadline."""
    assert isinstance(event, DrainRequested | QuarantineRequested)  # noqa: S101  narrows the table's type
    if isinstance(event, QuarantineRequested):
        return replace(slot, intent=Intent.QUARANTINE, restarting=False, deadline=None), ()
    if slot.intent is Intent.QUARANTINE:
        return slot, ()
    deadline = slot.deadline if slot.intent is Intent.DRAIN else None
    if event.deadline_s is not None:
        deadline = now + event.deadline_s
    return replace(slot, intent=Intent.DRAIN, restarting=False, deadline=deadline), ()


def _went_idle(slot: SlotState, _event: Event, now: float, limits: Limits) -> Step:
    if slot.intent in _ASIDE:
        return replace(slot, deadline=None), ()
    return _stop_drained(slot, now, limits)


def _drain_is_over(slot: SlotState, _event: Event, now: float, limits: Limits) -> Step:
    """What is left ends honestly. A drained slot's instance stays; the proxy forgets it until it is resumed."""
    if slot.intent in _ASIDE:
        return replace(slot, deadline=None, cut=True), (Action.ANNOUNCE_GONE,)
    return _stop_drained(slot, now, limits)


def _stop_drained(slot: SlotState, now: float, limits: Limits) -> Step:
    stopping, actions = _stop(slot, now, now + limits.stop_timeout_s)
    return stopping, (Action.ANNOUNCE_GONE, *actions)


def _resume(slot: SlotState, event: Event, now: float, _limits: Limits) -> Step:
    held = slot.intent in {Intent.QUARANTINE, Intent.HOLD}
    if held is not isinstance(event, ReleaseRequested):
        return slot, ()
    slot = replace(slot, intent=Intent.RUN, restarting=False, cut=False)
    return _enter(slot, State.READY, now), (Action.ANNOUNCE_READY,)


def _unhealthy(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    assert isinstance(event, ProbeFailed)  # noqa: S101  narrows the table's type
    if slot.intent is Intent.QUARANTINE:
        return _remember(slot, event.cause, now), ()
    stopping, actions = _kill(slot, now, limits, event.cause)
    return stopping, (*_gone(slot), *actions)


def _crashed(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    """An exit that nobody asked for, exit code 0 included (vllm#48966)."""
    assert isinstance(event, ProcessExited)  # noqa: S101  narrows the table's type
    announce = _gone(slot)
    cause = slot.crash or event.cause
    crashes = tuple(t for t in slot.crashes if now - t < limits.crash_window_s)
    if cause.retry is not Retry.SOON:
        crashes = (*crashes, now)
    elif cause == slot.last_cause:
        cause = slot.last_cause  # the same shortage goes on: no news
    slot = _remember(replace(slot, crashes=crashes, crash=None, restarting=False, cut=False), cause, now)
    if slot.intent in _REST:
        return _rest(slot, slot.intent, now), announce
    if slot.intent is Intent.QUARANTINE:  # nothing is left to look at but its last words
        return _rest(slot, Intent.HOLD, now), announce
    if cause.retry is Retry.SOON:
        return _enter(slot, State.BACKOFF, now, now + SHORTAGE_DELAY_S), announce
    if cause.retry is Retry.NEVER or len(crashes) >= limits.crash_limit:
        return _enter(slot, State.FAILED, now), announce
    at_once = cause.retry is Retry.NOW and len(crashes) == 1
    delay = 0.0 if at_once else restart_delay(len(crashes), event.jitter, limits)
    return _enter(slot, State.BACKOFF, now, now + delay), announce


def _stopped(slot: SlotState, event: Event, now: float, limits: Limits) -> Step:
    """The exit that was asked for."""
    if slot.crash is not None:
        return _crashed(slot, event, now, limits)
    if slot.intent in _REST:
        return _rest(slot, slot.intent, now), ()
    return _spawn(slot, now, limits)


def _insist(slot: SlotState, _event: Event, now: float, limits: Limits) -> Step:
    """SIGTERM was not enough."""
    return replace(slot, deadline=now + limits.stop_timeout_s), (Action.KILL,)


def _rest_while_stopping(slot: SlotState, event: Event, _now: float, _limits: Limits) -> Step:
    return replace(slot, intent=_resting(event), restarting=False), ()


def _start_while_stopping(slot: SlotState, event: Event, _now: float, _limits: Limits) -> Step:
    if (slot.intent is Intent.HOLD) is not isinstance(event, ReleaseRequested):
        return slot, ()
    return replace(slot, intent=Intent.RUN, restarting=True), ()


def _drain_while_stopping(slot: SlotState, _event: Event, _now: float, _limits: Limits) -> Step:
    """The next instance, where there will be one, stays out of rotation."""
    return (slot if slot.intent in _REST else replace(slot, intent=Intent.DRAIN)), ()


def _resume_while_stopping(slot: SlotState, _event: Event, _now: float, _limits: Limits) -> Step:
    """Takes back a drain of the next life; a stop is not called off any more."""
    return (replace(slot, intent=Intent.RUN) if slot.intent is Intent.DRAIN else slot), ()


def _kill_now(slot: SlotState, _event: Event, now: float, limits: Limits) -> Step:
    announce = _gone(slot)
    slot = replace(slot, intent=Intent.STOP, restarting=False)
    return _enter(slot, State.STOPPING, now, now + limits.stop_timeout_s), (*announce, Action.KILL)


def _give_up(slot: SlotState, event: Event, now: float, _limits: Limits) -> Step:
    return _rest(slot, _resting(event), now), ()


Handler = Callable[[SlotState, Event, float, Limits], Step]

TRANSITIONS: Final[Mapping[tuple[State, type], Handler]] = {
    (State.STOPPED, StartRequested): _start_fresh,
    (State.STOPPED, RestartRequested): _start_fresh,
    (State.STOPPED, HoldRequested): _give_up,
    (State.STOPPED, ProcessAdopted): _adopt,
    (State.HELD, ReleaseRequested): _start_fresh,
    (State.STARTING, ProbeSucceeded): _became_ready,
    (State.STARTING, ProcessExited): _crashed,
    (State.STARTING, ProbeFailed): _failed_start,
    (State.STARTING, DeadlinePassed): _never_ready,
    (State.STARTING, RestartRequested): _run,
    (State.STARTING, StartRequested): _run,
    (State.STARTING, ResumeRequested): _run,
    (State.STARTING, ReleaseRequested): _run,
    (State.STARTING, StopRequested): _stop_starting,
    (State.STARTING, HoldRequested): _stop_starting,
    (State.STARTING, DrainRequested): _aside,
    (State.STARTING, QuarantineRequested): _aside,
    (State.STARTING, KillRequested): _kill_now,
    (State.READY, DrainRequested): _begin_drain,
    (State.READY, RestartRequested): _begin_drain,
    (State.READY, StopRequested): _begin_drain,
    (State.READY, HoldRequested): _begin_drain,
    (State.READY, QuarantineRequested): _begin_drain,
    (State.READY, ProbeFailed): _unhealthy,
    (State.READY, ProcessExited): _crashed,
    (State.READY, KillRequested): _kill_now,
    (State.DRAINING, WentIdle): _went_idle,
    (State.DRAINING, DeadlinePassed): _drain_is_over,
    (State.DRAINING, ResumeRequested): _resume,
    (State.DRAINING, StartRequested): _resume,
    (State.DRAINING, ReleaseRequested): _resume,
    (State.DRAINING, StopRequested): _redrain,
    (State.DRAINING, HoldRequested): _redrain,
    (State.DRAINING, RestartRequested): _redrain,
    (State.DRAINING, DrainRequested): _keep_drained,
    (State.DRAINING, QuarantineRequested): _keep_drained,
    (State.DRAINING, ProbeFailed): _unhealthy,
    (State.DRAINING, ProcessExited): _crashed,
    (State.DRAINING, KillRequested): _kill_now,
    (State.STOPPING, ProcessExited): _stopped,
    (State.STOPPING, DeadlinePassed): _insist,
    (State.STOPPING, StopRequested): _rest_while_stopping,
    (State.STOPPING, HoldRequested): _rest_while_stopping,
    (State.STOPPING, StartRequested): _start_while_stopping,
    (State.STOPPING, RestartRequested): _start_while_stopping,
    (State.STOPPING, ReleaseRequested): _start_while_stopping,
    (State.STOPPING, DrainRequested): _drain_while_stopping,
    (State.STOPPING, ResumeRequested): _resume_while_stopping,
    (State.STOPPING, KillRequested): _kill_now,
    (State.BACKOFF, DeadlinePassed): _retry_now,
    (State.BACKOFF, StartRequested): _start_fresh,
    (State.BACKOFF, RestartRequested): _start_fresh,
    (State.BACKOFF, StopRequested): _give_up,
    (State.BACKOFF, HoldRequested): _give_up,
    (State.BACKOFF, DrainRequested): _aside,
    (State.BACKOFF, ResumeRequested): _run,
    (State.BACKOFF, KillRequested): _give_up,
    (State.FAILED, StartRequested): _start_fresh,
    (State.FAILED, RestartRequested): _start_fresh,
    (State.FAILED, StopRequested): _give_up,
    (State.FAILED, HoldRequested): _give_up,
    (State.FAILED, KillRequested): _give_up,
}
"""(state, event) -> handler. What is absent changes nothing."""
