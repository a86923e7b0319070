"""The status that an engine's error stands for, by its code and its words: an event has no status line.

Sources: OpenAI's API reference, "Error codes", and `response.error`; Anthropic's, "Errors"; vLLM 0.32,
serve/exception_handling (names of classes, phrases of statuses); text-generation-inference 3, `error_type`; llama-server,
server-common.cpp.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from launcher.base.api_errors import CLIENT_ERROR, SERVER_ERROR
from launcher.base.foreign_json import UNREADABLE

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


def status_of_error(data: bytes) -> int:
    """The status of an event of these data, which tell an error: SERVER_ERROR where they name none."""
    said = _decoded(data)
    error = next(
        (found for found in (said, _of(said, "response"), _of(said, "delta")) if found.get("error")), said
    )
    fields = _of(error, "error") or said
    code = fields.get("code")
    status = int(code) if isinstance(code, str) and len(code) == 3 and code.isdecimal() else code
    if isinstance(status, int) and CLIENT_ERROR <= status < 600:
        return status
    words = (fields.get("type"), code, said.get("error_type"))
    return next((found for word in words if (found := status_of_word(word)) is not None), SERVER_ERROR)


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        said = msgspec.json.decode(data)
    except UNREADABLE:
        return {}
    return said if isinstance(said, dict) else {}


def _of(said: dict[str, Any], name: str) -> dict[str, Any]:
    found = said.get(name)
    return found if isinstance(found, dict) else {}
