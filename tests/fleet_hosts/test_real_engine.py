"""What passes as an answer of vLLM, and what does not."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from chaos.clients import Result

from fleet_hosts.load import PROMPTS, FleetReading, question
from fleet_hosts.real_engine import MOST_TOKENS, Spoken, asks, spoken

WORDS = ("a", "ab", "abc", "abcd")


def event(text: str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    head = {"id": "cmpl-c1-1", "created": 1, "model": "chaos", "choices": [choice]}
    return b"data: " + json.dumps(head | more).encode() + b"\n\n"


def reading(tokens: int) -> FleetReading:
    asked = question("c1-1", "completions", random.Random(1))  # noqa: S311 - seeded
    asked.body["max_tokens"] = tokens
    asked.body.pop("stream_options", None)
    spoke = {(asked.path, asks(asked.body)): Spoken(5, dict(enumerate(("", *WORDS))))}
    found = FleetReading(asked, Result("c1-1", "completions", True, True, 0.0), spoke)
    found.engine = "host3"
    return found


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ((event("ab"), event("c", "length"), b"data: [DONE]\n\n"), "exact"),
        ((event("ab", "length"), b"data: [DONE]\n\n"), "wrong"),  # a token is missing
        ((event("abd", "length"), b"data: [DONE]\n\n"), "wrong"),
        ((event("abc", "stop"), b"data: [DONE]\n\n"), "wrong"),
        ((event("abc", "length", usage={}), b"data: [DONE]\n\n"), "exact"),
        ((event("abc", "length", usage={"prompt_tokens": 5}), b"data: [DONE]\n\n"), "wrong"),  # not asked for
        ((event("abc", "length"),), "silent"),
        ((event("ab"),), "silent"),
    ],
)
def test_an_answer_of_vllm_is_what_it_said_when_it_was_alone(events: tuple[bytes, ...], outcome: str) -> None:
    judged = reading(3)
    for each in events:
        judged.take(each)
    assert judged.verdict()[0] == outcome
    assert judged.host == "host3"


def test_without_its_header_vllm_is_known_by_the_id() -> None:
    judged = reading(3)
    judged.engine = ""
    judged.take(event("abc", "length"))
    judged.take(b"data: [DONE]\n\n")
    assert judged.verdict()[0] == "exact"
    assert judged.real
    assert judged.host == ""


def test_a_token_that_came_with_another_one_is_judged_by_its_neighbours() -> None:
    found = Spoken(5, {0: "", 1: "a", 3: "abc"})
    assert found.fits("ab", 2)
    assert not found.fits("b", 2)
    assert not found.fits("abcd", 2)
    assert found.fits("abc", 3)
    assert not found.fits("ab", 3)


def test_what_is_learned_has_every_token() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": MOST_TOKENS}
    page = event("a", usage={"prompt_tokens": 7, "completion_tokens": 1}) + event("b", "length", usage=usage)
    assert spoken(page) == Spoken(7, {0: "", 1: "a", MOST_TOKENS: "ab"})
    with pytest.raises(ValueError, match="1 tokens"):
        spoken(event("a", usage={"prompt_tokens": 7, "completion_tokens": 1}))


def test_clients_ask_only_what_was_learned() -> None:
    asked = [question(f"c1-{n}", "chat", random.Random(n)) for n in range(50)]  # noqa: S311
    assert {asks(one.body) for one in asked} <= set(PROMPTS)
    assert all(one.body["ignore_eos"] and one.body["max_tokens"] <= MOST_TOKENS for one in asked)
