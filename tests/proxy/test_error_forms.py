"""Errors of the proxy and of engines in the form of each API, whole and as events."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from launcher.base.api_errors import HttpError, too_many, unavailable
from launcher.proxy.error_forms import (
    Opening,
    anthropic_type,
    body_of,
    engine_event,
    error_in,
    event_of,
    in_form,
    new_opening,
    opening_of,
)
from launcher.proxy.routes import Api

NEW = new_opening("resp_r", "m", 5)
WHY = HttpError(502, "why", type_="upstream_error", code="upstream_error")


def whole(api: Api, error: HttpError) -> Any:
    return json.loads(body_of(api, error))


def told(event: bytes) -> tuple[str | None, Any]:
    """An event's name and data."""
    lines = event.decode().removesuffix("\n\n").split("\n")
    name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event:") else None
    (data,) = lines
    return name, json.loads(data.removeprefix("data: "))


def failed(error: HttpError, opening: Opening = NEW, events: int = 0) -> Any:
    name, data = told(event_of(Api.RESPONSES, error, opening, events))
    assert name == data["type"] == "response.failed"
    return data


# --- errors of the proxy ---------------------------------------------------------------------------


def test_whole_responses() -> None:
    openai = {"error": {"message": "why", "type": "upstream_error", "param": None, "code": "upstream_error"}}
    assert whole(Api.OPENAI, WHY) == whole(Api.RESPONSES, WHY) == openai
    assert whole(Api.ANTHROPIC, WHY) == {"type": "error", "error": {"type": "api_error", "message": "why"}}
    assert whole(Api.COHERE, WHY) == {"message": "why"}


def test_events() -> None:
    error = {"message": "why", "type": "upstream_error", "param": None, "code": 502}
    assert told(event_of(Api.OPENAI, WHY, NEW, 0)) == (None, {"error": error})
    anthropic = {"type": "error", "error": {"type": "api_error", "message": "why"}}
    assert told(event_of(Api.ANTHROPIC, WHY, NEW, 0)) == ("error", anthropic)
    end = {"type": "message-end", "delta": {"error": "why", "finish_reason": "ERROR"}}
    assert told(event_of(Api.COHERE, WHY, NEW, 0)) == (None, end)
    assert failed(WHY) == {
        "type": "response.failed",
        "sequence_number": 0,
        "response": {
            "id": "resp_r", "object": "response", "created_at": 5, "model": "m", "status": "failed", "output": [],
            "error": {"code": "server_error", "message": "why"},
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "type_"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (402, "billing_error"), (403, "permission_error"),
        (404, "not_found_error"), (405, "invalid_request_error"), (408, "invalid_request_error"),
        (413, "request_too_large"), (415, "invalid_request_error"), (422, "invalid_request_error"),
        (429, "rate_limit_error"), (431, "invalid_request_error"), (500, "api_error"), (501, "api_error"),
        (502, "api_error"), (503, "overloaded_error"), (504, "timeout_error"), (529, "overloaded_error"),
    ],
)  # fmt: skip
def test_anthropics_types(status: int, type_: str) -> None:
    assert anthropic_type(status) == type_
    said = whole(Api.ANTHROPIC, HttpError(status, "why", type_="NotFoundError", code="x"))
    assert said == {"type": "error", "error": {"type": type_, "message": "why"}}


def test_a_response_that_has_begun_is_the_one_that_fails() -> None:
    created = (
        b": waiting\n\n"
        b'event: response.created\ndata: {"type":"response.created","sequence_number":7,"response":{"id":"resp_1",'
        b'"object":"response","model":"m","status":"in_progress","output":[],"error":null,"temperature":0.5}}\n\n'
        b'event: response.in_progress\ndata: {"type":"response.in_progress","sequence_number":8}\n\n'
    )
    opening = opening_of(created)
    assert opening is not None
    data = failed(WHY, opening, 2)
    assert data["sequence_number"] == 9
    assert data["response"] == {
        "id": "resp_1", "object": "response", "model": "m", "status": "failed", "output": [], "temperature": 0.5,
        "error": {"code": "server_error", "message": "why"},
    }  # fmt: skip


def test_large_fields_of_a_response_are_not_kept() -> None:
    response = {"id": "resp_1", "instructions": "x" * 5000, "tools": [{"a": "y" * 5000}], "model": "m"}
    event = json.dumps({"sequence_number": 0, "response": response}).encode()
    opening = opening_of(b"data: " + event + b"\n\n")
    assert opening is not None
    assert failed(WHY, opening)["response"].keys() == {"id", "model", "status", "error"}


@pytest.mark.parametrize(
    "events",
    [b"", b": waiting\n\n", b"data: [DONE]\n\n", b"data: {}\n\n", b'data: {"response":1}\n\n', b"data: {"],
)
def test_what_opens_no_response(events: bytes) -> None:
    assert opening_of(events) is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (HttpError(400, "w", code="invalid_json"), "invalid_prompt"),
        (HttpError(404, "w", code="model_not_found"), "invalid_prompt"),
        (HttpError(413, "w"), "invalid_prompt"),
        (HttpError(408, "w"), "server_error"),
        (HttpError(429, "w", code="queue_full"), "rate_limit_exceeded"),
        (HttpError(429, "w", code="insufficient_quota", repeatable=False), "insufficient_quota"),
        (HttpError(400, "w", code="context_length_exceeded"), "context_length_exceeded"),
        (HttpError(500, "w", code=500), "server_error"),
        (HttpError(502, "w", repeatable=False), "invalid_prompt"),
        (HttpError(501, "w"), "invalid_prompt"),
        (HttpError(503, "w", code="no_instance_ready"), "server_error"),
    ],
)
def test_the_code_of_a_failed_response_says_whether_to_repeat_it(error: HttpError, code: str) -> None:
    """Codex repeats the request unless the code is one of those that say not to."""
    assert failed(error)["response"]["error"] == {"code": code, "message": "w"}


@pytest.mark.parametrize("api", Api)
def test_an_event_says_when_to_try_again(api: Api) -> None:
    """It has no Retry-After; Codex reads "try again in N s"."""
    assert b"full; try again in 7 s" in event_of(api, too_many("full", 7), NEW, 0)
    assert b"try again" not in event_of(api, WHY, NEW, 0)
    said = HttpError(429, "try again in 3 s", headers={"Retry-After": "3"})
    assert event_of(api, said, NEW, 0).count(b"try again in") == 1
    spent = HttpError(429, "spent", headers={"Retry-After": "3600"}, repeatable=False)
    assert b"try again" not in event_of(api, spent, NEW, 0)


def test_what_is_not_to_be_repeated_says_so() -> None:
    assert unavailable("x", 3).headers == {"Retry-After": "3"}
    assert HttpError(502, "x", repeatable=False).headers == {"X-Should-Retry": "false"}
    for status in (400, 401, 403, 404, 405, 413, 415, 501, 505):
        assert HttpError(status, "x").headers == {"X-Should-Retry": "false"}
    for status in (408, 409, 429, 500, 502, 503, 504):
        assert HttpError(status, "x").headers == {}


def test_fields_of_one_error_are_not_anothers() -> None:
    fields = {"Allow": "GET"}
    HttpError(405, "x", headers=fields)
    assert fields == {"Allow": "GET"}


# --- errors of engines -----------------------------------------------------------------------------

OPENAI = b'{"error":{"message":"too long","type":"BadRequestError","param":"input","code":400}}'
ANTHROPIC = b'{"type":"error","error":{"type":"invalid_request_error","message":"too long"}}'
VLLM_ANTHROPIC = b'{"type":"error","error":{"type":"BadRequestError","message":"too long"}}'
COHERE = b'{"message":"too long","id":"r"}'
TEXT = b'{"error":"too long","error_type":"validation"}'
FLAT = b'{"object":"error","message":"too long","type":"BadRequestError","param":null,"code":400}'
FASTAPI = b'{"detail":"too long"}'
RESPONSES = b'{"type":"response.failed","response":{"id":"resp_1","error":{"code":"server_error","message":"too long"}}}'
EVENT = b'{"type":"error","code":"server_error","message":"too long","param":null,"sequence_number":3}'
COHERE_END = b'{"type":"message-end","delta":{"error":"too long","finish_reason":"ERROR"}}'
FORMS = (OPENAI, ANTHROPIC, VLLM_ANTHROPIC, COHERE, TEXT, FLAT, FASTAPI, RESPONSES, EVENT, COHERE_END)


def test_what_is_right_or_unreadable_passes_as_it_is() -> None:
    unreadable = (b"", b"{", b"[]", b"<html>", b'{"error":{}}', b"Not Found", b"\xff")
    for api, body in (
        *product((Api.OPENAI, Api.RESPONSES), (OPENAI, ANTHROPIC, COHERE)),
        (Api.ANTHROPIC, ANTHROPIC),
        (Api.COHERE, COHERE),
        *product(Api, unreadable),
    ):
        assert in_form(api, body, 400, "POST /x") is body, (api, body)


@pytest.mark.parametrize("body", FORMS)
def test_every_form_becomes_that_of_its_api(body: bytes) -> None:
    anthropic = {"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}}
    assert json.loads(in_form(Api.ANTHROPIC, body, 400, "POST /x")) == anthropic
    assert json.loads(in_form(Api.COHERE, body, 400, "POST /x"))["message"] == "too long"
    for api in (Api.OPENAI, Api.RESPONSES):
        assert b"too long" in in_form(api, body, 400, "POST /x")
    for seen in (FASTAPI, RESPONSES, EVENT, COHERE_END, TEXT, FLAT):
        for api in (Api.OPENAI, Api.RESPONSES):
            assert json.loads(in_form(api, seen, 400, "POST /x"))["error"]["message"] == "too long"


def test_anthropics_own_types_are_kept() -> None:
    """As vLLM 0.33 has them, whatever the status says."""
    body = b'{"error":{"type":"overloaded_error","message":"busy","code":429}}'
    error = json.loads(in_form(Api.ANTHROPIC, body, 429, "POST /x"))["error"]
    assert error == {"type": "overloaded_error", "message": "busy"}


@pytest.mark.parametrize(
    ("body", "type_"),
    [
        (
            b'{"error":{"type":"invalid_request_error","message":"w","code":404}}',
            "not_found_error",
        ),  # OpenAI's
        (b'{"error":{"type":"invalid_request_error","message":"w","code":"x"}}', "invalid_request_error"),
        (b'{"error":{"type":"rate_limit_error","message":"w"}}', "rate_limit_error"),
        (b'{"type":"error","error":{"type":"not_found_error","message":"w"}}', "not_found_error"),
        (b'{"type":"error","error":{"type":"internal_error","message":"w"}}', "api_error"),  # vLLM 0.32
    ],
)
def test_the_type_of_an_event_of_an_engine(body: bytes, type_: str) -> None:
    error = error_in(body, 502, "")
    assert error is not None
    assert told(event_of(Api.ANTHROPIC, error, NEW, 0))[1]["error"]["type"] == type_


def test_fastapis_detail() -> None:
    body = in_form(Api.OPENAI, b'{"detail":"Not Found"}', 404, "POST /v1/embeddings")
    assert json.loads(body)["error"] == {
        "message": "this model's instance does not serve POST /v1/embeddings (Not Found)",
        "type": "NotFoundError",
        "param": None,
        "code": 404,
    }
    fields = in_form(Api.OPENAI, b'{"detail":[{"loc":["x"]}]}', 422, "POST /x")
    assert json.loads(fields)["error"]["message"] == '[{"loc":["x"]}]'
    assert in_form(Api.OPENAI, b'{"detail":1,"x":2}', 400, "POST /x") == b'{"detail":1,"x":2}'


@pytest.mark.parametrize("body", FORMS)
@pytest.mark.parametrize("api", Api)
def test_an_engines_error_as_an_event(api: Api, body: bytes) -> None:
    """Each client sees the message; one that reads the type or the code sees that it was the request's fault."""
    error = error_in(body, 400, "POST /x")
    assert error is not None
    event = event_of(api, error, NEW, 0)
    assert b"too long" in event
    match api:
        case Api.OPENAI:
            assert told(event)[1]["error"]["code"] == 400
        case Api.RESPONSES:
            code = told(event)[1]["response"]["error"]["code"]
            assert code == ("server_error" if b'"server_error"' in body else "invalid_prompt")
        case Api.ANTHROPIC:
            assert told(event)[1]["error"]["type"] == "invalid_request_error"
        case Api.COHERE:
            assert told(event)[1]["delta"] == {"error": "too long", "finish_reason": "ERROR"}


def test_an_engines_words_are_kept_in_an_event() -> None:
    error = error_in(OPENAI, 400, "POST /x")
    assert error is not None
    assert told(event_of(Api.OPENAI, error, NEW, 0))[1] == json.loads(OPENAI)


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"error":{}}', b'{"error":{"message":5}}', b"[1]"])
def test_an_error_that_says_nothing(body: bytes) -> None:
    assert error_in(body, 400, "POST /x") is None


OURS = b'data: {"error":{"message":"the engine aborted the request","type":"engine_aborted","code":503}}\n\n'


@pytest.mark.parametrize("api", Api)
def test_an_engines_error_event_has_the_form_of_the_api(api: Api) -> None:
    event = engine_event(api, OURS, WHY, NEW, 0)
    assert b"the engine aborted the request" in event
    match api:
        case Api.OPENAI:
            assert event == OURS
        case Api.RESPONSES:
            assert told(event)[1]["response"]["error"]["code"] == "server_error"
        case Api.ANTHROPIC:
            assert told(event)[1]["error"]["type"] == "overloaded_error"
        case Api.COHERE:
            assert told(event)[1]["delta"]["finish_reason"] == "ERROR"


def test_an_engines_failed_response_passes_as_it_is() -> None:
    event = b"event: response.failed\ndata: " + RESPONSES + b"\n\n"
    assert engine_event(Api.RESPONSES, event, WHY, NEW, 0) == event
    other = engine_event(Api.RESPONSES, b"event: error\ndata: " + EVENT + b"\n\n", WHY, NEW, 0)
    assert told(other)[0] == "response.failed"


@pytest.mark.parametrize("api", Api)
def test_an_error_event_that_cannot_be_read_is_replaced(api: Api) -> None:
    unreadable = b"event: error\ndata: oh no\n\n"
    assert engine_event(api, unreadable, WHY, NEW, 0) == event_of(api, WHY, NEW, 0)
