"""Errors in the form of the API that was called: as a whole response, and as the event that ends a stream.

| API | whole response | event |
| --- | --- | --- |
| OpenAI | `{"error": {"message", "type", "param", "code"}}` | the same as `data:`, `code` is the status |
| OpenAI's Responses | the same | `response.failed` with the response that the stream announced |
| Anthropic | `{"type": "error", "error": {"type", "message"}}` | the same as `event: error` |
| Cohere | `{"message"}` | `message-end` with `finish_reason: "ERROR"` |

An engine's error passes as it is where it has the form of its API; else it is read in any of these forms, or FastAPI's, and
written again. vLLM 0.32 answers /v1/messages with types of its own (`BadRequestError`), and with OpenAI's form where the
body does not fit the schema (serve/exception_handling); /v2/embed always has OpenAI's form.

503 keeps its status on Anthropic's routes and has the type of 529, which no RFC knows: probes, load balancers and the SDKs'
retries know 503, and clients that look at the type read that the server is overloaded.
"""

from __future__ import annotations

from typing import Final, NamedTuple, assert_never

import msgspec

from launcher.base.api_errors import CLIENT_ERROR, SERVER_ERROR, TOO_MANY, HttpError
from launcher.base.foreign_json import UNREADABLE
from launcher.proxy.routes import Api
from launcher.proxy.sse.ends import NO_REASONS
from launcher.proxy.sse.engine_errors import status_of_error, status_of_word
from launcher.proxy.sse.tracker import event_data, event_ends

_READ_BYTES: Final = 1 << 20  # of an error; no engine says as much
_FIELD_BYTES: Final = 4096  # of a response's field that an error event repeats: not of long instructions
_NOT_SERVED: Final = frozenset({404, 405})

# Anthropic's API reference, "Errors"; anthropic-python, types/shared/error_object.py.
_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_GENERAL_TYPE: Final = "invalid_request_error"  # in OpenAI's API of nearly every fault of a request
_KNOWN_TYPES: Final = {type_: status for status, type_ in _ANTHROPIC_TYPES.items()}
# Codes of a failed response by which clients decide (OpenAI's API reference, response.error; codex-rs,
# codex-api/src/sse/responses.rs, which repeats all but the last three).
_FAILED_CODES: Final = frozenset(
    {
        "server_error",
        "rate_limit_exceeded",
        "invalid_prompt",
        "insufficient_quota",
        "context_length_exceeded",
    }
)

_TELLING: Final = frozenset(
    {"error", "response", "delta", "detail", "message", "object", "type", "param", "code"}
)
_EVENTS: Final = ("error", "response.failed", "message-end")  # `type` of events that tell an error

Fields = dict[str, object]


class Opening(NamedTuple):
    """The beginning of a stream of /v1/responses: an error event goes on from it."""

    sequence_number: int
    """The number of its first event; each event has the next one."""
    response: Fields
    """As that event has it, without large fields."""


def body_of(api: Api, error: HttpError) -> bytes:
    """A whole response's body."""
    match api:
        case Api.OPENAI | Api.RESPONSES:
            return msgspec.json.encode({"error": _openai(error, error.code)})
        case Api.ANTHROPIC:
            return msgspec.json.encode(_anthropic(error.status, error.message))
        case Api.COHERE:
            return msgspec.json.encode({"message": error.message})
    assert_never(api)


def event_of(api: Api, error: HttpError, opening: Opening, events: int) -> bytes:
    """The event that ends a stream. `opening`, of which `events` were sent, matters for Responses alone."""
    message = _with_delay(error)
    match api:
        case Api.OPENAI:
            return b"data: %b\n\n" % msgspec.json.encode(
                {"error": {**_openai(error, error.status), "message": message}}
            )
        case Api.RESPONSES:
            return _failed(error, message, opening, events)
        case Api.ANTHROPIC:  # the name is read, too (anthropic-python, _streaming.py)
            return b"event: error\ndata: %b\n\n" % msgspec.json.encode(_anthropic(error.status, message))
        case Api.COHERE:  # its clients read no other event (vLLM 0.32, entrypoints/cohere/serving.py)
            end = {"type": "message-end", "delta": {"error": message, "finish_reason": "ERROR"}}
            return b"data: %b\n\n" % msgspec.json.encode(end)
    assert_never(api)


def _openai(error: HttpError, code: str | int | None) -> Fields:
    return {"message": error.message, "type": error.type, "param": error.param, "code": code}


def _anthropic(status: int, message: str) -> Fields:
    return {"type": "error", "error": {"type": anthropic_type(status), "message": message}}


def anthropic_type(status: int) -> str:
    found = _ANTHROPIC_TYPES.get(status)
    if found is None:
        return _ANTHROPIC_TYPES[CLIENT_ERROR if status < SERVER_ERROR else SERVER_ERROR]
    return found


def _failed(error: HttpError, message: str, opening: Opening, events: int) -> bytes:
    """An event `error` would be overlooked: Codex reads `response.failed` only."""
    response = {
        **opening.response,
        "status": "failed",
        "error": {"code": _failed_code(error), "message": message},
    }
    event = {
        "type": "response.failed",
        "sequence_number": opening.sequence_number + events,
        "response": response,
    }
    return b"event: response.failed\ndata: %b\n\n" % msgspec.json.encode(event)


def _failed_code(error: HttpError) -> str:
    """Clients repeat the request unless the code says that it is the request's fault, whatever the message says."""
    if isinstance(error.code, str) and error.code in _FAILED_CODES:
        return error.code
    if not error.repeatable:
        return "invalid_prompt"
    return "rate_limit_exceeded" if error.status == TOO_MANY else "server_error"


def _with_delay(error: HttpError) -> str:
    """An event has no Retry-After; some clients read the delay in the message."""
    delay_s = error.headers.get("Retry-After")
    if delay_s is None or not error.repeatable or "try again in" in error.message:
        return error.message
    return f"{error.message}; try again in {delay_s} s"


def new_opening(response_id: str, model: str, created: int) -> Opening:
    """The opening of a stream in which nothing but comments was sent. `created`: seconds since the epoch."""
    response = {"id": response_id, "object": "response", "created_at": created, "model": model}
    return Opening(0, {**response, "status": "failed", "output": [], "error": None})


def opening_of(events: bytes) -> Opening | None:
    """The opening of a stream of /v1/responses, by its first events; None: they announce no response."""
    start = 0
    for end in event_ends(events):
        data = event_data(events[start:end])
        start = end
        if data is not None:
            return _opening(data)
    return None


class _Announced(msgspec.Struct):
    response: dict[str, msgspec.Raw]
    sequence_number: int = 0


def _opening(data: bytes) -> Opening | None:
    try:
        said = msgspec.json.decode(data, type=_Announced)
    except UNREADABLE:
        return None
    # Copies: what is decoded refers to all of the events.
    response = {
        name: value.copy() for name, value in said.response.items() if len(bytes(value)) <= _FIELD_BYTES
    }
    return Opening(said.sequence_number, dict(response))


# --- What an engine says of an error. ---


def in_form(api: Api, body: bytes, status: int, asked: str) -> bytes:
    """An engine's error in the form of the API: the very same bytes where they have it, or cannot be read.

    `asked`: method and path.
    """
    said = _object(body)
    if said is None or _has_form(api, said):
        return body
    error = _read(said, status, asked)
    return body if error is None else body_of(api, error)


def error_in(body: bytes, status: int, asked: str) -> HttpError | None:
    """The error that an engine's response, or the data of its error event, tells; None: it cannot be read.

    `status` holds where the body names none.
    """
    said = _object(body)
    return None if said is None else _read(said, status, asked)


def engine_event(api: Api, event: bytes, error: HttpError, opening: Opening, events: int) -> bytes:
    """An engine's error event in the form of the API; `error` takes its place where it cannot be read."""
    data = event_data(event) or b""
    said = _object(data)
    if said is not None and _has_event_form(api, said):
        return event
    named = status_of_error(data)
    told = None if said is None else _read(said, error.status if named == SERVER_ERROR else named, "")
    return event_of(api, told or error, opening, events)


def _object(body: bytes) -> Fields | None:
    """Its fields; of those that tell nothing of an error the names alone."""
    if not body.lstrip().startswith(b"{") or len(body) > _READ_BYTES:
        return None
    try:
        said = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return {name: msgspec.json.decode(its) if name in _TELLING else None for name, its in said.items()}
    except UNREADABLE:
        return None


def _has_form(api: Api, said: Fields) -> bool:
    error = said.get("error")
    match api:
        case Api.OPENAI | Api.RESPONSES:
            return isinstance(error, dict) or not _is_another_form(said)
        case Api.ANTHROPIC:
            if said.get("type") != "error" or not isinstance(error, dict):
                return False
            return error.get("type") in _KNOWN_TYPES and isinstance(error.get("message"), str)
        case Api.COHERE:
            return isinstance(said.get("message"), str) and error is None
    assert_never(api)


def _is_another_form(said: Fields) -> bool:
    """Whether it is a form that is known and not OpenAI's; others were always passed on as they are."""
    error, type_ = said.get("error"), said.get("type")
    return (
        set(said) == {"detail"}
        or (isinstance(error, str) and error not in NO_REASONS)
        or said.get("object") == "error"
        or type_ in _EVENTS
    )


def _has_event_form(api: Api, said: Fields) -> bool:
    if api is Api.OPENAI:
        return isinstance(said.get("error"), dict)
    if api is Api.RESPONSES:
        error = _inner(said, "response").get("error")
        return said.get("type") == "response.failed" and isinstance(error, dict) and "message" in error
    return False  # another name of the event, or further fields, may be what clients stumble over


def _inner(said: Fields, name: str) -> Fields:
    found = said.get(name)
    return found if isinstance(found, dict) else {}


def _read(said: Fields, status: int, asked: str) -> HttpError | None:
    error = said.get("error") or _inner(said, "response").get("error") or _inner(said, "delta").get("error")
    if "detail" in said and error is None and "message" not in said:
        return _of_fastapi(said["detail"], status, asked)
    fields: Fields = error if isinstance(error, dict) else {"message": error} if error else said
    message, type_, param, code = (fields.get(name) for name in ("message", "type", "param", "code"))
    if not isinstance(message, str):
        return None
    if not isinstance(code, str | int):
        code = None
    status = _status(code, status)
    if not isinstance(type_, str) or type_ in _EVENTS:
        type_ = _type(status)
    elif said.get("type") == "error" or type_ != _GENERAL_TYPE or status >= SERVER_ERROR:
        status = _status_of_type(type_, status)
    return HttpError(
        status,
        message,
        type_=type_,
        param=param if isinstance(param, str) else None,
        code=code,
    )


def _status(code: str | int | None, status: int) -> int:
    """An error event has no status of its own; engines write it as the error's code."""
    if isinstance(code, str):
        code = int(code) if len(code) == 3 and code.isascii() and code.isdigit() else None
    return code if code is not None and CLIENT_ERROR <= code < 600 else status


def _status_of_type(type_: str, status: int) -> int:
    """The status that goes with a type. One of Anthropic's says more than the status of a response or an event; others say
    more than the status of a server's fault."""
    if anthropic_type(status) == type_:
        return status
    named = status_of_word(type_) if status >= SERVER_ERROR else None
    return _KNOWN_TYPES.get(type_, status if named is None else named)


def _of_fastapi(detail: object, status: int, asked: str) -> HttpError:
    """`{"detail": ...}`. vLLM attaches routes by the model's task: 404 means that this model does not support the route."""
    text = detail if isinstance(detail, str) else msgspec.json.encode(detail).decode()
    if status in _NOT_SERVED:
        text = f"this model's instance does not serve {asked} ({text})"
    return HttpError(status, text, type_=_type(status), code=status)


def _type(status: int) -> str:
    if status == 404:
        return "NotFoundError"
    return "invalid_request_error" if status < SERVER_ERROR else "upstream_error"
