"""One request: its body, its place in the queue, the instances that are asked, the answer that its client gets.

No task runs here. The client's connection, the scheduler, an attempt and the clock call in; each call ends at
once. What a request waits for is seen from its `attempt`:

    its body -> the queue -> an attempt -> (the attempt is delivering) -> done
                  ^              |                |
                  +--------------+----------------+   the instance broke: another one is asked

Until an instance's first byte went to the client (`committed`) a request may start anew on another instance.
After it a plain stream goes on where it was cut (`rest`: moves.py, continuation.py); anything else ends
honestly, in an error event and without [DONE].
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from launcher.proxy.balancing.demand import Ending
from launcher.proxy.continuation.eligibility import ASK_IDS
from launcher.proxy.continuation.splicer import Diverged, IdsIgnored, Splicer
from launcher.proxy.downstream.response import Client, ResponseWriter, own_head
from launcher.proxy.errors import HttpError
from launcher.proxy.http1 import RequestHead, upstream_head
from launcher.proxy.observability.exchange import Exchange, Outcome
from launcher.proxy.observability.server_timing import server_timing
from launcher.proxy.openai.answers import (
    JSON,
    begins_response,
    error_event_of,
    response_id,
    rewrite_detail,
    usage_of,
)
from launcher.proxy.pages.pages import Page
from launcher.proxy.pages.renderer import PageRenderer
from launcher.proxy.routes import Kind, Match
from launcher.proxy.sse.tracker import EventTracker
from launcher.proxy.upstream import overflow as overflow_endpoint
from launcher.proxy.upstream.overflow import Overflow
from launcher.proxy.upstream.reader import Answer, Attempt

if TYPE_CHECKING:
    import asyncio

    from launcher.proxy.auth.api_keys import KeyEntry
    from launcher.proxy.auth.rate_limits import Grant
    from launcher.proxy.balancing.ticket import Ticket
    from launcher.proxy.continuation.transcript import Transcript
    from launcher.proxy.dispatch.desk import Desk
    from launcher.proxy.dispatch.intake import BodyReader
    from launcher.proxy.dispatch.moves import Setbacks
    from launcher.proxy.upstream.pool import ConnectionPool

_LOG = logging.getLogger(__name__)
_TEXT = "text/plain"
_EVENTS = "text/event-stream; charset=utf-8"
_COMMENT = b": waiting\n\n"
_FAULT = "a fault of the front door"
_SAYS = re.compile(rb'"(?:content|text|finish_reason)"\s*:\s*"[^"]')
_CLIENT_ERROR = 400
_SERVER_ERROR = 500


class Relay:
    """One request and its answer."""

    __slots__ = (
        "_client", "_comment_at", "_desk", "attempt", "body", "committed", "deaths", "delivery", "done", "events",
        "exchange", "first_byte_timeout_s", "forwarded", "found", "grant", "head", "key", "page", "prompt_bytes", "reader",
        "rest", "setbacks", "stalled_at", "ticket", "transcript", "usage",
    )  # fmt: skip

    def __init__(
        self, desk: Desk, client: Client, head: RequestHead, found: Match | None, exchange: Exchange
    ) -> None:
        self._desk = desk
        self._client = client
        self.head = head
        self.found = found
        self.exchange = exchange
        self.delivery = ResponseWriter(client, head, exchange)
        self.body: bytes | bytearray = b""
        self.reader: BodyReader | None = None  # of a large body
        self.key: KeyEntry | None = None
        self.forwarded = b""  # field lines of a trusted proxy, for the instance
        self.done = False
        # What admission makes of it.
        self.ticket: Ticket | None = None  # None: no instance is asked
        self.grant: Grant | None = None  # of the key's limits
        self.prompt_bytes = 0
        self.first_byte_timeout_s = 0.0
        # Its answer.
        self.page: asyncio.Task[Page] | None = None  # renders a page of our own
        self.attempt: Attempt | None = None  # the instance that is being asked
        self.committed = False  # an instance's first byte went to the client
        self.transcript: Transcript | None = None  # of a stream that could go on elsewhere
        self.rest: Splicer | None = None  # of a cut stream, asked for elsewhere
        self.events = 0  # of its stream, from the instances that were left
        self.usage: tuple[int, int, int | None] | None = None  # tokens, as an instance says
        self.setbacks: Setbacks | None = None
        self.deaths = 0  # instances that died with it before its first byte
        # Its client.
        self.stalled_at: float | None = None  # since when its instance waits for the client
        self._comment_at: float | None = None  # when a stream that waits gets a sign of life

    @property
    def streamed(self) -> bool:
        """The client asked for a stream."""
        return self.ticket is not None and self.ticket.demand.stream

    @property
    def ends_in_done(self) -> bool:
        """A stream of its route is whole when [DONE] came."""
        return self.found is not None and self.found.route.ends_in_done

    @property
    def tokens(self) -> int:
        """How many tokens it took: as its instance said, else the prompt's estimate and one for each event."""
        if self.usage is not None:
            return self.usage[0] + self.usage[1]
        if self.ticket is None:
            return self.events
        demand = self.ticket.demand
        return demand.prompt_tokens + (self.events if demand.stream else demand.output_tokens)

    # --- the client's side -------------------------------------------------------------------------

    def start(self, body: bytes | bytearray) -> None:
        """The request is whole."""
        self.body = body
        self.exchange.bytes_in = len(body)
        try:
            self._desk.admit(self)
        except HttpError as refusal:
            self.refuse(refusal)

    def received(self, body: bytearray) -> bool:
        """Look at the next step of a large body; True: there is no more to see of what has come."""
        try:
            if self.reader is None:
                self.reader = self._desk.intake.reader(self)
            return self.reader.feed(body)
        except HttpError as refusal:
            refusal.close = True
            self.refuse(refusal)
            return False

    def client_gone(self) -> None:
        """Nobody waits for the answer any more: the instance stops working on it."""
        if self.done:
            return
        self.delivery.done = True
        # Some clients leave at [DONE], before the answer's last chunk: they have all of it.
        tracker = self.delivery.tracker if self.ends_in_done else None
        whole = tracker is not None and tracker.done
        self._let_go(Ending.WHOLE if whole else Ending.LEFT)
        self._end(Outcome.COMPLETED if whole else Outcome.CLIENT_ABORTED)

    def client_paused(self) -> None:
        """The client takes no more for now: the rest is kept for it, and where there is no room its instance waits."""
        if self.stalled_at is None:
            if self._desk.slow_clients.has_room(self._client):
                return
            self.stalled_at = self._desk.now()
        if self.attempt is not None:
            self.attempt.pause()

    def client_resumed(self) -> None:
        """It takes more, or there is room for the rest."""
        if self.stalled_at is None:
            return
        self.stalled_at = None
        if self.attempt is not None:
            self.attempt.resume(self._desk.now())

    @property
    def written(self) -> int:
        """Bytes of its answer that its connection was given."""
        return self.exchange.bytes_out + (0 if self.attempt is None else self.attempt.fast.bytes)

    @property
    def holds(self) -> str | None:
        """The model of the instance that waits for the client; None while none does."""
        if self.stalled_at is None:
            return None
        target = None if self.attempt is None else self.attempt.target
        return "" if target is None else target.upstream.model  # no request waits for ""

    def give_up(self, why: str) -> None:
        """Its client is too slow: it gets no more, and the instance is free."""
        if self.done:
            return
        self.exchange.reason = why
        self.delivery.abort()
        self.client_gone()

    # --- the scheduler's side ----------------------------------------------------------------------

    def queued(self, now: float) -> None:
        """It waits for an instance."""
        self._plan_comment(now)

    def send(self, attempt: Attempt, link: ConnectionPool, now: float) -> None:
        """Ask an instance."""
        self.attempt = attempt
        head, exchange = self.head, self.exchange
        if attempt.target is not None:
            exchange.slot = attempt.target.upstream.slot
        exchange.attempts += 1
        if exchange.bound is None:
            exchange.bound = now
        self._plan_comment(now)
        method = "GET" if head.method == "HEAD" else head.method
        body = self._asked_body() if self.rest is None else self.rest.body
        ours = self.key is not None  # the client's key was for us
        wire_head = upstream_head(
            head, exchange.request_id, len(body), host=b"localhost", method=method, keys=not ours,
            extra=self.forwarded,
        )  # fmt: skip
        attempt.ask(link, method, wire_head, body)

    def send_to_overflow(self, overflow: Overflow, body: bytes, now: float) -> None:
        """Ask the overflow endpoint."""
        exchange = self.exchange
        self.attempt = attempt = Attempt(self, None, now, overflow.pool.endpoint.policy)
        overflow.begin(exchange.model or "")
        head = overflow.head(self.head, exchange.request_id, exchange.path, len(body))
        attempt.ask(overflow.pool, "POST", head, body)

    def _asked_body(self) -> bytes | bytearray:
        """The client's body; an instance may be asked for token ids besides, which its client does not get."""
        said = self.transcript
        if said is None or not said.asks_ids or self.ticket is None:
            return self.body
        return ASK_IDS + self.body[self.body.find(b"{") + 1 :]

    # --- what an attempt says ----------------------------------------------------------------------

    def pass_events(self, attempt: Attempt, passed: bytes, raw: bytes | None, *, clean: bool) -> None:
        """Whole events; `clean`: all that was read and nothing else, so `raw` may go in their place."""
        if self.rest is not None:
            passed, clean = self._joined(self.rest, passed), False
        elif b'"usage":{' in passed:
            self._learn_usage(passed)
        transcript = self.transcript  # it takes out token ids that the client did not ask for
        told = passed if transcript is None else transcript.feed(passed)
        chunk = (
            raw if raw is not passed and told is passed else None
        )  # a part of a body with a length is none
        if not told:
            return
        if not attempt.delivering:
            self._commit(attempt)
            if self.exchange.path == "/v1/responses" and self.exchange.stored is None:
                self.exchange.stored = response_id(told)
        delivery = self.delivery
        if clean and chunk is not None and delivery.raw:
            delivery.pass_on(chunk)
        else:
            delivery.send(told)
        if not attempt.spoke:
            self._listen(attempt, told)
        if clean and attempt.spoke and delivery.raw:
            self._arm(attempt)

    def _arm(self, attempt: Attempt) -> None:
        """From the next read on usual events take the fast path."""
        fast, tracker = attempt.fast, attempt.tracker
        if tracker is None or not tracker.between_events:
            return
        if self.transcript is None:
            fast.arm_any(self._client.write)
        else:
            self.transcript.arm(fast, self._client.write)
        attempt.quick = fast.data_received if fast.armed else None

    def _joined(self, rest: Splicer, passed: bytes) -> bytes:
        """What of a continuation the client does not have yet."""
        try:
            return rest.feed(passed)
        except IdsIgnored as ignored:
            self._leave(Ending.LEFT)
            self._desk.moves.ignores_ids.add(self.exchange.model or "")
            if not self._desk.moves.resume(self, str(ignored)):
                self.fail(str(ignored))
            return b""
        except Diverged as diverged:
            self._leave(Ending.LEFT)
            self._from_the_start(str(diverged))
            return b""

    def _listen(self, attempt: Attempt, passed: bytes) -> None:
        """A first event may come before a prompt is computed: only words tell that it has been."""
        said = self.transcript
        spoke = not begins_response(passed) if said is None else bool(said.text) or said.odd is not None
        if spoke:
            attempt.spoke = True
            self._desk.first_token(self)

    def wordless(self, tracker: EventTracker, passed: bytes) -> bool:
        """Whether a plain stream that ends with these events has said nothing at all, not even why it ends.

        So ends vLLM 0.32 what comes to an engine that is shutting down: a role at most, then [DONE]
        (chat_completion/serving.py).
        """
        said = self.transcript
        if said is None or self.rest is not None or tracker.events > 2:
            return False
        return not said.text and said.odd is None and said.finish_reason is None and not _SAYS.search(passed)

    def pass_part(self, attempt: Attempt, data: bytes, raw: bytes | None) -> None:
        """A part of an answer that is no stream; `raw`: the same as a whole chunk."""
        if not attempt.delivering:
            self._commit(attempt)
        if raw is not None and raw is not data and self.delivery.raw:
            self.delivery.pass_on(raw)
        else:
            self.delivery.send(data)

    def ended(self, attempt: Attempt, last: bytes) -> None:
        """All of its answer has been told but `last`."""
        if not attempt.delivering:
            self._commit(attempt)
        self.delivery.end(last if self.rest is None else b"")  # of a continuation whole events only
        failed = attempt.tracker is not None and attempt.tracker.error is not None
        self._leave(Ending.REFUSED if failed else Ending.WHOLE)
        self._end(Outcome.COMPLETED)

    def answered(self, attempt: Attempt, answer: Answer) -> None:
        """A whole answer, not yet delivered; of an instance, no 5xx."""
        status = answer.head.status
        if attempt.target is None:
            self._learn_usage(answer.body)  # of what overflowed
            self._leave(Ending.WHOLE)
            self.answer(answer, Outcome.COMPLETED if status < _SERVER_ERROR else Outcome.FAILED)
            return
        if status < _CLIENT_ERROR:
            self._learn_usage(answer.body)
            if self.exchange.path == "/v1/responses":
                self.exchange.stored = response_id(answer.body)
        self._leave(Ending.WHOLE if status < _CLIENT_ERROR else Ending.REFUSED)
        if self.committed:
            self._from_the_start(f"the rest of the answer can't be had: an instance answered {status}")
        elif self.delivery.started and status < _CLIENT_ERROR:  # by comments, which promised a stream
            self.fail("an instance answered with something that is no stream")
        elif status == 404 and self.found is not None and self.found.route.kind is Kind.STORED:
            self._desk.moves.elsewhere(self, "it does not have it", answer, fault=False)
        else:
            self.answer(answer)

    def broken(self, attempt: Attempt, reason: str, answer: Answer | None, *, meant: bool = False) -> None:
        """An instance is no use any more; `answer` is what it said itself of that.

        `meant`: the same is to be expected of any other (http1.BadResponse).
        """
        self._leave(Ending.BROKEN, reason, None if answer is None else answer.head.status)
        if attempt.target is None and not self.committed:
            refusal = overflow_endpoint.failed(reason)
            self.answer(Answer(own_head(refusal.status, JSON), refusal.body()), Outcome.FAILED)
            return
        if meant and not self.committed:
            self.fail(reason)
            return
        if not self.committed or (self.rest is not None and not attempt.reached):
            self._desk.moves.elsewhere(self, reason, answer, fault=True)
            return
        # Half an event, or an answer that is no stream: nothing can follow it. An attempt without a tracker
        # has delivered nothing into a stream.
        torn = self.delivery.tracker is None or (attempt.tracker is not None and attempt.tracker.torn)
        if torn or not self._desk.moves.resume(self, reason):
            self.fail(reason)

    def _commit(self, attempt: Attempt) -> None:
        """Its first byte goes to the client."""
        attempt.delivering = True
        delivery, now = self.delivery, self._desk.now()
        if not delivery.started and attempt.head is not None:
            length = attempt.head.length if attempt.tracker is None else None
            delivery.start(attempt.head, now, length=length, extra=self._timing(now))
        delivery.tracker = attempt.tracker
        self._comment_at = None
        if not self.committed:
            self.committed = True
            self.exchange.first_byte = now  # comments do not count
            if self.streamed and attempt.tracker is not None:
                self._desk.timings.first_token.take(self.exchange.slot, now - self.exchange.started, now)
            self._desk.moves.settle(self, now)
            if self.transcript is None:
                self.body = b""  # it is not needed again

    def _learn_usage(self, data: bytes) -> None:
        if (usage := usage_of(data)) is not None:
            self.usage = usage
            self._desk.learn_usage(self, *usage)

    def _from_the_start(self, reason: str) -> None:
        """The rest can't be had by itself: the whole answer again, unless that is what was asked for."""
        begun_again = self.rest is not None and self.rest.from_start
        if begun_again or not self._desk.moves.resume(self, reason, repeat=True):
            self.fail(reason)

    def _timing(self, now: float) -> bytes:
        """How long it waited here, and for the instance's first byte."""
        exchange = self.exchange
        if exchange.bound is None:
            return b""
        return server_timing(exchange.bound - exchange.started, now - exchange.bound)

    # --- ends --------------------------------------------------------------------------------------

    def answer(self, answer: Answer, outcome: Outcome = Outcome.COMPLETED) -> None:
        """Deliver an instance's whole answer."""
        head, body, now = answer.head, answer.body, self._desk.now()
        if _CLIENT_ERROR <= head.status < _SERVER_ERROR:
            body = rewrite_detail(head.status, body, self.head.method, self.exchange.path) or body
        if self.delivery.started:  # comments went out while it waited
            self.exchange.status = head.status
            self.delivery.end(error_event_of(self.exchange.path, body, head.status))
        else:
            self.delivery.whole(head, body, now, extra=self._timing(now))
        self._end(outcome)

    def render(self, pages: PageRenderer, found: Match) -> None:
        """Answer with a page of our own, now or later."""
        self.page = pages.begin(found, self.key, self.show)

    def show(self, page: Page | BaseException) -> None:
        """Deliver a page of our own, or the error in its place."""
        try:
            if isinstance(page, BaseException):
                raise page
            if not self.done:
                self.answer(Answer(own_head(200, page.content_type), page.body))
        except HttpError as refusal:
            self.refuse(refusal)
        except Exception:
            self.fault()

    def finish(self, tail: bytes) -> None:
        """Only the end of its stream was missing."""
        self.delivery.end(tail)
        self._end(Outcome.COMPLETED)

    def preflight(self, status: int, lines: bytes) -> None:
        """Answer a browser that asks whether its page may call (CORS)."""
        self.delivery.whole(own_head(status, _TEXT, lines), b"", self._desk.now())
        self._end(Outcome.COMPLETED)

    def refuse(self, refusal: HttpError) -> None:
        """Answer with an error of our own."""
        if self.done:
            return
        self.exchange.reason = refusal.message
        if self.delivery.started:
            self.delivery.break_off(refusal.message, refusal.type, refusal.status)
        else:
            self.delivery.refuse(refusal, self._desk.now())
        self._end(Outcome.REJECTED)

    def fail(self, reason: str, code: int = 502) -> None:
        """End it honestly: there is no way to the rest of the answer."""
        if self.done:
            return
        self._let_go()
        self.exchange.reason = self.exchange.reason or reason  # one that says more is there already
        if self.delivery.started:
            self.delivery.break_off(reason, code=code)
        else:
            refusal = HttpError(
                code, f"no instance answered; the last one failed: {reason}", type_="upstream_error",
                code="upstream_error", headers={"Retry-After": str(self._desk.fleet.retry_after_s())},
            )  # fmt: skip
            self.delivery.refuse(refusal, self._desk.now())
        self._end(Outcome.FAILED)

    def fault(self) -> None:
        """What serves it has failed itself (called where that is caught): logged, and an honest end all the same."""
        exchange, now = self.exchange, self._desk.now()
        note = {"request_id": exchange.request_id}
        _LOG.exception("request %s: a fault of the front door", exchange.request_id, extra=note)
        exchange.reason = _FAULT
        for step in (self._let_go, self._say_fault, self._end_failed):
            try:
                step()
            except Exception:  # the steps after it are owed, too
                _LOG.exception("request %s: a fault at its end", exchange.request_id, extra=note)
        if self.grant is not None:
            self.grant.finish(self.grant.charged, now)  # where its end did not come so far

    def _say_fault(self) -> None:
        delivery = self.delivery
        if delivery.done:
            return
        try:
            if delivery.tracker is not None and delivery.tracker.done:
                delivery.abort()  # whether [DONE] went is not known: nothing may follow it
            elif delivery.started:
                delivery.break_off(_FAULT)
            else:
                refusal = HttpError(502, _FAULT, type_="upstream_error", code="upstream_error")
                delivery.refuse(refusal, self._desk.now())
        except Exception:
            delivery.abort()
            raise

    def _end_failed(self) -> None:
        if self.exchange.outcome is None:
            self._end(Outcome.FAILED)

    def _leave(self, ending: Ending, broken: str | None = None, answered: int | None = None) -> None:
        """Off the instance; `broken`: why it could not be used, `answered`: the status that it gave itself."""
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return
        attempt.cancel()
        self.exchange.bytes_out += attempt.fast.bytes
        if attempt.delivering:
            self.events += attempt.events
        if attempt.tracker is not None and self.delivery.tracker is not None:
            self.delivery.tracker = attempt.tracker  # what its engine said of its fault is told at the end
        if attempt.target is None:
            self._desk.left_overflow(self, ending, broken)
        else:
            self._desk.left(self, attempt, attempt.target, ending, broken=broken, answered=answered)

    def _let_go(self, ending: Ending = Ending.LEFT) -> None:
        """Off the instance, out of the queue."""
        self._leave(ending)
        if self.page is not None:
            self.page.cancel()
        if self.ticket is not None:
            self._desk.fleet.withdraw(self.ticket)

    def _end(self, outcome: Outcome) -> None:
        self.done = True
        self._desk.ended(self, outcome)

    # --- the clock ---------------------------------------------------------------------------------

    def tick(self, now: float) -> int:
        """Called a few times a second: what took too long? Returns what came meanwhile, in reads."""
        if self._comment_at is not None and now >= self._comment_at:
            self._comment(now)
        attempt, desk = self.attempt, self._desk
        if attempt is None:
            return 0
        if self.stalled_at is not None:
            return 0
        if self.transcript is not None and self.transcript.too_long():
            attempt.fast.disarm()
        reads = attempt.watch(now, self.first_byte_timeout_s, desk.idle_timeout_s)
        return reads if self.attempt is attempt else 0

    def _plan_comment(self, now: float) -> None:
        if self._comment_at is None and self.streamed:
            self._comment_at = now + self._desk.comment_interval_s

    def _comment(self, now: float) -> None:
        """A sign of life for a client that waits for an event (an SSE comment, ignored by clients)."""
        self._comment_at = now + self._desk.comment_interval_s
        if not self.delivery.started:
            self.delivery.tracker = EventTracker()
            self.delivery.start(own_head(200, _EVENTS), now)
        if not self.delivery.full:
            self.delivery.send(_COMMENT)
