"""Every transition of a slot, then any sequence of events against a model of the world."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace
from support.examples import examples

from launcher.config.schema import Supervision
from launcher.engines.causes import Cause, Retry
from launcher.instances.diagnosis import exited
from launcher.instances.lifecycle import (
    JITTER,
    STARTING_STOP_S,
    TRANSITIONS,
    Limits,
    Step,
    advance,
    restart_delay,
)
from launcher.instances.slot_state import (
    Action,
    DeadlinePassed,
    DrainRequested,
    Event,
    HoldRequested,
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

NOW = 5000.0
LIMITS = Limits.of(Supervision())
G = 3
OOM = Cause("oom", "died", "less", Retry.BACKOFF)
TYPO = Cause("typo", "refused", "correct it", Retry.NEVER)
SICK = Cause("unhealthy", "sick", "wait", Retry.BACKOFF)
KILLED = Cause("killed-by-operator", "somebody", "", Retry.NOW)
EXIT = ProcessExited(G, OOM, 0.0)
A = Action


def slot(state: State, intent: Intent = Intent.RUN, **more: object) -> SlotState:
    return replace(SlotState(state=state, intent=intent, generation=G, since=1.0), **more)


def act(of: SlotState, *events: Event, now: float = NOW, limits: Limits = LIMITS) -> Step:
    """The slot after all events, and the actions of the last."""
    actions: tuple[Action, ...] = ()
    for event in events:
        of, actions = advance(of, event, now, limits)
    return of, actions


# Drained, its deadline over.
CUT = slot(State.DRAINING, Intent.DRAIN, cut=True)

# (before, event, state after, intent after, actions)
TABLE: list[tuple[SlotState, Event, State, Intent, tuple[Action, ...]]] = [
    (SlotState(), StartRequested(), State.STARTING, Intent.RUN, (A.SPAWN,)),
    (SlotState(), RestartRequested(), State.STARTING, Intent.RUN, (A.SPAWN,)),
    (SlotState(), DrainRequested(), State.STOPPED, Intent.STOP, ()),
    (SlotState(), ResumeRequested(), State.STOPPED, Intent.STOP, ()),
    (SlotState(), StopRequested(), State.STOPPED, Intent.STOP, ()),
    (SlotState(), KillRequested(), State.STOPPED, Intent.STOP, ()),
    (slot(State.STARTING), ProbeSucceeded(G), State.READY, Intent.RUN, (A.ANNOUNCE_READY,)),
    (
        # The proxy learns of it, and that it gets nothing: a later stop can then wait for idleness.
        slot(State.STARTING, Intent.DRAIN),
        ProbeSucceeded(G),
        State.DRAINING,
        Intent.DRAIN,
        (A.ANNOUNCE_READY, A.ANNOUNCE_DRAINING),
    ),
    (slot(State.STARTING), EXIT, State.BACKOFF, Intent.RUN, ()),
    (slot(State.STARTING, Intent.DRAIN), EXIT, State.BACKOFF, Intent.DRAIN, ()),
    (slot(State.STARTING), ProcessExited(G, TYPO, 0), State.FAILED, Intent.RUN, ()),
    (slot(State.STARTING), DeadlinePassed(), State.STOPPING, Intent.RUN, (A.KILL,)),
    (slot(State.STARTING), StopRequested(), State.STOPPING, Intent.STOP, (A.TERMINATE,)),
    (slot(State.STARTING), KillRequested(), State.STOPPING, Intent.STOP, (A.KILL,)),
    (slot(State.STARTING), DrainRequested(), State.STARTING, Intent.DRAIN, ()),
    (slot(State.STARTING, Intent.DRAIN), ResumeRequested(), State.STARTING, Intent.RUN, ()),
    (slot(State.STARTING, Intent.DRAIN), StartRequested(), State.STARTING, Intent.RUN, ()),
    (slot(State.STARTING), RestartRequested(), State.STOPPING, Intent.RUN, (A.TERMINATE,)),
    (slot(State.STARTING, Intent.DRAIN), RestartRequested(), State.STOPPING, Intent.RUN, (A.TERMINATE,)),
    (slot(State.STARTING, Intent.QUARANTINE), RestartRequested(), State.STARTING, Intent.QUARANTINE, ()),
    (slot(State.STOPPING, restarting=True), RestartRequested(), State.STOPPING, Intent.RUN, ()),
    (slot(State.STARTING), ProbeFailed(G, SICK), State.STOPPING, Intent.RUN, (A.KILL,)),
    # hold: stopped, and nothing but a release starts it
    (SlotState(), HoldRequested(), State.HELD, Intent.HOLD, ()),
    (slot(State.HELD, Intent.HOLD), HoldRequested(), State.HELD, Intent.HOLD, ()),
    (slot(State.HELD, Intent.HOLD), StartRequested(), State.HELD, Intent.HOLD, ()),
    (slot(State.HELD, Intent.HOLD), RestartRequested(), State.HELD, Intent.HOLD, ()),
    (slot(State.HELD, Intent.HOLD), StopRequested(), State.HELD, Intent.HOLD, ()),
    (slot(State.HELD, Intent.HOLD), KillRequested(), State.HELD, Intent.HOLD, ()),
    (slot(State.HELD, Intent.HOLD), ReleaseRequested(), State.STARTING, Intent.RUN, (A.SPAWN,)),
    (slot(State.STARTING), HoldRequested(), State.STOPPING, Intent.HOLD, (A.TERMINATE,)),
    (slot(State.READY), HoldRequested(), State.DRAINING, Intent.HOLD, (A.ANNOUNCE_DRAINING,)),
    (slot(State.DRAINING, Intent.DRAIN), HoldRequested(), State.DRAINING, Intent.HOLD, (A.ANNOUNCE_DRAINING,)),
    (slot(State.DRAINING, Intent.HOLD), HoldRequested(), State.DRAINING, Intent.HOLD, ()),
    (slot(State.DRAINING, Intent.HOLD), StopRequested(), State.DRAINING, Intent.STOP, (A.ANNOUNCE_DRAINING,)),
    (slot(State.DRAINING, Intent.HOLD), ResumeRequested(), State.DRAINING, Intent.HOLD, ()),
    (slot(State.DRAINING, Intent.HOLD), ReleaseRequested(), State.READY, Intent.RUN, (A.ANNOUNCE_READY,)),
    (slot(State.DRAINING, Intent.HOLD), WentIdle(G), State.STOPPING, Intent.HOLD, (A.ANNOUNCE_GONE, A.TERMINATE)),
    (slot(State.DRAINING, Intent.HOLD), EXIT, State.HELD, Intent.HOLD, (A.ANNOUNCE_FAILED,)),
    (slot(State.STOPPING), HoldRequested(), State.STOPPING, Intent.HOLD, ()),
    (slot(State.STOPPING, Intent.HOLD), StartRequested(), State.STOPPING, Intent.HOLD, ()),
    (slot(State.STOPPING, Intent.HOLD), ReleaseRequested(), State.STOPPING, Intent.RUN, ()),
    (slot(State.STOPPING, Intent.STOP), ReleaseRequested(), State.STOPPING, Intent.STOP, ()),
    (slot(State.STOPPING, Intent.HOLD), EXIT, State.HELD, Intent.HOLD, ()),
    (slot(State.STOPPING, Intent.HOLD, crash=SICK), EXIT, State.HELD, Intent.HOLD, ()),
    (slot(State.BACKOFF), HoldRequested(), State.HELD, Intent.HOLD, ()),
    (slot(State.FAILED), HoldRequested(), State.HELD, Intent.HOLD, ()),
    # quarantine: kept running, whatever its probes find
    (slot(State.READY), QuarantineRequested(), State.DRAINING, Intent.QUARANTINE, (A.ANNOUNCE_DRAINING,)),
    (slot(State.READY), ReleaseRequested(), State.READY, Intent.RUN, ()),
    (slot(State.STARTING), QuarantineRequested(), State.STARTING, Intent.QUARANTINE, ()),
    (slot(State.STARTING, Intent.QUARANTINE), DrainRequested(), State.STARTING, Intent.QUARANTINE, ()),
    (slot(State.STARTING, Intent.QUARANTINE), StartRequested(), State.STARTING, Intent.QUARANTINE, ()),
    (slot(State.STARTING, Intent.QUARANTINE), DeadlinePassed(), State.STARTING, Intent.QUARANTINE, ()),
    (slot(State.STARTING, Intent.QUARANTINE), ProbeFailed(G, SICK), State.STARTING, Intent.QUARANTINE, ()),
    (slot(State.STARTING, Intent.QUARANTINE), ReleaseRequested(), State.STARTING, Intent.RUN, ()),
    (slot(State.STARTING), ReleaseRequested(), State.STARTING, Intent.RUN, ()),
    (
        slot(State.STARTING, Intent.QUARANTINE), ProbeSucceeded(G), State.DRAINING, Intent.QUARANTINE,
        (A.ANNOUNCE_READY, A.ANNOUNCE_DRAINING),
    ),
    (slot(State.STARTING, Intent.QUARANTINE), EXIT, State.HELD, Intent.HOLD, ()),
    (slot(State.DRAINING, Intent.STOP), QuarantineRequested(), State.DRAINING, Intent.QUARANTINE, ()),
    (slot(State.DRAINING, Intent.QUARANTINE), DrainRequested(), State.DRAINING, Intent.QUARANTINE, ()),
    (slot(State.DRAINING, Intent.QUARANTINE), RestartRequested(), State.DRAINING, Intent.QUARANTINE, ()),
    (slot(State.DRAINING, Intent.QUARANTINE), ResumeRequested(), State.DRAINING, Intent.QUARANTINE, ()),
    (slot(State.DRAINING, Intent.QUARANTINE), StopRequested(), State.DRAINING, Intent.STOP, (A.ANNOUNCE_DRAINING,)),
    (slot(State.DRAINING, Intent.QUARANTINE), ProbeFailed(G, SICK), State.DRAINING, Intent.QUARANTINE, ()),
    (slot(State.DRAINING, Intent.QUARANTINE), WentIdle(G), State.DRAINING, Intent.QUARANTINE, ()),
    (slot(State.DRAINING, Intent.QUARANTINE), EXIT, State.HELD, Intent.HOLD, (A.ANNOUNCE_FAILED,)),
    (slot(State.DRAINING, Intent.QUARANTINE), ReleaseRequested(), State.READY, Intent.RUN, (A.ANNOUNCE_READY,)),
    (slot(State.DRAINING, Intent.DRAIN), ReleaseRequested(), State.DRAINING, Intent.DRAIN, ()),
    # a drain that is not waited for any longer: what is in flight ends, the instance stays
    (
        slot(State.DRAINING, Intent.DRAIN, deadline=NOW), DeadlinePassed(), State.DRAINING, Intent.DRAIN,
        (A.ANNOUNCE_GONE,),
    ),
    (CUT, StopRequested(), State.STOPPING, Intent.STOP, (A.TERMINATE,)),
    (CUT, RestartRequested(), State.STOPPING, Intent.RUN, (A.TERMINATE,)),
    (CUT, ResumeRequested(), State.READY, Intent.RUN, (A.ANNOUNCE_READY,)),
    (CUT, EXIT, State.BACKOFF, Intent.DRAIN, ()),
    (CUT, ProbeFailed(G, SICK), State.STOPPING, Intent.DRAIN, (A.KILL,)),
    (CUT, KillRequested(), State.STOPPING, Intent.STOP, (A.KILL,)),
    (CUT, QuarantineRequested(), State.DRAINING, Intent.QUARANTINE, ()),
    (SlotState(), ProcessAdopted(0), State.STARTING, Intent.RUN, ()),
    (slot(State.READY), StartRequested(), State.READY, Intent.RUN, ()),
    (slot(State.READY), ResumeRequested(), State.READY, Intent.RUN, ()),
    (slot(State.READY), DrainRequested(), State.DRAINING, Intent.DRAIN, (A.ANNOUNCE_DRAINING,)),
    (slot(State.READY), RestartRequested(), State.DRAINING, Intent.RUN, (A.ANNOUNCE_DRAINING,)),
    (slot(State.READY), StopRequested(), State.DRAINING, Intent.STOP, (A.ANNOUNCE_DRAINING,)),
    (slot(State.READY), KillRequested(), State.STOPPING, Intent.STOP, (A.ANNOUNCE_GONE, A.KILL)),
    (slot(State.READY), ProbeFailed(G, SICK), State.STOPPING, Intent.RUN, (A.ANNOUNCE_FAILED, A.KILL)),
    (slot(State.READY), EXIT, State.BACKOFF, Intent.RUN, (A.ANNOUNCE_FAILED,)),
    (slot(State.READY), WentIdle(G), State.READY, Intent.RUN, ()),
    (slot(State.DRAINING, Intent.DRAIN), WentIdle(G), State.DRAINING, Intent.DRAIN, ()),
    (slot(State.DRAINING, Intent.DRAIN), ResumeRequested(), State.READY, Intent.RUN, (A.ANNOUNCE_READY,)),
    (slot(State.DRAINING, Intent.DRAIN), StartRequested(), State.READY, Intent.RUN, (A.ANNOUNCE_READY,)),
    (slot(State.DRAINING, Intent.DRAIN), DrainRequested(), State.DRAINING, Intent.DRAIN, ()),
    (slot(State.DRAINING, Intent.DRAIN), StopRequested(), State.DRAINING, Intent.STOP, (A.ANNOUNCE_DRAINING,)),
    (slot(State.DRAINING, Intent.DRAIN), RestartRequested(), State.DRAINING, Intent.RUN, (A.ANNOUNCE_DRAINING,)),
    (slot(State.DRAINING, Intent.DRAIN), EXIT, State.BACKOFF, Intent.DRAIN, (A.ANNOUNCE_FAILED,)),
    (slot(State.DRAINING, Intent.STOP), WentIdle(G), State.STOPPING, Intent.STOP, (A.ANNOUNCE_GONE, A.TERMINATE)),
    (slot(State.DRAINING, Intent.STOP), DeadlinePassed(), State.STOPPING, Intent.STOP, (A.ANNOUNCE_GONE, A.TERMINATE)),
    (slot(State.DRAINING, Intent.STOP), StopRequested(), State.DRAINING, Intent.STOP, ()),
    (slot(State.DRAINING, Intent.STOP), ResumeRequested(), State.READY, Intent.RUN, (A.ANNOUNCE_READY,)),
    (slot(State.DRAINING, Intent.STOP), DrainRequested(), State.DRAINING, Intent.DRAIN, ()),
    (slot(State.DRAINING, Intent.STOP), KillRequested(), State.STOPPING, Intent.STOP, (A.ANNOUNCE_GONE, A.KILL)),
    (slot(State.DRAINING, Intent.STOP), EXIT, State.STOPPED, Intent.STOP, (A.ANNOUNCE_FAILED,)),
    (slot(State.DRAINING, Intent.STOP), ProbeFailed(G, SICK), State.STOPPING, Intent.STOP, (A.ANNOUNCE_FAILED, A.KILL)),
    (
        slot(State.DRAINING, restarting=True), WentIdle(G), State.STOPPING, Intent.RUN,
        (A.ANNOUNCE_GONE, A.TERMINATE),
    ),
    (slot(State.DRAINING, restarting=True), RestartRequested(), State.DRAINING, Intent.RUN, ()),
    (slot(State.STOPPING, Intent.STOP), EXIT, State.STOPPED, Intent.STOP, ()),
    (slot(State.STOPPING), EXIT, State.STARTING, Intent.RUN, (A.SPAWN,)),
    (slot(State.STOPPING, Intent.DRAIN), EXIT, State.STARTING, Intent.DRAIN, (A.SPAWN,)),
    (slot(State.STOPPING, crash=SICK), EXIT, State.BACKOFF, Intent.RUN, ()),
    (slot(State.STOPPING, Intent.STOP, crash=SICK), EXIT, State.STOPPED, Intent.STOP, ()),
    (slot(State.STOPPING), DeadlinePassed(), State.STOPPING, Intent.RUN, (A.KILL,)),
    (slot(State.STOPPING), StopRequested(), State.STOPPING, Intent.STOP, ()),
    (slot(State.STOPPING, Intent.STOP), StartRequested(), State.STOPPING, Intent.RUN, ()),
    (slot(State.STOPPING, Intent.STOP), RestartRequested(), State.STOPPING, Intent.RUN, ()),
    (slot(State.STOPPING), DrainRequested(), State.STOPPING, Intent.DRAIN, ()),
    (slot(State.STOPPING, Intent.STOP), DrainRequested(), State.STOPPING, Intent.STOP, ()),
    (slot(State.STOPPING, Intent.DRAIN), ResumeRequested(), State.STOPPING, Intent.RUN, ()),
    (slot(State.STOPPING, Intent.STOP), ResumeRequested(), State.STOPPING, Intent.STOP, ()),
    (slot(State.STOPPING, Intent.STOP), KillRequested(), State.STOPPING, Intent.STOP, (A.KILL,)),
    (slot(State.STOPPING), ProbeSucceeded(G), State.STOPPING, Intent.RUN, ()),
    (slot(State.BACKOFF), DeadlinePassed(), State.STARTING, Intent.RUN, (A.SPAWN,)),
    (slot(State.BACKOFF, Intent.DRAIN), DeadlinePassed(), State.STARTING, Intent.DRAIN, (A.SPAWN,)),
    (slot(State.BACKOFF, Intent.DRAIN), StartRequested(), State.STARTING, Intent.RUN, (A.SPAWN,)),
    (slot(State.BACKOFF), RestartRequested(), State.STARTING, Intent.RUN, (A.SPAWN,)),
    (slot(State.BACKOFF), StopRequested(), State.STOPPED, Intent.STOP, ()),
    (slot(State.BACKOFF), KillRequested(), State.STOPPED, Intent.STOP, ()),
    (slot(State.BACKOFF), DrainRequested(), State.BACKOFF, Intent.DRAIN, ()),
    (slot(State.BACKOFF, Intent.DRAIN), ResumeRequested(), State.BACKOFF, Intent.RUN, ()),
    (slot(State.FAILED), StartRequested(), State.STARTING, Intent.RUN, (A.SPAWN,)),
    (slot(State.FAILED), RestartRequested(), State.STARTING, Intent.RUN, (A.SPAWN,)),
    (slot(State.FAILED), StopRequested(), State.STOPPED, Intent.STOP, ()),
    (slot(State.FAILED), KillRequested(), State.STOPPED, Intent.STOP, ()),
    (slot(State.FAILED), ResumeRequested(), State.FAILED, Intent.RUN, ()),
    (slot(State.FAILED), DeadlinePassed(), State.FAILED, Intent.RUN, ()),
]  # fmt: skip


def name(case: object) -> str:
    match case:
        case SlotState():
            return f"{case.state}/{case.intent}"
        case State() | Intent():
            return case.value
        case tuple():
            return "+".join(case) or "nothing"
        case _:
            return type(case).__name__


@pytest.mark.parametrize(("before", "event", "state", "intent", "actions"), TABLE, ids=name)
def test_transition(
    before: SlotState, event: Event, state: State, intent: Intent, actions: tuple[Action, ...]
) -> None:
    after, done = advance(before, event, NOW, LIMITS)
    assert (after.state, after.intent, done) == (state, intent, actions)
    assert after.generation == before.generation + (A.SPAWN in done)
    if after.state is not before.state:
        assert after.since == NOW


def test_every_transition_of_the_table_has_a_case() -> None:
    assert {(before.state, type(event)) for before, event, *_ in TABLE} >= set(TRANSITIONS)


def test_an_event_of_an_older_generation_changes_nothing() -> None:
    for state in State:
        before = slot(state)
        for event in (
            ProbeSucceeded(G - 1),
            ProbeFailed(G - 1, SICK),
            WentIdle(G - 1),
            ProcessExited(G - 1, OOM, 0),
        ):
            assert advance(before, event, NOW, LIMITS) == (before, ())


@pytest.mark.parametrize(
    ("before", "event", "after_s"),
    [
        (SlotState(), StartRequested(), LIMITS.ready_timeout_s),
        (slot(State.STARTING), StopRequested(), STARTING_STOP_S),
        (slot(State.STARTING), RestartRequested(), STARTING_STOP_S),
        (slot(State.STARTING), DeadlinePassed(), LIMITS.stop_timeout_s),
        (slot(State.READY), DrainRequested(), None),
        (slot(State.READY), RestartRequested(), LIMITS.drain_timeout_s),
        (slot(State.READY), StopRequested(), LIMITS.drain_timeout_s),
        (slot(State.DRAINING, Intent.STOP, deadline=9.0), DrainRequested(), None),
        (slot(State.DRAINING, Intent.STOP, deadline=9.0), ResumeRequested(), None),
        (slot(State.DRAINING, Intent.STOP), WentIdle(G), LIMITS.stop_timeout_s),
        (slot(State.STOPPING), DeadlinePassed(), LIMITS.stop_timeout_s),
        (slot(State.STARTING), EXIT, LIMITS.backoff_initial_s),
        (slot(State.STARTING), ProcessExited(G, TYPO, 0.0), None),
        (slot(State.STOPPING, Intent.STOP), EXIT, None),
    ],
    ids=name,
)
def test_deadline(before: SlotState, event: Event, after_s: float | None) -> None:
    after, _ = advance(before, event, NOW, LIMITS)
    assert after.deadline == (None if after_s is None else NOW + after_s)


def test_a_short_stop_timeout_bounds_a_loading_stop_too() -> None:
    after, _ = advance(slot(State.STARTING), StopRequested(), NOW, replace(LIMITS, stop_timeout_s=2.0))
    assert after.deadline == NOW + 2


def test_an_exit_with_code_0_is_a_crash() -> None:
    after, _ = act(
        slot(State.READY), ProcessExited(G, Cause("unknown", "exit code 0", "", Retry.BACKOFF), 0.0)
    )
    assert (after.state, after.crashes) == (State.BACKOFF, (NOW,))
    assert after.last_cause is not None
    assert after.last_cause.message == "exit code 0"


def test_a_kill_for_bad_health_reports_its_reason_not_the_signal() -> None:
    after, _ = act(slot(State.READY), ProbeFailed(G, SICK), ProcessExited(G, OOM, 0.0))
    assert (after.state, after.last_cause, after.crash) == (State.BACKOFF, SICK, None)


def test_never_ready_is_a_crash_that_says_so() -> None:
    after, _ = act(slot(State.STARTING), DeadlinePassed(), EXIT)
    assert after.state is State.BACKOFF
    assert after.last_cause is not None
    assert after.last_cause.name == "not-ready-in-time"
    assert "1800 s" in after.last_cause.message


def test_the_fifth_crash_within_the_window_fails_the_slot() -> None:
    of = SlotState()
    of, _ = advance(of, StartRequested(), 0.0, LIMITS)
    for crash in range(1, LIMITS.crash_limit + 1):
        of, _ = advance(of, ProcessExited(of.generation, OOM, 0.0), crash * 10.0, LIMITS)
        assert of.state is (State.FAILED if crash == LIMITS.crash_limit else State.BACKOFF)
        if of.state is State.BACKOFF:
            of, actions = advance(of, DeadlinePassed(), crash * 10.0 + 5, LIMITS)
            assert actions == (A.SPAWN,)
    assert (of.generation, of.restarts) == (5, 4)
    of, _ = advance(of, StartRequested(), 100.0, LIMITS)
    assert of.crashes == (), "an operator's start forgets"


def test_crashes_out_of_the_window_are_forgotten() -> None:
    old = tuple(NOW - LIMITS.crash_window_s - i for i in range(4))
    after, _ = act(slot(State.READY, crashes=old), EXIT)
    assert (after.state, after.crashes) == (State.BACKOFF, (NOW,))


def test_a_cause_to_try_again_now_waits_the_second_time() -> None:
    after, _ = act(slot(State.READY), ProcessExited(G, KILLED, 0.0))
    assert (after.state, after.deadline) == (State.BACKOFF, NOW)
    again, _ = act(slot(State.READY, crashes=(NOW - 5,)), ProcessExited(G, KILLED, 0.0))
    assert again.deadline == NOW + 2 * LIMITS.backoff_initial_s


def test_a_drain_with_a_deadline_is_moved_and_forgotten() -> None:
    drained, _ = act(slot(State.READY), DrainRequested(30.0))
    assert drained.deadline == NOW + 30
    assert act(drained, DrainRequested())[0].deadline == NOW + 30
    assert act(drained, DrainRequested(10.0))[0].deadline == NOW + 10
    assert act(drained, WentIdle(G))[0].deadline is None
    assert act(drained, QuarantineRequested())[0].deadline is None


def test_a_quarantine_keeps_the_cause_that_probes_found() -> None:
    looked_at, _ = act(slot(State.DRAINING, Intent.QUARANTINE), ProbeFailed(G, SICK))
    assert looked_at.last_cause == SICK
    released, _ = act(slot(State.STARTING, Intent.QUARANTINE), DeadlinePassed(), ReleaseRequested())
    assert released.deadline == NOW + LIMITS.ready_timeout_s


def test_an_adopted_instance_keeps_its_generation_and_is_no_restart() -> None:
    after, actions = act(SlotState(), ProcessAdopted(7))
    assert (after.generation, after.restarts, after.deadline) == (7, 0, NOW + LIMITS.ready_timeout_s)
    assert actions == ()


def test_a_restart_is_no_crash() -> None:
    after, actions = act(slot(State.READY), RestartRequested(), WentIdle(G), EXIT)
    assert (after.state, after.generation, after.restarts, after.crashes, after.last_cause) == (
        State.STARTING, G + 1, 1, (), None,
    )  # fmt: skip
    assert actions == (A.SPAWN,)
    assert not after.restarting


def test_a_crash_during_a_restart_is_counted_and_comes_back() -> None:
    after, _ = act(slot(State.READY), RestartRequested(), EXIT)
    assert (after.state, after.restarting, after.crashes) == (State.BACKOFF, False, (NOW,))


def test_a_start_called_while_stopping_starts_afterwards() -> None:
    after, actions = act(slot(State.STOPPING, Intent.STOP), StartRequested(), EXIT)
    assert (after.state, actions) == (State.STARTING, (A.SPAWN,))


def test_delays_double_to_their_limit_and_jitter_shortens_them() -> None:
    delays = [restart_delay(n, 0.0, LIMITS) for n in range(1, 10)]
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert restart_delay(1, 0.5, LIMITS) == pytest.approx(1 - JITTER / 2)
    assert restart_delay(10_000, 0.999, LIMITS) > 48


# --- any sequence --------------------------------------------------------------------------

VERBS = st.sampled_from(
    [
        StartRequested(), RestartRequested(), DrainRequested(), DrainRequested(30.0), ResumeRequested(),
        StopRequested(), HoldRequested(), QuarantineRequested(), ReleaseRequested(),
    ]
)  # fmt: skip
CAUSES = st.sampled_from([OOM, TYPO, KILLED])
WITH_PROCESS = {State.STARTING, State.READY, State.DRAINING, State.STOPPING}


class SlotModel(RuleBasedStateMachine):
    """The slot against a world with at most one process and a proxy."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = replace(LIMITS, crash_limit=3)
        self.slot = SlotState()
        self.now = 0.0
        self.living: int | None = None
        self.generations: list[int] = []
        self.in_rotation: int | None = None
        """The life that the proxy may send to."""
        self.known: int | None = None
        """The life that the proxy knows."""

    def feed(self, event: Event) -> tuple[Action, ...]:
        self.slot, actions = advance(self.slot, event, self.now, self.limits)
        for action in actions:
            match action:
                case Action.SPAWN:
                    assert self.living is None, "a second process in the slot"
                    assert self.slot.generation not in self.generations, "an old generation"
                    self.living = self.slot.generation
                    self.generations.append(self.living)
                case Action.ANNOUNCE_READY:
                    assert self.living == self.slot.generation
                    self.in_rotation = self.known = self.living
                case Action.ANNOUNCE_DRAINING:
                    assert self.known == self.slot.generation, "the proxy does not know it"
                    self.in_rotation = None
                case Action.ANNOUNCE_GONE | Action.ANNOUNCE_FAILED:
                    assert self.known == self.slot.generation
                    self.in_rotation = self.known = None
                case Action.TERMINATE | Action.KILL:
                    assert self.living is not None
                    assert self.in_rotation is None, "killed while it may get requests"
        return actions

    @rule(verb=VERBS)
    def operator_asks_twice(self, verb: Event) -> None:
        self.feed(verb)
        if verb == RestartRequested():
            # A start is stopped and repeated, also one that the first request has begun.
            self.feed(verb)
        once = self.slot
        assert self.feed(verb) == ()
        assert self.slot == once

    @rule()
    def daemon_is_told_twice_to_stop(self) -> None:
        self.feed(KillRequested())
        assert self.slot.state in {State.STOPPING, State.STOPPED, State.HELD}

    @precondition(lambda self: self.living is not None)
    @rule(cause=CAUSES, jitter=st.floats(0, 0.99))
    def process_ends(self, cause: Cause, jitter: float) -> None:
        assert self.living is not None
        ended, self.living = self.living, None
        self.feed(ProcessExited(ended, cause, jitter))
        if self.slot.intent is Intent.STOP:
            assert self.slot.state is State.STOPPED
        if self.slot.intent is Intent.HOLD:
            assert self.slot.state is State.HELD

    @precondition(lambda self: self.generations)
    @rule(data=st.data())
    def the_world_says(self, data: st.DataObject) -> None:
        """Also late, of lives that are over."""
        generation = data.draw(st.sampled_from(self.generations))
        event = data.draw(
            st.sampled_from([ProbeSucceeded(generation), ProbeFailed(generation, SICK), WentIdle(generation)])
        )
        self.feed(event)

    @precondition(lambda self: self.slot.deadline is not None)
    @rule()
    def deadline_passes(self) -> None:
        assert self.slot.deadline is not None
        self.now = max(self.now, self.slot.deadline)
        before = self.slot
        self.feed(DeadlinePassed())
        assert self.slot != before, "a deadline that changes nothing would come again at once, for ever"

    @rule(seconds=st.floats(0, 1000))
    def time_passes(self, seconds: float) -> None:
        deadline = self.slot.deadline
        self.now = (
            self.now + seconds if deadline is None else min(self.now + seconds, max(self.now, deadline))
        )

    @invariant()
    def state_and_process_agree(self) -> None:
        assert (self.slot.state in WITH_PROCESS) == (self.living is not None)
        assert (self.slot.state is State.READY) == (self.in_rotation is not None)
        assert (self.slot.state in {State.READY, State.DRAINING} and not self.slot.cut) == (
            self.known is not None
        )
        assert not self.slot.cut or self.slot.state in {State.DRAINING, State.STOPPING}

    @invariant()
    def nothing_waits_for_ever(self) -> None:
        """Loading, stopping, backing off, and draining to an end have a deadline; resting states have none."""
        aside = self.slot.intent in {Intent.DRAIN, Intent.QUARANTINE}
        match self.slot.state:
            case State.STOPPING | State.BACKOFF:
                assert self.slot.deadline is not None
            case State.STARTING:
                assert (self.slot.deadline is not None) or self.slot.intent is Intent.QUARANTINE
            case State.DRAINING:
                assert (self.slot.deadline is not None) or aside
                assert (self.slot.deadline is None) or self.slot.intent is not Intent.QUARANTINE
            case _:
                assert self.slot.deadline is None

    @invariant()
    def intent_and_state_agree(self) -> None:
        match self.slot.state:
            case State.STOPPED:
                assert self.slot.intent is Intent.STOP
            case State.HELD:
                assert self.slot.intent is Intent.HOLD
            case State.READY:
                assert self.slot.intent is Intent.RUN
            case State.BACKOFF | State.FAILED:
                assert self.slot.intent in {Intent.RUN, Intent.DRAIN}
            case State.STARTING:
                assert self.slot.intent in {Intent.RUN, Intent.DRAIN, Intent.QUARANTINE}
            case _:
                pass

    @invariant()
    def counters_agree(self) -> None:
        assert self.slot.generation == len(self.generations)
        assert self.slot.restarts == max(0, len(self.generations) - 1)
        assert len(self.slot.crashes) <= self.limits.crash_limit
        assert self.slot.crash is None or self.slot.state is State.STOPPING


SlotModel.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestSlotModel = SlotModel.TestCase


def test_the_exit_tells_the_cause_of_an_instance_whose_main_process_had_ended() -> None:
    after, _ = act(slot(State.READY), ProbeFailed(G, exited()), ProcessExited(G, KILLED, 0.0))
    assert after.last_cause == KILLED
    after, _ = act(slot(State.READY), ProbeFailed(G, SICK), ProcessExited(G, KILLED, 0.0))
    assert after.last_cause == SICK, "the daemon has killed it"
