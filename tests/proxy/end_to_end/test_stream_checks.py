"""Streams and bodies that nobody would send, against slow and simple readers of the same."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st
from support import stream_checks

LINE_ENDS = (b"\n", b"\r\n", b"\r")
MARKS = (b"\n\n", b"\n\r\n", b"\r\r", b"\r\n\r\n", b"\r\n\n")
CHUNK = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"%b"}}]}'
PIECES = (
    *(
        CHUNK % text
        for text in (b"a", b"", b'b\\"c', b"\\u00e9", b"\xc3\xa9", b"\xff", b"\\ud83d", b"\\ude42", b"a\nb")
    ),
    *(
        b'data: {"id":"x","choices":[]}',
        b'data: {"choices":[{"text":"t"}]}',
        b"data: [DONE]",
        b"data:",
        b": c",
        b"data",
    ),
    *(b'data: {"error": {"code": 500}}', b"event: error", b"id: 1", b"data: {", b"}", b"[DONE]", b"error"),
)

streams = st.lists(st.sampled_from((*PIECES, *LINE_ENDS, *MARKS, *MARKS, *MARKS)), max_size=24).map(b"".join)
cuts = st.lists(st.integers(0, 2000), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
names = st.sampled_from(
    ["model", "stream", "n", "max_tokens", "messages", "prompt", "input", "tools", "user", "priority"]
)


@given(streams | st.binary(max_size=60), cuts)
def test_any_split_of_a_stream_is_the_same_stream(data: bytes, marks: list[int]) -> None:
    stream_checks.check_tracker(data, marks)


@given(streams, cuts)
@example((CHUNK % b"a" + b"\n\r\n") * 3, [])
def test_what_is_kept_of_a_stream_is_what_a_client_reads(data: bytes, marks: list[int]) -> None:
    stream_checks.check_transcript(data, marks)


@given(st.lists(st.tuples(names, values), max_size=6), st.booleans())
def test_a_body_says_the_same_to_others(fields: list[tuple[str, object]], escaped: bool) -> None:
    members = (json.dumps(name) + ": " + json.dumps(value, ensure_ascii=escaped) for name, value in fields)
    stream_checks.check_peek(("{" + ", ".join(members) + "}").encode())


@given(st.binary(max_size=60))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    stream_checks.check_peek(body)
    stream_checks.check_form(body)
