"""Reads a JSON request body: what it costs and where it goes, nothing else."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from launcher.proxy.errors import HttpError
from launcher.proxy.openai.body_schema import ABSENT, RequestBody, decoder

MAX_PRIORITY: Final = 1000  # priorities are clamped to this, positive and negative


def read_body(body: bytes | bytearray, prompt: tuple[str, ...] = ("messages",)) -> RequestBody:
    """One pass over a JSON object. Raises HttpError: no JSON, no object, or `model` is not a string.

    `prompt`: the fields that hold the route's prompt. A field of a wrong type is the instance's to refuse; here it
    counts as absent.
    """
    try:
        raw = decoder(prompt).decode(body)
    except msgspec.ValidationError as error:
        raise HttpError(400, f"cannot read the request: {error}", code="invalid_request") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid_json(str(error)) from None
    except RecursionError:
        raise invalid_json("nested too deeply") from None
    stream, n, priority = raw.stream, raw.n, raw.priority
    fields = {}
    for name in prompt:
        value = getattr(raw, name)
        if value is not ABSENT:
            fields[name] = memoryview(value)
    return RequestBody(
        raw.model or None,
        raw.previous_response_id or None,
        stream is not ABSENT and bytes(stream) == b"true",
        1 if n is ABSENT else _integer(n) or 1,
        _integer(raw.max_completion_tokens) or _integer(raw.max_tokens) or _integer(raw.max_output_tokens),
        fields,
        b"" if raw.tools is ABSENT else memoryview(raw.tools),
        0 if priority is ABSENT else _priority(priority),
        b"" if raw.stream_options is ABSENT else memoryview(raw.stream_options),
    )


def _integer(raw: Raw) -> int | None:
    """None unless it is an integer above 0."""
    if raw is ABSENT:
        return None
    text = bytes(raw)
    return int(text) or None if text.isdigit() and len(text) < 20 else None


def _priority(raw: Raw) -> int:
    text = bytes(raw)
    negative = text[:1] == b"-"
    value = min(MAX_PRIORITY, _integer(Raw(text[negative:])) or 0)
    return -value if negative else value


def invalid_json(why: str) -> HttpError:
    return HttpError(400, f"cannot parse the request body as JSON: {why}", code="invalid_json")
