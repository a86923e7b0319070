"""One event after the other, in the order in which they were posted; an error ends the request on which it happened."""

from __future__ import annotations

import pytest
from support.requests import World, executor_of, request_of

from launcher.base.api_errors import HttpError
from launcher.proxy.dispatch.executor import Executor, Perform
from launcher.proxy.request.actions import Action, Outcome, State
from launcher.proxy.request.events import (
    BackoffOver,
    BodyCompleted,
    BytesArrived,
    ClientPaused,
    ClientResumed,
    Event,
    Faulted,
    RequestReceived,
)
from launcher.proxy.request.record import Request


class Recorder:
    """Performs nothing; what an action raises or posts is set by tests."""

    def __init__(self) -> None:
        self.performed: list[Action] = []
        self.raises: dict[Action, Exception] = {}
        self.posts: dict[Action, list[Event]] = {}
        self.executor: Executor = executor_of(World(), {action: self.performer(action) for action in Action})

    def performer(self, action: Action) -> Perform:
        def perform(request: Request, _event: Event, _now: float) -> None:
            self.performed.append(action)
            for event in self.posts.pop(action, []):
                self.executor.post(request, event)
            if action in self.raises:
                raise self.raises[action]

        return perform


ENDED = [Action.WITHDRAW, Action.LEAVE, Action.REFUSE, Action.COUNT, Action.LOG]


def test_what_an_action_posts_waits_until_all_actions_of_its_event_are_done() -> None:
    recorder, request = Recorder(), request_of()
    recorder.posts[Action.AUTHORIZE] = [ClientPaused(), ClientResumed()]
    recorder.executor.post(request, RequestReceived(b""))
    assert recorder.performed == [Action.AUTHORIZE, Action.ADMIT, Action.PAUSE, Action.RESUME]


def test_an_event_that_its_state_does_not_know_is_passed_over() -> None:
    recorder, request = Recorder(), request_of(state=State.QUEUED)
    recorder.executor.post(request, BackoffOver())
    recorder.executor.post(request, ClientPaused())
    assert recorder.performed == [Action.PAUSE]


def test_an_event_of_an_earlier_attempt_is_passed_over() -> None:
    recorder, request = Recorder(), request_of(state=State.SENT)
    earlier, request.attempt = request.attempt, request_of(state=State.SENT).attempt
    assert earlier is not None
    recorder.executor.post(request, BytesArrived(earlier, b"x"))
    assert recorder.performed == []


def test_an_action_that_raises_an_http_error_refuses_its_request() -> None:
    recorder, request = Recorder(), request_of()
    recorder.raises[Action.AUTHORIZE] = HttpError(401, "no key")
    recorder.executor.post(request, RequestReceived(b""))
    assert recorder.performed == [Action.AUTHORIZE, *ENDED]
    assert (request.outcome, request.error) == (Outcome.REJECTED, recorder.raises[Action.AUTHORIZE])


@pytest.mark.parametrize("action", [Action.AUTHORIZE, Action.ADMIT])
def test_any_other_error_ends_the_request_and_no_other(
    action: Action, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, request, other = Recorder(), request_of(), request_of()
    recorder.raises[action] = ZeroDivisionError()
    recorder.executor.post(request, RequestReceived(b""))
    assert (request.state, request.outcome) == (State.DONE, Outcome.FAILED)
    assert recorder.performed[-5:] == ENDED
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]
    recorder.raises.clear()
    recorder.executor.post(other, BodyCompleted(b""))
    assert other.state is State.QUEUED


def test_an_http_error_where_no_refusal_is_due_ends_the_request_too() -> None:
    recorder, request = Recorder(), request_of(state=State.ANSWERING)
    recorder.raises[Action.PAUSE] = HttpError(400, "odd")
    recorder.executor.post(request, ClientPaused())
    assert (request.state, request.outcome) == (State.DONE, Outcome.FAILED)
    assert Action.BREAK_OFF in recorder.performed


@pytest.mark.parametrize("action", [Action.WITHDRAW, Action.LEAVE, Action.COUNT, Action.LOG])
def test_when_a_last_action_raises_the_others_are_still_due(action: Action) -> None:
    recorder, request = Recorder(), request_of()
    recorder.raises[action] = ZeroDivisionError()
    recorder.executor.post(request, Faulted(KeyboardInterrupt()))
    assert [each for each in recorder.performed if each in ENDED] == ENDED
