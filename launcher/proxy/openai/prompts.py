"""The size and the text of a request's prompt, which its cost and the choice of its instance depend on.

The prompt is in the fields that the route reads (`Route.prompt`). An image or a sound in base64 counts as MEDIA_BYTES of
text, whatever its size: its number of tokens depends on the model, not on its bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from launcher.base.foreign_json import UNREADABLE
from launcher.proxy.openai.body import MAX_TOKENS, whole_number, without_mark

TEXT_BYTES = 2 * 1024 * 1024  # what a fingerprint is made of: longer than any context
MEDIA_BYTES = 4096  # an image or a sound counts as that much text: about 1,000 tokens
_MEDIA_ENDS = 65536  # an image or a sound is identified by its length and that many bytes at either end
_SURE_BYTES = 1024  # shorter ones are ignored, which bounds the number of matches in one body
_MARK_BYTES = 256  # more than any name, the space around its colon and the head of a data URL

# Where vLLM 0.32 takes media from (chat_utils.py, responses/protocol.py, anthropic/protocol.py): a data URL
# (RFC 2397), OpenAI's input_audio, Anthropic's source.
_MEDIUM = re.compile(
    rb'"(?:(?:url|image_url|audio_url|video_url|file_url|file_data)"[ \t\r\n]{0,8}:[ \t\r\n]{0,8}"data:[^",\\]{0,128},'
    rb'|(?:data|file_data|image_embeds|audio_embeds)"[ \t\r\n]{0,8}:[ \t\r\n]{0,8}")'
    rb"(?=[A-Za-z0-9+/=_\\-]{%d})" % _SURE_BYTES  # base64; JSON may escape its slashes
)
_QUOTE = re.compile(b'"')
# Some agents begin `system` with a text that contains a hash of the request (`cch=`); vLLM 0.32 leaves it out
# (anthropic/serving.py), so it is not part of a shared prefix.
_ATTRIBUTION = re.compile(rb'("text"\s*:\s*")x-anthropic-billing-header(?:[^"\\]++|\\.)*+', re.DOTALL)
_ATTRIBUTION_WITHIN = 65536

Spans = list[tuple[int, int]]


class Prompt(Struct):
    text: memoryview | bytes = b""  # at least its first TEXT_BYTES, media replaced
    size: int = 0  # bytes of all of it, each image or sound counted as MEDIA_BYTES
    media: bool = False  # it has images or sounds


class MediaFinder:
    """Finds the images and sounds of a raw JSON text while it grows; `spans` are the complete ones."""

    def __init__(self) -> None:
        self.spans: Spans = []
        self._at = 0
        self._start: int | None = None  # of an incomplete one

    def feed(self, text: bytes | bytearray | memoryview, end: int) -> None:
        """Search `text` up to `end`; what was searched before is skipped."""
        while True:
            if self._start is not None:
                quote = _QUOTE.search(text, self._at, end)
                if quote is None:
                    self._at = max(self._at, end)
                    return
                self._at = quote.end()
                if quote.start() - self._start > MEDIA_BYTES:
                    self.spans.append((self._start, quote.start()))
                self._start = None
            mark = _MEDIUM.search(text, self._at, end)
            if mark is None:
                self._at = max(self._at, end - _SURE_BYTES - _MARK_BYTES)
                return
            self._start, self._at = mark.end(), mark.end() + _SURE_BYTES

    def cut(self, end: int) -> None:
        """The text ends there; an incomplete image or sound ends with it."""
        if self._start is not None and end - self._start > MEDIA_BYTES:
            self.spans.append((self._start, end))
        self._start = None


def read_prompt(fields: Mapping[str, memoryview], media: Mapping[str, Spans] | None = None) -> Prompt:
    """The prompt in these fields, in their order; `media`: where their images and sounds are, if known already.

    Large texts are not copied, except those with images or sounds.
    """
    if len(fields) == 1:
        ((name, raw),) = fields.items()
        if len(raw) <= MEDIA_BYTES and name != "system":
            return Prompt(raw, len(raw))
    parts: list[bytes | memoryview] = []
    size = 0
    for name, field in fields.items():
        raw = _without_attribution(field) if name == "system" else field
        spans = _media_of(raw) if media is None or raw is not field else media.get(name, ())
        at = 0
        for start, end in spans:
            parts += raw[at:start], _stand_in(raw, start, end)
            size += start - at + MEDIA_BYTES
            at = end
        parts.append(raw[at:])
        size += len(raw) - at
    if len(parts) == 1:
        return Prompt(parts[0], size)
    return Prompt(_beginning(parts), size, len(parts) > len(fields))


def _beginning(parts: list[bytes | memoryview]) -> bytes:
    left, taken = TEXT_BYTES, []
    for part in parts:
        if left <= 0:
            break
        taken.append(part[:left])
        left -= len(part)
    return b"".join(taken)


def _media_of(raw: memoryview) -> Spans:
    """A plain string has none, whatever it contains."""
    if len(raw) <= MEDIA_BYTES or raw[0] == ord('"'):
        return []
    finder = MediaFinder()
    finder.feed(raw, len(raw))
    return finder.spans


def _stand_in(text: memoryview, start: int, end: int) -> bytes:
    """Text of MEDIA_BYTES in its place; equal images and sounds get equal texts."""
    ends = text[start : start + _MEDIA_ENDS].tobytes(), text[max(start, end - _MEDIA_ENDS) : end].tobytes()
    name = b"%+020d" % hash((end - start, *ends))
    return (name * (MEDIA_BYTES // len(name) + 1))[:MEDIA_BYTES]


def _without_attribution(system: memoryview) -> memoryview:
    head = bytes(system[:_ATTRIBUTION_WITHIN])
    if head[:1] != b"[" or (found := _ATTRIBUTION.search(head)) is None:
        return system
    return memoryview(head[: found.end(1)] + head[found.end() :] + bytes(system[_ATTRIBUTION_WITHIN:]))


# --- The most tokens that a request can take at an API, from its body alone; what the API says that it took.

# What a chat template, and an API's own instructions, may add to a prompt.
TEMPLATE_TOKENS: Final = 1024
# Of one image or sound. The most known is gpt-4o-mini's for an image of eight tiles: 48,169.
MEDIA_TOKENS: Final = 1 << 16
_MEDIA: Final = (b'_url"', b'"input_audio"', b'"file"')
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
        fields = msgspec.json.decode(without_mark(body), type=dict[str, msgspec.Raw])
    except UNREADABLE:
        fields = {}
    media = sum(body.count(part) for part in _MEDIA)
    choices = max(_number(fields, "n") or 1, _number(fields, "best_of") or 1) * _prompts(fields)
    # One that is no number may be none for an API: the endpoint's own limit counts then.
    named = [
        name for name in ("max_tokens", "max_completion_tokens") if bytes(fields.get(name, b""))[:1].isdigit()
    ]
    limits = [_number(fields, name) for name in named]
    known = [limit for limit in limits if limit is not None]
    prompt = len(body) + TEMPLATE_TOKENS + media * MEDIA_TOKENS
    return TokenBounds(min(prompt, MAX_TOKENS), choices, max(known) if known else None)


def _number(fields: Mapping[str, msgspec.Raw], name: str) -> int | None:
    raw = fields.get(name)
    found = None if raw is None else whole_number(bytes(raw))
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
    if not prompt and not completion:
        return None  # no request is so small: a server without null has not counted
    return SaidUsage(prompt, completion, of_cache)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None
