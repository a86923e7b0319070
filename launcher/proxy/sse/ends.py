"""The meaning of events: a part of the answer, nothing yet, the end of their stream, or that the engine gave the request up.

Sources: vLLM 0.32 and 0.33, entrypoints/anthropic/serving.py, cohere/serving.py, openai/responses/serving.py. Only events
that may be the last ones are decoded, by a sign; texts may hold the same words.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, Final, assert_never

import msgspec

_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_LAST_TYPES: Final = frozenset({"response.completed", "response.incomplete"})
_NO_END: Final = frozenset({"cancelled", "failed"})  # status of a response that its client has not cancelled


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


SIGNS: Final[dict[StreamEnd, tuple[bytes, ...]]] = {
    StreamEnd.DONE: (),
    StreamEnd.MESSAGE_END: (b"message-end",),
    StreamEnd.MESSAGE_STOP: (b"message_delta", b"message_stop"),
    StreamEnd.RESPONSE_COMPLETED: (b"response.completed", b"response.incomplete"),
}
"""Of events that `read_event` must see, beside `data: [DONE]`."""

MARKS: Final[dict[StreamEnd, bytes]] = {
    StreamEnd.DONE: b"[DONE]",
    StreamEnd.MESSAGE_END: b"message-end",
    StreamEnd.MESSAGE_STOP: b"message_",
    StreamEnd.RESPONSE_COMPLETED: b"complete",
}
"""In each event that has one of the signs: one search is all that the fast path affords."""


# The fields of an object, not decoded: one of them may be a whole response, of any shape.
_Said = dict[str, msgspec.Raw]


# --- Choices: chats, completions, generate, audio. ---

# Why a choice ended: OpenAI's API reference, "chat completion chunk", and vLLM 0.32 (v1/engine/__init__.py).
_REASONS: Final = frozenset(
    {"stop", "length", "tool_calls", "function_call", "content_filter", "abort", "error", "repetition"}
)
NO_REASONS: Final = frozenset({"", "null"})
"""Before a choice's last event the API's value is null. SGLang, TGI and older Ollama write "", others "null"."""
# An answer that ends so is not whole: the engine gave it up, or failed (vLLM 0.32: FinishReason.ABORT, ERROR).
_NOT_WHOLE: Final = frozenset({"abort", "error"})
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
    except _UNREADABLE:
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
    except _UNREADABLE:
        return True


def _brings(end: StreamEnd, said: _Said) -> bool:
    match end:
        case StreamEnd.DONE:
            choices = _decoded(said, "choices")
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


# --- Other APIs. ---

_NULL: Final = b"null"
_FIELD_BYTES: Final = 256  # of a name or a reason


def read_event(end: StreamEnd, data: bytes) -> Event:
    """What an event of these data says of the end of its stream; [DONE] is not asked about."""
    if not any(sign in data for sign in SIGNS[end]):
        return Event.USUAL
    said = _object(data)
    match end:
        case StreamEnd.MESSAGE_END:
            return _of_cohere(said)
        case StreamEnd.MESSAGE_STOP:
            return _of_anthropic(said)
        case StreamEnd.RESPONSE_COMPLETED:
            return _of_response(said)
        case StreamEnd.DONE:
            return Event.USUAL
    assert_never(end)


def _of_cohere(said: _Said) -> Event:
    if _text(said, "type") != "message-end":
        return Event.USUAL
    return Event.GIVEN_UP if _text(_inner(said, "delta"), "finish_reason") == "ERROR" else Event.CLOSING


def _of_anthropic(said: _Said) -> Event:
    match _text(said, "type"):
        case "message_delta":
            # null: the engine's "abort", which has no counterpart in Anthropic's API. Absent is not null.
            return Event.GIVEN_UP if _value(_inner(said, "delta"), "stop_reason") == _NULL else Event.CLOSING
        case "message_stop":
            return Event.LAST
        case _:
            return Event.USUAL


def _of_response(said: _Said) -> Event:
    if _text(said, "type") not in _LAST_TYPES:
        return Event.USUAL
    return Event.GIVEN_UP if _text(_inner(said, "response"), "status") in _NO_END else Event.LAST


def gave_up(end: StreamEnd, body: bytes) -> bool:
    """Whether a whole response, JSON of status 200, says that the engine aborted the request."""
    match end:
        case StreamEnd.DONE:
            return False
        case StreamEnd.MESSAGE_END:
            return b'"ERROR"' in body and _text(_object(body), "finish_reason") == "ERROR"
        case StreamEnd.MESSAGE_STOP:
            # vLLM leaves out what is null.
            said = _object(body) if b'"stop_reason":"' not in body else {}
            return _text(said, "type") == "message" and _value(said, "stop_reason") in {b"", _NULL}
        case StreamEnd.RESPONSE_COMPLETED:
            suspect = b'"cancelled"' in body or b'"failed"' in body
            return suspect and _text(_object(body), "status") in _NO_END
    assert_never(end)


def _object(data: bytes) -> _Said:
    """Its fields; none where it is no object."""
    try:
        return msgspec.json.decode(data, type=_Said)
    except _UNREADABLE:
        return {}


def _inner(said: _Said, name: str) -> _Said:
    return _object(_value(said, name))


def _value(said: _Said, name: str) -> bytes:
    """As it is written; nothing where it is absent."""
    found = said.get(name)
    return b"" if found is None else bytes(found)


def _decoded(said: _Said, name: str) -> Any:
    """Its value; None where it is absent. Raises what is `_UNREADABLE`."""
    found = said.get(name)
    return None if found is None else msgspec.json.decode(found)


def _text(said: _Said, name: str) -> str:
    """An empty one where it is no string, or too long to be a name."""
    data = _value(said, name)
    if len(data) > _FIELD_BYTES:
        return ""
    try:
        return msgspec.json.decode(data, type=str)
    except _UNREADABLE:
        return ""
