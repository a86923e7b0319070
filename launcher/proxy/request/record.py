"""The record of one request: what its client sent, where it is, what its access log line says.

Decisions write its state, its end and what an action needs; actions write what they did: those of dispatch/, and for
the client's side downstream/response.py. Clients.begin fills `forwarded` and `wished`, Counters.end sets `counted`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from launcher.accounts.ended_request import EndedRequest, Step, Trace, What
from launcher.balancing.upstreams import Ending, Ticket, Upstream
from launcher.base.api_errors import HttpError
from launcher.keys.api_keys import KeyEntry
from launcher.keys.rate_limits import Grant
from launcher.proxy.continuation.splicer import Splicer
from launcher.proxy.continuation.transcript import Transcript
from launcher.proxy.error_forms import Opening
from launcher.proxy.http1.requests import RequestHead
from launcher.proxy.openai.answers import Counts
from launcher.proxy.openai.body_schema import RequestBody
from launcher.proxy.openai.prompts import TokenBounds
from launcher.proxy.openai.stream_options import UsageAsk
from launcher.proxy.request.actions import Outcome, OverflowReason, State
from launcher.proxy.request.events import Event
from launcher.proxy.request.ports import Answer, Cancellable, Downstream, UpstreamCall
from launcher.proxy.request.retry_policy import FailedAttempts
from launcher.proxy.routes import Match
from launcher.proxy.sse.ends import StreamEnd
from launcher.proxy.sse.tracker import EventTracker

MAX_STEPS: Final = 200  # of one request: then one of the middle is left out for each more


class BodyReader(Protocol):
    """Reads a body as it grows. Both raise HttpError."""

    def feed(self, body: bytes | bytearray) -> bool:
        """Look at the next step of all that has come; True: there is no more to look at."""

    def finish(self, body: bytes | bytearray) -> RequestBody:
        """What the whole of it says."""


class Request:
    """One client's request, from its head to its access log line."""

    __slots__ = (
        "accepted", "adapter", "admitted", "answer", "attempt", "attempts", "body", "body_reader", "bound", "bytes_in",
        "bytes_out", "choices", "chunked", "client", "comment_at", "commented", "committed", "continued", "counted",
        "cut", "deaths", "ended", "ending", "error", "events", "failures", "faulted", "finished", "first_byte",
        "first_byte_timeout_s", "forwarded", "generation", "grant", "head", "head_sent", "keep_alive", "key", "latest_s",
        "lines", "local_ticket", "looked", "match", "method", "model", "opening", "outcome", "overflow",
        "overflow_reason", "overflow_tried", "path", "pending", "picos", "predicted_s", "prompt_bytes", "reason",
        "request_id", "slot", "splice", "stalled_at", "started", "state", "status", "steps", "stored", "tail", "ticket",
        "token_bounds", "trace", "tracker", "transcript", "unread_tail", "unsent_head", "usage", "usage_ask",
        "usage_doubt", "usage_is_exact", "wished",
    )  # fmt: skip

    def __init__(  # noqa: PLR0915
        self,
        client: Downstream,
        head: RequestHead,
        match: Match | None,
        *,
        path: str,
        request_id: str,
        started: float,
    ) -> None:
        self.client = client
        self.head = head
        self.match = match
        self.path = path
        self.method = head.method
        self.request_id = request_id
        self.started = started  # loop time, seconds
        self.state = State.RECEIVING
        self.forwarded = b""  # field lines of a trusted proxy, for the instance
        self.wished: int | None = None  # the slot that a trusted proxy chose
        # Authorization.
        self.key: KeyEntry | None = None
        self.grant: Grant | None = None  # of the key's limits
        self.accepted = False  # on a route of instances: it counts
        # The body.
        self.body: bytes | bytearray = b""
        self.body_reader: BodyReader | None = None  # of a large one
        self.looked = True  # all that has come of it was read
        self.bytes_in = 0
        # Admission.
        self.admitted: float | None = None  # when it was complete, loop time
        self.model: str | None = None
        self.adapter: str | None = None  # the LoRA adapter of the model that was asked for
        self.ticket: Ticket | None = None  # None: no instance is asked
        self.prompt_bytes = 0
        self.choices = 1  # of its stream
        self.first_byte_timeout_s = 0.0
        self.predicted_s: float | None = None  # to its first token, when it arrived
        self.usage_ask = UsageAsk.NO  # of a stream whose client does not ask for its usage
        # Where the request was refused, perhaps for that ask: an overflow endpoint's name, "" for an instance.
        self.usage_doubt: str | None = None
        self.latest_s: float | None = None  # the same at worst, where that was too late for it
        # Overflow.
        self.overflow = ""  # name of the endpoint that it went to
        self.overflow_reason: OverflowReason | None = None
        self.token_bounds: TokenBounds | None = None  # of its body, for overflow endpoints
        self.overflow_tried: tuple[str, ...] = ()  # endpoints that it was sent to
        self.picos = 0  # what it cost there
        self.local_ticket: Ticket | None = None  # for the queue here, of one that went before it was queued
        # Attempts.
        self.attempt: UpstreamCall | None = None  # the present one
        self.attempts = 0
        self.slot: int | None = None  # of the last one
        self.generation: int | None = None  # of its instance
        self.trace: Trace | None = None  # None: tracing is off, or has not decided
        self.steps: list[Step] | None = None  # what happened; None: nothing but what this record says
        self.ended: EndedRequest | None = None  # its record, once it was counted
        self.bound: float | None = None  # when an instance was first asked
        self.failures: FailedAttempts | None = None
        self.deaths = 0  # instances that died with it before its first byte
        self.ending = Ending.LEFT  # how it leaves its instance
        self.pending: Cancellable | None = None  # the back-off's timer, the page's task
        # The response.
        self.committed = False  # an upstream's first byte went to the client
        self.transcript: Transcript | None = None  # of a stream that could continue elsewhere
        self.splice: Splicer | None = None  # of a cut stream, asked for elsewhere
        self.continued = 0  # how often
        self.cut: str | None = None  # what became of a stream that was cut
        self.events = 0  # of its stream, from the attempts before
        self.usage: Counts | None = None  # tokens, as an instance says
        self.usage_is_exact = True  # False: after a continuation, part of them is an estimate
        self.unread_tail = b""  # of a whole response that is delivered in pieces: a usage may begin there
        self.opening: Opening | None = None  # of a stream of /v1/responses
        self.stored: str | None = None  # the id of a stored response that the instance now keeps
        self.answer: Answer | None = None  # to deliver
        self.error: HttpError | None = None  # to refuse or break off with
        self.tail = b""  # the last bytes of a stream
        # The client's side (downstream.response).
        self.keep_alive = head.keep_alive and not head.http_1_0
        self.chunked = False
        self.lines = b""  # header lines that every response to this request gets, each ended by CRLF
        self.unsent_head = b""  # goes with the body's first bytes: one packet, one system call
        self.head_sent = False  # the response has begun
        self.finished = False  # the client gets no more
        self.tracker: EventTracker | None = None  # of the event stream that the client gets
        self.stalled_at: float | None = None  # since when its upstream waits for the client
        self.comment_at: float | None = None  # when a stream that waits gets a comment
        self.commented = 0  # `written` as that was planned
        # The end.
        self.status = 0
        self.first_byte: float | None = None
        self.bytes_out = 0
        self.outcome: Outcome | None = None
        self.reason: str | None = None  # why it failed
        self.counted = False
        self.faulted = False

    @property
    def overflowed(self) -> bool:
        """It went to an overflow endpoint."""
        return bool(self.overflow)

    @property
    def streamed(self) -> bool:
        """The client asked for a stream."""
        return self.ticket is not None and self.ticket.demand.stream

    @property
    def first_byte_left_s(self) -> float:
        """How long its present attempt may take to its first byte; 0: as long as it does."""
        failures, timeout_s = self.failures, self.first_byte_timeout_s
        return timeout_s if failures is None else failures.left_s(timeout_s)

    def failed(self) -> FailedAttempts:
        """Its failed attempts so far."""
        if self.failures is None:
            self.failures = FailedAttempts()
        return self.failures

    def note(
        self,
        what: str,
        now: float,
        *,
        upstream: Upstream | None = None,
        endpoint: str | None = None,
        why: str | None = None,
    ) -> None:
        """A step that this record does not tell by itself; from the first one on all are noted. `upstream`, `endpoint`: at
        which instance or overflow endpoint."""
        if self.steps is None:
            self.steps = self._first_steps()
        slot, generation = (None, None) if upstream is None else upstream.key
        if len(self.steps) >= MAX_STEPS:
            del self.steps[MAX_STEPS // 2]
        self.steps.append(Step(now - self.started, what, slot, generation, endpoint, why))

    def _first_steps(self) -> list[Step]:
        """Those of the first attempt, if there was one."""
        steps = []
        if self.bound is not None:
            steps.append(Step(self.bound - self.started, What.SENT, self.slot, self.generation))
        if self.committed and self.first_byte is not None and self.tracker is not None:
            steps.append(Step(self.first_byte - self.started, What.FIRST_TOKEN, self.slot, self.generation))
        return steps

    def note_tried(self, upstream: Upstream) -> None:
        """An instance had it, and is not asked again in this round."""
        if self.ticket is not None:
            self.ticket.tried.add(upstream.key)

    @property
    def stream_end(self) -> StreamEnd | None:
        """The end of a whole stream of its route; None: the route has no streams."""
        stream = None if self.match is None else self.match.route.stream
        return None if stream is None else stream.end

    @property
    def written(self) -> int:
        """Bytes of its response that its connection was given."""
        return self.bytes_out + (0 if self.attempt is None else self.attempt.fast_bytes)

    @property
    def holds(self) -> str | None:
        """The model of the instance that waits for the client; None while none does."""
        if self.stalled_at is None:
            return None
        upstream = None if self.attempt is None else self.attempt.upstream
        return "" if upstream is None else upstream.model  # no request waits for ""


Post = Callable[[Request, Event], None]
"""Tell that something happened to a request; returns at once, and never raises."""
