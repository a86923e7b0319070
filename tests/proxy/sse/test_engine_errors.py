"""The status that an engine's error stands for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.proxy.sse.engine_errors import status_of_error, status_of_word


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ({"error": {"code": 404, "type": "invalid_request_error"}}, 404),
        ({"error": {"code": "429"}}, 429),
        ({"error": {"code": 500, "type": "invalid_request_error"}}, 500),
        ({"error": {"code": 20, "type": "BadRequestError"}}, 400),
        ({"error": {"code": True, "type": "x"}}, 500),
        ({"error": {"type": "server_error", "code": "model_not_found"}}, 404),
        ({"error": "x", "error_type": "validation"}, 400),
        ({"error": "x", "error_type": "generation"}, 500),
        ({"error": "Input validation error"}, 500),
        ({"object": "error", "message": "x", "code": 400}, 400),
        ({"type": "error", "error": {"type": "overloaded_error"}}, 500),
        ({"type": "error", "error": {"type": "permission_error"}}, 403),
        ({"type": "error", "code": "invalid_prompt"}, 400),
        ({"type": "response.failed", "response": {"error": {"code": "rate_limit_exceeded"}}}, 429),
        ({"type": "response.failed", "response": {"error": {"code": "server_error"}}}, 500),
        ({"type": "message-end", "delta": {"error": "x", "finish_reason": "ERROR"}}, 500),
        ([], 500),
    ],
)
def test_errors(said: Any, status: int) -> None:
    assert status_of_error(json.dumps(said).encode()) == status


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 5000, b'{"error":'])
def test_what_cannot_be_read_is_the_engines_fault(data: bytes) -> None:
    assert status_of_error(data) == 500


@pytest.mark.parametrize(
    ("word", "status"),
    [
        ("BadRequestError", 400), ("Bad Request", 400), ("invalid_request_error", 400), ("invalid_base64_image", 400),
        ("context_length_exceeded", 400), ("exceed_context_size_error", 400), ("Unprocessable Entity", 422),
        ("NotFoundError", 404), ("authentication_error", 401), ("request_too_large", 413), ("rate_limit_error", 429),
        ("insufficient_quota", 429), ("InternalServerError", None), ("api_error", None), ("server_error", None),
        ("", None), ("error", None), (None, None), (400, None), ("invalid" * 20, None),
    ],
)  # fmt: skip
def test_words(word: object, status: int | None) -> None:
    assert status_of_word(word) == status


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda of: (
            st.lists(of)
            | st.dictionaries(
                st.sampled_from(["error", "code", "type", "response", "delta", "error_type"]), of
            )
        ),
    )
)
def test_any_json_has_a_status_of_an_error(said: Any) -> None:
    assert 400 <= status_of_error(json.dumps(said).encode()) < 600
