"""A stream tells its usage only where `stream_options.include_usage` asks for it. The proxy asks where its client does not.

vLLM 0.32 then ends the stream with one more event, `"choices":[]` and the usage (entrypoints/openai/chat_completion and
completion, serving.py), which the client does not get (sse/tracker.py).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from launcher.base.foreign_json import UNREADABLE
from launcher.proxy.openai.body import flag, without_mark

ASK_USAGE: Final = b'"stream_options":{"include_usage":true},'
"""Behind the `{` of a request that has no `stream_options`."""

_BAD_REQUEST: Final = frozenset({400, 422})
_MAX_BYTES: Final = 4096  # of a client's stream_options; longer ones are the instance's to judge


class UsageAsk(StrEnum):
    """How the proxy asks for the usage of a stream, which its client does not get."""

    NO = "no"  # not at all: the client does, or no stream of this request has one
    ADDED = "added"  # in front of the body
    CHANGED = "changed"  # in the client's own stream_options, which would win over others
    FORM_FIELD = "form field"  # in front of the first field of a form


def usage_ask(stream_options: bytes | memoryview) -> UsageAsk:
    """How to ask beside the client's own `stream_options`, raw JSON; b"": it has none."""
    if not stream_options:
        return UsageAsk.ADDED
    if len(stream_options) > _MAX_BYTES:
        return UsageAsk.NO
    try:
        options = msgspec.json.decode(stream_options, type=dict[str, msgspec.Raw] | None) or {}
    except UNREADABLE:
        return UsageAsk.NO
    wanted = bytes(options.get("include_usage", b"null"))
    return UsageAsk.CHANGED if wanted == b"null" or flag(wanted) is False else UsageAsk.NO


def with_usage(body: bytes | bytearray) -> bytes | bytearray:
    """A request whose own stream_options ask for no usage, asking for it; what cannot be read stays as it is."""
    try:
        fields = msgspec.json.decode(without_mark(body), type=dict[str, msgspec.Raw])
        options = msgspec.json.decode(fields["stream_options"]) or {}
    except (*UNREADABLE, KeyError):
        return body
    options.pop("continuous_usage_stats", None)  # without include_usage it had no effect
    fields["stream_options"] = msgspec.Raw(msgspec.json.encode(options | {"include_usage": True}))
    return msgspec.json.encode(fields)


def usage_field(form: bytes | bytearray, boundary: bytes) -> tuple[bytes, memoryview]:
    """The field that asks for the usage of an audio stream (vLLM 0.32, speech_to_text/transcription/protocol.py), and the
    form behind it, which begins with its first boundary: what precedes that would become part of the field."""
    first = b"--" + boundary
    field = first + b'\r\nContent-Disposition: form-data; name="stream_include_usage"\r\n\r\ntrue\r\n'
    return field, memoryview(form)[form.find(first) :]


def refuses_usage(status: int, answer: bytes) -> bool:
    """Whether an upstream may refuse the `stream_options` that the proxy put into a request; it may also quote its text."""
    return status in _BAD_REQUEST and (b"stream_options" in answer or b"include_usage" in answer)
