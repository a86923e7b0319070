"""Usage and response ids."""

from __future__ import annotations

import pytest

from launcher.proxy.openai.answers import response_id, usage_of, with_reasoning
from launcher.proxy.openai.prompts import said_usage


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
        (b'{"texts":["a"],"meta":{"billed_units":{"input_tokens":3,"image_tokens":0}}}', (3, 0, None)),
        (b'{"meta":{"billed_units":{"input_tokens":0,"image_tokens":9}}}', (9, 0, None)),
        (
            b'{"usage":{"billed_units":{"input_tokens":3.0,"output_tokens":4.0},"cached_tokens":2.0}}',
            (3, 4, 2),
        ),
        (b'{"usage" : {"prompt_tokens": 3, "completion_tokens": 4}, "tool": {"usage": null}}', (3, 4, None)),
        (
            b'{"text":"x_input_tokens","usage":{"prompt_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}',
            (3, 0, 2),
        ),
        (b"{}", None),
    ],
)
def test_usage(told: bytes, usage: tuple[int, int, int | None] | None) -> None:
    assert usage_of(told) == usage


def test_a_usage_of_output_alone_completes_what_was_said_before() -> None:
    told = b'event: message_delta\ndata: {"usage":{"output_tokens":2}}\n\n'
    assert usage_of(told, (31, 0, 16)) == (31, 2, 16)


ZERO = b'{"choices":[],"usage":{"prompt_tokens":0,"completion_tokens":0,"total_tokens":0}}'


@pytest.mark.parametrize(
    "unset", [ZERO, b'{"usage":""}', b'{"usage":"null"}', b'{"usage":{}}', b'{"usage":null}']
)
def test_a_usage_that_is_not_set_is_none(unset: bytes) -> None:
    """Servers whose language has no null write zeros until they have counted."""
    assert usage_of(unset) is None
    assert usage_of(unset, (31, 2, 16)) in {None, (31, 2, 16)}
    assert said_usage(unset) is None


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (
            rb'[{"reasoning_content":"a \"b\\"},{"reasoning_content":""}]',
            rb'[{"reasoning":"a \"b\\","reasoning_content":"a \"b\\"},{"reasoning":"","reasoning_content":""}]',
        ),
        (rb'{"content":"\"reasoning_content\":\"x\""}', None),
        (b'{"reasoning_content":null,"content":"x"}', None),
        (b'{"reasoning":"x","reasoning_content":"x"}', None),  # as some engines write it
        (b'{"reasoning":"x"}', None),
        (b'{"reasoning_content":"half', None),
    ],
)
def test_llama_cpps_reasoning_gets_vllms_name_too(told: bytes, expected: bytes | None) -> None:
    found = with_reasoning(told)
    assert found == expected or (expected is None and found == told)
