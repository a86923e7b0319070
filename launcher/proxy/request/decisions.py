"""The decisions about a request. lifecycle.TRANSITIONS says which event of which state leads to which.

Until an upstream's first byte went to the client (`committed`) a request may start again on
another instance. After it a plain stream continues where it was cut (`splice`); any other response ends honestly, in an
error event and without [DONE].
"""

from __future__ import annotations

from typing import Final, Protocol

from launcher.balancing.upstreams import Ending, Ticket, Upstream
from launcher.base.api_errors import (
    CLIENT_ERROR,
    SERVER_ERROR,
    TOO_MANY,
    HttpError,
    blames_request,
    blames_server,
)
from launcher.proxy.continuation.continuation import Complete, NotExact
from launcher.proxy.continuation.splicer import continue_stream
from launcher.proxy.openai.body import without_mark
from launcher.proxy.openai.models import ModelTraits
from launcher.proxy.openai.stream_options import UsageAsk, refuses_usage
from launcher.proxy.request import events
from launcher.proxy.request.actions import Action, Outcome, OverflowReason, State
from launcher.proxy.request.ports import Answer
from launcher.proxy.request.record import Request
from launcher.proxy.request.retry_policy import RetryPolicy
from launcher.proxy.routes import OWN_PAGES, Kind

# --- Whether a request goes to an overflow endpoint, to the next one, or back to the queue here. ---

# Of a request that is written again, for a continuation or the overflow endpoint: up to 40 ms.
MAX_REWRITTEN_BYTES = 8 << 20


class Overflow(Protocol):
    def takes(self, request: Request, reason: OverflowReason, now: float) -> str | None:
        """Name of the overflow endpoint that a request may be sent to now; None: it stays here."""


class Overflowing:
    """Changes the request where it goes."""

    def __init__(self, overflow: Overflow | None, traits: ModelTraits) -> None:
        self._overflow = overflow
        self._traits = traits

    def starts(self, request: Request, reason: OverflowReason, now: float) -> bool:
        """Whether an overflow endpoint takes it. A head that went out was that of another response."""
        if self._overflow is None or request.head_sent or request.adapter is not None:
            return False
        if len(request.body) > MAX_REWRITTEN_BYTES:
            return False
        endpoint = self._overflow.takes(request, reason, now)
        if endpoint is None:
            return False
        request.ticket = None
        request.overflow, request.overflow_reason = endpoint, reason
        if not self._traits.asks_usage(request.model, endpoint):
            request.usage_ask = UsageAsk.NO
        request.state = State.SENT
        return True

    def continues(self, request: Request, now: float) -> bool:
        """Whether another overflow endpoint takes what one did not answer."""
        reason = request.overflow_reason
        return reason is not None and not request.committed and self.starts(request, reason, now)

    @staticmethod
    def stays(request: Request, ticket: Ticket | None) -> bool:
        """Whether it can be queued here after all, with the ticket that it had: it was predicted to be late."""
        if ticket is None:
            return False
        ticket.limit_s = request.local_ticket = None
        request.ticket, request.state = ticket, State.QUEUED
        request.overflow, request.overflow_reason = "", None
        return True


MAX_CONTINUED = 8  # times that one stream is continued
MAX_DEATHS = 3  # a request that was on so many instances when they died may be what kills them
INTERNAL_ERROR: Final = "internal proxy error"

_OVERFLOW_FAILED: Final = "overflow endpoint failed"

Actions = tuple[Action, ...]

_NOTHING: Final[Actions] = ()
_AUTHORIZE: Final = (Action.AUTHORIZE,)
_AUTHORIZE_AND_ADMIT: Final = (Action.AUTHORIZE, Action.ADMIT)
_AUTHORIZE_AND_RENDER: Final = (Action.AUTHORIZE, Action.RENDER_PAGE)
_ADMIT: Final = (Action.ADMIT,)
_RENDER: Final = (Action.RENDER_PAGE,)
_SEND: Final = (Action.SEND,)
_OVERFLOW: Final = (Action.SEND_OVERFLOW,)
_OVERFLOW_AGAIN: Final = (Action.LEAVE, Action.SEND_OVERFLOW)
_ENQUEUE: Final = (Action.ENQUEUE,)
_START: Final = (Action.START,)
_START_AND_SETTLE: Final = (Action.START, Action.SETTLE)
_LEAVE_AND_QUEUE: Final = (Action.LEAVE, Action.ENQUEUE)
_LEAVE_AND_WAIT: Final = (Action.LEAVE, Action.SET_TIMER)
_RETRY: Final = (Action.LEAVE, Action.COUNT_RETRY, Action.ENQUEUE)
_RETRY_LATER: Final = (Action.LEAVE, Action.COUNT_RETRY, Action.SET_TIMER)
_DELIVER: Final = (Action.DELIVER, Action.LEAVE, Action.COUNT, Action.LOG)
_DELIVER_AND_SETTLE: Final = (Action.DELIVER, Action.LEAVE, Action.SETTLE, Action.COUNT, Action.LOG)
_FINISH: Final = (Action.FINISH, Action.LEAVE, Action.COUNT, Action.LOG)
_START_AND_FINISH: Final = (Action.START, Action.SETTLE, *_FINISH)
_REFUSE: Final = (Action.WITHDRAW, Action.LEAVE, Action.REFUSE, Action.COUNT, Action.LOG)
_BREAK_OFF: Final = (Action.WITHDRAW, Action.LEAVE, Action.BREAK_OFF, Action.COUNT, Action.LOG)
_LET_GO: Final = (Action.WITHDRAW, Action.LEAVE, Action.COUNT, Action.LOG)
_ABORT: Final = (Action.ABORT, *_LET_GO)


class Capacity(Protocol):
    """The balancer."""

    def possible(self, ticket: Ticket) -> bool:
        """Whether there is an instance that it has not tried yet."""

    def retry_after_s(self, now: float) -> int:
        """When a client may try again."""


class Decisions:
    """What each event leads to: the next state, and the actions."""

    def __init__(
        self, retry_policy: RetryPolicy, capacity: Capacity, traits: ModelTraits, overflow: Overflow | None
    ) -> None:
        self._retry_policy = retry_policy
        self._capacity = capacity
        self._traits = traits
        self._overflowing = Overflowing(overflow, traits)

    # --- before an upstream is asked ---------------------------------------------------------------

    def received(self, request: Request, event: events.RequestReceived, _now: float) -> Actions:
        if request.match is None:  # AUTHORIZE refuses it, or answers a CORS preflight
            return _AUTHORIZE
        return _AUTHORIZE_AND_RENDER if _is_page(request, event.body) else _AUTHORIZE_AND_ADMIT

    def body_completed(self, request: Request, event: events.BodyCompleted, _now: float) -> Actions:
        return _RENDER if _is_page(request, event.body) else _ADMIT

    def refused(self, request: Request, event: events.Refused, _now: float) -> Actions:
        return self._refuse(request, event.error)

    def bound(self, request: Request, _event: events.Bound, _now: float) -> Actions:
        request.state = State.SENT
        return _SEND

    def no_capacity(self, request: Request, event: events.NoCapacity, now: float) -> Actions:
        if request.committed:
            return self._fail(request, event.error.message, now, event.error.status)
        if self._overflowing.starts(request, OverflowReason.FULL, now):
            return _OVERFLOW
        return self._refuse(request, event.error)

    def predicted_late(self, request: Request, _event: events.PredictedLate, now: float) -> Actions:
        ticket = request.ticket
        if self._overflowing.starts(request, OverflowReason.PREDICTED, now):
            request.local_ticket = ticket
            return _OVERFLOW
        return _ENQUEUE if self._overflowing.stays(request, ticket) else _NOTHING

    def backoff_over(self, request: Request, _event: events.BackoffOver, _now: float) -> Actions:
        if request.ticket is not None:
            request.ticket.tried.clear()
        request.state = State.QUEUED
        return _ENQUEUE

    # --- what an upstream does ---------------------------------------------------------------------

    def started(self, request: Request, _event: events.StreamStarted, _now: float) -> Actions:
        request.state = State.ANSWERING
        if request.usage_doubt is not None:
            self._conclude_usage(request)
        failures = request.failures
        return _START if failures is None or not failures.blamed else _START_AND_SETTLE

    def page_ready(self, request: Request, event: events.PageReady, _now: float) -> Actions:
        return _deliver(request, event.answer, Outcome.COMPLETED)

    def answered(self, request: Request, event: events.AnswerReceived, now: float) -> Actions:
        answer = event.answer
        status, upstream = answer.head.status, event.attempt.upstream
        if request.usage_ask is not UsageAsk.NO and refuses_usage(status, answer.body):
            return self._without_usage(request, upstream)
        if request.usage_doubt is not None and status < CLIENT_ERROR:
            self._conclude_usage(request)
        if upstream is None:
            return self._overflow_answered(request, answer, now)
        well = status < CLIENT_ERROR
        request.ending = Ending.WHOLE if well else Ending.REFUSED
        if request.committed:
            request.note_tried(upstream)
            return self._from_start(
                request, f"the rest of the answer can't be had: an instance answered {status}", now
            )
        if request.head_sent and well:  # comments promised a stream
            return self._fail(request, "an instance answered with something that is no stream", now)
        if status == 404 and request.match is not None and request.match.route.kind is Kind.STORED:
            request.note_tried(upstream)
            return self._elsewhere(request, "it does not have it", answer, now, fault=False)
        return _deliver(request, answer, _outcome_of(status))

    def _overflow_answered(self, request: Request, answer: Answer, now: float) -> Actions:
        status, request.ending = answer.head.status, Ending.WHOLE
        busy = status == TOO_MANY or status >= SERVER_ERROR
        if busy and (actions := self._not_served(request, now)) is not None:
            return actions
        return _deliver(request, answer, _outcome_of(status))

    def _without_usage(self, request: Request, upstream: Upstream | None) -> Actions:
        """The same again, as its client sent it: the upstream may refuse what the proxy put into it."""
        request.usage_ask, request.usage_doubt = UsageAsk.NO, request.overflow
        request.ending = Ending.REFUSED
        if upstream is None:
            return _OVERFLOW_AGAIN
        request.state = State.QUEUED
        return _LEAVE_AND_QUEUE

    def _conclude_usage(self, request: Request) -> None:
        """A response that is no error: if the same request was refused with what the proxy had put into it, that was why.
        The text of the error alone proves nothing: it may quote the request."""
        if request.usage_doubt is not None and request.usage_doubt == request.overflow:
            self._traits.note_usage_refused(request.model, request.overflow)
        request.usage_doubt = None

    def completed(self, request: Request, event: events.AnswerCompleted, _now: float) -> Actions:
        tracker = event.attempt.tracker
        if request.usage_doubt is not None:
            self._conclude_usage(request)
        request.ending = Ending.WHOLE if tracker is None or tracker.error is None else Ending.REFUSED
        # A continuation passes whole events only.
        request.tail = event.last if request.splice is None else b""
        actions = _FINISH if request.state is State.ANSWERING else _START_AND_FINISH
        request.state = State.DONE
        request.outcome = Outcome.COMPLETED
        if tracker is not None and tracker.error is not None:  # one of the request, with a 4xx
            request.outcome = Outcome.REFUSED if tracker.error_first else Outcome.FAILED
        return actions

    def failed(self, request: Request, event: events.AttemptFailed, now: float) -> Actions:
        if _is_done(request):
            return _complete(request)
        attempt = event.attempt
        upstream = attempt.upstream
        request.ending = Ending.BROKEN
        if upstream is None:
            return self._overflow_failed(request, event, now)
        failures = request.failed()
        failures.reached |= attempt.reached
        failures.unreached += not attempt.reached
        if not attempt.delivering:
            failures.waited_s += now - attempt.asked_at
            if event.answer is not None or (attempt.reached and not event.deterministic):
                failures.blamed.append(upstream)  # the request may be what it stumbles over
        request.deaths += event.died and not request.committed
        request.note_tried(upstream)
        if event.deterministic and not request.committed:
            return self._fail(request, event.reason, now, repeatable=False)
        if not request.committed or (request.splice is not None and not attempt.reached):
            return self._elsewhere(request, event.reason, event.answer, now, fault=True)
        # Nothing can follow half an event, or a response that is no stream.
        if request.tracker is None or (attempt.tracker is not None and attempt.tracker.inside_event):
            return self._fail(request, event.reason, now)
        return self._continue(request, event.reason, now)

    def _not_served(self, request: Request, now: float) -> Actions | None:
        """What follows when an overflow endpoint did not answer: the next one, or the queue here; None: its error."""
        if self._overflowing.continues(request, now):
            return _OVERFLOW_AGAIN
        if not request.committed and self._overflowing.stays(request, request.local_ticket):
            return _LEAVE_AND_QUEUE
        return None

    def _overflow_failed(self, request: Request, event: events.AttemptFailed, now: float) -> Actions:
        if request.committed:
            return self._fail(request, event.reason, now)
        if (actions := self._not_served(request, now)) is not None:
            return actions
        request.reason = _OVERFLOW_FAILED
        error = HttpError(502, _OVERFLOW_FAILED, type_="upstream_error", code="overflow_failed")
        return _end(request, Outcome.FAILED, error)

    def diverged(self, request: Request, event: events.Diverged, now: float) -> Actions:
        request.ending = Ending.LEFT
        if event.attempt.upstream is not None:
            request.note_tried(event.attempt.upstream)
        if event.ids_ignored:
            return self._continue(request, event.reason, now)
        return self._from_start(request, event.reason, now)

    def died(self, request: Request, _event: events.InstanceDied, _now: float) -> Actions:
        request.deaths += not request.committed
        return _NOTHING

    # --- another instance --------------------------------------------------------------------------

    def _elsewhere(
        self, request: Request, reason: str, answer: Answer | None, now: float, *, fault: bool
    ) -> Actions:
        """`answer` is delivered if no other instance does better; `fault`: the instance's."""
        ticket, failures = request.ticket, request.failed()
        if answer is not None:
            failures.answer = answer
        if failures.answer is not None and (ticket is None or not self._capacity.possible(ticket)):
            request.reason = reason
            outcome = Outcome.FAILED if fault else _outcome_of(failures.answer.head.status)
            return _deliver(request, failures.answer, outcome)
        return self._next(request, reason, now, counted=fault)

    def _next(self, request: Request, reason: str, now: float, *, counted: bool) -> Actions:
        """The next attempt, or an end; `counted`: as a retry."""
        ticket, failures = request.ticket, request.failed()
        if ticket is None:
            return self._fail(request, reason, now)
        if request.deaths >= MAX_DEATHS:
            why = f"{request.deaths} instances died while they worked on it"
            return self._fail(request, why, now, repeatable=False)
        pause_s = self._retry_policy.next(
            failures, request.attempts, len(ticket.tried), now,
            timeout_s=request.first_byte_timeout_s, possible=self._capacity.possible(ticket),
        )  # fmt: skip
        if pause_s is None:
            reason = failures.why_given_up(request.first_byte_timeout_s, reason)
            if failures.answer is None:
                return self._fail(request, reason, now)
            request.reason = reason
            return _deliver(request, failures.answer, Outcome.FAILED)
        if pause_s:
            failures.pause_s = pause_s
            request.state = State.BACKOFF
            return _RETRY_LATER if counted else _LEAVE_AND_WAIT
        request.state = State.QUEUED
        return _RETRY if counted else _LEAVE_AND_QUEUE

    def _from_start(self, request: Request, reason: str, now: float) -> Actions:
        """The rest cannot be had by itself: ask for the whole response again, unless that is what was asked for."""
        if request.splice is not None and request.splice.from_start:
            return self._fail(request, reason, now)
        return self._continue(request, reason, now, repeat=True)

    def _continue(self, request: Request, reason: str, now: float, *, repeat: bool = False) -> Actions:
        """Continue a stream that was cut on another instance; `repeat`: from its beginning."""
        transcript = request.transcript
        if (
            transcript is None
            or request.ticket is None
            or request.continued >= MAX_CONTINUED
            or len(request.body) > MAX_REWRITTEN_BYTES
        ):
            return self._fail(request, reason, now)
        engine = self._traits.engine(request.model)
        plan = continue_stream(
            request.path, bytes(without_mark(request.body)), transcript, engine, repeat=repeat
        )
        if isinstance(plan, NotExact):
            request.cut, request.splice = "unfit", None
            request.reason = f"{reason}; not continued: {plan.reason}"
            return self._fail(request, reason, now)
        request.continued += 1
        if isinstance(plan, Complete):
            request.cut, request.tail = "continued", plan.tail
            request.state, request.outcome = State.DONE, Outcome.COMPLETED
            return _FINISH
        request.splice = plan
        return self._next(request, reason, now, counted=False)

    # --- the end -----------------------------------------------------------------------------------

    def client_left(self, request: Request, _event: events.Event, _now: float) -> Actions:
        request.finished = True
        _let_go(request)
        return _LET_GO

    def client_stalled(self, request: Request, event: events.ClientStalled, _now: float) -> Actions:
        request.reason = event.reason
        _let_go(request)
        return _ABORT

    def stopped(self, request: Request, event: events.ServerStopped, now: float) -> Actions:
        if _is_done(request):
            return _complete(request)
        request.ending = Ending.BROKEN
        return self._fail(request, event.reason, now)

    def _refuse(self, request: Request, error: HttpError) -> Actions:
        request.reason = error.message
        return _end(request, Outcome.REJECTED, error)

    def _fail(
        self, request: Request, reason: str, now: float, status: int = 502, *, repeatable: bool = True
    ) -> Actions:
        """There is no way to the rest of the response. `repeatable`: the same request may succeed later."""
        request.reason = request.reason or reason  # one that says more is there already
        if request.committed:
            error = HttpError(
                status, f"the response broke off: {reason}", type_="upstream_error", repeatable=repeatable
            )
            return _end(request, Outcome.FAILED, error)
        retry_after = {"Retry-After": str(self._capacity.retry_after_s(now))} if repeatable else {}
        error = HttpError(
            status, f"no instance answered; the last one failed: {reason}", type_="upstream_error",
            code="upstream_error", headers=retry_after, repeatable=repeatable,
        )  # fmt: skip
        return _end(request, Outcome.FAILED, error)


def fault(request: Request) -> Actions:
    """The actions that end a request on which the proxy itself failed, each of them due whatever becomes of the others."""
    request.faulted = True
    request.state = State.DONE
    request.reason = INTERNAL_ERROR
    request.ending = Ending.BROKEN
    if not request.counted:
        request.outcome = Outcome.FAILED
    end: Actions = ()
    if not request.finished:
        request.error = HttpError(502, INTERNAL_ERROR, type_="upstream_error", code="upstream_error")
        # Whether [DONE] went is not known then: nothing may follow it.
        end = (
            Action.ABORT if _is_done(request) else Action.BREAK_OFF if request.head_sent else Action.REFUSE,
        )
    return (Action.WITHDRAW, Action.LEAVE, *end, Action.COUNT, Action.LOG)


def _is_page(request: Request, body: bytes | bytearray) -> bool:
    """Take the whole request: its instance is chosen next, or it asks for one of the proxy's own pages."""
    request.body = body
    request.bytes_in = len(body)
    page = request.match is not None and request.match.route.kind in OWN_PAGES
    request.state = State.SENT if page else State.QUEUED
    return page


def _end(request: Request, outcome: Outcome, error: HttpError) -> Actions:
    request.state = State.DONE
    request.outcome = outcome
    request.error = error
    return _BREAK_OFF if request.head_sent else _REFUSE


def _is_done(request: Request) -> bool:
    """Its client has the end of its stream, if not yet of the body."""
    return request.tracker is not None and request.tracker.done


def _complete(request: Request) -> Actions:
    """Nothing of the stream is missing, whatever its instance did after the end."""
    request.ending = Ending.WHOLE
    request.state = State.DONE
    request.outcome = Outcome.COMPLETED
    return _FINISH


def _let_go(request: Request) -> None:
    """Nobody waits for the response. Some clients leave at the last event, before the last chunk: they have all of it."""
    whole = request.stream_end is not None and _is_done(request)
    request.ending = Ending.WHOLE if whole else Ending.LEFT
    request.outcome = Outcome.COMPLETED if whole else Outcome.CLIENT_ABORTED
    request.state = State.DONE


def _outcome_of(status: int) -> Outcome:
    """That of a whole response of an upstream."""
    if blames_server(status):
        return Outcome.FAILED
    return Outcome.REFUSED if blames_request(status) else Outcome.COMPLETED


def _deliver(request: Request, answer: Answer, outcome: Outcome) -> Actions:
    request.answer = answer
    request.outcome = outcome
    request.state = State.DONE
    failures = request.failures
    if (
        failures is None
        or not failures.blamed
        or outcome not in {Outcome.COMPLETED, Outcome.REFUSED}
        or answer.head.status >= SERVER_ERROR
    ):
        return _DELIVER
    return _DELIVER_AND_SETTLE
