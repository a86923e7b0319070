"""One attempt: a request on one upstream, whose response is read as far as must be known, and judged.

What it finds is posted to the request: StreamStarted with the first bytes that may go to the client (further ones go to
`Output`), then one of AnswerCompleted, AnswerReceived (a whole response, held back until it was complete) and
AttemptFailed. A small whole response, and the first event of a stream that brings output, are waited for before anything
is delivered: an upstream that breaks until then costs the client nothing but time, and no id of its events has been told.
Comments and pings are no event and no progress: an API server writes them by a timer, whatever its engine does. The client
gets those that come after the first output.
"""

from __future__ import annotations

import re
from typing import Protocol

from launcher.balancing.upstreams import Upstream
from launcher.base.api_errors import CLIENT_ERROR, NEVER_REPEATED, SERVER_ERROR, blames_server
from launcher.proxy.error_forms import body_of
from launcher.proxy.http1.responses import ResponseHead
from launcher.proxy.openai.answers import is_json, not_json, promises_json
from launcher.proxy.request.events import (
    AnswerCompleted,
    AnswerReceived,
    AttemptFailed,
    BytesArrived,
    Faulted,
    StreamStarted,
)
from launcher.proxy.request.ports import Answer, own_answer
from launcher.proxy.request.record import Post, Request
from launcher.proxy.routes import Api, Kind
from launcher.proxy.sse.ends import StreamEnd, aborted, gave_up
from launcher.proxy.sse.tracker import EventTracker, event_data
from launcher.proxy.upstream.connection import EVENT_STREAM, UpstreamConnection
from launcher.proxy.upstream.overflow_endpoint import OverflowCall, unusable
from launcher.proxy.upstream.pool import ConnectionPool
from launcher.proxy.upstream.pulse import Pulse

HOLD_BYTES = 1 << 20  # a whole response up to this size is held until it is complete
_NOT_JSON = "an event of its stream was not JSON"
_SAYS = re.compile(rb'"(?:content|text)"\s*:\s*"[^"]|"finish_reason"\s*:\s*"(?!null")[^"]')


class Output(Protocol):
    """Takes what may go to the client; `raw` is the same as the upstream framed it, where that is whole."""

    # Whole events; `clean`: all that was read and nothing else, so `raw` may go in their place.
    def events(self, attempt: Attempt, events: bytes, raw: bytes | None, *, clean: bool) -> None: ...
    # A part of a response that is no stream.
    def part(self, attempt: Attempt, data: bytes, raw: bytes | None) -> None: ...


class Attempt:
    """A request on one upstream."""

    __slots__ = (
        "_events", "_fast_bytes", "_held", "_hold", "_output", "_post", "_reads", "_seen", "asked_at",
        "connection", "delivering", "has_output", "head", "moved_at", "overflow", "pulse", "reached", "request", "tracker",
        "upstream",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        upstream: Upstream | OverflowCall,
        post: Post,
        output: Output,
        now: float,
    ) -> None:
        self.request = request
        # One of the two.
        self.upstream = None if isinstance(upstream, OverflowCall) else upstream
        self.overflow = upstream if isinstance(upstream, OverflowCall) else None
        self.pulse: Pulse | None = None  # of its instance's engine
        self._post = post
        self._output = output
        self.connection: UpstreamConnection | None = None  # None: it has not been sent, or is over
        self.head: ResponseHead | None = None
        self.tracker: EventTracker | None = None  # of an event stream
        # Of a response that is no stream; of a stream, the events before its first output.
        self._held: bytes | bytearray = b""
        self._hold = HOLD_BYTES  # beyond this it is delivered in pieces
        self.reached = True  # the upstream may have begun with it: no connect that failed
        self.delivering = False  # bytes of it went to the client
        self.has_output = False  # text, or another delta, has come: its prompt is computed
        self._events = self._fast_bytes = 0  # relayed by the fast path of the connection that it had
        self._reads = 0  # others that brought the head, or a part of the response
        self._seen = 0  # reads that `watch` knows of
        self.asked_at = self.moved_at = now  # loop time; `moved_at` as far as `watch` has seen

    def begin(self, pulse: Pulse) -> None:
        """It starts on an instance, whose engine has this pulse."""
        self.pulse = pulse

    def send(
        self, pool: ConnectionPool, method: str, head: bytes, body: bytes | bytearray | memoryview, now: float
    ) -> None:
        if pool.closed:
            self.broken("the upstream was removed", sent=False)
        else:
            self.connection = pool.send(self, method, head, body, now)

    def cancel(self) -> None:
        connection = self.connection
        if connection is not None:
            self._part()
            connection.abort()

    def _part(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            self._events, self._fast_bytes = connection.events, connection.bytes

    def pause(self) -> None:
        if self.connection is not None:
            self.connection.pause()

    def resume(self, now: float) -> None:
        """It takes more; the silence meanwhile was not the upstream's."""
        self.moved_at = now
        if self.connection is not None:
            self.connection.resume()

    def read(self, data: bytes) -> None:
        """Read on; what it says is posted, or goes to the output."""
        if self.connection is not None:
            self.connection.read(data)

    @property
    def reads(self) -> int:
        """Reads so far that brought something, on the fast path one for each event. Comments do not count, nor does framing:
        an upstream may write a chunk's size by itself."""
        return self._reads + (self._events if self.connection is None else self.connection.events)

    @property
    def fast_bytes(self) -> int:
        return self._fast_bytes if self.connection is None else self.connection.bytes

    @property
    def events(self) -> int:
        """Whole events of its stream so far."""
        fast = self._events if self.connection is None else self.connection.events
        return fast + (0 if self.tracker is None else self.tracker.events)

    @property
    def held_back(self) -> bool:
        """Its client takes nothing, so it is not read."""
        return self.request.stalled_at is not None

    def note_output(self) -> None:
        self.has_output = True

    def start(self, data: bytes, raw: bytes | None, *, clean: bool) -> None:
        """The first bytes that may go to the client."""
        self.delivering = True
        self._post(self.request, StreamStarted(self, data, raw, clean=clean))

    # --- what the upstream says (connection.Sink) ---------------------------------------------------

    def bytes_arrived(self, data: bytes) -> None:
        self._post(self.request, BytesArrived(self, data))

    def head_received(self, head: ResponseHead) -> None:
        self._reads += 1
        self.head = head
        if self.overflow is not None:
            reason = unusable(head)
            if reason is not None:
                self.fail(reason)
                return
            self.head = head = self.overflow.endpoint.passing(head)
        if head.status == 200 and head.content_type == EVENT_STREAM:
            self.tracker = EventTracker(
                self.request.stream_end or StreamEnd.DONE, choices=self.request.choices
            )
        elif head.length is None:
            self._hold = HOLD_BYTES if self._promises_json(head) else 0
        elif head.length > HOLD_BYTES:
            self._hold = 0

    def body_received(self, payload: bytes, raw: bytes | None) -> None:
        tracker = self.tracker
        if tracker is None:
            self._reads += 1
            self._plain_part(payload, raw)
            return
        passed = tracker.feed(payload)
        self._reads += not tracker.quiet
        clean = passed is payload
        if not self.delivering:
            if tracker.quiet:
                return
            if self._held:
                passed, raw, self._held = bytes(self._held) + passed, None, b""
            if not tracker.output and len(passed) <= HOLD_BYTES:
                self._held, passed = passed, b""
        if tracker.done and self.upstream is not None and self._is_empty(tracker, passed):
            self.fail("it ended without any output")
            return
        if passed:
            self._output.events(self, passed, raw, clean=clean)
        if tracker.broken:
            self.fail(_NOT_JSON)
        elif tracker.error is not None and tracker.engine_fault:
            self.fail("its engine failed in the middle of the answer")

    def _is_empty(self, tracker: EventTracker, passed: bytes) -> bool:
        """Whether a plain stream that ends with these events has said nothing at all, not even why it ends.

        vLLM 0.32 ends requests this way during engine shutdown: a role and usage at most, then [DONE]
        (chat_completion/serving.py).
        """
        said = self.request.transcript
        if said is None or self.request.splice is not None or tracker.events > 3:
            return False
        return not said.text and said.odd is None and said.finish_reason is None and not _SAYS.search(passed)

    def _plain_part(self, payload: bytes, raw: bytes | None) -> None:
        if self.delivering:
            self._output.part(self, payload, raw)
            return
        if not self._held:
            self._held = payload  # nearly always all of it
        else:
            if isinstance(self._held, bytes):
                self._held = bytearray(self._held)
            self._held += payload
        size = len(self._held)
        if size > self._hold and self._may_come_in_pieces():
            held, self._held = bytes(self._held), b""
            self._output.part(self, held, None)
        elif size > HOLD_BYTES:  # an error's body: no engine says as much
            self._held = self._held[:HOLD_BYTES]

    def _may_come_in_pieces(self) -> bool:
        """Not an error, and not into a stream that has begun."""
        well = self.head is None or self.head.status < CLIENT_ERROR
        return well and not self.request.head_sent

    def completed(self) -> None:
        """It is complete, as HTTP sees it."""
        connection, self.connection = self.connection, None
        if connection is not None:
            self._events, self._fast_bytes = connection.events, connection.bytes
        if self.tracker is not None:
            self._stream_end(self.tracker)
        elif self.delivering:
            self._post(self.request, AnswerCompleted(self, b""))
        elif self.head is None:
            self.fail("it sent no answer")
        else:
            self._judge(Answer(self.head, bytes(self._held)))

    def _judge(self, answer: Answer) -> None:
        """Whether a whole response is fit for the client; the overflow endpoint's always is."""
        # The request is at fault for an answer that says that this engine cannot do that.
        if self.upstream is None or answer.head.status in NEVER_REPEATED:
            self._post(self.request, AnswerReceived(self, answer))
        elif blames_server(answer.head.status):
            self.fail(f"it answered {answer.head.status}", answer)
        elif self._gave_up(answer):
            self.fail("its engine gave the request up")
        elif self._promises_json(answer.head) and not is_json(answer.body):
            # As with 5xx, the request itself may be what the instances stumble over: the blame waits.
            error = not_json()
            self.fail(error.message, own_answer(error.status, body_of(Api.OPENAI, error)))
        else:
            self._post(self.request, AnswerReceived(self, answer))

    def _gave_up(self, answer: Answer) -> bool:
        """Whether the engine aborted the request, as answers of its route say it."""
        if aborted(answer.body):
            return True
        found = self.request.match
        if found is None or found.route.kind is Kind.STORED or answer.head.status >= CLIENT_ERROR:
            return False  # a stored response says what became of an earlier request
        return found.route.stream is not None and gave_up(found.route.stream.end, answer.body)

    def _promises_json(self, head: ResponseHead) -> bool:
        found = self.request.match
        json_route = found is not None and found.route.kind is Kind.JSON
        return promises_json(head.status, head.content_type, json_route=json_route)

    def _stream_end(self, tracker: EventTracker) -> None:
        rest = bytes(self._held) + tracker.rest()
        if self.request.stream_end is not None and (end := tracker.missing_end(rest)):
            self._output.events(self, end, None, clean=False)
            rest = b""
        if tracker.error is not None and tracker.engine_fault:
            self.fail("its engine failed")
        elif tracker.broken:
            self.fail(_NOT_JSON)
        elif self.request.stream_end is not None and not tracker.done and tracker.error is None:
            self.fail(f"the stream ended without {tracker.end}")
        else:
            self.delivering = True
            self._post(self.request, AnswerCompleted(self, rest))

    def broken(self, reason: str, *, sent: bool, deterministic: bool = False) -> None:
        self._part()
        self.reached = sent
        self.fail(reason, deterministic=deterministic)

    def faulted(self, error: Exception) -> None:
        self._part()
        self._post(self.request, Faulted(error))

    def fail(
        self,
        reason: str,
        answer: Answer | None = None,
        *,
        deterministic: bool = False,
        died: bool = False,
    ) -> None:
        """It failed: `answer` says so itself, or its connection, its process (`died`) or the clock."""
        self.cancel()
        tracker = self.tracker
        if answer is None and tracker is not None and tracker.error_first and tracker.error is not None:
            answer = _error_answer(tracker.error)
        failed = AttemptFailed(self, reason, answer, deterministic=deterministic, died=died)
        self._post(self.request, failed)

    # --- the clock ---------------------------------------------------------------------------------

    def excuse(self, seconds: float, now: float) -> None:
        """It could not be read for so long: that was not the upstream's silence."""
        self.asked_at = min(now, self.asked_at + seconds)
        self.moved_at = min(now, self.moved_at + seconds)

    def watch(
        self, now: float, first_byte_timeout_s: float, idle_timeout_s: float, silence_timeout_s: float
    ) -> int:
        """Fail what takes too long. Returns the reads since the last call.

        `silence_timeout_s`: of a stream that has begun, while counters rise: they are the engine's, so they may rise for
        other requests while this one is lost inside of it.
        """
        reads = self.reads
        new, self._seen = reads - self._seen, reads
        if new:
            self.moved_at = now
        elif self.delivering:
            self._watch_silence(now, self.moved_at, idle_timeout_s, silence_timeout_s, "further")
        if not self.delivering and first_byte_timeout_s > 0:
            # A first event: its engine has begun with it, and a parser may hold the answer back.
            begun = self.tracker is not None and self.tracker.events > 0
            longest_s = silence_timeout_s if begun else first_byte_timeout_s
            self._watch_silence(now, self.asked_at, first_byte_timeout_s, longest_s, "first")
        return new

    def _watch_silence(self, now: float, since: float, limit_s: float, longest_s: float, which: str) -> None:
        """Fail after `limit_s` without a byte and without a rise of the engine's counters, or after `longest_s` with it."""
        longest_s = max(limit_s, longest_s)
        if now - since > longest_s:
            self.fail(f"no {which} byte within {longest_s:g} s")
        elif longest_s > limit_s and now - max(since, self._counted_at) > limit_s:
            self.fail(f"no {which} byte within {limit_s:g} s")

    @property
    def _counted_at(self) -> float:
        """When the counters of its engine had risen: then its silence proves nothing."""
        return self.moved_at if self.pulse is None else self.pulse.counted_at


def _error_answer(event: bytes) -> Answer:
    """What a stream's first and only event, an error, would have been as a plain answer."""
    return own_answer(SERVER_ERROR, event_data(event) or b"")
