"""What the proxy reads from an instance's response: usage, response ids, whether its JSON is whole.

A dying engine, or a layer in front of it, may answer 200 with half a JSON object and a Content-Length that fits it, or
with an HTML page. Nothing was delivered then: another instance can be asked.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from launcher.base.api_errors import HttpError
from launcher.base.foreign_json import UNREADABLE

JSON: Final = "application/json"
# The id of a stored response is in its first event, or near the start of its object.
_PREFIX_BYTES: Final = 65536
_RAW: Final = msgspec.json.Decoder(msgspec.Raw)
_BODILESS: Final = frozenset({204, 205})

_USAGE: Final = b'"usage"'
# A usage is null, or a string of a tool's arguments, a few times in an answer; in a read of events once for each event.
_LOOKS: Final = 4_096
_OBJECT: Final = re.compile(rb"\s*:\s*\{")
USAGE_BYTES: Final = 512
"""A usage in a larger body: so much of it may have come with the bytes before."""
_PROMPT_TOKENS: Final = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,9})')
_COMPLETION_TOKENS: Final = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,9})')
_BILLED: Final = b'"billed_units"'
_IMAGE_TOKENS: Final = re.compile(rb'"image_tokens"\s*:\s*(\d{1,9})')
_CACHED_TOKENS: Final = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})')
# Anthropic's `input_tokens` exclude cached tokens (vLLM 0.32, anthropic/serving.py).
_CACHE_READ: Final = re.compile(rb'"cache_read_input_tokens"\s*:\s*(\d{1,9})')
_CACHE_CREATED: Final = re.compile(rb'"cache_creation_input_tokens"\s*:\s*(\d{1,9})')
_RESPONSE_ID: Final = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,195})"')
REASONING_SIGN: Final = b'"reasoning_content":"'
"""Begins a text of reasoning as llama.cpp names it (build 11549, server_chat_msg_diff_to_json_oaicompat). It is in no JSON
string, where quotation marks are escaped."""
_REASONING: Final = re.compile(REASONING_SIGN + rb'((?:[^"\\]|\\.)*+)"', re.DOTALL)


def response_id(answer: bytes) -> str | None:
    """The id of the stored response that an answer of /v1/responses, or its first event, announces."""
    found = _RESPONSE_ID.search(answer, 0, _PREFIX_BYTES)
    return found[1].decode() if found else None


def with_reasoning(answer: bytes) -> bytes:
    """A chat's response, or events of one, with llama.cpp's reasoning under vLLM's name as well, in front of the other; the
    very same bytes where there is none, or it has that name."""
    if REASONING_SIGN not in answer or b'"reasoning":' in answer:
        return answer
    return _REASONING.sub(rb'"reasoning":"\1","reasoning_content":"\1"', answer)


Counts = tuple[int, int, int | None]
"""Prompt, completion and cached tokens, as an upstream says; None: it does not say how many were cached."""


def usage_of(data: bytes, before: Counts | None = None) -> Counts | None:
    """The usage in an answer's end or a stream's last events; None without one.

    `before`: what its stream said before. Some say the prompt's tokens in the first event of /v1/messages only.

    /v1/responses and /v1/messages call them input and output. A search suffices: in JSON strings quotation marks are
    escaped, so an answer's text cannot contain `"usage":`.
    """
    at = _last_usage(data)
    if at < 0:
        return _billed(data)
    prompt, completion = _PROMPT_TOKENS.search(data, at), _COMPLETION_TOKENS.search(data, at)
    if prompt is None:
        return None if before is None or completion is None else (before[0], int(completion[1]), before[2])
    cached = _CACHED_TOKENS.search(data, at)
    tokens = int(prompt[1])
    if data.find(b'_input_tokens"', at) >= 0:
        cached, created = _CACHE_READ.search(data, at), _CACHE_CREATED.search(data, at)
        tokens += (int(cached[1]) if cached else 0) + (int(created[1]) if created else 0)
    output = int(completion[1]) if completion else 0
    if not tokens and not output:
        return before  # no request is so small: a server without null has not counted yet
    return tokens, output, int(cached[1]) if cached else None


def _last_usage(data: bytes) -> int:
    """The offset of the last usage that is an object; -1 without one among the last LOOKS."""
    at = len(data)
    for _ in range(_LOOKS):
        at = data.rfind(_USAGE, 0, at)
        if at < 0 or _OBJECT.match(data, at + len(_USAGE)) is not None:
            return at
    return -1


def _billed(data: bytes) -> Counts | None:
    """/v2/embed says it in Cohere's form: all tokens are of images where there is one (vLLM 0.32, pooling/embed)."""
    at = data.rfind(_BILLED)
    tokens = None if at < 0 else _PROMPT_TOKENS.search(data, at)
    if tokens is None:
        return None
    images = _IMAGE_TOKENS.search(data, at)
    return int(tokens[1]) + (int(images[1]) if images else 0), 0, None


def promises_json(status: int, content_type: bytes, *, json_route: bool) -> bool:
    """Whether the body of a successful answer must be JSON: by its type, or when a JSON route answers with text.

    JSON routes that answer with bytes (embeddings under `encoding_format: "bytes"`) and audio's texts need not be JSON.
    """
    if not 200 <= status < 300 or status in _BODILESS:
        return False
    if content_type == b"application/json" or content_type.endswith(b"+json"):
        return True
    return json_route and (not content_type or content_type.startswith(b"text/"))


def is_json(body: bytes) -> bool:
    """Whether it is exactly one JSON value: 0.4 us for a chat of 1 KiB, 37 us for an embedding of 64 KiB."""
    try:
        _RAW.decode(body)
        if not body.isascii():
            body.decode()  # the decoder looks for the ends of strings, not into them
    except UNREADABLE:
        return False
    return True


def not_json() -> HttpError:
    """502 for the client when no instance gave a better answer."""
    return HttpError(
        502, "an instance's answer was not complete JSON", type_="upstream_error", code="upstream_error"
    )
