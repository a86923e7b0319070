"""An OTLP receiver over HTTP, strict: what it gets must be messages of opentelemetry-proto."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

IDS = {"traceId", "spanId", "parentSpanId"}


@dataclass(frozen=True)
class ReceivedSpan:
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    begin: float
    end: float
    attributes: dict[str, object]
    events: list[str]
    failed: bool
    state: str
    service: str


@dataclass
class Receiver:
    """`answers`: (status, body) of the next requests; 200 when there are none. `delay_s`: before each answer."""

    url: str = ""
    answers: list[tuple[int, bytes]] = field(default_factory=list)
    delay_s: float = 0.0
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    spans: list[ReceivedSpan] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def wait(self, spans: int, within_s: float = 10.0) -> list[ReceivedSpan]:
        deadline = time.monotonic() + within_s
        while len(self.spans) < spans and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not self.faults, self.faults
        assert len(self.spans) >= spans, self.spans
        return self.spans

    def of(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def take(self, kind: str, body: bytes) -> tuple[int, bytes]:
        self.texts.append(body.decode("utf-8", "replace"))
        status, answer = self.answers.pop(0) if self.answers else (200, b"{}")
        if status == 200:
            try:
                self.spans += decoded(kind, body)
            except Exception as error:
                self.faults.append(repr(error))
                return 400, b""
        time.sleep(self.delay_s)
        return status, answer


def decoded(kind: str, body: bytes) -> Iterator[ReceivedSpan]:
    """JSON, or what OpenTelemetry's own exporters send."""
    message = ExportTraceServiceRequest()
    if kind == "application/json":
        json_format.Parse(json.dumps(in_base64(json.loads(body))), message)
    else:
        message.ParseFromString(body)
    for resource_spans in message.resource_spans:
        about = values(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield ReceivedSpan(
                    span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.name, span.kind,
                    span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9, values(span.attributes),
                    [event.name for event in span.events], span.status.code == 2, span.trace_state,
                    str(about.get("service.name", "")),
                )  # fmt: skip


def values(attributes: Any) -> dict[str, object]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def in_base64(value: Any) -> Any:
    """Ids are hexadecimal in OTLP's JSON; protobuf's own mapping has base64."""
    if isinstance(value, list):
        return [in_base64(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: base64.b64encode(bytes.fromhex(each)).decode() if name in IDS else in_base64(each)
        for name, each in value.items()
    }


@contextmanager
def receiving(port: int = 0) -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.headers.append(dict(self.headers))
            receiver.paths.append(self.path)
            status, answer = receiver.take(self.headers["Content-Type"], body)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="receiver"
        )
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


def uncovered(spans: list[ReceivedSpan]) -> float:
    """The share of a request's own span (the first) that none of its children covers."""
    root, *children = spans
    gaps, at = 0.0, root.begin
    for begin, end in sorted((child.begin, child.end) for child in children):
        gaps += max(0.0, begin - at)
        at = max(at, end)
    gaps += max(0.0, root.end - at)
    return gaps / (root.end - root.begin) if gaps else 0.0
