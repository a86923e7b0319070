"""One request's way: asked of an instance, its answer handed to the client as it comes.

No task runs here. The client's connection, the instance's connection, the scheduler and the clock call in;
each call ends at once. `Phase` says what is waited for:

    BODY -> QUEUED -> ASKED -> DELIVERING -> DONE
               ^        |          |
               +--------+----------+   the instance broke: another one is asked

Until an instance's first byte went to the client (`committed`) a request may start anew on another
instance. A whole answer that is small, and the first event of a stream, are waited for before that point,
so an instance that breaks costs the client nothing but time. After it, a plain stream goes on where it was
cut (continuation.py); anything else ends honestly, in an error event and without [DONE].
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from launcher.proxy.delivery import Client, Delivery, own_head
from launcher.proxy.exchange import Exchange, Outcome
from launcher.proxy.http1 import RequestHead, ResponseHead, upstream_head
from launcher.proxy.openai import JSON, Refusal, error_event_of, response_id, rewrite_detail, usage_of
from launcher.proxy.rewriter import ContinuationRewriter, Diverged
from launcher.proxy.routes import Kind, Match
from launcher.proxy.server_timing import server_timing
from launcher.proxy.sse import EventTracker

if TYPE_CHECKING:
    from launcher.proxy.key_limits import Grant
    from launcher.proxy.keys import KeyEntry
    from launcher.proxy.links import Call, Link
    from launcher.proxy.scheduling.demand import Ticket
    from launcher.proxy.scheduling.upstreams import Upstream
    from launcher.proxy.transcript import Transcript

HOLD_BYTES = 1 << 20  # a whole answer up to this size is held until it is complete
STREAM = b"text/event-stream"
TEXT = "text/plain"
_SERVER_ERROR = 500
_COMMENT = b": waiting\n\n"


class Phase(Enum):
    """What a request waits for."""

    BODY = "its body"
    QUEUED = "an instance that can start it"
    ASKED = "the instance's first byte"
    DELIVERING = "the rest of the answer"
    DONE = "nothing"


class Desk(Protocol):
    """Where a relay turns to: admission, instances, sums. Implemented by the front door."""

    idle_timeout_s: float
    comment_interval_s: float
    client_stall_timeout_s: float

    def now(self) -> float:
        """Loop time, seconds."""

    def admit(self, relay: Relay) -> None:
        """Find out what is asked and queue it. Raises Refusal."""

    def left(self, relay: Relay, *, broken: str | None, answered: int | None) -> None:
        """The relay has left its upstream; `broken`: why it could not be used, `answered` its status."""

    def moved(self, relay: Relay, reason: str, answer: Answer | None, *, fault: bool) -> None:
        """It may be asked of another instance; else the desk ends it."""

    def resume(self, relay: Relay, reason: str, *, repeat: bool = False) -> bool:
        """A stream was cut: let it go on elsewhere. False: it can't be continued."""

    def retry_after_s(self) -> int:
        """When a client may try again."""

    def delivering(self, relay: Relay) -> None:
        """The first byte of an instance went to the client."""

    def usage(self, relay: Relay, prompt: int, completion: int, cached: int | None) -> None:
        """An instance says how many tokens the request took."""

    def first_token(self, relay: Relay) -> None:
        """The first content of a stream came, or all of a whole answer."""

    def withdraw(self, relay: Relay) -> None:
        """It waits no more."""

    def ended(self, relay: Relay, outcome: Outcome) -> None:
        """Count it."""


class Answer:
    """What an instance said, whole."""

    __slots__ = ("body", "head")

    def __init__(self, head: ResponseHead, body: bytes) -> None:
        self.head = head
        self.body = body


class Relay:
    """One request and its answer."""

    __slots__ = (
        "_asked_at",
        "_call",
        "_client",
        "_comment_at",
        "_desk",
        "_held",
        "_hold",
        "_last_reads",
        "_moved_at",
        "_spoke",
        "_stalled_at",
        "_tracker",
        "before",
        "blamed",
        "body",
        "committed",
        "deaths",
        "delivery",
        "done",
        "events",
        "exchange",
        "first_byte_timeout_s",
        "found",
        "grant",
        "head",
        "key",
        "last_answer",
        "moved",
        "phase",
        "prompt_bytes",
        "quick",
        "reads",
        "reply",
        "rest_body",
        "rewriter",
        "rounds",
        "streamed",
        "ticket",
        "told",
        "transcript",
        "upstream",
        "usage",
    )  # fmt: skip

    def __init__(
        self, desk: Desk, client: Client, head: RequestHead, found: Match | None, exchange: Exchange
    ) -> None:
        self._desk = desk
        self._client = client
        self.head = head
        self.found = found
        self.exchange = exchange
        self.delivery = Delivery(client, head, exchange)
        self.phase = Phase.BODY
        self.done = False
        self.body: bytes | bytearray = b""
        self.streamed = False  # the client asked for a stream
        self.ticket: Ticket | None = None
        self.key: KeyEntry | None = None
        self.grant: Grant | None = None  # of the key's limits
        self.upstream: Upstream | None = None
        self.first_byte_timeout_s = 0.0
        self.committed = False
        self.events = 0  # of the answer's stream, over all instances
        self.reads = 0  # from the present instance, but for those taken
        self.usage: tuple[int, int, int | None] | None = None  # tokens, as an instance says
        self.prompt_bytes = 0
        self.before = 0  # reads from instances before the present one
        self.told = 0  # events that the scheduler knows of
        self._spoke = False  # the present instance has said something
        self.moved = [0, 0]  # events and bytes that took the hot path
        self.quick: Callable[[bytes], bool] | None = None
        self.rounds = 0  # every ready instance was tried so often
        self.deaths = 0  # instances that died with it before its first byte
        self.blamed: list[Upstream] = []  # they answered 5xx; theirs if another one answers well
        self.last_answer: Answer | None = None
        self.transcript: Transcript | None = None  # of a stream that could go on elsewhere
        self.rewriter: ContinuationRewriter | None = None
        self.rest_body: bytes | None = None  # asks for the rest of a cut stream
        self.reply: ResponseHead | None = None
        self._call: Call | None = None
        self._tracker: EventTracker | None = None
        self._held = bytearray()
        self._hold = HOLD_BYTES
        self._asked_at = 0.0
        self._comment_at: float | None = None
        self._last_reads = -1
        self._moved_at = 0.0
        self._stalled_at: float | None = None

    # --- the client's side -------------------------------------------------------------------------

    def start(self, body: bytes | bytearray) -> None:
        """The request is whole."""
        self.body = body
        self.exchange.bytes_in = len(body)
        try:
            self._desk.admit(self)
        except Refusal as refusal:
            self.refuse(refusal)

    def refuse(self, refusal: Refusal, outcome: Outcome = Outcome.REJECTED) -> None:
        """Answer with an error of our own."""
        if self.done:
            return
        self.exchange.reason = refusal.message
        if self.delivery.started:  # comments went out while it waited
            self.delivery.break_off(refusal.message, refusal.type, refusal.status)
        else:
            self.delivery.refuse(refusal, self._desk.now())
        self._end(outcome)

    def preflight(self, status: int, lines: bytes) -> None:
        """Answer a browser that asks whether its page may call (CORS)."""
        self.delivery.whole(own_head(status, TEXT, lines), b"", self._desk.now())
        self._end(Outcome.COMPLETED)

    def client_gone(self) -> None:
        """Nobody waits for the answer any more: the instance stops working on it."""
        if self.done:
            return
        self.delivery.done = True
        self._leave_all()
        self._end(Outcome.CLIENT_ABORTED)

    def client_paused(self) -> None:
        """The client takes no more for now: nor do we."""
        if self._call is not None:
            self._call.pause()
        self._stalled_at = self._desk.now()

    def client_resumed(self) -> None:
        """It takes more."""
        self._stalled_at = None
        self._moved_at = self._desk.now()
        if self._call is not None:
            self._call.resume()

    # --- the scheduler's side ----------------------------------------------------------------------

    def queued(self, now: float) -> None:
        """It waits for an instance."""
        self.phase = Phase.QUEUED
        if self.streamed and self._comment_at is None:
            self._comment_at = now + self._desk.comment_interval_s

    def send(self, upstream: Upstream | None, link: Link, now: float) -> None:
        """Ask this instance."""
        self.upstream = upstream
        self.phase = Phase.ASKED
        self.before = self.taken + self.reads
        self._asked_at = self._moved_at = now
        self.reply = None
        self.quick = None
        self._spoke = False
        self._tracker = None
        self._held.clear()
        self._hold = HOLD_BYTES
        exchange = self.exchange
        if upstream is not None:
            exchange.slot = upstream.slot
            exchange.attempts += 1
            if exchange.bound is None:
                exchange.bound = now
            if self.streamed and self._comment_at is None:
                self._comment_at = now + self._desk.comment_interval_s
        head = self.head
        method = "GET" if head.method == "HEAD" else head.method
        body = self.body if self.rest_body is None else self.rest_body
        ours = upstream is not None and self.key is not None  # the client's key was for us
        wire_head = upstream_head(
            head, exchange.request_id, len(body), host=b"localhost", method=method, authorization=not ours
        )
        self._call = link.ask(self, method, wire_head, body)

    def instance_gone(self, reason: str) -> None:
        """Its instance is gone, the supervisor says; what it had sent has been read."""
        if self.phase in {Phase.ASKED, Phase.DELIVERING}:
            self._break(reason)

    # --- the instance's side -----------------------------------------------------------------------

    def on_head(self, head: ResponseHead) -> None:
        """Its answer begins."""
        self.reply = head
        self.reads += 1
        if self._client.paused and self._call is not None:
            self._call.pause()  # it takes nothing since before this instance was asked
        if head.status == 200 and head.content_type == STREAM:
            self._tracker = EventTracker()
            if not self.committed:
                self.delivery.tracker = self._tracker
        elif (head.length is not None and head.length > HOLD_BYTES and head.status < 400) or (
            head.content_type != b"application/json" and head.status < 400 and head.length is None
        ):
            self._hold = 0

    def on_body(self, payload: bytes, raw: bytes | None) -> None:
        """A piece of it."""
        self.reads += 1
        self.quick = None
        tracker = self._tracker
        if tracker is None:
            self._plain_part(payload, raw)
            return
        passed = tracker.feed(payload)
        if self.committed and self.rewriter is None:
            if passed:
                if self.transcript is not None:
                    self.transcript.feed(passed)
                if b'"usage":{' in passed:
                    self._learn_usage(passed)
                if passed is payload and raw is not None and self.delivery.raw:
                    self.delivery.pass_on(raw)
                    if self.transcript is not None:
                        self.quick = self.transcript.quick(self._client.write, self.moved)
                else:
                    self.delivery.send(passed)
        else:
            self._early_events(tracker, passed)
        if not self._spoke and self.committed:
            self._listen()
        if tracker.error is not None and tracker.engine_fault:
            self._break("its engine failed in the middle of the answer")

    def _listen(self) -> None:
        """A role event may come before a prompt is computed: only words tell that it has been."""
        transcript = self.transcript
        if transcript is None or transcript.text or transcript.odd is not None:
            self._spoke = True
            self._desk.first_token(self)

    def _early_events(self, tracker: EventTracker, passed: bytes) -> None:
        """The first events, and those of a continuation."""
        if tracker.error_first and tracker.engine_fault:
            return
        if self.rewriter is not None:
            try:
                passed = self.rewriter.feed(passed)
            except Diverged as diverged:
                self._diverged(str(diverged))
                return
        if not passed:
            return
        self._commit()
        if self.exchange.path == "/v1/responses" and self.exchange.stored is None:
            self.exchange.stored = response_id(passed)
        if self.transcript is not None:
            self.transcript.feed(passed)
        self.delivery.send(passed)

    def _diverged(self, reason: str) -> None:
        """The next instance says something else; once more, from the beginning."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        self._leave(None)
        self._from_the_start(reason)

    def _from_the_start(self, reason: str) -> None:
        """The rest can't be had by itself: the whole answer again, unless that is what was asked for."""
        self.phase = Phase.QUEUED
        begun_again = self.rewriter is not None and self.rewriter.from_start
        if begun_again or not self._desk.resume(self, reason, repeat=True):
            self.fail(reason)

    def finish_stream(self, tail: bytes) -> None:
        """Only the end was missing."""
        self.delivery.end(tail)
        self._end(Outcome.COMPLETED)

    def _commit(self) -> None:
        """The instance's first byte goes to the client."""
        if self.phase is Phase.DELIVERING:
            return
        self.phase = Phase.DELIVERING
        if not self.delivery.started and self.reply is not None:
            length = self.reply.length if self._tracker is None else None
            self.delivery.start(self.reply, self._desk.now(), length=length, extra=self._timing())
        first, self.committed = not self.committed, True
        if first:
            if self.exchange.first_byte is None or self._comment_at is not None:
                self.exchange.first_byte = self._desk.now()
            self._desk.delivering(self)
            if self.transcript is None:
                self.body = b""  # it is not needed again
        self._comment_at = None

    def _timing(self) -> bytes:
        """How long it waited here, and for the instance's first byte."""
        exchange = self.exchange
        if exchange.bound is None:
            return b""
        return server_timing(exchange.bound - exchange.started, None, self._desk.now() - exchange.bound)

    def _plain_part(self, payload: bytes, raw: bytes | None) -> None:
        if self.phase is Phase.DELIVERING:
            if raw is not None and raw is not payload and self.delivery.raw:
                self.delivery.pass_on(raw)  # a whole chunk, as the instance framed it
            else:
                self.delivery.send(payload)
            return
        self._held += payload
        if len(self._held) > self._hold and (self.reply is None or self.reply.status < 400):
            self._commit()
            self.delivery.send(bytes(self._held))
            self._held.clear()
        elif len(self._held) > HOLD_BYTES:  # an error's body: no engine says as much
            del self._held[HOLD_BYTES:]

    def on_end(self) -> None:
        """It is complete, as HTTP sees it."""
        self._call = None
        if self._tracker is not None:
            self._stream_end(self._tracker)
        else:
            self._plain_end()

    def _stream_end(self, tracker: EventTracker) -> None:
        route = self.found.route if self.found is not None else None
        rest = tracker.rest()
        if tracker.error is not None and tracker.engine_fault:
            self._break("its engine failed")
        elif route is not None and route.ends_in_done and not tracker.done and tracker.error is None:
            self._break("the stream ended without [DONE]")
        else:
            if rest and self.rewriter is not None:
                rest = b""  # no whole event: nothing of ours
            self._commit()
            self.events += tracker.events
            self.delivery.end(rest)
            self._leave(None)
            self._end(Outcome.COMPLETED)

    def _learn_usage(self, data: bytes) -> None:
        if (usage := usage_of(data)) is not None:
            self.usage = usage
            self._desk.usage(self, *usage)

    def _plain_end(self) -> None:
        reply = self.reply
        if reply is None:
            self._break("it sent no answer")
            return
        if self.phase is Phase.DELIVERING:
            self.delivery.end()
            self._leave(None)
            self._end(Outcome.COMPLETED)
            return
        answer = Answer(reply, bytes(self._held))
        if reply.status < 400 and self.upstream is not None:
            self._learn_usage(answer.body)
            if self.exchange.path == "/v1/responses":
                self.exchange.stored = response_id(answer.body)
        self._held.clear()
        if self.upstream is None:  # our own page, or the endpoint that takes what overflows
            self.answer(answer, Outcome.COMPLETED if reply.status < _SERVER_ERROR else Outcome.FAILED)
        elif reply.status >= _SERVER_ERROR:
            self._break(f"it answered {reply.status}", answer)
        elif self.committed:
            self._leave(None)
            self._from_the_start(f"the rest of the answer can't be had: an instance answered {reply.status}")
        elif reply.status == 404 and self.found is not None and self.found.route.kind is Kind.STORED:
            self._break("it does not have it", answer, fault=False)
        else:
            self._leave(None)
            self.answer(answer)

    def answer(self, answer: Answer, outcome: Outcome = Outcome.COMPLETED) -> None:
        """Deliver an instance's whole answer."""
        head, body = answer.head, answer.body
        if 400 <= head.status < _SERVER_ERROR:
            body = rewrite_detail(head.status, body, self.head.method, self.exchange.path) or body
        if self.delivery.started:
            self.exchange.status = head.status
            self.delivery.end(error_event_of(self.exchange.path, body, head.status))
        else:
            self.delivery.whole(head, body, self._desk.now(), extra=self._timing())
        self._end(outcome)

    def on_broken(self, reason: str) -> None:
        """It broke off."""
        self._call = None
        self._break(reason)

    # --- ends --------------------------------------------------------------------------------------

    def _break(self, reason: str, answer: Answer | None = None, *, fault: bool = True) -> None:
        """This instance is no use any more."""
        if self.done or self.phase not in {Phase.ASKED, Phase.DELIVERING}:
            return
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        tracker = self._tracker
        if answer is None and tracker is not None and tracker.error_first and tracker.error is not None:
            answer = _error_answer(tracker.error)
        if not self.committed:
            self._leave(reason if fault else None, answer.head.status if answer is not None else None)
            self.phase = Phase.QUEUED
            self._desk.moved(self, reason, answer, fault=fault)
            return
        if tracker is not None:
            self.events += tracker.events
        self._leave(reason, answer.head.status if answer is not None else None)
        self.phase = Phase.QUEUED
        whole = tracker is None or not tracker.torn  # without a tracker nothing of this attempt was delivered
        if not (whole and self._desk.resume(self, reason)):
            self.fail(reason)

    def fail(self, reason: str, code: int = 502) -> None:
        """End it honestly: there is no way to the rest of the answer."""
        if self.done:
            return
        self._leave_all()
        self.exchange.reason = reason
        if self.delivery.started:
            tracker = self._tracker
            if tracker is not None and self.delivery.tracker is not None:
                self.delivery.tracker = tracker
            self.delivery.break_off(reason, code=code)
        else:
            refusal = Refusal(
                code, f"no instance answered; the last one failed: {reason}", type_="upstream_error",
                code="upstream_error", headers={"Retry-After": str(self._desk.retry_after_s())},
            )  # fmt: skip
            self.delivery.refuse(refusal, self._desk.now())
        self._end(Outcome.FAILED)

    def _leave(self, broken: str | None, answered: int | None = None) -> None:
        if self.upstream is not None:
            self._desk.left(self, broken=broken, answered=answered)
            self.upstream = None

    def _leave_all(self) -> None:
        """Off the instance, out of the queue."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        self._leave(None)
        if self.phase is Phase.QUEUED:
            self._desk.withdraw(self)

    def _end(self, outcome: Outcome) -> None:
        self.done = True
        self.phase = Phase.DONE
        self.exchange.bytes_out += self.moved[1]
        self._desk.ended(self, outcome)

    # --- the clock ---------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Called a few times a second: what took too long?"""
        if self._comment_at is not None and now >= self._comment_at and not self.committed:
            self._comment(now)
        if self.phase is Phase.ASKED:
            if now - self._asked_at > self.first_byte_timeout_s and self.first_byte_timeout_s:
                self._break(f"no first byte within {self.first_byte_timeout_s:g} s")
        elif self.phase is Phase.DELIVERING:
            self._watch(now)

    def _watch(self, now: float) -> None:
        if self._stalled_at is not None:
            if now - self._stalled_at > self._desk.client_stall_timeout_s:
                self.exchange.reason = "the client takes nothing"
                self.delivery.abort()
                self.client_gone()
        elif self.reads + self.taken != self._last_reads:
            self._last_reads = self.reads + self.taken
            self._moved_at = now
        elif now - self._moved_at > self._desk.idle_timeout_s:
            self._break(f"no further byte within {self._desk.idle_timeout_s:g} s")

    @property
    def tokens(self) -> int:
        """How many tokens it took: as its instance said, else the prompt's estimate and one for each event."""
        if self.usage is not None:
            return self.usage[0] + self.usage[1]
        demand = None if self.ticket is None else self.ticket.demand
        prompt = 0 if demand is None else demand.prompt_tokens
        if self.streamed or demand is None:
            return prompt + self.events + self.taken
        return prompt + demand.output_tokens

    @property
    def taken(self) -> int:
        """Reads on the hot path, one event each."""
        return self.moved[0]

    @property
    def moved_at(self) -> float:
        """When the present instance last sent something, as far as `tick` has seen; loop time."""
        return self._moved_at

    @property
    def held_back(self) -> bool:
        """Its client takes nothing, so its instance is not read."""
        return self._stalled_at is not None

    def _comment(self, now: float) -> None:
        """A sign of life for a client that waits for its first event (an SSE comment, ignored by clients)."""
        self._comment_at = now + self._desk.comment_interval_s
        if not self.delivery.started:
            self.delivery.tracker = EventTracker()
            self.delivery.start(own_head(200, "text/event-stream; charset=utf-8"), now)
        if not self._client.paused:
            self.delivery.send(_COMMENT)


def _error_answer(event: bytes) -> Answer:
    """What a stream's first and only event, an error, would have been as a plain answer."""
    data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
    return Answer(own_head(_SERVER_ERROR, JSON), data)
