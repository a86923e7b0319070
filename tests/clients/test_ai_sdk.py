"""Vercel's AI SDK with its OpenAI, OpenAI-compatible and Anthropic providers: one streamText in a script."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clients.engine import AFTER_TOOL, REFUSAL, WORDS
from support.client_runs import Product, Ran

SCRIPT = Path(__file__).with_name("stream_text.mjs")
Stream = Callable[..., tuple[dict[str, Any], Ran]]
apis = pytest.mark.parametrize("api", ["chat", "compatible", "responses", "messages"])


@pytest.fixture
def stream(packages: Path, node: str, home: Path) -> Stream:
    """What an application gets, and how the script ran."""

    def run(product: Product, api: str, scene: str, key: str | None = None) -> tuple[dict[str, Any], Ran]:
        argv = [node, str(SCRIPT), api, product.daemon.url, key or product.key, f"scene:{scene}"]
        ran = product.run(argv, home, {"CLIENTS": str(packages)})
        assert ran.errors == ""
        return json.loads(ran.printed), ran

    return run


@apis
def test_an_answer(product: Product, stream: Stream, api: str) -> None:
    got, ran = stream(product, api, "answer")
    assert got == {"text": "".join(WORDS), "tools": [], "errors": [], "finish": "stop"}
    assert (ran.exit_code, ran.requests) == (0, {"accepted": 1, "completed": 1})


@apis
def test_a_tool_call_after_a_long_silence(product: Product, stream: Stream, api: str) -> None:
    got, ran = stream(product, api, "held")
    assert got == {"text": "".join(AFTER_TOOL), "tools": ["rain in Oslo"], "errors": [], "finish": "stop"}
    assert (ran.exit_code, ran.requests) == (0, {"accepted": 2, "completed": 2})


@apis
def test_an_engines_400_after_comments(product: Product, stream: Stream, api: str) -> None:
    got, ran = stream(product, api, "refused")
    (error,) = got["errors"]
    assert (got["text"], error["message"], error["retryable"], error["status"]) == ("", REFUSAL, False, 400)
    assert (ran.exit_code, ran.requests) == (1, {"accepted": 1, "refused": 1})


@apis
def test_an_engine_that_is_killed(mortal: Product, stream: Stream, api: str) -> None:
    """The application has half of the answer and knows it."""
    got, ran = stream(mortal, api, "killed")
    (error,) = got["errors"]
    assert "".join(WORDS).startswith(got["text"])
    assert got["finish"] == "error"
    assert error["message"].startswith("the response broke off: ")
    assert error["retryable"] is True
    assert (ran.exit_code, ran.requests) == (1, {"accepted": 1, "failed": 1})


@apis
def test_a_wrong_key(product: Product, stream: Stream, api: str) -> None:
    got, ran = stream(product, api, "answer", "wrong")
    (error,) = got["errors"]
    assert (error["message"], error["status"]) == ("incorrect API key provided", 401)
    assert (ran.exit_code, ran.requests) == (1, {"unauthorized": 1})
