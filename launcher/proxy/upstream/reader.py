"""One request asked of one instance: what comes back, read as far as must be known, and told to the request.

An attempt is the sink of its call (links). Of what it hears it tells its relay, in this order:

    pass_events, pass_part   bytes that may go to the client; the first are the commit point
    then one of
        ended                all of it has been told so
        answered             a whole answer, which was held back until it was complete
        broken               it is no use any more, and why

A whole answer that is small, and the first event of a stream, are waited for before anything is told, so an
instance that breaks until then costs the client nothing but time. An attempt is over once its relay has let go
of it (`Relay.attempt` is another one, or none); what somebody says to it later changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher.proxy.downstream.response import own_head
from launcher.proxy.http1 import ResponseHead
from launcher.proxy.openai.answers import JSON
from launcher.proxy.openai.whole_json import is_json, not_json, promises_json
from launcher.proxy.routes import Kind
from launcher.proxy.sse.fast_path import FastPath
from launcher.proxy.sse.tracker import EventTracker, aborted
from launcher.proxy.upstream.endpoint import HeaderPolicy

if TYPE_CHECKING:
    from launcher.proxy.dispatch.fleet import Target
    from launcher.proxy.dispatch.relay import Relay
    from launcher.proxy.upstream.connection import Call
    from launcher.proxy.upstream.pool import ConnectionPool

HOLD_BYTES = 1 << 20  # a whole answer up to this size is held until it is complete
STREAM = b"text/event-stream"
_IDLE = FastPath()  # of answers that are no stream: never armed
_CLIENT_ERROR = 400
_SERVER_ERROR = 500


class Answer:
    """What an instance said, whole."""

    __slots__ = ("body", "head")

    def __init__(self, head: ResponseHead, body: bytes) -> None:
        self.head = head
        self.body = body


class Attempt:
    """One asking of one instance."""

    __slots__ = (
        "_asked_at", "_call", "_held", "_hold", "_policy", "_reads", "_relay", "_seen", "delivering", "fast", "head",
        "moved_at", "quick", "reached", "spoke", "target", "tracker",
    )  # fmt: skip

    def __init__(
        self, relay: Relay, target: Target | None, now: float, policy: HeaderPolicy | None = None
    ) -> None:
        self._relay = relay
        self.target = target  # None: the overflow endpoint
        self._policy = policy
        self._call: Call | None = None
        self.head: ResponseHead | None = None
        self.tracker: EventTracker | None = None  # of an event stream
        self._held: bytes | bytearray = b""  # of an answer that is no stream
        self._hold = HOLD_BYTES  # beyond this it is delivered in pieces
        self.reached = True  # the instance may have begun with it: no connect that failed
        self.delivering = False  # bytes of it went to the client
        self.spoke = False  # words of it did
        self.fast = _IDLE
        self.quick: Callable[[bytes], bool] | None = None  # see Sink
        self._reads = 0  # that did not take the fast path
        self._seen = 0  # reads that `watch` knows of
        self._asked_at = self.moved_at = now  # loop time; `moved_at` as far as `watch` has seen

    def ask(self, link: ConnectionPool, method: str, head: bytes, body: bytes | bytearray) -> None:
        """Send the request; the answer may begin before this returns."""
        self._call = link.ask(self, method, head, body)

    def cancel(self) -> None:
        """Nothing more is wanted of it."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def pause(self) -> None:
        """The client takes no more for now."""
        if self._call is not None:
            self._call.pause()

    def resume(self, now: float) -> None:
        """It takes more; the silence meanwhile was not the instance's."""
        self.moved_at = now
        if self._call is not None:
            self._call.resume()

    @property
    def reads(self) -> int:
        """Reads so far, on the hot path one event each."""
        return self._reads + self.fast.events

    @property
    def events(self) -> int:
        """Whole events of its stream so far."""
        return self.fast.events + (0 if self.tracker is None else self.tracker.events)

    @property
    def held_back(self) -> bool:
        """Its client takes nothing, so it is not read."""
        return self._relay.stalled_at is not None

    # --- what the instance says (links.Sink) -------------------------------------------------------

    def on_head(self, head: ResponseHead) -> None:
        """Its answer begins."""
        if self._policy is not None:
            reason = self._policy.unusable(head)
            if reason is not None:
                self.broken(reason)
                return
            head = self._policy.response(head)
        self.head = head
        self._reads += 1
        if self._relay.delivery.full:
            self._relay.client_paused()  # since before this instance was asked
        if head.status == 200 and head.content_type == STREAM:
            self.tracker = EventTracker()
            self.fast = FastPath()
        elif head.length is None:
            self._hold = HOLD_BYTES if self._promises_json(head) else 0
        elif head.length > HOLD_BYTES:
            self._hold = 0

    def on_body(self, payload: bytes, raw: bytes | None) -> None:
        """A piece of it."""
        self._reads += 1
        self.fast.disarm()
        self.quick = None
        if self._relay.delivery.full:
            self._relay.client_paused()  # what is usual is not looked at: the clock does, and it comes in drops
        tracker = self.tracker
        if tracker is None:
            self._plain_part(payload, raw)
            return
        passed = tracker.feed(payload)
        if tracker.done and self.target is not None and self._relay.wordless(tracker, passed):
            self.broken("it ended without a word")
            return
        if passed:
            self._relay.pass_events(self, passed, raw, clean=passed is payload)
        if tracker.error is not None and tracker.engine_fault:
            self.broken("its engine failed in the middle of the answer")

    def _plain_part(self, payload: bytes, raw: bytes | None) -> None:
        if self.delivering:
            self._relay.pass_part(self, payload, raw)
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
            self._relay.pass_part(self, held, None)
        elif size > HOLD_BYTES:  # an error's body: no engine says as much
            self._held = self._held[:HOLD_BYTES]

    def _may_come_in_pieces(self) -> bool:
        """Not an error, and not into a stream that has begun."""
        well = self.head is None or self.head.status < _CLIENT_ERROR
        return well and not self._relay.delivery.started

    def on_end(self) -> None:
        """It is complete, as HTTP sees it."""
        self._call = None
        if self.tracker is not None:
            self._stream_end(self.tracker)
        elif self.delivering:
            self._relay.ended(self, b"")
        elif self.head is None:
            self.broken("it sent no answer")
        else:
            answer = Answer(self.head, bytes(self._held))
            if self.target is None:
                self._relay.answered(self, answer)
            else:
                self._judge(answer)

    def _judge(self, answer: Answer) -> None:
        """An instance's whole answer: fit for the client?"""
        if answer.head.status >= _SERVER_ERROR:
            self.broken(f"it answered {answer.head.status}", answer)
        elif aborted(answer.body):
            self.broken("its engine gave the request up")
        elif self._promises_json(answer.head) and not is_json(answer.body):
            # As with 5xx, the request itself may be what the instances stumble over: the blame waits.
            refusal = not_json()
            self.broken(refusal.message, Answer(own_head(refusal.status, JSON), refusal.body()))
        else:
            self._relay.answered(self, answer)

    def _promises_json(self, head: ResponseHead) -> bool:
        found = self._relay.found
        json_route = found is not None and found.route.kind is Kind.JSON
        return promises_json(head.status, head.content_type, json_route=json_route)

    def _stream_end(self, tracker: EventTracker) -> None:
        rest = tracker.rest()
        if tracker.error is not None and tracker.engine_fault:
            self.broken("its engine failed")
        elif self._relay.ends_in_done and not tracker.done and tracker.error is None:
            self.broken("the stream ended without [DONE]")
        else:
            self._relay.ended(self, rest)

    def on_broken(self, reason: str, *, meant: bool = False) -> None:
        """It broke off."""
        call, self._call = self._call, None
        self.reached = call is None or call.sent
        self.broken(reason, meant=meant)

    def broken(self, reason: str, answer: Answer | None = None, *, meant: bool = False) -> None:
        """It is no use any more: `answer` says so itself, or its connection, its process, the clock.

        `meant`: another instance would answer the same (http1.BadResponse).
        """
        if self._relay.attempt is not self:
            return
        self.cancel()
        tracker = self.tracker
        try:
            if answer is None and tracker is not None and tracker.error_first and tracker.error is not None:
                answer = _error_answer(tracker.error)
            self._relay.broken(self, reason, answer, meant=meant)
        except Exception:  # also the clock and the fleet call here
            self.on_fault()

    def on_fault(self) -> None:
        """What was made of its words failed: its relay ends."""
        self.cancel()
        self._relay.fault()

    # --- the clock ---------------------------------------------------------------------------------

    def watch(self, now: float, first_byte_timeout_s: float, idle_timeout_s: float) -> int:
        """Give up what takes too long. Returns the reads since the last call."""
        reads = self.reads
        new, self._seen = reads - self._seen, reads
        if new:
            self.moved_at = now
        elif self.delivering and now - self.moved_at > idle_timeout_s:
            self.broken(f"no further byte within {idle_timeout_s:g} s")
        if not self.delivering and 0 < first_byte_timeout_s < now - self._asked_at:
            self.broken(f"no first byte within {first_byte_timeout_s:g} s")
        return new


def _error_answer(event: bytes) -> Answer:
    """What a stream's first and only event, an error, would have been as a plain answer."""
    data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
    return Answer(own_head(_SERVER_ERROR, JSON), data)
