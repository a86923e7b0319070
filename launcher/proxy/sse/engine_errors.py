"""The status that an engine's error stands for, by its code and its words: an event has no status line.

Sources: OpenAI's API reference, "Error codes", and `response.error`; Anthropic's, "Errors"; vLLM 0.32,
serve/exception_handling (names of classes, phrases of statuses); text-generation-inference 3, `error_type`; llama-server,
server-common.cpp.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from launcher.base.api_errors import CLIENT_ERROR, SERVER_ERROR
from launcher.base.foreign_json import UNREADABLE

_NOTHING: Final = msgspec.Raw(b"")
_WORD_BYTES: Final = 64
_LETTERS: Final = re.compile("[^a-z]+")
# Words without their ends in "error", and letters alone.
_STATUSES: Final = {
    "authentication": 401,
    "badrequest": 400,
    "contentpolicyviolation": 400,
    "contextlengthexceeded": 400,
    "exceedcontextsize": 400,
    "forbidden": 403,
    "insufficientquota": 429,
    "modelnotfound": 404,
    "notfound": 404,
    "permission": 403,
    "permissiondenied": 403,
    "ratelimit": 429,
    "ratelimitexceeded": 429,
    "requestentitytoolarge": 413,
    "requesttoolarge": 413,
    "unauthorized": 401,
    "unprocessableentity": 422,
    "validation": 400,
}


def status_of_word(word: object) -> int | None:
    """The status of a type or a code that is a word; None where it blames nobody that is known."""
    if not isinstance(word, str) or len(word) > _WORD_BYTES:
        return None
    letters = _LETTERS.sub("", word.lower()).removesuffix("error")
    found = _STATUSES.get(letters)
    return CLIENT_ERROR if found is None and letters.startswith("invalid") else found


class _Said(msgspec.Struct):
    """The fields that tell an error, not decoded: an event may be large, and what tells nothing is passed over."""

    error: msgspec.Raw = _NOTHING
    response: msgspec.Raw = _NOTHING
    delta: msgspec.Raw = _NOTHING
    code: msgspec.Raw = _NOTHING
    type: msgspec.Raw = _NOTHING
    error_type: msgspec.Raw = _NOTHING


def status_of_error(data: bytes) -> int:
    """The status of an event of these data, which tell an error: SERVER_ERROR where they name none."""
    said = _fields(data)
    error = next(
        (found for found in (said, _fields(said.response), _fields(said.delta)) if _tells(found.error)), said
    )
    fields = _fields(error.error) if _is_object(error.error) else said
    code = _scalar(fields.code)
    status = int(code) if isinstance(code, str) and len(code) == 3 and code.isdecimal() else code
    if isinstance(status, int) and CLIENT_ERROR <= status < 600:
        return status
    words = (_scalar(fields.type), code, _scalar(said.error_type))
    return next((found for word in words if (found := status_of_word(word)) is not None), SERVER_ERROR)


def _fields(data: bytes | msgspec.Raw) -> _Said:
    try:
        return msgspec.json.decode(data, type=_Said)
    except UNREADABLE:
        return _Said()


def _tells(value: msgspec.Raw) -> bool:
    """Whether a field has a value that says something."""
    return bytes(value).strip() not in {b"", b"null", b"false", b"0", b'""', b"{}", b"[]"}


def _is_object(value: msgspec.Raw) -> bool:
    return bytes(value).startswith(b"{") and _tells(value)


def _scalar(value: msgspec.Raw) -> object:
    """A number or a short text; None for all else."""
    text = bytes(value)
    if not 0 < len(text) <= _WORD_BYTES + 2 or text.startswith((b"{", b"[")):
        return None
    try:
        return msgspec.json.decode(text)
    except UNREADABLE:
        return None
