"""How streams end, and how engines say that they gave a request up."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.proxy.http1.chunks import ChunkedDecoder
from launcher.proxy.sse.ends import MARKS, SIGNS, Event, StreamEnd, gave_up, read_event
from launcher.proxy.sse.fast_path import FastPath
from launcher.proxy.sse.tracker import EventTracker

COHERE, ANTHROPIC, RESPONSE = StreamEnd.MESSAGE_END, StreamEnd.MESSAGE_STOP, StreamEnd.RESPONSE_COMPLETED


@pytest.mark.parametrize(
    ("end", "payload", "expected"),
    [
        (COHERE, {"type": "message-end", "delta": {"finish_reason": "COMPLETE"}}, Event.CLOSING),
        (COHERE, {"type": "message-end", "delta": {"finish_reason": "ERROR", "error": "x"}}, Event.GIVEN_UP),
        (COHERE, {"type": "content-delta", "delta": {"message": {"content": {"text": "message-end"}}}}, Event.USUAL),
        (ANTHROPIC, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, Event.CLOSING),
        (ANTHROPIC, {"type": "message_delta", "delta": {"stop_reason": None}}, Event.GIVEN_UP),
        (ANTHROPIC, {"type": "message_delta", "usage": {"output_tokens": 1}}, Event.CLOSING),
        (ANTHROPIC, {"type": "message_stop"}, Event.LAST),
        (ANTHROPIC, {"type": "content_block_delta", "delta": {"text": "message_stop"}}, Event.USUAL),
        (ANTHROPIC, {"type": "message_start", "message": {"stop_reason": None}}, Event.USUAL),
        (RESPONSE, {"type": "response.completed", "response": {"status": "completed"}}, Event.LAST),
        (RESPONSE, {"type": "response.incomplete", "response": {"status": "incomplete"}}, Event.LAST),
        (RESPONSE, {"type": "response.completed", "response": {"status": "cancelled"}}, Event.GIVEN_UP),
        (RESPONSE, {"type": "response.completed", "response": {"metadata": {"status": "failed"}}}, Event.LAST),
        (RESPONSE, {"type": "response.output_text.delta", "delta": "response.completed"}, Event.USUAL),
        (StreamEnd.DONE, {"type": "message_stop"}, Event.USUAL),
    ],
)  # fmt: skip
def test_events(end: StreamEnd, payload: dict[str, object], expected: Event) -> None:
    assert read_event(end, json.dumps(payload).encode()) is expected
    assert read_event(end, json.dumps(payload).encode()[:-1]) is Event.USUAL  # half of it


@pytest.mark.parametrize(
    ("end", "body", "expected"),
    [
        (COHERE, {"finish_reason": "ERROR"}, True),
        (COHERE, {"finish_reason": "COMPLETE", "message": {"content": [{"text": '"ERROR"'}]}}, False),
        (ANTHROPIC, {"type": "message", "content": []}, True),
        (ANTHROPIC, {"type": "message", "stop_reason": None}, True),
        (ANTHROPIC, {"type": "message", "stop_reason": "max_tokens"}, False),
        (ANTHROPIC, {"input_tokens": 3}, False),
        (RESPONSE, {"status": "cancelled"}, True),
        (RESPONSE, {"status": "failed"}, True),
        (RESPONSE, {"status": "incomplete", "metadata": {"a": "cancelled"}}, False),
        (RESPONSE, {"status": "queued"}, False),
        (StreamEnd.DONE, {"status": "cancelled", "finish_reason": "ERROR"}, False),
    ],
)
def test_whole_responses(end: StreamEnd, body: dict[str, object], expected: bool) -> None:
    for separators in ((",", ":"), (", ", ": ")):
        assert gave_up(end, json.dumps(body, separators=separators).encode()) is expected
    assert not gave_up(end, b"no JSON")


@pytest.mark.parametrize("end", StreamEnd)
def test_the_fast_path_passes_no_event_by_that_may_be_the_last(end: StreamEnd) -> None:
    assert all(MARKS[end] in sign for sign in SIGNS[end])


def event(payload: dict[str, object]) -> bytes:
    return f"event: {payload['type']}\ndata: {json.dumps(payload)}\n\n".encode()


PIECES = (
    event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}),
    event({"type": "message_delta", "delta": {"stop_reason": None}}),
    event({"type": "message_stop"}),
    event({"type": "content_block_delta", "delta": {"text": "a message_stop"}}),
    event({"type": "message-end", "delta": {"finish_reason": "COMPLETE"}}),
    event({"type": "message-end", "delta": {"finish_reason": "ERROR"}}),
    event({"type": "response.completed", "response": {"status": "completed"}}),
    event({"type": "response.incomplete", "response": {"status": "cancelled"}}),
    event({"type": "response.output_text.delta", "delta": "complete"}),
    b"data: [DONE]\n\n",
    b": c\n\n",
    b"data: {}\r\n\r\n",
)


def outcome(end: StreamEnd, reads: list[bytes], *, fast: bool) -> list[object]:
    tracker, decoder, path, passed = EventTracker(end), ChunkedDecoder(), FastPath(), list[bytes]()
    for data in reads:
        if path.data_received(data):
            continue
        path.disarm()
        told = tracker.feed(decoder.feed(data))
        if told:
            passed.append(b"%x\r\n%b\r\n" % (len(told), told))
            if fast and tracker.events and decoder.at_boundary and tracker.between_events:
                path.arm_any(passed.append, end=end)
    client = ChunkedDecoder()
    text = client.feed(b"".join(passed)) + tracker.rest()
    return [text, tracker.done, tracker.error, tracker.error_first, tracker.events + path.events]


@given(
    st.sampled_from(list(StreamEnd)),
    st.lists(st.sampled_from(PIECES), max_size=8),
    st.lists(st.integers(0, 3000), max_size=6) | st.none(),
)
def test_any_split_and_the_fast_path_find_the_same_end(
    end: StreamEnd, events: list[bytes], cuts: list[int] | None
) -> None:
    chunks = [b"%x\r\n%b\r\n" % (len(each), each) for each in events]
    whole = b"".join(chunks)
    if cuts is not None:
        edges = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
        chunks = [whole[a:b] for a, b in pairwise(edges)]
    found = outcome(end, chunks, fast=True)
    assert found == outcome(end, chunks, fast=False)
    assert found[1:4] == outcome(end, [whole], fast=False)[1:4]
    text, done, error = found[0], found[1], found[2]
    assert not (done and error)
    if error is not None and end is not StreamEnd.DONE:
        assert b"[DONE]" not in bytes(text).rpartition(b"\n\n")[2]  # type: ignore[call-overload]
