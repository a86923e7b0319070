"""A request's lifecycle: what each event leads to in each state. dispatch/executor.py looks it up and performs it.

A pair that is not in TRANSITIONS changes nothing, and neither does an event of an attempt that is not the present one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from launcher.proxy.request.actions import Action, State
from launcher.proxy.request.decisions import Actions, Decisions
from launcher.proxy.request.events import (
    AnswerCompleted,
    AnswerReceived,
    AttemptFailed,
    BackoffOver,
    BodyCompleted,
    BodyGrew,
    Bound,
    BytesArrived,
    ClientLeft,
    ClientPaused,
    ClientResumed,
    ClientStalled,
    CommentDue,
    ConnectionDue,
    Diverged,
    Due,
    Event,
    Faulted,
    HeadReceived,
    InstanceDied,
    NoCapacity,
    PageReady,
    PromptComputed,
    Refused,
    RequestReceived,
    ServerStopped,
    StreamStarted,
)
from launcher.proxy.request.record import Request

_LOOK: Final = (Action.LOOK,)
_AUTHORIZE: Final = (Action.AUTHORIZE,)
_READ: Final = (Action.READ,)
_FIRST_TOKEN: Final = (Action.FIRST_TOKEN,)
_COMMENT: Final = (Action.COMMENT,)
_CHECK: Final = (Action.CHECK_CLIENT,)
_PAUSE: Final = (Action.PAUSE,)
_RESUME: Final = (Action.RESUME,)
_FAULT: Final = (Action.FAULT,)


def _due(_decisions: Decisions, _request: Request, event: Due, _now: float) -> Actions:
    return (event.action,)


Handler = Callable[[Decisions, Request, Any, float], Actions] | Actions
"""What decides (decisions.py), or the actions themselves where nothing is to be decided."""

_ANYWHERE: Final[Mapping[type[Event], Handler]] = {
    ClientLeft: Decisions.client_left,
    ClientStalled: Decisions.client_stalled,
    ServerStopped: Decisions.stopped,
    Faulted: _FAULT,
    InstanceDied: Decisions.died,
    ClientPaused: _PAUSE,
    ClientResumed: _RESUME,
    ConnectionDue: _CHECK,
}
TRANSITIONS: Final[Mapping[State, Mapping[type[Event], Handler]]] = {
    State.RECEIVING: {
        **_ANYWHERE,
        HeadReceived: _AUTHORIZE,
        RequestReceived: Decisions.received,
        BodyGrew: _LOOK,
        BodyCompleted: Decisions.body_completed,
        PageReady: Decisions.page_ready,
        Refused: Decisions.refused,
    },
    State.QUEUED: {
        **_ANYWHERE,
        Bound: Decisions.bound,
        NoCapacity: Decisions.no_capacity,
        Refused: Decisions.refused,
        CommentDue: _COMMENT,
    },
    State.BACKOFF: {**_ANYWHERE, BackoffOver: Decisions.backoff_over, CommentDue: _COMMENT},
    State.SENT: {
        **_ANYWHERE,
        BytesArrived: _READ,
        StreamStarted: Decisions.started,
        AnswerReceived: Decisions.answered,
        AnswerCompleted: Decisions.completed,
        AttemptFailed: Decisions.failed,
        Diverged: Decisions.diverged,
        CommentDue: _COMMENT,
        PageReady: Decisions.page_ready,
        Refused: Decisions.refused,
    },
    State.ANSWERING: {
        **_ANYWHERE,
        BytesArrived: _READ,
        PromptComputed: _FIRST_TOKEN,
        AnswerCompleted: Decisions.completed,
        AttemptFailed: Decisions.failed,
        Diverged: Decisions.diverged,
    },
    State.DONE: {Due: _due},
}
TABLE: Final = [TRANSITIONS[state] for state in State]
