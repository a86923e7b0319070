"""What is kept of a stream, and what makes it odd."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plain_engine import CHAT, COMPLETIONS, PlainEngine, event

from launcher.proxy.continuation.transcript import Transcript
from launcher.proxy.sse.fast_path import FastPath


def chunk(delta: dict[str, Any], **more: Any) -> bytes:
    return event({"id": "x", "created": 1, "model": "m", "choices": [{"index": 0, "delta": delta, **more}]})


def fed(*payloads: bytes) -> Transcript:
    transcript = Transcript()
    for payload in payloads:
        transcript.feed(payload)
    return transcript


@given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    said=st.lists(st.text(max_size=4), min_size=1, max_size=12).map(tuple),
    escaped=st.booleans(),
    marks=st.lists(st.integers(0, 15), max_size=15),
)
def test_any_reads_give_the_same_pieces(
    path: str, said: tuple[str, ...], escaped: bool, marks: list[int]
) -> None:
    engine = PlainEngine(path, said, escaped=escaped)
    events = engine.answer(engine.request(max_tokens=50))
    edges = sorted({0, len(events), *(mark % (len(events) + 1) for mark in marks)})
    transcript = fed(*(b"".join(events[a:b]) for a, b in pairwise(edges)))
    assert transcript.odd is None
    assert [json.loads(b'"' + piece + b'"') for piece in transcript.pieces()] == [*said, ""]
    assert transcript.done
    assert transcript.finish_reason == "stop"
    assert (transcript.id, transcript.created, transcript.model) == ("id-one", 3, "m")
    assert transcript.role_sent == (path == CHAT)


def test_the_parts_of_a_stream_are_seen() -> None:
    role = chunk({"role": "assistant", "content": ""})
    usage = event({"id": "x", "choices": [], "usage": {"prompt_tokens": 1}})
    transcript = fed(b": hello\n\n", role, usage, event({"id": "x", "choices": []}))
    assert (transcript.role_sent, transcript.usage_seen, transcript.pieces()) == (True, True, [])
    assert not transcript.pattern.known


def test_the_usage_may_come_with_the_end() -> None:
    """As llama-server tells it on /v1/completions: in the event that has the finish_reason."""

    def told(text: str, **more: Any) -> bytes:
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": more.pop("finish", None)}
        return event(
            {"choices": [choice], "created": 1, "model": "m", "object": "text_completion", "id": "x", **more}
        )

    transcript = fed(
        told("a"), told("b"), told("", finish="length", usage={"prompt_tokens": 3}, timings={"n": 1})
    )
    assert transcript.odd is None
    assert (transcript.usage_seen, transcript.finish_reason) == (True, "length")
    assert transcript.pieces() == [b"a", b"b", b""]


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"data: {oh\n\n", "an event that is no chunk"),
        (b"data: [1]\n\n", "an event that is no chunk"),
        (b"data: {}\n\n", "an event that is no chunk"),
        (event({"error": "died"}), "an error event"),
        (event({"id": "x", "choices": [{}, {}]}), "several choices"),
        (event({"id": "x", "choices": [{"index": 1}]}), "several choices"),
        (
            event({"id": "x", "choices": [{"index": 0}], "usage": {"prompt_tokens": 1}}),
            "usage in every event",
        ),
        (chunk({"content": "a"}, logprobs={"content": []}), "logprobs in its events"),
        (chunk({"content": "a"}, token_ids=[1]), "token_ids in its events"),
        (chunk({"tool_calls": [{"index": 0}]}), "delta.tool_calls in its events"),
        (chunk({"reasoning": "hm"}), "delta.reasoning in its events"),
        (chunk({"content": "a"}, finish_reason="eos"), "an unknown finish_reason in its events"),
    ],
)
def test_an_odd_event_ends_the_transcript(payload: bytes, why: str) -> None:
    transcript = fed(chunk({"content": "a"}), chunk({"content": "b"}), payload + chunk({"content": "c"}))
    assert transcript.odd == why
    transcript.feed(chunk({"content": "d"}))
    assert transcript.pieces() == []


def test_a_part_of_an_event_ends_the_transcript() -> None:
    """An event that was too large to be held back passes as it comes."""
    assert fed(chunk({"content": "a"}), chunk({"content": "b" * 9})[:40]).odd == "a part of an event"


def test_the_first_reason_is_kept() -> None:
    transcript = fed(chunk({"content": "a"}, logprobs={"content": []}))
    transcript.forget_ids()
    assert transcript.odd == "logprobs in its events"
    part = Transcript(token_ids=True)
    part.feed(chunk({"content": "a"}, logprobs={"content": []}) + b"data: a part")
    assert part.odd == "logprobs in its events"


def test_line_endings_may_be_mixed() -> None:
    transcript = fed(*(chunk({"content": word})[:-1] + b"\r\n" for word in "abc"))
    assert transcript.pieces() == [b"a", b"b", b"c"]


def test_nothing_of_a_delta_is_no_text() -> None:
    assert fed(chunk({}, finish_reason="stop")).pieces() == []
    assert fed(chunk({"content": "", "tool_calls": [], "reasoning": None})).pieces() == [b""]


def test_json_with_spaces_is_read_event_by_event() -> None:
    payloads = [
        f'data: {{"id": "x", "choices": [{{"delta": {{"content": "{word}"}}}}]}}\n\n'.encode()
        for word in "ab"
    ]
    transcript = fed(*payloads)
    assert (transcript.pieces(), transcript.pattern.known) == ([b"a", b"b"], False)


def test_two_events_in_one_do_not_pass_for_one() -> None:
    both = chunk({"content": "a"}) + chunk({"content": "b"})
    assert fed(chunk({"content": "z"}), both).pieces() == [b"z", b"a", b"b"]


def test_a_field_beside_the_text_does_not_pass_for_text() -> None:
    first = b'data: {"id":"x","choices":[{"delta":{"content":"a"}}]}\n\n'
    both = b'data: {"id":"x","choices":[{"delta":{"content":"a","reasoning":"b"}}]}\n\n'
    assert fed(first, both).odd == "delta.reasoning in its events"


def test_an_event_that_is_shorter_than_its_pattern_is_none() -> None:
    first = chunk({"content": "a"})
    transcript = fed(first)
    overlap = transcript.pattern.prefix + transcript.pattern.suffix[1:]
    assert fed(first, overlap).odd == "an event that is no chunk"


@pytest.mark.parametrize("limit", [6, 7])
def test_text_is_kept_up_to_a_bound(limit: int) -> None:
    transcript = Transcript(limit)
    for word in ("ab", "cd", '"e'):
        transcript.feed(chunk({"content": word}))
    assert transcript.odd == f"more than {limit} bytes of text"
    assert transcript.text == b""


def test_the_bound_holds_for_ordinary_events() -> None:
    transcript = Transcript(6)
    for word in ("ab", "cd", "e"):
        transcript.feed(chunk({"content": word}))
    assert transcript.odd == "more than 6 bytes of text"


def test_the_fast_path_has_the_same_bound() -> None:
    transcript, fast, sent = Transcript(6), FastPath(), list[bytes]()
    transcript.feed(chunk({"content": "ab"}))
    transcript.arm(fast, sent.append)
    event = chunk({"content": "cde"})
    assert fast.data_received(b"%x\r\n%b\r\n" % (len(event), event))
    assert transcript.too_long()  # the clock asks
    assert transcript.odd == "more than 6 bytes of text"
    transcript.arm(fast, sent.append)  # from now on any event passes
    other = chunk({"content": "f"}, logprobs={"content": []})
    assert fast.data_received(b"%x\r\n%b\r\n" % (len(other), other))
    assert sent[-1].endswith(other + b"\r\n")
    assert not transcript.text


@given(
    st.lists(
        st.binary(max_size=12)
        | st.sampled_from([chunk({"content": "a"}), b"data: ", b"[" * 2000, b"\n\n", b'"'])
    )
)
def test_any_bytes_are_accepted(raw: list[bytes]) -> None:
    transcript = fed(*raw, b"".join(raw))
    assert transcript.odd is not None or transcript.pieces() is not None
