"""The meaning of events: a part of the answer, nothing yet, the end of their stream, or that the engine gave the request up.

Sources: vLLM 0.32 and 0.33, entrypoints/anthropic/serving.py, cohere/serving.py, openai/responses/serving.py; the APIs'
references. Only events that may be the last ones are decoded, by a sign; texts may hold the same words.

A field is set if it holds a value of its API. Servers whose language has no null write "" for "not yet", others "null".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, assert_never

import msgspec

from launcher.base.foreign_json import UNREADABLE
from launcher.proxy.openai.answers import REASONING_SIGN


class StreamEnd(StrEnum):
    """What the last event of a whole stream says; the value names it to people."""

    DONE = "[DONE]"
    MESSAGE_END = "message-end"  # Cohere's, with a reason; behind it [DONE]
    MESSAGE_STOP = "message_stop"  # Anthropic's, behind message_delta with a reason
    RESPONSE_COMPLETED = (
        "response.completed"  # or response.incomplete, which names the limit that was reached
    )


class Event(StrEnum):
    """What an event is to the end of its stream."""

    USUAL = "usual"
    CLOSING = "closing"  # the engine says why it ends; one event must follow
    LAST = "last"
    GIVEN_UP = "given up"  # the engine aborted the request
    ERROR = "error"  # the engine tells an error, whatever the event's name


@dataclass(frozen=True, slots=True)
class _Last:
    """An event that may end a stream, if its reason says so."""

    event: Event
    at: tuple[str, ...] = ()  # the fields that lead to the reason; (): it needs none
    absent: Event = Event.USUAL  # what it is where that field is missing


@dataclass(frozen=True, slots=True)
class _Api:
    """What ends a stream of an API, and which reasons say that an answer is whole."""

    last: Mapping[str, _Last]  # by the event's type
    field: str  # a whole response's, with its reason
    reasons: frozenset[str] | None  # all with which it is whole; None: the API may get more
    given_up: frozenset[str]  # with these it is not
    errors: frozenset[str]  # types of events that tell an error


NO_REASONS: Final = frozenset({"", "null"})
"""Strings that stand for null."""
# vLLM 0.32, v1/engine/__init__.py: FinishReason.ABORT, ERROR. Engines that translate reasons may pass these on.
_NOT_WHOLE: Final = frozenset({"abort", "error"})

_APIS: Final[dict[StreamEnd, _Api]] = {
    # Chats, completions, generate, audio: each choice has a reason, [DONE] ends the stream. OpenAI's API reference, "chat
    # completion chunk"; "repetition": vLLM 0.32.
    StreamEnd.DONE: _Api(
        last={},
        field="finish_reason",
        reasons=frozenset({"stop", "length", "tool_calls", "function_call", "content_filter", "repetition"}),
        given_up=_NOT_WHOLE,
        errors=frozenset({"error"}),
    ),
    # Cohere's API reference, chat v2: `finish_reason`.
    StreamEnd.MESSAGE_END: _Api(
        last={"message-end": _Last(Event.CLOSING, ("delta", "finish_reason"), absent=Event.GIVEN_UP)},
        field="finish_reason",
        reasons=None,
        given_up=_NOT_WHOLE | {"ERROR", "ERROR_LIMIT", "ERROR_TOXIC", "TIMEOUT", "USER_CANCEL"},
        errors=frozenset(),
    ),
    # Anthropic's API reference, "Streaming messages": message_delta tells any change of the message. `null` there is vLLM's
    # "abort", which has no counterpart in this API.
    StreamEnd.MESSAGE_STOP: _Api(
        last={
            "message_delta": _Last(Event.CLOSING, ("delta", "stop_reason")),
            "message_stop": _Last(Event.LAST),
        },
        field="stop_reason",
        reasons=None,
        given_up=_NOT_WHOLE,
        errors=frozenset({"error"}),
    ),
    # OpenAI's API reference, "the response object": `status`, which need not be there.
    StreamEnd.RESPONSE_COMPLETED: _Api(
        last={
            type_: _Last(Event.LAST, ("response", "status"), absent=Event.LAST)
            for type_ in ("response.completed", "response.incomplete")
        },
        field="status",
        reasons=frozenset({"completed", "incomplete"}),
        given_up=frozenset({"cancelled", "failed"}),
        errors=frozenset({"error", "response.failed"}),
    ),
}

SIGNS: Final[dict[StreamEnd, tuple[bytes, ...]]] = {
    StreamEnd.DONE: (),
    StreamEnd.MESSAGE_END: (b"message-end",),
    StreamEnd.MESSAGE_STOP: (b"message_delta", b"message_stop"),
    StreamEnd.RESPONSE_COMPLETED: (b"response.completed", b"response.incomplete", b"response.failed"),
}
"""Of events that `read_event` must see, beside `data: [DONE]` and errors."""

MARKS: Final[dict[StreamEnd, tuple[bytes, bytes]]] = {
    StreamEnd.DONE: (b"[DONE]", REASONING_SIGN),
    StreamEnd.MESSAGE_END: (b"message-end", b"\0"),
    StreamEnd.MESSAGE_STOP: (b"message_", b"\0"),
    StreamEnd.RESPONSE_COMPLETED: (b"complete", b"failed"),
}
"""One of them is in each event that has one of the signs, or reasoning that gets a second name (answers.with_reasoning): two
searches are all that the fast path affords. No event has a null byte."""

USUAL_KEYS: Final[dict[StreamEnd, bytes]] = {
    StreamEnd.DONE: b'"choices"',
    StreamEnd.MESSAGE_END: b'"delta"',
    StreamEnd.MESSAGE_STOP: b'"delta"',
    StreamEnd.RESPONSE_COMPLETED: b'"delta"',
}
"""Once in each event of the API that brings a piece of text, and in no ping."""


# The fields of an object, not decoded: one of them may be a whole response, of any shape.
_Said = dict[str, msgspec.Raw]


# --- Choices: chats, completions, generate, audio. ---

_REASONS: Final = (_APIS[StreamEnd.DONE].reasons or frozenset()) | _NOT_WHOLE
_REASON_SIGN: Final = re.compile(rb'"finish_reason"\s*:\s*"[^"]')


def finish_reason_of(choice: dict[str, Any]) -> str | None:
    """The reason for which a choice has ended, one of the API's; None while it is unfinished, whatever the field holds."""
    reason = choice.get("finish_reason")
    return reason if isinstance(reason, str) and reason in _REASONS else None


def finished_choices(data: bytes) -> tuple[int, ...]:
    """Indexes of the choices that an event of these data says to be whole."""
    if _REASON_SIGN.search(data) is None:
        return ()
    try:
        choices = _decoded(_object(data), "choices")
    except UNREADABLE:
        return ()
    if not isinstance(choices, list):
        return ()
    found = [choice for choice in choices if isinstance(choice, dict)]
    whole = [
        choice.get("index", 0) for choice in found if finish_reason_of(choice) not in {None, *_NOT_WHOLE}
    ]
    return tuple(index for index in whole if isinstance(index, int))


# --- Output: the events that bring a part of an answer. ---

# Types of events that servers send by a timer: Anthropic's API, OpenAI's /v1/responses.
_PINGS: Final = frozenset({"ping", "keepalive"})
PING_SIGNS: Final = (b'"ping"', b'"keepalive"')
"""In the data of each such event."""
_NO_PARTS: Final = frozenset({"index", "delta", "finish_reason", "stop_reason", "content_filter_results"})
_CREATED: Final = frozenset({"response.created", "response.queued", "response.in_progress"})
_ADDED: Final = frozenset(
    {
        "response.content_part.added",
        "response.output_item.added",
        "response.reasoning_part.added",
        "response.reasoning_summary_part.added",
    }
)
# Of a content block, an item or a part: such a one has its text, or its summary, in other fields. A tool's name is output.
_TEXT_TYPES: Final = frozenset(
    {"message", "output_text", "reasoning", "reasoning_text", "summary_text", "text", "thinking"}
)
_ABOUT: Final = frozenset({"id", "role", "signature", "status", "type"})


def is_ping(data: bytes) -> bool:
    """Whether an event of these data is sent by a timer, whatever the engine does."""
    return any(sign in data for sign in PING_SIGNS) and _text(_object(data), "type") in _PINGS


def brings_output(end: StreamEnd, data: bytes) -> bool:
    """Whether an event of these data brings a part of the answer, or says why none comes; an unknown event does.

    What does not: a chunk with a role and nothing else, message_start, response.created, the beginning of a text that is
    empty so far. An engine may send them before it has computed anything, or its API server does without asking it.
    """
    said = _object(data)
    try:
        return bool(_decoded(said, "error")) or _brings(end, said)
    except UNREADABLE:
        return True


def _brings(end: StreamEnd, said: _Said) -> bool:
    match end:
        case StreamEnd.DONE:
            choices = _decoded(said, "choices")
            if choices is None and "choices" in said:
                return False
            return not isinstance(choices, list) or any(map(_choice_brings, choices))
        case StreamEnd.MESSAGE_STOP:
            return _anthropic_brings(said)
        case StreamEnd.RESPONSE_COMPLETED:
            return _response_brings(said)
        case StreamEnd.MESSAGE_END:
            return _cohere_brings(said)
    assert_never(end)


def _choice_brings(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return True
    reason = choice.get("finish_reason")
    if isinstance(reason, str) and reason not in NO_REASONS:
        return True
    delta = choice.get("delta")
    parts = [value for name, value in choice.items() if name not in _NO_PARTS]
    if isinstance(delta, dict):
        parts += [value for name, value in delta.items() if name != "role"]
    return _is_filled(parts)


def _anthropic_brings(said: _Said) -> bool:
    match _text(said, "type"):
        case "message_start":
            message = _decoded(said, "message")
            return isinstance(message, dict) and _is_filled(message.get("content"))
        case "content_block_start":
            return _begun_brings(_decoded(said, "content_block"))
        case "message_delta":
            return _read(StreamEnd.MESSAGE_STOP, said) is Event.CLOSING
        case "content_block_stop" | "message_stop":
            return False
        case _:
            return True


def _response_brings(said: _Said) -> bool:
    type_ = _text(said, "type")
    if type_ in _CREATED:
        response = _decoded(said, "response")
        return isinstance(response, dict) and _is_filled(response.get("output"))
    return type_ not in _ADDED or _begun_brings(_decoded(said, "item" if "item" in said else "part"))


def _cohere_brings(said: _Said) -> bool:
    type_ = _text(said, "type")
    if type_ == "message-start":
        return False
    if type_ != "content-start":
        return True
    at = _decoded(said, "delta")
    for name in ("message", "content"):
        at = at.get(name) if isinstance(at, dict) else None
    return _begun_brings(at)


def _begun_brings(begun: Any) -> bool:
    """Whether a content block, an item or a part that begins is more than the place for a text."""
    if not isinstance(begun, dict) or begun.get("type") not in _TEXT_TYPES:
        return True
    return any(_is_filled(value) for name, value in begun.items() if name not in _ABOUT)


def _is_filled(value: Any) -> bool:
    """Whether any text or number is in it."""
    if isinstance(value, dict):
        return any(map(_is_filled, value.values()))
    if isinstance(value, list):
        return any(map(_is_filled, value))
    return bool(value)


# --- Ends and errors. ---

_ERROR_KEY: Final = b'"error"'
_FIELD_BYTES: Final = 256  # of a name or a reason
_GAVE_UP: Final = re.compile(rb'"finish_reason"\s*:\s*"(?:abort|error)"')


def read_event(end: StreamEnd, data: bytes) -> Event:
    """What an event of these data says of the end of its stream; [DONE] is not asked about."""
    if _ERROR_KEY not in data and not any(sign in data for sign in SIGNS[end]):
        return Event.USUAL
    return _read(end, _object(data))


def _read(end: StreamEnd, said: _Said) -> Event:
    api, type_ = _APIS[end], _text(said, "type")
    if type_ in api.errors or _tells_error(said):
        return Event.ERROR
    last = api.last.get(type_)
    if last is None or not last.at:
        return Event.USUAL if last is None else last.event
    *path, name = last.at
    for outer in path:
        said = _inner(said, outer)
    if name not in said:
        return last.absent
    return last.event if _is_whole(api, _text(said, name)) else Event.GIVEN_UP


def _is_whole(api: _Api, reason: str) -> bool:
    """`reason`: empty where it is no string, which is no reason in any API."""
    if reason in NO_REASONS or reason in api.given_up:
        return False
    return api.reasons is None or reason in api.reasons


def _tells_error(said: _Said) -> bool:
    """Whether the field `error` is set, whatever stands beside it; or the object is an error itself (LMDeploy, FastChat)."""
    if "error" not in said:
        return _text(said, "object") == "error"
    error = _decoded(said, "error")
    return error not in NO_REASONS if isinstance(error, str) else bool(error)


def gave_up(end: StreamEnd, body: bytes) -> bool:
    """Whether a whole response, JSON of status 200, says that the engine aborted the request."""
    api = _APIS[end]
    match end:
        case StreamEnd.DONE:
            return aborted(body)
        case StreamEnd.MESSAGE_STOP:
            said = _object(body)  # vLLM leaves out what is null
            return _text(said, "type") == "message" and not _is_whole(api, _text(said, api.field))
        case StreamEnd.MESSAGE_END:
            said = _object(body)
            return api.field in said and not _is_whole(api, _text(said, api.field))
        case StreamEnd.RESPONSE_COMPLETED:
            # A response in the background is "queued".
            said = _object(body)
            status = _text(said, api.field)
            return api.field in said and (status in NO_REASONS or status in api.given_up)
    assert_never(end)


def aborted(answer: bytes) -> bool:
    """Whether an event, or a whole response, says that the engine gave a choice up.

    vLLM 0.32 ends requests this way during engine shutdown, with status 200 (v1/engine/core.py).
    """
    return _GAVE_UP.search(answer) is not None


def _object(data: bytes) -> _Said:
    """Its fields; none where it is no object."""
    try:
        return msgspec.json.decode(data, type=_Said)
    except UNREADABLE:
        return {}


def _inner(said: _Said, name: str) -> _Said:
    return _object(_value(said, name))


def _value(said: _Said, name: str) -> bytes:
    """As it is written; nothing where it is absent."""
    found = said.get(name)
    return b"" if found is None else bytes(found)


def _decoded(said: _Said, name: str) -> Any:
    """Its value; None where it is absent. Raises what is `UNREADABLE`."""
    found = said.get(name)
    return None if found is None else msgspec.json.decode(found)


def _text(said: _Said, name: str) -> str:
    """An empty one where it is no string, or too long to be a name."""
    data = _value(said, name)
    if len(data) > _FIELD_BYTES:
        return ""
    try:
        return msgspec.json.decode(data, type=str)
    except UNREADABLE:
        return ""
