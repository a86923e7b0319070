"""Large bodies, read as they come: the same as a small one would say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from launcher.base.api_errors import HttpError
from launcher.proxy.openai.body import read_body
from launcher.proxy.openai.body_schema import RequestBody
from launcher.proxy.openai.json_reader import (
    MAX_DEPTH,
    MAX_FIELDS,
    MAX_SHORT_BYTES,
    MAX_VALUES,
    STEP_BYTES,
    JsonReader,
)

PROMPT = ("system", "messages")
_NAMES = [
    "model",
    "messages",
    "system",
    "stream",
    "n",
    "max_tokens",
    "user",
    "tools",
    "priority",
    "x",
    "",
    "\u00e9",
]
_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
_bodies = st.dictionaries(st.sampled_from(_NAMES) | st.text(max_size=3), _values, max_size=8)


def outcome(read: Any) -> object:
    """What a body says; None: it is refused."""
    try:
        found: RequestBody = read()
    except HttpError:
        return None
    raws = {name: json.loads(bytes(raw)) for name, raw in found.prompt.items()}
    tools = json.loads(bytes(found.tools)) if found.tools else None
    return (found.model, found.previous_response_id, found.stream, found.n, found.max_tokens, raws, tools,
            found.priority)  # fmt: skip


def words(read: Any) -> str | None:
    """The message of a refusal; None: it is read."""
    try:
        read()
    except HttpError as error:
        return error.message
    return None


def in_pieces(body: bytes, sizes: list[int]) -> RequestBody:
    reader, had, at = JsonReader(PROMPT), bytearray(), 0
    for number in range(len(body)):
        if at >= len(body):
            break
        size = sizes[number % len(sizes)]
        had += body[at : at + size]
        at += size
        reader.feed(had)
    return reader.finish(had)


@settings(deadline=None)
@given(
    _bodies, st.booleans(), st.sampled_from([None, 1]), st.lists(st.integers(1, 30), min_size=1, max_size=5)
)
def test_both_readers_agree(
    body: dict[str, object], ascii_only: bool, indent: int | None, sizes: list[int]
) -> None:
    raw = json.dumps(body, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "replace")
    assert outcome(lambda: in_pieces(raw, sizes)) == outcome(lambda: read_body(raw, PROMPT))


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","model":"b","mod\\u0065l":"c","messages":[1],"messages":[2]}',
        b' {"a":"\\\\","b":"\\"","c":[{"d":"]}"}],"model":"m"} \n',
        b'{"model":"a"} x',
        b'{"model":"a"}}',
        b'{"model":"a",}',
        b'{"model" "a"}',
        b'{"model":"a" "b":1}',
        b"{'model':'a'}",
        b'{"model":}',
        b'{"model":1}',
        b'{"model":"\xff"}',
        b'{,"model":"a"}',
        b'["model"]',
        b"",
        b"{",
        b'{"model":"a","x":[',
        b'{"model":"a',
        b"\xef\xbb\xbf{}",
        b'\xef\xbb\xbf {"model":"a","messages":["x"],"n":2}',
        b'\xef\xbb\xbf\xef\xbb\xbf{"model":"a"}',
        b'\xef\xbb{"model":"a"}',
        b' \xef\xbb\xbf{"model":"a"}',
        '{"model":"a"}'.encode("utf-16"),
        *(
            b'{"model":"a","messages":["%b"]}' % text
            for text in (
                rb"\ud83d",
                rb"\ud83dx",
                rb"\ude00",
                rb"\ude00\ud83d",
                rb"\ud83d\ud83d\ude00",
                rb"\ud83d\u0041",
                rb"\uD83D\\ude00",
                rb"\ud83d\ude00",
                rb"\\ud83d",
                rb"\\\ud83d",
                rb"\\\\ud83d\\ude00",
                rb"\\ud83d\ude00",
                rb"\\\ud83d\ude00",
                rb"\ud83d\ude00\ude00",
                rb"\uD7ff\uE000",
                rb"\\\\\ud83d\ude00\uDBFF",
            )
        ),
    ],
)
def test_both_readers_agree_on_unusual_bodies(body: bytes) -> None:
    assert outcome(lambda: in_pieces(body, [3])) == outcome(lambda: read_body(body, PROMPT))


_escapes = st.lists(
    st.sampled_from(
        [r"\ud83d", r"\ude00", r"\uDBFF", r"\uDC00", r"\\", r"\u4e2d", r"\"", r"\n", "x", "ud83d", "é"]
    ),
    max_size=12,
).map("".join)


@settings(deadline=None, max_examples=examples(300))
@given(_escapes, st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_both_readers_find_the_same_half_of_a_surrogate_pair(text: str, sizes: list[int]) -> None:
    body = f'{{"model":"a","messages":["{text}"]}}'.encode()
    assert words(lambda: in_pieces(body, sizes)) == words(lambda: read_body(body, PROMPT))
    json.loads(body)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'"model"', "expected { (byte 0), found '\"'"),
        (b"\xef\xbb\xbfmodel", "expected { (byte 3), found 'm'"),
        ('{"model":"a"}'.encode("utf-16"), "it is UTF-16, and JSON must be UTF-8 (RFC 8259 section 8.1)"),
        ('{"model":"a"}'.encode("utf-16-be"), "it is UTF-16, and JSON must be UTF-8 (RFC 8259 section 8.1)"),
        ('{"model":"a"}'.encode("utf-32"), "it is UTF-32, and JSON must be UTF-8 (RFC 8259 section 8.1)"),
        ("{\u201cmodel\u201d:1}".encode(), "expected \" or } (byte 1), found '\u201c' (U+201C)"),
        (b'{"model":\xff}', "expected a value (byte 9), found 0xff"),
        (b'{"user":{},"n":01}', "the value of `n` is malformed (byte 15), found '0'"),
        (b'{"user":{},"model":"\xff"}', "the value of `model` is malformed (byte 19), found '\"'"),
        (b'{"user":"\\ud83d', "unexpected end"),
        (b'{"user":"\\ud83d\\ud', "unexpected end"),
        (b'{"user":"\\ud83d"', "\\ud83d is half of a surrogate pair (byte 9), its other half is missing"),
        (b" ", "it is empty"),
    ],
)
@pytest.mark.parametrize("size", [9, 99])
def test_a_refusal_names_the_cause_and_the_byte(body: bytes, why: str, size: int) -> None:
    assert words(lambda: in_pieces(body, [size])) == f"cannot parse the request body as JSON: {why}"


def test_a_half_of_a_surrogate_pair_is_found_across_steps() -> None:
    before = b'{"model":"a","user":["'
    for shift in range(14):
        text = b"x" * (STEP_BYTES - len(before) - shift)
        good = before + text + rb'\ud83d\ude00"]}'
        assert JsonReader(PROMPT).finish(good).model == "a"
        for half in (rb"\ud83d", rb"\ude00"):
            with pytest.raises(HttpError, match=rf"half of a surrogate pair \(byte {len(before + text)}\)"):
                JsonReader(PROMPT).finish(before + text + half + b' and more"]}')


@pytest.mark.parametrize(
    "body",
    [
        b'{"x":[' + b"[]," * MAX_VALUES + b"0]}",
        b'{"x":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
        b"{" + b'"x":{},' * MAX_FIELDS + b'"y":0}',
        b'{"model":"' + b"m" * MAX_SHORT_BYTES + b'"}',
        b'{"n":' + b"1" * 2000 + b"}",
    ],
)
def test_expensive_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(HttpError) as caught:
        JsonReader(PROMPT).finish(body)
    assert caught.value.status == 400


def test_media_of_the_prompt_are_found() -> None:
    medium = b'{"data":"' + b"A" * 9999 + b'"}'
    found = JsonReader(PROMPT).finish(b'{"x":[%b],"messages": [1,%b]}' % (medium, medium))
    assert found.media == {"messages": [(3 + 9, 3 + 9 + 9999)]}
    assert bytes(found.prompt["messages"]) == b"[1,%b]" % medium


# --- the beginning of a body -----------------------------------------------------------------------

WHOLE = json.dumps(
    {
        "stream": True,
        "model": "m",
        "messages": [{"role": "user", "content": 'a "word" \\ ' * 20}],
        "max_tokens": 7,
    }
).encode()


def test_a_body_is_read_as_far_as_it_has_come() -> None:
    """Whatever is said of a field is what the whole body says, wherever the cut is."""
    whole = read_body(WHOLE)
    for end in range(1, len(WHOLE) + 1):
        said = JsonReader(("messages",)).so_far(WHOLE[:end])
        messages = bytes(said.prompt.get("messages", b""))
        assert bytes(whole.prompt["messages"]).startswith(messages), end
        begun = end - WHOLE.index(b"[")
        assert len(messages) == (0 if begun <= 0 else min(begun, len(whole.prompt["messages"]))), end
        assert said.model == ("m" if end > WHOLE.index(b'"m"') + 2 else None), end
        assert said.stream is (end > WHOLE.index(b"true") + 4), end
        assert said.max_tokens == (7 if end == len(WHOLE) else None), end


def test_an_image_that_is_cut_off_ends_with_the_body() -> None:
    url = "data:image/png;base64," + "A" * 20_000
    body = json.dumps({"messages": [{"type": "image_url", "image_url": {"url": url}}]}).encode()[:9000]
    said = JsonReader(("messages",)).so_far(body)
    prompt = said.prompt["messages"]
    assert said.media is not None
    ((start, end),) = said.media["messages"]
    assert (bytes(prompt[start : start + 3]), end) == (b"AAA", len(prompt))


@pytest.mark.parametrize("body", [b"[]", b"{]", b'{"a" 1', b"--form", b'{"model": 5,'])
def test_the_beginning_of_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(HttpError):
        JsonReader(("messages",)).so_far(body)
