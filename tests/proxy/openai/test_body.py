"""What is read out of bodies, and errors in OpenAI's form."""

from __future__ import annotations

import json

import pytest

from launcher.proxy.openai.body import (
    HttpError,
    Names,
    RequestBody,
    begins_response,
    error_event,
    peek_json,
    response_id,
    rewrite_detail,
    usage_of,
)


@pytest.mark.parametrize(
    ("body", "peek"),
    [
        (b'{"model":"a","messages":[{"content":"\\u00e9"}]}', RequestBody("a")),
        (b'{"messages":[],"model":"b/c"}', RequestBody("b/c")),
        (b"{}", RequestBody()),
        (b'{"model":null}', RequestBody()),
        (b'{"model":""}', RequestBody()),
        (b'{"previous_response_id":"resp_1","model":"a"}', RequestBody("a", "resp_1")),
    ],
)
def test_peek(body: bytes, peek: RequestBody) -> None:
    found = peek_json(body)
    assert (found.model, found.previous_response_id) == (peek.model, peek.previous_response_id)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b'{"model":1}', b'{"model":"a"} x', b'{"model":"\xff"}', b"[" * 100_000],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(HttpError) as caught:
        peek_json(body)
    assert caught.value.status == 400
    assert set(json.loads(caught.value.body())["error"]) == {"message", "type", "param", "code"}


def test_names() -> None:
    assert Names(("a",)).resolve(None) == "a"
    assert Names(("a", "b")).resolve("b") == "b"
    with pytest.raises(HttpError) as missing:
        Names(("a", "b")).resolve(None)
    assert missing.value.status == 400
    with pytest.raises(HttpError) as unknown:
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
        (
            b'{"type":"message","usage":{"input_tokens":1,"output_tokens":2,"cache_read_input_tokens":128}}',
            (129, 2, 128),
        ),
        (
            b'{"usage":{"cache_creation_input_tokens":64,"cache_read_input_tokens":0,"input_tokens":1,"output_tokens":2}}',
            (65, 2, 0),
        ),
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
