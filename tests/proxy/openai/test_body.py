"""What the proxy reads from JSON request bodies."""

from __future__ import annotations

import json
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from support.examples import examples

from launcher.base.api_errors import HttpError
from launcher.proxy.error_forms import body_of
from launcher.proxy.openai.body import MAX_CHOICES, MAX_PRIORITY, MAX_TOKENS, read_body
from launcher.proxy.openai.body_schema import RequestBody
from launcher.proxy.openai.json_reader import JsonReader
from launcher.proxy.openai.stream_options import UsageAsk, usage_ask
from launcher.proxy.routes import Api


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"a","messages":[{"content":"\\u00e9"}]}', RequestBody("a")),
        (b'{"messages":[],"model":"b/c"}', RequestBody("b/c")),
        (b"{}", RequestBody()),
        (b'{"model":null}', RequestBody()),
        (b'{"model":""}', RequestBody()),
        (b'{"previous_response_id":"resp_1","model":"a"}', RequestBody("a", "resp_1")),
    ],
)
def test_reads_model_and_previous_response(body: bytes, expected: RequestBody) -> None:
    found = read_body(body)
    assert (found.model, found.previous_response_id) == (expected.model, expected.previous_response_id)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b'{"model":1}', b'{"model":"a"} x', b'{"model":"\xff"}', b"[" * 100_000],
)
def test_invalid_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(HttpError) as caught:
        read_body(body)
    assert caught.value.status == 400
    assert set(json.loads(body_of(Api.OPENAI, caught.value))["error"]) == {"message", "type", "param", "code"}


HALF = "{} is half of a surrogate pair (byte {}), its other half is missing"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "it is empty"),
        (b"\r\n", "it is empty"),
        (b"\xef\xbb\xbf", "it is empty"),
        (b'\xef\xbb\xbf{"model" 1}', "JSON is malformed: expected ':' (byte 12), found '1'"),
        (b"\xef\xbb\xbf\xef\xbb\xbf{}", "JSON is malformed: invalid character (byte 3), found '\\ufeff' (U+FEFF)"),
        ('{"model":"ü"}'.encode("utf-16"), "it is UTF-16, and JSON must be UTF-8 (RFC 8259 section 8.1)"),
        ('{"model":"ü"}'.encode("utf-16-le"), "it is UTF-16, and JSON must be UTF-8 (RFC 8259 section 8.1)"),
        ('{"model":"ü"}'.encode("utf-16-be"), "it is UTF-16, and JSON must be UTF-8 (RFC 8259 section 8.1)"),
        ('{"model":"ü"}'.encode("utf-32"), "it is UTF-32, and JSON must be UTF-8 (RFC 8259 section 8.1)"),
        ('{"model":"ü"}'.encode("utf-32-be"), "it is UTF-32, and JSON must be UTF-8 (RFC 8259 section 8.1)"),
        (b"\x1f\x8b\x08\0", "it is compressed with gzip: send it uncompressed"),
        (b"model=m", "JSON is malformed: invalid character (byte 0), found 'm'"),
        ("{\u201cmodel\u201d:1}".encode(), "JSON is malformed: object keys must be strings (byte 1), found '“' (U+201C)"),
        (b'{"model":"a","x":\xff}', "JSON is malformed: invalid character (byte 17), found 0xff"),
        (b'{"model":"a"}  x', "JSON is malformed: trailing characters (byte 15), found 'x'"),
        (b'{"model":"a\xffb"}', "it is not UTF-8 (byte 11), found 0xff"),
        (b'{"x":"\\ux"}', "\\u without four hexadecimal digits (byte 6), found 'x'"),
        (b'{"x":"\\ud83d"}', HALF.format("\\ud83d", 6)),
        (b'{"x":"\\uD83Dxxxxxxxxxxxxxxxx"}', HALF.format("\\uD83D", 6)),
        (b'{"x":"\\ude00 low"}', HALF.format("\\ude00", 6)),
        (b'{"x":"\\ud83d\\ude00\\\\\\ud83d\\u0041"}', HALF.format("\\ud83d", 20)),
        (b'{"\\ud83d":1}', HALF.format("\\ud83d", 2)),
        (b'{"x":01,"y":"\\ud83d"}', "JSON is malformed: invalid number (byte 6), found '1'"),
        (b'{"x":"really cut off', "Input data was truncated"),
        (b'{"x":"\\\\ud83d', "Input data was truncated"),
        (b'{"x":"\\ud83d', "Input data was truncated"),
        (b'{"x":"\\ud83d\\ude', "Input data was truncated"),
        (b'{"x":"\\u12', "Input data was truncated"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_cause_and_the_byte(body: bytes, why: str) -> None:
    with pytest.raises(HttpError) as caught:
        read_body(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert caught.value.message == f"cannot parse the request body as JSON: {why}"


def test_a_byte_order_mark_is_skipped() -> None:
    """As vLLM does (Starlette's Request.json: json.loads of the bytes)."""
    body = b'\xef\xbb\xbf{"model":"a","messages":["x"],"stream":true}'
    assert json.loads(body)["model"] == "a"
    found = read_body(body)
    assert (found.model, found.stream, bytes(found.prompt["messages"])) == ("a", True, b'["x"]')


# --- fields of other types than the API's, as the engine reads them ----------------------------------

T = TypeVar("T")
BOOL, INT = TypeAdapter(bool | None), TypeAdapter(int | None)
_words = st.sampled_from([
    *("0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes", "2", "", "None", "null", "-1"),
    *("on ", " on", "1.0", "0x1", "1e3", "8.", ".0", "--8", "+-8", "8 .0", "1_0.0", "0_8", "-_1", "_1", "1__0", "8\x00"),
])  # fmt: skip
_padding = st.sampled_from(
    ["", " ", "\t\n", "\x0b\x0c\r", "\x1c", "\x85", "\xa0", "\u2003", "\u3000", "\ufeff", "\u200b"]
)
_digits = st.from_regex(r"[+-]?[0-9_]{1,30}(\.[0_]{0,3})?", fullmatch=True)
_long = st.builds(
    lambda zeros, size: "0" * zeros + "9" * size, st.sampled_from([0, 5000]), st.integers(4290, 4310)
)
_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-20, 20)
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-(2**65), 2**65).map(float)
    | st.sampled_from([2.0**63, -(2.0**63), 2.0**63 - 1024, 10**18])
    | st.text(max_size=6)
    | _words
    | _words.map(str.upper)
    | _words.map(str.title)
    | st.builds(lambda a, b, c: a + b + c, _padding, _digits | _words, _padding)
    | _long
)
_odd_values = _scalars | st.lists(_scalars, max_size=2) | st.dictionaries(st.just("a"), _scalars, max_size=1)


def as_engine(adapter: TypeAdapter[T | None], value: object) -> T | None:
    """What vLLM's field of this type is; None also where it answers 400."""
    try:
        return adapter.validate_python(value)
    except ValidationError:
        return None


def at_least_one(value: int | None, most: int) -> int | None:
    return None if value is None or value < 1 else min(value, most)


@settings(deadline=None, max_examples=examples(300))
@given(_odd_values, st.booleans())
def test_fields_are_read_as_the_engine_reads_them(value: object, ascii_only: bool) -> None:
    fields = dict.fromkeys(("stream", "n", "max_tokens", "priority"), value)
    body = json.dumps(fields, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    number = as_engine(INT, value)
    for said in (read_body(body), JsonReader(("messages",)).finish(body)):
        assert said.stream is (as_engine(BOOL, value) is True)
        assert said.n == (at_least_one(number, MAX_CHOICES) or 1)
        assert said.max_tokens == at_least_one(number, MAX_TOKENS)
        assert said.priority == max(-MAX_PRIORITY, min(MAX_PRIORITY, number or 0))


@settings(deadline=None, max_examples=examples(200))
@given(_odd_values)
def test_usage_is_asked_for_where_the_engine_would_not_send_it(value: object) -> None:
    asked = usage_ask(json.dumps({"include_usage": value}).encode())
    try:
        wanted = BOOL.validate_python(value)
    except ValidationError:
        wanted = True  # the engine's to refuse
    assert (asked is UsageAsk.NO) is bool(wanted)


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        ("/v1/chat/completions", {"max_tokens": 9, "max_completion_tokens": 5}, 5),
        ("/v1/chat/completions", {"max_tokens": 9, "max_completion_tokens": None}, 9),
        ("/v1/chat/completions", {"max_tokens": 9, "max_completion_tokens": []}, None),  # 400
        ("/v1/chat/completions", {"max_output_tokens": 1}, None),
        ("/v1/chat/completions/batch", {"max_tokens": 9, "max_completion_tokens": 5}, 5),
        ("/v1/completions", {"max_tokens": 9, "max_completion_tokens": 1, "max_output_tokens": 1}, 9),
        ("/v1/completions", {"max_completion_tokens": 1}, None),
        ("/v1/responses", {"max_tokens": 1, "max_completion_tokens": 1}, None),
        ("/v1/responses", {"max_output_tokens": 7, "max_tokens": 1}, 7),
        ("/v1/messages", {"max_tokens": 9, "max_completion_tokens": 1}, 9),
    ],
)
def test_only_the_limit_that_the_route_has_counts(
    path: str, fields: dict[str, object], expected: int | None
) -> None:
    body = json.dumps(fields).encode()
    assert read_body(body, path=path).max_tokens == expected
    assert JsonReader(("messages",), path).finish(body).max_tokens == expected


@settings(deadline=None, max_examples=50)
@given(_odd_values)
def test_generate_has_its_limits_in_its_sampling_parameters(value: object) -> None:
    path, number = "/inference/v1/generate", as_engine(INT, value)
    body = json.dumps({"n": 3, "max_tokens": 3, "sampling_params": {"n": value, "max_tokens": value}})
    raw = body.encode("utf-8", "surrogatepass")
    for said in (read_body(raw, ("token_ids",), path), JsonReader(("token_ids",), path).finish(raw)):
        assert said.n == (at_least_one(number, MAX_CHOICES) or 1)
        assert said.max_tokens == at_least_one(number, MAX_TOKENS)


@pytest.mark.parametrize("params", [None, 7, "x", [], {}, {"model": 5, "n": 8}])
def test_sampling_parameters_that_the_engine_refuses_say_nothing(params: object) -> None:
    body = json.dumps({"n": 3, "sampling_params": params}).encode()
    said = read_body(body, ("token_ids",), "/inference/v1/generate")
    assert (said.n, said.max_tokens) == (1, None)
