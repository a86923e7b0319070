"""Each state and event: the next state and the actions; any sequence of events: one end, nothing lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.requests import BODY, NEXT_INSTANCE, Call, World, begin, executor_of, request_of

from launcher.balancing.upstreams import Demand, Ticket, Upstream
from launcher.base.api_errors import HttpError
from launcher.proxy.continuation.transcript import Transcript
from launcher.proxy.dispatch.executor import Perform
from launcher.proxy.http1.responses import parse_response
from launcher.proxy.request import events
from launcher.proxy.request.actions import Action, Outcome, State
from launcher.proxy.request.decisions import MAX_DEATHS, fault
from launcher.proxy.request.events import Event
from launcher.proxy.request.lifecycle import TRANSITIONS
from launcher.proxy.request.ports import Answer
from launcher.proxy.request.record import Request
from launcher.proxy.sse.tracker import EventTracker

A = Action


def advance(request: Request, event: Event, world: World | None = None) -> tuple[Action, ...]:
    """What is performed at an event."""
    performed: list[Action] = []

    def noting(action: Action) -> Perform:
        return lambda _request, _event, _now: performed.append(action)

    executor_of(world or World(), {action: noting(action) for action in Action}).post(request, event)
    return tuple(performed)


def answer(status: int, body: bytes = b"{}") -> Answer:
    head = b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\nContent-Type: application/json\r\n\r\n"
    return Answer(parse_response(head % (status, len(body)), "POST"), body)


def of(name: str, request: Request) -> Event:
    """An event by a short name, of the present attempt."""
    attempt: Any = request.attempt
    error = HttpError(429, "no")
    failed = events.AttemptFailed
    made: dict[str, Event] = {
        "head": events.HeadReceived(),
        "whole": events.RequestReceived(BODY),
        "grew": events.BodyGrew(bytearray()),
        "body": events.BodyCompleted(BODY),
        "no body": events.BodyCompleted(b""),
        "refused": events.Refused(error),
        "no capacity": events.NoCapacity(error),
        "late": events.PredictedLate(),
        "bound": events.Bound(),
        "backoff over": events.BackoffOver(),
        "comment": events.CommentDue(),
        "paused": events.ClientPaused(),
        "resumed": events.ClientResumed(),
        "left": events.ClientLeft(),
        "stalled": events.ClientStalled("slow"),
        "stopped": events.ServerStopped("stop"),
        "died": events.InstanceDied(),
        "page": events.PageReady(answer(200)),
        "bytes": events.BytesArrived(attempt, b"x"),
        "started": events.StreamStarted(attempt, b"x", None),
        "computed": events.PromptComputed(attempt),
        "200": events.AnswerReceived(attempt, answer(200)),
        "404": events.AnswerReceived(attempt, answer(404)),
        "completed": events.AnswerCompleted(attempt, b""),
        "diverged": events.Diverged(attempt, "odd", ids_ignored=False),
        "ignored": events.Diverged(attempt, "ids", ids_ignored=True),
        "500": failed(attempt, "it answered 500", answer(500)),
        "broken": failed(attempt, "reset"),
        "killed": failed(attempt, "signal 9", died=True),
        "bad head": failed(attempt, "bad", deterministic=True),
    }
    return made[name]


ALL = (
    "head", "whole", "grew", "body", "no body", "refused", "no capacity", "late", "bound", "backoff over", "comment",
    "paused", "resumed", "left", "stalled", "stopped", "died", "page", "bytes", "started", "computed", "200", "404",
    "completed", "diverged", "ignored", "500", "broken", "killed", "bad head",
)  # fmt: skip
REFUSED = (A.WITHDRAW, A.LEAVE, A.REFUSE, A.COUNT, A.LOG)
BROKEN_OFF = (A.WITHDRAW, A.LEAVE, A.BREAK_OFF, A.COUNT, A.LOG)
RETRIED = (A.LEAVE, A.COUNT_RETRY, A.ENQUEUE)
ENDED = (A.WITHDRAW, A.LEAVE, A.COUNT, A.LOG)
R, Q, B, S, W, D = State


@pytest.mark.parametrize(
    ("state", "event", "then", "actions"),
    [
        (R, "head", R, (A.AUTHORIZE,)),
        (R, "whole", Q, (A.AUTHORIZE, A.ADMIT)),
        (R, "grew", R, (A.LOOK,)),
        (R, "body", Q, (A.ADMIT,)),
        (R, "refused", D, REFUSED),
        (R, "page", D, (A.DELIVER, A.LEAVE, A.COUNT, A.LOG)),
        (R, "left", D, ENDED),
        (R, "bound", R, ()),
        (Q, "bound", S, (A.SEND,)),
        (Q, "no capacity", D, REFUSED),
        (Q, "comment", Q, (A.COMMENT,)),
        (Q, "left", D, ENDED),
        (Q, "body", Q, ()),
        (B, "backoff over", Q, (A.ENQUEUE,)),
        (B, "bound", B, ()),
        (S, "bytes", S, (A.READ,)),
        (S, "started", W, (A.START,)),
        (S, "200", D, (A.DELIVER, A.LEAVE, A.COUNT, A.LOG)),
        (S, "404", D, (A.DELIVER, A.LEAVE, A.COUNT, A.LOG)),
        (S, "500", Q, RETRIED),
        (S, "broken", Q, RETRIED),
        (S, "bad head", D, REFUSED),
        (S, "completed", D, (A.START, A.SETTLE, A.FINISH, A.LEAVE, A.COUNT, A.LOG)),
        (S, "stopped", D, REFUSED),
        (S, "stalled", D, (A.ABORT, *ENDED)),
        (W, "computed", W, (A.FIRST_TOKEN,)),
        (W, "paused", W, (A.PAUSE,)),
        (W, "resumed", W, (A.RESUME,)),
        (W, "completed", D, (A.FINISH, A.LEAVE, A.COUNT, A.LOG)),
        (W, "broken", Q, (A.LEAVE, A.ENQUEUE)),
        (W, "comment", W, (A.COMMENT,)),
        (W, "stopped", D, BROKEN_OFF),
    ],
)
def test_the_table(state: State, event: str, then: State, actions: tuple[Action, ...]) -> None:
    request = request_of(state=state)
    assert advance(request, of(event, request)) == actions
    assert request.state is then


@pytest.mark.parametrize("name", ALL)
def test_nothing_happens_to_a_request_that_is_done(name: str) -> None:
    request = request_of(state=State.DONE)
    assert advance(request, of(name, request)) == ()


@pytest.mark.parametrize("name", ["bytes", "started", "200", "completed", "broken", "diverged"])
def test_an_attempt_before_the_present_one_changes_nothing(name: str) -> None:
    request = request_of(state=State.SENT)
    late = of(name, request)
    request.attempt = Call(None)
    assert advance(request, late) == ()
    assert request.state is State.SENT


def test_a_page_is_rendered() -> None:
    request = request_of("/health")
    assert advance(request, events.BodyCompleted(b"")) == (A.RENDER_PAGE,)
    assert request.state is State.SENT
    assert advance(request_of("/health"), events.RequestReceived(b"")) == (A.AUTHORIZE, A.RENDER_PAGE)


def test_what_is_on_no_route_is_not_admitted() -> None:
    request = request_of()
    request.match = None
    assert advance(request, events.RequestReceived(b"")) == (A.AUTHORIZE,)
    assert request.state is State.RECEIVING


def test_the_overflow_endpoint_takes_what_finds_no_capacity() -> None:
    request = request_of(state=State.QUEUED)
    actions = advance(request, of("no capacity", request), World(overflow=True))
    assert (actions, request.state, request.ticket) == ((A.SEND_OVERFLOW,), State.SENT, None)


def test_one_predicted_to_be_late_overflows_and_comes_back_when_no_endpoint_answers() -> None:
    request, world = request_of(state=State.QUEUED), World(overflow=True)
    ticket = request.ticket
    assert ticket is not None
    ticket.limit_s = 4.0
    assert advance(request, of("late", request), world) == (A.SEND_OVERFLOW,)
    assert (request.state, request.ticket, request.overflow_reason) == (State.SENT, None, "predicted")
    for name in ("first", "second"):
        assert request.overflow == name
        request.overflow_tried += (name,)
        request.attempt = Call(None)
        actions = advance(request, of("broken", request), world)
        assert actions == ((A.LEAVE, A.SEND_OVERFLOW) if name == "first" else (A.LEAVE, A.ENQUEUE))
    assert (request.state, request.ticket, ticket.limit_s) == (State.QUEUED, ticket, None)
    assert (request.overflow, request.overflow_reason) == ("", None)


def test_one_predicted_to_be_late_is_queued_when_no_endpoint_takes_it() -> None:
    request = request_of(state=State.QUEUED)
    ticket = request.ticket
    assert ticket is not None
    ticket.limit_s = 4.0
    assert advance(request, of("late", request)) == (A.ENQUEUE,)
    assert (request.state, request.ticket, ticket.limit_s) == (State.QUEUED, ticket, None)


def test_not_after_comments() -> None:
    request = request_of(state=State.QUEUED)
    request.head_sent = True
    actions = advance(request, of("no capacity", request), World(overflow=True))
    assert actions == BROKEN_OFF


def test_when_all_instances_failed_the_last_response_is_delivered() -> None:
    request = request_of(state=State.SENT)
    actions = advance(request, of("500", request), World(left=False))
    assert actions == (A.DELIVER, A.LEAVE, A.COUNT, A.LOG)
    assert request.outcome is Outcome.FAILED


def test_when_none_gave_a_response_all_are_tried_again_after_a_pause() -> None:
    request = request_of(state=State.SENT)
    actions = advance(request, of("broken", request), World(left=False))
    assert actions == (A.LEAVE, A.COUNT_RETRY, A.SET_TIMER)
    assert request.state is State.BACKOFF
    assert request.failures is not None
    assert request.failures.pause_s > 0


def test_after_three_deaths_there_is_no_fourth_attempt() -> None:
    request = request_of(state=State.SENT)
    request.deaths = 2
    assert advance(request, of("killed", request)) == REFUSED
    assert request.reason == "3 instances died while they worked on it"


def test_only_deaths_before_the_first_byte_count() -> None:
    """A stream is continued over as many as MAX_CONTINUED."""
    request = request_of(state=State.ANSWERING)
    for _ in range(MAX_DEATHS):
        advance(request, events.InstanceDied())
    assert request.deaths == 0
    assert advance(request, of("killed", request)) == (A.LEAVE, A.ENQUEUE)


def test_a_success_settles_who_was_at_fault() -> None:
    request = request_of(state=State.SENT)
    advance(request, of("500", request))
    request.state = State.SENT
    assert advance(request, of("200", request)) == (
        A.DELIVER,
        A.LEAVE,
        A.SETTLE,
        A.COUNT,
        A.LOG,
    )


@pytest.mark.parametrize(("whole", "outcome"), [(True, Outcome.COMPLETED), (False, Outcome.CLIENT_ABORTED)])
def test_a_client_that_leaves_at_done_has_its_response(whole: bool, outcome: Outcome) -> None:
    request = request_of(state=State.ANSWERING)
    assert request.tracker is not None
    if whole:
        request.tracker.feed(b"data: [DONE]\n\n")
    advance(request, events.ClientLeft())
    assert request.outcome is outcome


def test_every_action_is_due_somewhere() -> None:
    from_handlers = {
        A.SETTLE,
        A.COUNT_RETRY,
        A.SEND_OVERFLOW,
        A.SET_TIMER,
        A.DELIVER,
        A.REFUSE,
        A.BREAK_OFF,
        A.RENDER_PAGE,
    }
    found = {
        action
        for row in TRANSITIONS.values()
        for actions in row.values()
        if isinstance(actions, tuple)
        for action in actions
    }
    reached = {A.ADMIT, A.SEND, A.START, A.FINISH, A.LEAVE, A.COUNT, A.LOG, A.WITHDRAW, A.ABORT, A.ENQUEUE}
    assert found | from_handlers | reached == set(Action)


@dataclass
class Run:
    """Performs actions on the record alone, and notes them."""

    request: Request
    world: World
    done: list[Action] = field(default_factory=list)
    leaves: int = 0

    def feed(self, name: str) -> None:
        for action in advance(self.request, of(name, self.request), self.world):
            self.perform(action)

    def perform(self, action: Action) -> None:
        request = self.request
        self.done.append(action)
        match action:
            case A.SEND:
                request.attempt = Call(Upstream(request.attempts, 1, "m", NEXT_INSTANCE, 4), EventTracker())
                request.attempts += 1
            case A.SEND_OVERFLOW:
                request.attempt = Call(None, EventTracker())
            case A.START if request.attempt is not None:
                begin(request)
            case A.COMMENT:
                request.head_sent = True
                request.tracker = request.tracker or EventTracker()
            case A.LEAVE:
                self.leaves += request.attempt is not None
                request.attempt = None
            case A.ADMIT:
                request.ticket = Ticket(Demand("m"), 0.0, 1.0)
                request.transcript = Transcript()
            case A.COUNT:
                assert request.outcome is not None
                assert not request.counted
                request.counted = True
            case _:
                pass


@given(st.lists(st.sampled_from(ALL), max_size=40), st.booleans(), st.booleans(), st.booleans())
def test_any_sequence_ends_once(names: list[str], left: bool, overflow: bool, faults: bool) -> None:
    run = Run(request_of(), World(left, overflow))
    for name in names:
        run.feed(name)
    request, done = run.request, run.done
    if request.state is not State.DONE:
        if faults:
            for action in fault(request):
                run.perform(action)
        else:
            run.feed("left")
    assert request.state is State.DONE
    assert done.count(A.COUNT) == done.count(A.LOG) == 1
    assert done[-2:] == [A.COUNT, A.LOG]
    assert done.count(A.SEND) + done.count(A.SEND_OVERFLOW) == run.leaves
    ends = [action for action in done if action in {A.DELIVER, A.FINISH, A.REFUSE, A.BREAK_OFF, A.ABORT}]
    assert len(ends) <= 1
    assert ends or request.outcome in {Outcome.CLIENT_ABORTED, Outcome.COMPLETED}
    assert done.count(A.ADMIT) <= 1
    if A.BREAK_OFF in ends:
        assert request.outcome is not Outcome.COMPLETED
