"""An upstream's bytes on their way to the client: commit, continuation, transcript, usage, the fast path.

Read slowly here: the beginning of a response, its end, and whatever is not usual. Usual events take the fast path of
the upstream's connection (sse/fast_path.py), which is armed here.
"""

from __future__ import annotations

from launcher.accounts.ended_request import What
from launcher.balancing.balancer import Balancer
from launcher.base.api_errors import SERVER_ERROR, HttpError
from launcher.proxy.continuation.splicer import Diverged as DivergedError
from launcher.proxy.continuation.splicer import IdsIgnored, Splicer
from launcher.proxy.downstream import response
from launcher.proxy.error_forms import engine_event, opening_of
from launcher.proxy.openai.answers import USAGE_BYTES, response_id, usage_of, with_reasoning
from launcher.proxy.openai.body import CHAT
from launcher.proxy.openai.models import ModelTraits
from launcher.proxy.openai.prompts import said_usage
from launcher.proxy.openai.stream_options import UsageAsk
from launcher.proxy.request.events import AnswerCompleted, Diverged, PromptComputed, StreamStarted
from launcher.proxy.request.ports import Answer
from launcher.proxy.request.record import Post, Request
from launcher.proxy.routes import api_of
from launcher.proxy.sse.ends import StreamEnd
from launcher.proxy.sse.fast_path import NO_USAGE
from launcher.proxy.sse.tracker import USAGE_KEY, usage_apart
from launcher.proxy.upstream.attempt import Attempt
from launcher.proxy.upstream.overflow_endpoint import has_output
from launcher.telemetry.timings import Timings

RESPONSES = "/v1/responses"


class Streaming:
    """Passes responses to clients."""

    def __init__(self, balancer: Balancer, traits: ModelTraits, timings: Timings, post: Post) -> None:
        self._balancer = balancer
        self._traits = traits
        self._timings = timings
        self._post = post

    def start(self, request: Request, event: StreamStarted | AnswerCompleted, now: float) -> None:
        """Commit: an upstream's first bytes go to the client."""
        attempt = event.attempt
        if not isinstance(attempt, Attempt):
            raise TypeError("no other attempt has a head")
        if not request.head_sent and attempt.head is not None:
            length = attempt.head.length if attempt.tracker is None else None
            response.start(request, attempt.head, now, length=length, extra=response.timing(request, now))
        request.tracker = attempt.tracker
        # The registry counts from the last byte on; a comment is for event streams only.
        request.comment_at = None if attempt.tracker is None else request.comment_at or now
        if not request.committed:
            request.committed = True
            request.first_byte = now  # comments do not count
            has_token = attempt.tracker is not None and not attempt.tracker.error_first
            if request.streamed and has_token:
                waited_s = now - request.started
                self._timings.take_first_token(request.slot, request.model or "", waited_s, now)
                if request.predicted_s is not None and request.attempts == 1:
                    self._timings.prediction_error.observe(abs(waited_s - request.predicted_s))
            if request.transcript is None:
                request.body = b""  # it is not needed again
            if request.steps is not None and has_token:
                request.note(
                    What.FIRST_TOKEN, now, upstream=attempt.upstream, endpoint=request.overflow or None
                )
        elif request.splice is not None:
            request.note(What.CONTINUED, now, upstream=attempt.upstream)
        if isinstance(event, StreamStarted):
            self._open(request, attempt, event)

    def _open(self, request: Request, attempt: Attempt, event: StreamStarted) -> None:
        if request.stream_end is StreamEnd.RESPONSE_COMPLETED:
            request.opening = opening_of(event.data)
        self._write(request, attempt, event.data, event.raw, clean=event.clean)

    def _write(
        self, request: Request, attempt: Attempt, data: bytes, raw: bytes | None, *, clean: bool
    ) -> None:
        """Send bytes, `raw` in their place where it is whole chunks of the same; `clean`: all that was read."""
        if raw is not None and request.chunked:
            response.pass_on(request, raw)
        else:
            response.send(request, data)
        if attempt.tracker is None:
            return
        if clean and attempt.has_output and request.chunked:
            self._arm(request, attempt)

    def events(self, attempt: Attempt, events: bytes, raw: bytes | None, *, clean: bool) -> None:
        request = attempt.request
        if (tracker := attempt.tracker) is not None and tracker.error is not None:
            told = _in_form(request, attempt, tracker.error, events)
            if told is not events:
                events, raw, clean = told, None, False
        if request.splice is not None:
            events, clean = self._spliced(request, attempt, request.splice, events), False
        if USAGE_KEY in events:
            self.learn_usage(request, events)
            keep = request.usage_ask is UsageAsk.NO
            if (told := usage_apart(events, keep=keep)) is not events:
                if not keep:
                    self._traits.note_usage_told(request.model, request.overflow)
                events, raw = told, None
        if request.path == CHAT and (told := with_reasoning(events)) is not events:
            events, raw = told, None
        transcript = request.transcript  # it takes out token ids that the client did not ask for
        told = events if transcript is None else transcript.feed(events)
        if not told:
            return
        if not attempt.delivering and request.path == RESPONSES and request.stored is None:
            request.stored = response_id(told)
        # A part of a body with a length is no chunk.
        chunk = raw if clean and raw is not events and told is events else None
        self._pass(request, attempt, told, chunk, clean=clean)

    def part(self, attempt: Attempt, data: bytes, raw: bytes | None) -> None:
        request = attempt.request
        before, request.unread_tail = request.unread_tail, data[-USAGE_BYTES:]
        if USAGE_KEY in data or USAGE_KEY in before + data[: len(USAGE_KEY)]:
            self.learn_usage(request, before + data)
        self._pass(attempt.request, attempt, data, None if raw is data else raw, clean=False)

    def _pass(
        self, request: Request, attempt: Attempt, data: bytes, raw: bytes | None, *, clean: bool
    ) -> None:
        if attempt.delivering:
            self._write(request, attempt, data, raw, clean=clean)
        else:
            attempt.start(data, raw, clean=clean)
        if attempt.tracker is not None and attempt.tracker.output and not attempt.has_output:
            attempt.note_output()
            self._post(request, PromptComputed(attempt))

    def _spliced(self, request: Request, attempt: Attempt, splice: Splicer, events: bytes) -> bytes:
        """What of a continuation the client does not have yet."""
        try:
            return splice.feed(events)
        except DivergedError as error:
            ids_ignored = isinstance(error, IdsIgnored)
            if ids_ignored:
                self._traits.note_ids_ignored(request.model)
            self._post(request, Diverged(attempt, str(error), ids_ignored=ids_ignored))
            return b""

    def _arm(self, request: Request, attempt: Attempt) -> None:
        """From the next read on usual events take the fast path."""
        connection, tracker = attempt.connection, attempt.tracker
        if (
            connection is None
            or tracker is None
            or not connection.between_chunks
            or not tracker.between_events
        ):
            return
        if request.transcript is None:
            connection.arm_any(request.client.write, end=tracker.end)
        else:
            request.transcript.arm(connection, request.client.write)

    def learn_usage(self, request: Request, data: bytes) -> None:
        """An instance says how many tokens the request took: estimates get better."""
        if request.overflow:
            self._learn_charged(request, data)
            return
        usage = usage_of(data, request.usage)
        if usage is None:
            return
        request.usage, splice = usage, request.splice
        if splice is not None:  # it says what several instances did, one after the other
            request.usage_is_exact = splice.counts_exactly
        elif request.ticket is not None:
            self._balancer.usage(request.ticket, request.prompt_bytes, *usage)

    @staticmethod
    def _learn_charged(request: Request, data: bytes) -> None:
        """An overflow endpoint says what it charges for."""
        if data.count(USAGE_KEY) > data.count(NO_USAGE):
            request.usage = said_usage(data, output=has_output(request.path))

    def learn_whole(self, request: Request, answer: Answer) -> None:
        """What a whole response says of itself."""
        body = answer.body
        self.learn_usage(request, body)
        if request.usage is None:  # vLLM's embeddings under `encoding_format: "bytes"` (pooling/utils.py)
            self.learn_usage(request, (answer.head.get(b"metadata") or "").encode())
        if request.path == RESPONSES:
            request.stored = response_id(body)


def _in_form(request: Request, attempt: Attempt, error: bytes, events: bytes) -> bytes:
    """Events with an error that an engine tells of the request, in the form of the API; the same object where it has it."""
    if error not in events:
        return events
    opening, sent = response.opened(request, events)
    why = HttpError(SERVER_ERROR, "the engine failed", type_="upstream_error")
    told = engine_event(api_of(request.path), error, why, opening, sent + attempt.events - 1)
    return events if told is error else events.replace(error, told, 1)
