"""What is read out of bodies, and errors in OpenAI's form."""

from __future__ import annotations

import json

import pytest

from launcher.proxy.openai import (
    Names,
    Peek,
    Refusal,
    begins_response,
    error_event,
    peek_form,
    peek_json,
    response_id,
    rewrite_detail,
    usage_of,
)


@pytest.mark.parametrize(
    ("body", "peek"),
    [
        (b'{"model":"a","messages":[{"content":"\\u00e9"}]}', Peek("a")),
        (b'{"messages":[],"model":"b/c"}', Peek("b/c")),
        (b"{}", Peek()),
        (b'{"model":null}', Peek()),
        (b'{"model":""}', Peek()),
        (b'{"previous_response_id":"resp_1","model":"a"}', Peek("a", "resp_1")),
    ],
)
def test_peek(body: bytes, peek: Peek) -> None:
    found = peek_json(body)
    assert (found.model, found.previous_response_id) == (peek.model, peek.previous_response_id)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b'{"model":1}', b'{"model":"a"} x', b'{"model":"\xff"}', b"[" * 100_000],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        peek_json(body)
    assert caught.value.status == 400
    assert set(json.loads(caught.value.body())["error"]) == {"message", "type", "param", "code"}


def form(*parts: tuple[str, bytes]) -> bytes:
    return (
        b"".join(b"--B\r\n" + head.encode() + b"\r\n\r\n" + value + b"\r\n" for head, value in parts)
        + b"--B--\r\n"
    )


FILE = ('Content-Disposition: form-data; name="file"; filename="model"', b"\x00--B \r\n" * 30_000)


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (form(FILE, ('Content-Disposition: form-data; name="model"', b"whisper")), "whisper"),
        (form(("content-disposition: form-data; name=model", b" whisper "), FILE), "whisper"),
        (form(FILE), None),
        (form(('Content-Disposition: form-data; name="model"; filename="x"', b"no")), None),
        (form(('Content-Disposition: form-data; name="model_x"', b"no")), None),
        (b"", None),
    ],
)
def test_the_model_of_a_form(body: bytes, model: str | None) -> None:
    assert peek_form(body, "multipart/form-data; boundary=B").model == model
    assert peek_form(body, 'multipart/form-data; boundary="B"').model == model


MODEL = 'Content-Disposition: form-data; name="model"'


@pytest.mark.parametrize(
    "body",
    [
        form((MODEL, b"mine"), FILE, (MODEL, b"another")),
        form((MODEL, b"mine"), ("content-disposition: form-data;\r\n name=model", b"another")),
        form((MODEL, b"mine"), (f"X: {'x' * 9000}\r\n{MODEL}", b"another")),
    ],
)
def test_a_form_that_names_two_models_is_refused(body: bytes) -> None:
    """Whichever of them an instance reads, a key's list of models holds."""
    with pytest.raises(Refusal) as caught:
        peek_form(body, "multipart/form-data; boundary=B")
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; xboundary=B",
        "multipart/form-data; boundary=A; boundary=B",
    ],
)
def test_a_form_needs_a_boundary(content_type: str) -> None:
    with pytest.raises(Refusal):
        peek_form(b"", content_type)


def test_names() -> None:
    assert Names(("a",)).resolve(None) == "a"
    assert Names(("a", "b")).resolve("b") == "b"
    with pytest.raises(Refusal) as missing:
        Names(("a", "b")).resolve(None)
    assert missing.value.status == 400
    with pytest.raises(Refusal) as unknown:
        Names(("a",)).resolve("x")
    assert unknown.value.status == 404
    assert json.loads(unknown.value.body())["error"] == {
        "message": "The model `x` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": "model_not_found",
    }


def test_detail_becomes_an_error() -> None:
    body = rewrite_detail(404, b'{"detail":"Not Found"}', "POST", "/v1/embeddings")
    assert body is not None
    error = json.loads(body)["error"]
    assert error["type"] == "NotFoundError"
    assert "/v1/embeddings" in error["message"]
    assert rewrite_detail(422, b'{"detail":[{"loc":["x"]}]}', "POST", "/x") is not None
    for other in (b'{"error":{}}', b"", b"{", b'{"detail":1,"x":2}', b"[]"):
        assert rewrite_detail(400, other, "POST", "/x") is None


def test_error_events_parse() -> None:
    plain = error_event("/v1/chat/completions", "why", "upstream_error", 502)
    assert plain.startswith(b"data: ")
    assert plain.endswith(b"\n\n")
    assert json.loads(plain[6:])["error"]["message"] == "why"
    assert error_event("/v1/messages", "why", "x", 502).startswith(b"event: error\ndata: ")


def test_the_id_of_a_stored_response() -> None:
    assert response_id(b'{"id": "resp_12-a", "object": "response"}') == "resp_12-a"
    assert response_id(b'event: response.created\ndata: {"response":{"id":"resp_9","x":1}}\n\n') == "resp_9"
    assert response_id(b'{"id":"chatcmpl-1"}') is None


@pytest.mark.parametrize(
    ("told", "usage"),
    [
        (b'{"usage":{"prompt_tokens":3,"total_tokens":7,"completion_tokens":4}}', (3, 4, None)),
        (b'{"usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}', (3, 0, 2)),
        (
            b'{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":8},"output_tokens":5,"total_tokens":14}}',
            (9, 5, 8),
        ),
        (b'event: message_delta\ndata: {"usage":{"input_tokens":1,"output_tokens":2}}\n\n', (1, 2, None)),
        (b'event: message_delta\ndata: {"usage":{"output_tokens":2}}\n\n', None),
        (b'{"choices":[{"text":"\\"usage\\":{\\"prompt_tokens\\":3}"}]}', None),
        (b"{}", None),
    ],
)
def test_usage(told: bytes, usage: tuple[int, int, int | None] | None) -> None:
    assert usage_of(told) == usage


def test_what_comes_before_a_response_is_computed() -> None:
    created = b'event: response.created\ndata: {"type":"response.created"}\n\n'
    delta = b'event: response.output_text.delta\ndata: {"delta":"response.created"}\n\n'
    assert begins_response(created)
    assert begins_response(created + created.replace(b"created", b"in_progress"))
    assert not begins_response(created + delta)
    assert not begins_response(delta)
    assert not begins_response(b": waiting\n\n")
