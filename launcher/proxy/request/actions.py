"""A request's states, its outcomes, and the actions that the executor performs."""

from __future__ import annotations

from enum import IntEnum, StrEnum, auto


class State(IntEnum):
    """Where a request is. An IntEnum indexes the transition table without a call."""

    RECEIVING = 0  # its body comes
    QUEUED = 1
    BACKOFF = 2  # every instance was tried
    SENT = 3  # an upstream works on it and has delivered nothing
    ANSWERING = 4  # bytes of the upstream's response went to the client
    DONE = 5


class Outcome(StrEnum):
    """How an accepted request ended; exactly one of these."""

    COMPLETED = "completed"  # a whole response of an upstream was delivered
    REFUSED = "refused"  # the same, with a 4xx, 501 or 505, or the event of a stream that is one
    CLIENT_ABORTED = "client_aborted"  # the client left first
    REJECTED = "rejected"  # the proxy's own refusal: limits, no such model, no ready instance
    FAILED = "failed"  # a 5xx, or a response that broke after its first byte


class OverflowReason(StrEnum):
    """Why a request goes to an overflow endpoint."""

    FULL = "full"  # it would be refused
    PREDICTED = "predicted"  # its first token is predicted to come too late


class Action(IntEnum):
    """What the executor does."""

    AUTHORIZE = 0  # route, API key, CORS
    LOOK = auto()  # read the next step of a large body
    ADMIT = auto()  # classify, then enqueue
    RENDER_PAGE = auto()
    ENQUEUE = auto()  # again, at the place of its arrival
    SET_TIMER = auto()  # for BackoffOver
    COUNT_RETRY = auto()
    SEND = auto()
    SEND_OVERFLOW = auto()
    READ = auto()
    START = auto()  # commit: the head, where none went out, and the first bytes
    FIRST_TOKEN = auto()
    SETTLE = auto()  # blame the instances that failed before another one succeeded
    COMMENT = auto()
    CHECK_CLIENT = auto()  # the deadlines of its connection
    PAUSE = auto()
    RESUME = auto()
    DELIVER = auto()  # a whole response
    FINISH = auto()  # the end of a stream
    REFUSE = auto()  # an error of the proxy's own, as a whole response
    BREAK_OFF = auto()  # the same after a head went out: an error event, or no clean end
    ABORT = auto()  # close the client's connection without a clean end
    WITHDRAW = auto()  # out of the queue; no timer, no page
    LEAVE = auto()  # off the upstream
    FAULT = auto()  # log the proxy's own error, then end the request (decisions.fault)
    COUNT = auto()  # outcome, histograms, the key's charge
    LOG = auto()  # the access log's line
