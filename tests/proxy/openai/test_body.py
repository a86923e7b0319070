"""What the proxy reads from JSON request bodies."""

from __future__ import annotations

import json

import pytest

from launcher.proxy.errors import HttpError
from launcher.proxy.openai.body import read_body
from launcher.proxy.openai.body_schema import RequestBody


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
    assert set(json.loads(caught.value.body())["error"]) == {"message", "type", "param", "code"}
