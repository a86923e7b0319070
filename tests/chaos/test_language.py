"""A response in the chaos engines' language can be continued exactly; `scripts/chaos` relies on it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos import language
from chaos.clients import CHAT, COMPLETIONS, SUBJECTS
from chaos.engine import Events, Exchange
from launcher.proxy.continuation.continuation import Complete, Continuation, plan_continuation
from launcher.proxy.continuation.splicer import Splicer
from launcher.proxy.continuation.transcript import Transcript


def request(path: str, subject: str, limit: int) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": limit, "user": "c1"}
    body["stream_options"] = {"include_usage": True}
    return body | (
        {"prompt": subject} if path == COMPLETIONS else {"messages": [{"role": "user", "content": subject}]}
    )


def stream(path: str, body: dict[str, Any]) -> list[bytes]:
    """The response of an engine without faults."""
    events = Events(Exchange("c1", path, body), "m", "ident")
    context = language.render(path, body)
    said = [events.text(text, end) for text, end in language.speak(context, language.limit_of(path, body))]
    return [
        *([events.role()] if path == CHAT else []),
        *said,
        events.usage(context, len(said)),
        b"data: [DONE]\n\n",
    ]


@given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    subject=st.sampled_from(SUBJECTS),
    limit=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 60), min_size=1, max_size=3),
)
def test_a_response_is_continued_exactly(path: str, subject: str, limit: int, cuts: list[int]) -> None:
    body = request(path, subject, limit)
    transcript = Transcript()
    told: list[bytes] = []
    asked, splicer = body, None
    for cut in [*cuts, None]:
        for event in stream(path, asked)[:cut]:
            passed = event if splicer is None else splicer.feed(event)
            transcript.feed(passed)
            told.append(passed)
        plan = plan_continuation(path, json.dumps(body).encode(), transcript)
        if isinstance(plan, Complete):
            told.append(plan.tail)
            break
        assert isinstance(plan, Continuation)
        asked, splicer = json.loads(plan.body), Splicer(plan, transcript)
    text, finish, usage = language.answer(path, body)
    raw = b"".join(told).split(b"\n\n")
    assert raw[-2:] == [b"data: [DONE]", b""]
    chunks = [json.loads(event[6:]) for event in raw[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert (
        "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
        == text
    )
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [finish]
    assert [chunk["usage"] for chunk in chunks if "usage" in chunk] == [usage]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_token_counts_do_not_depend_on_splitting(subject: str) -> None:
    said = [text for text, _ in language.speak(subject, 60)]
    assert language.count(subject + "".join(said)) == language.count(subject) + len([*said]) - (
        said[-1] == ""
    )
