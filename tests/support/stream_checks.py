"""What must hold for any bytes of a stream or a body; the properties and the fuzzer both call these."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

from launcher.base.api_errors import HttpError
from launcher.proxy.continuation.transcript import Transcript
from launcher.proxy.openai.body import read_body
from launcher.proxy.openai.body_schema import RequestBody
from launcher.proxy.openai.forms import FormReader
from launcher.proxy.sse.fast_path import FastPath
from launcher.proxy.sse.tracker import EventTracker

_LINE = re.compile(rb"\r\n|\n|\r")


def split(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """`data` in pieces; a place past its end counts from the beginning again."""
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(edges)]


def check_tracker(data: bytes, cuts: Sequence[int]) -> None:
    """Any split lets the same lines pass by the end, and finds the same."""
    whole, parts = EventTracker(), EventTracker()
    passed = whole.feed(data) + whole.rest()
    in_parts = b"".join(parts.feed(piece) for piece in split(data, cuts)) + parts.rest()
    # An empty line more before an error that is withheld is nothing to a client.
    assert in_parts.translate(None, b"\r\n") == passed.translate(None, b"\r\n")
    assert (whole.done, whole.engine_fault) == (parts.done, parts.engine_fault)
    assert (whole.error or b"").strip() == (parts.error or b"").strip()
    assert whole.broken == parts.broken
    assert whole.error is not None or whole.broken or passed == data


def check_transcript(data: bytes, cuts: Sequence[int]) -> bool:
    """What is kept of a stream is what a client reads, or it says that it is odd; whether it was kept.

    The events must be JSON: the hot path compares an event's ends and trusts the engine with what is between.
    """
    tracker, transcript, fast, passed = EventTracker(), Transcript(), FastPath(), b""
    taken: list[bytes] = []
    for piece in split(data, cuts):
        event = tracker.feed(piece)
        if event:
            framed = b"%x\r\n%b\r\n" % (len(event), event)
            passed += event
            transcript.arm(fast, taken.append)
            if not fast.data_received(framed):
                transcript.feed(event)
    if transcript.odd is not None:
        assert not transcript.text
        return False
    try:
        text = msgspec.json.decode(b'"' + b"".join(transcript.pieces()) + b'"')
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False  # so it says when it is to go on
    try:
        read = read_stream(passed)
    except (ValueError, LookupError, TypeError, AttributeError):
        return False
    assert text == read
    return True


def read_stream(data: bytes) -> str:
    """The text of a stream, as the standard reads one (HTML Living Standard, 9.2.6)."""
    text, event = "", list[bytes]()
    for line in _LINE.split(data):
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                event.append(value.removeprefix(b" "))
        elif event:
            text += _said(b"\n".join(event))
            event.clear()
    return text


def _said(data: bytes) -> str:
    if data.strip() in {b"", b"[DONE]"}:
        return ""
    chunk: dict[str, Any] = json.loads(data)
    return "".join(
        (choice["text"] if "text" in choice else (choice.get("delta") or {}).get("content")) or ""
        for choice in chunk["choices"]
    )


def check_peek(body: bytes) -> bool:
    """A body that is taken says the same to Python's parser, or is none to it; whether it was taken."""
    try:
        peek = read_body(body, ("prompt", "messages"))
    except HttpError:
        return False
    try:
        said = json.loads(body)
    except ValueError:  # bad UTF-8 in what is not looked at: the instance refuses it
        return False
    assert peek.model == (said.get("model") or None)
    assert peek.stream == (said.get("stream") is True)
    for name in ("prompt", "messages", "tools"):
        kept = peek.tools if name == "tools" else peek.prompt.get(name, b"")
        assert (json.loads(bytes(kept)) if kept else None) == said.get(name)
    return True


def check_form(body: bytes) -> RequestBody | None:
    """A form is read or refused."""
    try:
        return FormReader("multipart/form-data; boundary=B").finish(body)
    except HttpError:
        return None
