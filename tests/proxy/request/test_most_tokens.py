"""The most tokens that a request can take: never less than an engine would compute."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.proxy.openai.body import read_body
from launcher.proxy.request.most_tokens import UNKNOWN_CONTEXT, MostTokens, most_tokens
from launcher.proxy.routes import Match, match

CHAT = "/v1/chat/completions"


def most(
    path: str, context: int | None = 8192, defaults: dict[str, float] | None = None, **fields: Any
) -> MostTokens:
    found = match("POST", path)
    assert isinstance(found, Match)
    body = json.dumps({"model": "m", **fields}).encode()
    said = read_body(body, found.route.prompt, path)
    return most_tokens(path, body, said, context=context, defaults=defaults or {})


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        ({"max_tokens": 100}, 100),
        ({"max_completion_tokens": 100, "n": 3}, 300),
        ({"max_tokens": 100.0, "n": "8"}, 800),
        ({"max_tokens": "4_000"}, 4000),
        ({"max_output_tokens": 1}, 8192),
        ({}, 8192),
        ({"n": 2}, 2 * 8192),
        ({"max_tokens": 10**9}, 8192),
        ({"defaults": {"max_tokens": 2048}}, 2048),
        ({"defaults": {"most_tokens": 50}, "max_tokens": 100}, 50),
        ({"context": None}, UNKNOWN_CONTEXT),
    ],
)
def test_chats(fields: dict[str, Any], output: int) -> None:
    found = most(CHAT, messages=[{"role": "user", "content": "hello"}], **fields)
    assert found.output == output
    assert 512 < found.prompt < 700


def test_a_limit_of_another_route_bounds_nothing() -> None:
    assert most("/v1/completions", prompt="a", max_tokens="4000", max_completion_tokens=1).output == 4000
    assert most("/v1/responses", input="a", max_tokens=1).output == 8192


def test_choices_of_sampling_parameters_count() -> None:
    """A key with a budget could else spend as many times what was reserved."""
    sampling = {"n": "64", "max_tokens": 100}
    assert most("/inference/v1/generate", token_ids=[1, 2], sampling_params=sampling).output == 6400
    assert most("/inference/v1/generate", token_ids=[1, 2], sampling_params={"n": 2}).output == 2 * 8192


def test_a_prompt_is_never_longer_than_the_context() -> None:
    assert most(CHAT, messages=[{"role": "user", "content": "x" * 100_000}]).prompt == 8192


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "https://host/cat.png"}}],
        [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
    ],
)
def test_what_a_body_does_not_contain_may_fill_the_context(content: list[Any]) -> None:
    assert most(CHAT, messages=[{"role": "user", "content": content}]).prompt == 8192


def test_a_stored_conversation_may_fill_the_context() -> None:
    assert most("/v1/responses", input="and then?", previous_response_id="resp_1").prompt == 8192
    found = most("/v1/responses", input="hello", max_output_tokens=9)
    assert found.output == 9
    assert found.prompt < 600


@pytest.mark.parametrize(
    ("prompt", "output"),
    [("a", 16), (["a", "b", "c"], 48), ([1, 2, 3], 16), ([[1, 2], [3]], 32), ([], 16)],
)
def test_completions_of_lists(prompt: Any, output: int) -> None:
    assert most("/v1/completions", prompt=prompt).output == output
    assert most("/v1/completions", prompt=prompt, max_tokens=32).output == 2 * output


def test_batches_of_conversations() -> None:
    one = [{"role": "user", "content": "hello"}]
    assert most("/v1/chat/completions/batch", messages=[one, one], max_tokens=5).output == 10


def test_embeddings_and_scores_have_no_output() -> None:
    assert most("/v1/embeddings", input=["x" * 100] * 10).output == 0
    score = most("/v1/rerank", query="q" * 500, documents=["d" * 10] * 20)
    assert score.output == 0
    assert score.prompt > 20 * 510
    assert most("/v2/rerank", query="q" * 500, documents=[{"text": "d"}] * 20).prompt > 20 * 500


@pytest.mark.parametrize("path", ["/v1/decisions", "/v1/systemone"])
def test_a_prompt_is_computed_for_each_question(path: str) -> None:
    """Usage adds them up: else a key with a budget could spend as many times what was reserved."""
    asked = [{"type": "predicate", "instructions": f"is it {number}?"} for number in range(5)]
    questions = asked if path == "/v1/decisions" else {str(number): one for number, one in enumerate(asked)}
    found = most(path, input="x" * 1000, questions=questions)
    assert 5 * 1500 < found.prompt < 5 * 2500
    assert 10 <= found.output <= 5 * 256
    assert most(path, input="x" * 100_000, questions=questions).prompt == 5 * 8192
    assert most(path, input="x", questions=asked * 1000).prompt == 64 * 8192  # the engine refuses as many
    assert most(path, state="x", images=["https://host/cat.png"], questions=questions).prompt == 5 * 8192
    assert most(path, input="x", questions=7).prompt < 1000


def test_a_query_is_computed_with_each_item() -> None:
    found = most("/generative_scoring", query="q" * 500, items=["d" * 10] * 20, label_token_ids=[1])
    assert found.prompt > 20 * 510
    assert 20 <= found.output <= 20 * 256


@given(texts=st.lists(st.text(max_size=50), min_size=1, max_size=5))
def test_a_byte_is_a_token_at_most(texts: list[str]) -> None:
    found = most("/v1/completions", context=None, prompt=texts)
    assert found.prompt >= sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
