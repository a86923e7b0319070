"""The spans of an ended request. No word of its prompt or response. Pure.

    chat MODEL                 the whole request
      queue                    until an instance is asked
      attempt                  on an instance, with vLLM's own span below it; one for each attempt
      continuation             from the cut of a stream to its end, or to the next cut
        queue, attempt
      overflow                 on an overflow endpoint

Attributes have the names of OpenTelemetry's semantic conventions for generative AI and HTTP where there are any.
"""

from __future__ import annotations

from typing import Final

from launcher.accounts.ended_request import EndedRequest, Step, Trace, What
from launcher.accounts.otlp import Attribute, Event, Kind, Span, Status, StatusCode
from launcher.accounts.timeline import steps_of
from launcher.base.redaction import Redactor

# By route; others have no name of their own in the conventions.
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/cohere/v2/chat": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
}
_NANOS: Final = 1_000_000_000
# Spans of attempts have the request's number plus 1, 2, ...; the others begin here.
_OTHERS: Final = 1000
_SERVER_ERROR: Final = 500


def spans_of(ended: EndedRequest) -> list[Span]:
    """The request's own span first; none for a request that is not traced."""
    return [] if ended.trace is None else _Walk(ended, ended.trace).spans()


class _Walk:
    """Goes through the steps of one request; a span is open from one step to another."""

    def __init__(self, ended: EndedRequest, trace: Trace) -> None:
        self._ended = ended
        self._trace = trace
        self._began = ended.ended_at - ended.duration_s
        self._root = self._span(_name(ended), Kind.SERVER, 0.0, trace.span_id, trace.parent_id)
        self._found = [self._root]
        self._others = 0
        self._attempts = 0
        self._open: Span | None = None
        """Queue, attempt or overflow."""
        self._continuation: Span | None = None
        self._streaming = False
        """The client has a part of a stream."""
        self._cut_at_s: float | None = None
        """When an attempt failed after that."""

    def spans(self) -> list[Span]:
        for step in steps_of(self._ended):
            _TAKE[step.what](self, step)
        self._root.attributes = _about(self._ended)
        self._root.status = _status(self._ended)
        return self._found

    def _received(self, step: Step) -> None:
        self._wait(step.at_s)

    def _output(self, step: Step) -> None:
        self._streaming = True
        if self._open is not None:
            self._open.events.append(Event(self._nanos(step.at_s), step.what))

    def _ended_at(self, step: Step) -> None:
        self._close(step.at_s)
        self._close_continuation(step.at_s)

    def _wait(self, at_s: float) -> None:
        self._open = self._child("queue", Kind.INTERNAL, at_s)

    def _queued(self, step: Step) -> None:
        self._continue()
        if self._open is not None:
            why = [] if step.why is None else [Attribute.text("numa_launcher.reason", step.why)]
            self._open.events.append(Event(self._nanos(step.at_s), "queued", why))

    def _asked(self, step: Step) -> None:
        self._continue()
        self._close(step.at_s)
        self._attempts += 1
        name = "attempt" if step.what == What.SENT else "overflow"
        self._open = self._child(name, Kind.CLIENT, step.at_s, self._trace.span_id + self._attempts)
        about = [Attribute.number("numa_launcher.attempt", self._attempts)]
        if step.slot is not None:
            about.append(Attribute.number("numa_launcher.slot", step.slot))
        if step.generation is not None:
            about.append(Attribute.number("numa_launcher.generation", step.generation))
        if step.endpoint is not None:
            about.append(Attribute.text("numa_launcher.overflow.endpoint", step.endpoint))
            about.append(Attribute.text("numa_launcher.overflow.reason", step.why or ""))
        self._open.attributes = about

    def _failed(self, step: Step) -> None:
        if self._open is not None:
            self._open.status = Status(StatusCode.ERROR, _masked(step.why))
            self._open.attributes.append(Attribute.text("error.type", "attempt_failed"))
        self._close(step.at_s)
        if self._streaming:
            self._cut_at_s = step.at_s
        else:
            self._wait(step.at_s)

    def _continue(self) -> None:
        """The rest of a stream that was cut is asked for."""
        if self._cut_at_s is not None:
            self._close_continuation(self._cut_at_s)
            self._continuation = self._child("continuation", Kind.INTERNAL, self._cut_at_s)
            self._wait(self._cut_at_s)
            self._cut_at_s = None

    def _close(self, at_s: float) -> None:
        if self._open is not None:
            self._open.end_time_unix_nano = self._nanos(at_s)
            self._open = None

    def _close_continuation(self, at_s: float) -> None:
        if self._continuation is not None:
            self._continuation.end_time_unix_nano = self._nanos(at_s)
            self._continuation = None

    def _child(self, name: str, kind: Kind, at_s: float, number: int | None = None) -> Span:
        if number is None:
            self._others += 1
            number = self._trace.span_id + _OTHERS + self._others
        parent = self._continuation or self._root
        span = self._span(name, kind, at_s, number, parent.span_id)
        self._found.append(span)
        return span

    def _span(self, name: str, kind: Kind, at_s: float, number: int, parent_id: str) -> Span:
        end = self._nanos(self._ended.duration_s)
        return Span(
            self._trace.trace_id,
            f"{number:016x}",
            parent_id,
            self._trace.state,
            name,
            kind,
            self._nanos(at_s),
            end,
        )

    def _nanos(self, at_s: float) -> str:
        return str(int((self._began + at_s) * _NANOS))


_TAKE: Final = {
    What.RECEIVED: _Walk._received,
    What.QUEUED: _Walk._queued,
    What.SENT: _Walk._asked,
    What.OVERFLOWED: _Walk._asked,
    What.FIRST_TOKEN: _Walk._output,
    What.CONTINUED: _Walk._output,
    What.FAILED: _Walk._failed,
    What.ENDED: _Walk._ended_at,
}


def _name(ended: EndedRequest) -> str:
    operation = _OPERATIONS.get(ended.path)
    return ended.path if operation is None else f"{operation} {ended.model}".rstrip()


def _about(ended: EndedRequest) -> list[Attribute]:
    text, number = Attribute.text, Attribute.number
    found = [
        text("gen_ai.provider.name", "numa_launcher"),
        text("http.route", ended.path),
        text("numa_launcher.request.id", ended.request_id),
        text("numa_launcher.outcome", ended.outcome),
        number("numa_launcher.attempts", ended.attempts),
    ]
    texts = (
        ("gen_ai.operation.name", _OPERATIONS.get(ended.path, "")),
        ("gen_ai.request.model", ended.adapter or ended.model),
        ("numa_launcher.key", ended.key),
        ("numa_launcher.reason", _masked(ended.reason)),
    )
    found += [text(name, value) for name, value in texts if value]
    if ended.status:
        found.append(number("http.response.status_code", ended.status))
    if ended.prompt_tokens or ended.output_tokens:
        found.append(number("gen_ai.usage.input_tokens", ended.prompt_tokens))
        found.append(number("gen_ai.usage.output_tokens", ended.output_tokens))
        found.append(number("gen_ai.usage.cache_read.input_tokens", ended.cached_tokens))
        found.append(Attribute.flag("numa_launcher.usage.estimated", value=not ended.exact))
    if ended.streamed:
        found.append(Attribute.flag("gen_ai.request.stream", value=True))
        if ended.first_byte_s is not None:
            found.append(Attribute.real("gen_ai.response.time_to_first_chunk", ended.first_byte_s))
    if ended.predicted_s is not None:
        found.append(Attribute.real("numa_launcher.predicted_time_to_first_token", ended.predicted_s))
    if ended.continued:
        found.append(number("numa_launcher.continued", ended.continued))
    if ended.outcome == "failed":
        found.append(text("error.type", str(ended.status) if ended.status >= _SERVER_ERROR else "broken_off"))
    return found


def _status(ended: EndedRequest) -> Status | None:
    return Status(StatusCode.ERROR, _masked(ended.reason)) if ended.outcome == "failed" else None


def _masked(why: str | None) -> str:
    return Redactor().text(why) if why else ""
