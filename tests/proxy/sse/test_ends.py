"""How streams end, and how engines say that they gave a request up."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.proxy.http1.chunks import ChunkedDecoder
from launcher.proxy.sse.ends import MARKS, SIGNS, Event, StreamEnd, brings_output, gave_up, read_event
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


NOTHING_YET = (
    (StreamEnd.DONE, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}),
    (StreamEnd.DONE, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": ""}]}),
    (StreamEnd.DONE, {"choices": [{"index": 1, "delta": {"role": "assistant", "tool_calls": []}, "logprobs": None}]}),
    (StreamEnd.DONE, {"choices": [{"index": 0, "text": "", "finish_reason": "null"}]}),
    (StreamEnd.DONE, {"choices": [], "prompt_filter_results": [{"prompt_index": 0}]}),
    (ANTHROPIC, {"type": "message_start", "message": {"id": "a", "content": [], "usage": {"input_tokens": 3}}}),
    (ANTHROPIC, {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
    (ANTHROPIC, {"type": "content_block_start", "content_block": {"type": "thinking", "thinking": "", "signature": "x"}}),
    (RESPONSE, {"type": "response.created", "response": {"id": "r", "instructions": "x", "output": []}}),
    (RESPONSE, {"type": "response.in_progress", "response": {"id": "r"}}),
    (RESPONSE, {"type": "response.queued"}),
    (RESPONSE, {"type": "response.output_item.added", "item": {"id": "i", "type": "message", "status": "x", "content": []}}),
    (RESPONSE, {"type": "response.content_part.added", "part": {"type": "output_text", "text": "", "annotations": []}}),
    (COHERE, {"type": "message-start", "id": "c", "delta": {"message": {"role": "assistant"}}}),
    (COHERE, {"type": "content-start", "delta": {"message": {"content": {"type": "text", "text": ""}}}}),
)  # fmt: skip
SOMETHING = (
    (StreamEnd.DONE, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "a"}}]}),
    (StreamEnd.DONE, {"choices": [{"delta": {"role": "assistant"}}, {"index": 1, "delta": {"reasoning_content": "a"}}]}),
    (StreamEnd.DONE, {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}]}),
    (StreamEnd.DONE, {"choices": [{"delta": {}, "finish_reason": "stop"}]}),
    (StreamEnd.DONE, {"choices": [{"delta": {}, "finish_reason": "eos_token"}]}),
    (StreamEnd.DONE, {"choices": [{"token_ids": [5]}]}),
    (StreamEnd.DONE, {"error": {"message": "no", "code": 400}}),
    (StreamEnd.DONE, {"text": "another engine's"}),
    (StreamEnd.DONE, ["a"]),
    (ANTHROPIC, {"type": "content_block_start", "content_block": {"type": "tool_use", "id": "t", "name": "f", "input": {}}}),
    (ANTHROPIC, {"type": "content_block_delta", "delta": {"text": "message_start"}}),
    (ANTHROPIC, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}),
    (ANTHROPIC, {"type": "error", "error": {"type": "invalid_request_error"}}),
    (RESPONSE, {"type": "response.output_item.added", "item": {"type": "function_call", "name": "f", "arguments": ""}}),
    (RESPONSE, {"type": "response.output_text.delta", "delta": "response.created"}),
    (RESPONSE, {"type": "response.completed", "response": {"status": "completed", "output": []}}),
    (COHERE, {"type": "tool-plan-delta", "delta": {"message": {"tool_plan": "a"}}}),
)  # fmt: skip


@pytest.mark.parametrize(
    ("end", "payload", "expected"),
    [(*told, False) for told in NOTHING_YET] + [(*told, True) for told in SOMETHING],
)
def test_output_is_what_brings_a_part_of_the_answer(end: StreamEnd, payload: object, expected: bool) -> None:
    data = json.dumps(payload).encode()
    assert brings_output(end, data) is expected
    tracker = EventTracker(end)
    tracker.feed(b"data: " + data + b"\n\n")
    assert tracker.output is expected
    assert not tracker.quiet


PINGS = (
    b'event: ping\ndata: {"type": "ping"}\n\n',
    b'data: {"type":"ping"}\n\n',
    b"event: ping\ndata: {}\n\n",
    b'event: keepalive\ndata: {"type":"keepalive","sequence_number":3}\n\n',
    b'data: {"type":"keepalive","sequence_number":3}\n\n',
    b"event: heartbeat\ndata: x\n\n",
    b"data:\n\n",
    b"data: \n\n",
    b": ping\n\n",
)


@pytest.mark.parametrize("ping", PINGS)
@pytest.mark.parametrize("end", StreamEnd)
def test_a_ping_is_nothing(end: StreamEnd, ping: bytes) -> None:
    word = b'data: {"delta":{"type":"ping","ping":"ping"},"type":"x"}\n\n'
    for before in (b"", word):
        tracker = EventTracker(end)
        tracker.feed(before)
        events = tracker.events
        for cut in range(1, len(ping)):
            assert tracker.feed(ping[:cut]) + tracker.feed(ping[cut:]) == ping
            assert tracker.quiet
        assert tracker.feed(ping) == ping
        assert tracker.quiet
        assert (tracker.events, tracker.output, tracker.broken, tracker.error) == (
            events,
            bool(before),
            False,
            None,
        )


@pytest.mark.parametrize("ping", PINGS[:5])
@pytest.mark.parametrize("end", StreamEnd)
def test_a_ping_is_nothing_to_the_fast_path(end: StreamEnd, ping: bytes) -> None:
    fast, sent = FastPath(), list[bytes]()
    fast.arm_any(sent.append, end=end)
    assert not fast.data_received(b"%x\r\n%b\r\n" % (len(ping), ping))
