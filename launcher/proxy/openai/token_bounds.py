"""The most tokens that a request can take at an API, from its body alone; what the API says that it took."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

# What a chat template, and an API's own instructions, may add to a prompt.
TEMPLATE_TOKENS: Final = 1024
# Of one image or sound. The most known is gpt-4o-mini's for an image of eight tiles: 48,169.
MEDIA_TOKENS: Final = 1 << 16
# No context is as long, and no response.
MAX_TOKENS: Final = 1 << 24
_MEDIA: Final = (b'_url"', b'"input_audio"', b'"file"')
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_USAGE: Final = b'"usage":'
_DECODER: Final = json.JSONDecoder()


class TokenBounds(NamedTuple):
    prompt: int
    choices: int  # responses asked for
    output: int | None  # tokens of each that the request allows; None: it names no limit


class SaidUsage(NamedTuple):
    prompt: int  # the cached ones included
    output: int
    cached: int


def bounds_of(body: bytes | bytearray) -> TokenBounds:
    """A token of a byte-level tokenizer is one byte of text or more, and JSON only adds bytes to it."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except _UNREADABLE:
        fields = {}
    media = sum(body.count(part) for part in _MEDIA)
    choices = max(_number(fields, "n") or 1, _number(fields, "best_of") or 1) * _prompts(fields)
    limits = [_number(fields, name) for name in ("max_tokens", "max_completion_tokens")]
    named = [limit for limit in limits if limit is not None]
    prompt = len(body) + TEMPLATE_TOKENS + media * MEDIA_TOKENS
    return TokenBounds(min(prompt, MAX_TOKENS), choices, max(named) if named else None)


def _number(fields: Mapping[str, msgspec.Raw], name: str) -> int | None:
    try:
        found = msgspec.json.decode(fields.get(name, b"null"), type=int | None)
    except _UNREADABLE:
        return None
    return found if found is not None and found > 0 else None


def _prompts(fields: Mapping[str, msgspec.Raw]) -> int:
    """At most so many prompts are in a list of them. Its items are not decoded: it may be large."""
    raw = bytes(fields.get("prompt", b""))
    return max(1, raw.count(b'"') // 2, raw.count(b"[") - 1) if raw.startswith(b"[") else 1


def said_usage(data: bytes, *, output: bool = True) -> SaidUsage | None:
    """What an answer, or a stream's last events, say of their tokens; None where that is missing or no count of tokens.
    `output`: a route whose responses have output tokens."""
    at = data.rfind(_USAGE)
    if at < 0:
        return None
    text = data[at + len(_USAGE) :].decode(errors="replace").lstrip()
    try:
        said = _DECODER.raw_decode(text)[0]
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    details = said.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt, completion = _count(said.get("prompt_tokens")), _count(said.get("completion_tokens"))
    of_cache = 0 if cached is None else _count(cached)
    if completion is None and not output:
        completion = 0
    if prompt is None or completion is None or of_cache is None or of_cache > prompt:
        return None
    return SaidUsage(prompt, completion, of_cache)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None
