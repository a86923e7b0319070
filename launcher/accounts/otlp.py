"""Spans as OTLP over HTTP sends them: JSON of the protocol's messages (opentelemetry-proto, trace/v1). Pure.

Identifiers are hexadecimal, and 64-bit numbers are texts, as the protocol's mapping to JSON wants them.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping, Sequence
from enum import Enum, IntEnum, auto
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Struct

from launcher.base.errors import LauncherError, reason
from launcher.base.text import quoted


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


# --- A collector that takes OTLP over HTTP. Blocking: of the exporter's thread. ---

PATH: Final = "/v1/traces"
# Of the OpenTelemetry specification, for what a collector asks of its clients: an API key, a tenant.
HEADERS_VARIABLE: Final = "OTEL_EXPORTER_OTLP_HEADERS"
TIMEOUT_S: Final = 5.0
_MAX_ANSWER: Final = 64 * 1024
_MAX_SHOWN: Final = 200
# It may take the same later (OTLP specification, "Retryable Response Codes").
_LATER: Final = frozenset({429, 502, 503, 504})


class Taken(Enum):
    YES = auto()
    LATER = auto()
    NO = auto()
    """The same would be refused again."""


class Reply(NamedTuple):
    taken: Taken
    why: str = ""
    rejected: int = 0
    """Spans of a batch that was taken."""


class Collector:
    """Raises LauncherError for a header that cannot be sent."""

    def __init__(self, endpoint: str, environ: Mapping[str, str]) -> None:
        url = urlsplit(endpoint)
        self._host, self._port = url.hostname or "", url.port
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        path = url.path.rstrip("/")
        self._path = path if path.endswith(PATH) else path + PATH
        self._headers = {"Content-Type": "application/json", "User-Agent": "numa-launcher"}
        self._headers |= _headers_of(environ.get(HEADERS_VARIABLE, ""))
        self._connection: http.client.HTTPConnection | None = None

    def send(self, body: bytes, timeout_s: float = TIMEOUT_S) -> Reply:
        """Never raises."""
        reused = self._connection is not None
        reply = self._try(body, timeout_s)
        if reply is None and reused:  # it closed an idle connection
            reply = self._try(body, timeout_s)
        return reply or Reply(Taken.LATER, "it closed the connection without an answer")

    def _try(self, body: bytes, timeout_s: float) -> Reply | None:
        """None: the connection was closed before an answer."""
        connection = self._connection or self._connect()
        self._connection = None
        try:
            connection.timeout = timeout_s
            if connection.sock is not None:
                connection.sock.settimeout(timeout_s)
            connection.request("POST", self._path, body, self._headers)
            response = connection.getresponse()
            answer = response.read(_MAX_ANSWER)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            connection.close()
            return None
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            return Reply(Taken.LATER, _why(error, timeout_s))
        if response.will_close or not response.isclosed():
            connection.close()
        else:
            self._connection = connection
        return _judge(response.status, answer)

    def _connect(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port)
        return http.client.HTTPSConnection(self._host, self._port, context=self._tls)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _judge(status: int, answer: bytes) -> Reply:
    if 200 <= status < 300:
        count, why = rejected(answer)
        return Reply(Taken.YES, quoted(why, _MAX_SHOWN), count)
    text = quoted(answer.decode("utf-8", "replace").strip(), _MAX_SHOWN)
    why = f"it answered {status}" + (f": {text}" if text else "")
    return Reply(Taken.LATER if status in _LATER else Taken.NO, why)


def _why(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    return reason(error) if isinstance(error, OSError) else str(error) or type(error).__name__


def _headers_of(text: str) -> dict[str, str]:
    """`name=value,name=value`, percent-encoded."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, mark, value = (piece.strip() for piece in part.partition("="))
        value = unquote(value)
        if not mark or not name.replace("-", "").replace("_", "").isalnum() or not value.isprintable():
            raise LauncherError(
                f"cannot send traces: {HEADERS_VARIABLE} is not a list of headers",
                "write name=value,name=value, with special characters percent-encoded",
            )
        found[name] = value
    return found
