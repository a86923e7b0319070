"""Spans as OTLP over HTTP sends them: JSON of the protocol's messages (opentelemetry-proto, trace/v1). Pure.

Identifiers are hexadecimal, and 64-bit numbers are texts, as the protocol's mapping to JSON wants them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec
from msgspec import Struct


class Kind(IntEnum):
    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class StatusCode(IntEnum):
    ERROR = 2


class Message(Struct, rename="camel", omit_defaults=True, gc=False):
    """A message of the protocol."""


class Value(Message):
    string_value: str | None = None
    int_value: str | None = None
    double_value: float | None = None
    bool_value: bool | None = None


class Attribute(Message):
    key: str
    value: Value

    @staticmethod
    def text(key: str, value: str) -> Attribute:
        return Attribute(key, Value(value))

    @staticmethod
    def number(key: str, value: int) -> Attribute:
        return Attribute(key, Value(None, str(value)))

    @staticmethod
    def real(key: str, value: float) -> Attribute:
        return Attribute(key, Value(None, None, value))

    @staticmethod
    def flag(key: str, *, value: bool) -> Attribute:
        return Attribute(key, Value(None, None, None, value))


class Event(Message):
    time_unix_nano: str
    name: str
    attributes: list[Attribute] = []


class Status(Message):
    code: StatusCode
    message: str = ""


class Span(Message):
    trace_id: str
    span_id: str
    parent_span_id: str
    trace_state: str
    name: str
    kind: Kind
    start_time_unix_nano: str
    end_time_unix_nano: str
    attributes: list[Attribute] = []
    events: list[Event] = []
    status: Status | None = None


class Resource(Message):
    attributes: list[Attribute]


class Scope(Message):
    name: str
    version: str


class ScopeSpans(Message):
    scope: Scope
    spans: Sequence[Span]


class ResourceSpans(Message):
    resource: Resource
    scope_spans: list[ScopeSpans]


class ExportRequest(Message):
    resource_spans: list[ResourceSpans]


def encode(resource: Resource, scope: Scope, spans: Sequence[Span]) -> bytes:
    """The body of a request to the collector."""
    return msgspec.json.encode(ExportRequest([ResourceSpans(resource, [ScopeSpans(scope, spans)])]))


class PartialSuccess(Message):
    rejected_spans: int | str = 0
    error_message: str = ""


class ExportResponse(Message):
    partial_success: PartialSuccess | None = None


def rejected(body: bytes) -> tuple[int, str]:
    """Spans that a collector did not take although it answered 200, and why."""
    try:
        partial = msgspec.json.decode(body, type=ExportResponse).partial_success
        return (0, "") if partial is None else (int(partial.rejected_spans), partial.error_message)
    except (msgspec.MsgspecError, ValueError):
        return 0, ""
