"""Upper bounds of what a request may take, and counts of tokens that are none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.proxy.openai.prompts import (
    MAX_TOKENS,
    MEDIA_TOKENS,
    TEMPLATE_TOKENS,
    SaidUsage,
    bounds_of,
    said_usage,
)


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("fields", "choices", "output"),
    [
        ({}, 1, None),
        ({"max_tokens": 7}, 1, 7),
        ({"max_completion_tokens": 9, "max_tokens": 7}, 1, 9),
        ({"max_tokens": None}, 1, None),
        ({"max_tokens": "7"}, 1, None),
        ({"max_tokens": -1}, 1, None),  # no limit, for some servers
        ({"max_tokens": 0}, 1, None),
        ({"n": 3, "max_tokens": 7}, 3, 7),
        ({"n": 2, "best_of": 5}, 5, None),
        ({"n": "many"}, 1, None),
        ({"prompt": "one"}, 1, None),
        ({"prompt": ["a", "b", "c"], "n": 2}, 6, None),
        ({"prompt": [1, 2, 3]}, 1, None),
        ({"prompt": [[1, 2], [3]]}, 2, None),
        ({"prompt": []}, 1, None),
    ],
)
def test_bounds(fields: dict[str, Any], choices: int, output: int | None) -> None:
    sent = body(**fields)
    assert bounds_of(sent) == (len(sent) + TEMPLATE_TOKENS, choices, output)
    marked = b"\xef\xbb\xbf" + sent
    assert bounds_of(marked) == (len(marked) + TEMPLATE_TOKENS, choices, output)


def test_an_image_has_tokens_that_its_address_has_not() -> None:
    part = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
    assert bounds_of(body(messages=[{"role": "user", "content": [part, part]}])).prompt >= 2 * MEDIA_TOKENS


@given(st.binary(max_size=80))
def test_any_bytes_have_bounds(sent: bytes) -> None:
    found = bounds_of(sent)
    assert found.prompt >= len(sent)
    assert found.choices >= 1


@given(st.lists(st.text(max_size=8), min_size=1, max_size=8))
def test_no_prompt_of_a_list_is_overlooked(prompts: list[str]) -> None:
    assert bounds_of(body(prompt=prompts)).choices >= len(prompts)


def said(usage: object, **more: bool) -> SaidUsage | None:
    return said_usage(b'{"choices": [], "usage": ' + json.dumps(usage).encode() + b"}", **more)


def test_usage() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
    assert said(usage) == (9, 4, 0)
    assert said({**usage, "prompt_tokens_details": {"cached_tokens": 3}}) == (9, 4, 3)
    assert said({**usage, "prompt_tokens_details": None}) == (9, 4, 0)
    assert said({"prompt_tokens": 9, "total_tokens": 9}, output=False) == (9, 0, 0)
    assert said_usage(
        b'data: {"usage": {"prompt_tokens": 1, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'
    ) == (1, 2, 0)


@pytest.mark.parametrize(
    "usage",
    [
        None,
        [],
        "12",
        {},
        {"prompt_tokens": 9},
        {"completion_tokens": 9},
        {"prompt_tokens": -9, "completion_tokens": 4},
        {"prompt_tokens": 9, "completion_tokens": -4},
        {"prompt_tokens": "9", "completion_tokens": 4},
        {"prompt_tokens": 9, "completion_tokens": "4"},
        {"prompt_tokens": 9.0, "completion_tokens": 4},
        {"prompt_tokens": True, "completion_tokens": 4},
        {"prompt_tokens": 9, "completion_tokens": MAX_TOKENS + 1},
        {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 10}},
        {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": -1}},
    ],
)
def test_usage_that_is_none(usage: object) -> None:
    assert said(usage) is None


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'"usage":', b'"usage": {', b'"usage": {"prompt_tokens": 1\xff']
)
def test_no_usage(data: bytes) -> None:
    assert said_usage(data) is None


@given(st.binary(max_size=60))
def test_any_usage_is_tokens_or_none(data: bytes) -> None:
    found = said_usage(b'"usage":' + data)
    assert found is None or (found.prompt >= found.cached >= 0 and found.output >= 0)
