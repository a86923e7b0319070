"""A request's lifecycle: what each event leads to in each state. dispatch/executor.py looks it up and performs it.

A pair that is not in TRANSITIONS changes nothing, and neither does an event of an attempt that is not the present one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from launcher.proxy.request import events
from launcher.proxy.request.actions import Action, State
from launcher.proxy.request.decisions import Actions, Decisions
from launcher.proxy.request.record import Request


def _due(_decisions: Decisions, _request: Request, event: events.Due, _now: float) -> Actions:
    return (event.action,)


Handler = Callable[[Decisions, Request, Any, float], Actions] | Actions
"""What decides (decisions.py), or the actions themselves where nothing is to be decided."""

_ANYWHERE: Final[Mapping[type[events.Event], Handler]] = {
    events.ClientLeft: Decisions.client_left,
    events.ClientStalled: Decisions.client_stalled,
    events.ServerStopped: Decisions.stopped,
    events.Faulted: (Action.FAULT,),
    events.InstanceDied: Decisions.died,
    events.ClientPaused: (Action.PAUSE,),
    events.ClientResumed: (Action.RESUME,),
    events.ConnectionDue: (Action.CHECK_CLIENT,),
}
TRANSITIONS: Final[Mapping[State, Mapping[type[events.Event], Handler]]] = {
    State.RECEIVING: {
        **_ANYWHERE,
        events.HeadReceived: (Action.AUTHORIZE,),
        events.RequestReceived: Decisions.received,
        events.BodyGrew: (Action.LOOK,),
        events.BodyCompleted: Decisions.body_completed,
        events.PageReady: Decisions.page_ready,
        events.Refused: Decisions.refused,
    },
    State.QUEUED: {
        **_ANYWHERE,
        events.Bound: Decisions.bound,
        events.NoCapacity: Decisions.no_capacity,
        events.PredictedLate: Decisions.predicted_late,
        events.Refused: Decisions.refused,
        events.CommentDue: (Action.COMMENT,),
    },
    State.BACKOFF: {
        **_ANYWHERE,
        events.BackoffOver: Decisions.backoff_over,
        events.CommentDue: (Action.COMMENT,),
    },
    State.SENT: {
        **_ANYWHERE,
        events.BytesArrived: (Action.READ,),
        events.StreamStarted: Decisions.started,
        events.AnswerReceived: Decisions.answered,
        events.AnswerCompleted: Decisions.completed,
        events.AttemptFailed: Decisions.failed,
        events.Diverged: Decisions.diverged,
        events.CommentDue: (Action.COMMENT,),
        events.PageReady: Decisions.page_ready,
        events.Refused: Decisions.refused,
    },
    State.ANSWERING: {
        **_ANYWHERE,
        events.BytesArrived: (Action.READ,),
        events.PromptComputed: (Action.FIRST_TOKEN,),
        events.CommentDue: (Action.COMMENT,),
        events.AnswerCompleted: Decisions.completed,
        events.AttemptFailed: Decisions.failed,
        events.Diverged: Decisions.diverged,
    },
    State.DONE: {events.Due: _due},
}
TABLE: Final = [TRANSITIONS[state] for state in State]
