"""The client's side of one response: its head, its framing, its honest end. All state is in the request's record.

Nothing has been delivered until `start`, `deliver` or `refuse`; until then the request may move to another instance.
Nothing here waits: how much may pile up in the connection is decided by the executor (PAUSE).
"""

from __future__ import annotations

import time

from launcher.base.api_errors import CLIENT_ERROR, SHOULD_RETRY, HttpError, may_pass
from launcher.proxy.error_forms import (
    Opening,
    body_of,
    engine_event,
    error_in,
    event_of,
    in_form,
    new_opening,
    opening_of,
)
from launcher.proxy.http1.responses import ResponseHead, client_head
from launcher.proxy.openai.answers import JSON, with_reasoning
from launcher.proxy.openai.body import CHAT
from launcher.proxy.request.events import Event
from launcher.proxy.request.ports import own_head
from launcher.proxy.request.record import Request
from launcher.proxy.routes import api_of

_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_NO_BODY = frozenset({204, 304})
_NO_RETRY = f"{SHOULD_RETRY}: false\r\n".encode()


def start(
    request: Request, head: ResponseHead, now: float, *, length: int | None = None, extra: bytes = b""
) -> None:
    """Commit: the head, sent with what follows. Without `length` the body is chunked, or ends with the connection."""
    if request.head_sent:
        raise AssertionError("a response starts once")
    framing = b""
    if length is not None:
        framing = b"Content-Length: %d\r\n" % length
    elif request.head.http_1_0:
        request.keep_alive = False
    elif head.status not in _NO_BODY:
        framing = _CHUNKED
        request.chunked = request.method != "HEAD"
    request.status = head.status
    request.first_byte = now
    request.unsent_head = client_head(
        head, request.request_id, framing=framing, keep_alive=request.keep_alive, extra=extra + request.lines
    )
    request.head_sent = True


def pass_on(request: Request, raw: bytes) -> None:
    request.bytes_out += len(raw)
    _write(request, raw)


def send(request: Request, data: bytes) -> None:
    request.bytes_out += len(data)
    if request.method == "HEAD":
        data = b""
    _write(request, b"%x\r\n%b\r\n" % (len(data), data) if request.chunked else data)


def finish(request: Request, _event: Event, _now: float) -> None:
    """The body is complete; `tail` is its last part."""
    if request.finished:
        return
    last = request.tail
    if last:
        request.bytes_out += len(last)
        last = b"%x\r\n%b\r\n" % (len(last), last) if request.chunked else last
    if request.chunked:
        last += _LAST_CHUNK
    _write(request, b"" if request.method == "HEAD" else last)
    request.finished = True
    request.client.answered(keep=request.keep_alive)


def deliver(request: Request, event: Event, now: float) -> None:
    """The whole response of an upstream, or a page."""
    answer = request.answer
    if answer is None:
        raise AssertionError("there is nothing to deliver")
    head, body = answer.head, answer.body
    status, asked = head.status, f"{request.method} {request.path}"
    if request.head_sent:  # comments went out while it waited
        request.status = status
        told = error_in(body, status, asked)
        error = told or HttpError(status, f"an instance answered {status}", type_="upstream_error")
        request.tail = event_of(api_of(request.path), error, *opened(request))
        finish(request, event, now)
        return
    if status >= CLIENT_ERROR:
        body = in_form(api_of(request.path), body, status, asked)
    elif request.path == CHAT:
        body = with_reasoning(body)
    extra = timing(request, now)
    if not may_pass(status) and head.get(SHOULD_RETRY.lower().encode()) is None:
        extra += _NO_RETRY
    _send_whole(request, head, body, now, extra)


def _send_whole(request: Request, head: ResponseHead, body: bytes, now: float, extra: bytes) -> None:
    """Before the request's body is here it is the connection's last response."""
    if request.head_sent:
        raise AssertionError("a response starts once")
    client = request.client
    if client.body_missing:
        request.keep_alive = False
    request.status = head.status
    request.first_byte = now
    request.bytes_out += len(body)
    no_body = head.status in _NO_BODY
    framing = b"" if no_body else b"Content-Length: %d\r\n" % len(body)
    data = client_head(
        head, request.request_id, framing=framing, keep_alive=request.keep_alive, extra=extra + request.lines
    )
    request.head_sent = True
    client.write(data if no_body or request.method == "HEAD" else data + body)
    request.finished = True
    client.answered(keep=request.keep_alive)


def refuse(request: Request, _event: Event, now: float) -> None:
    """An error of the proxy's own."""
    error = _error_of(request)
    if error.close:
        request.keep_alive = False
    lines = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items()).encode()
    body = body_of(api_of(request.path), error)
    _send_whole(request, own_head(error.status, JSON, lines), body, now, b"")


def break_off(request: Request, event: Event, now: float) -> None:
    """End a response that broke after its head: an error event, or no clean end at all."""
    error, tracker = _error_of(request), request.tracker
    if tracker is None:
        abort(request, event, now)
        return
    api = api_of(request.path)
    if tracker.error is None:
        told = event_of(api, error, *opened(request))
    elif not tracker.engine_fault:  # the client has it
        told = b""
    else:  # what the engine itself said of its fault has been withheld until now
        told = engine_event(api, tracker.error, error, *opened(request))
    request.tail = tracker.break_off() + told
    finish(request, event, now)


def opened(request: Request, events: bytes = b"") -> tuple[Opening, int]:
    """The stream of /v1/responses that an error event ends, and the events of it that its client has.

    `events`: those that come before the error, if they are the first.
    """
    opening = request.opening or opening_of(events)
    if opening is None:
        opening = new_opening(f"resp_{request.request_id}", request.model or "", int(time.time()))
    return opening, request.events


def abort(request: Request, _event: Event, _now: float) -> None:
    """No clean end: the client sees that the response is not whole."""
    request.finished = True
    request.client.abort()


def timing(request: Request, now: float) -> bytes:
    """The line of `Server-Timing` (W3C): milliseconds in the queue, and from there to the first byte."""
    if request.bound is None:
        return b""
    queued_ms, first_byte_ms = (request.bound - request.started) * 1000, (now - request.bound) * 1000
    return b"Server-Timing: queue;dur=%.1f, first_byte;dur=%.1f\r\n" % (queued_ms, first_byte_ms)


def _error_of(request: Request) -> HttpError:
    if request.error is None:
        raise AssertionError("there is no error to answer with")
    return request.error


def _write(request: Request, data: bytes) -> None:
    if request.unsent_head:
        data, request.unsent_head = request.unsent_head + data, b""
    if data:
        request.client.write(data)
