"""How streams end, and how engines say that they gave a request up."""

from __future__ import annotations

import json
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from launcher.proxy.http1.chunks import ChunkedDecoder
from launcher.proxy.sse.ends import MARKS, SIGNS, Event, StreamEnd, brings_output, gave_up, read_event
from launcher.proxy.sse.fast_path import FastPath
from launcher.proxy.sse.tracker import EventTracker

COHERE, ANTHROPIC, RESPONSE = StreamEnd.MESSAGE_END, StreamEnd.MESSAGE_STOP, StreamEnd.RESPONSE_COMPLETED


UNSET: tuple[Any, ...] = ("", "null", 7, {}, [])


@pytest.mark.parametrize(
    ("end", "payload", "expected"),
    [
        (COHERE, {"type": "message-end", "delta": {"finish_reason": "COMPLETE"}}, Event.CLOSING),
        (COHERE, {"type": "message-end", "delta": {"finish_reason": "ERROR", "error": "x"}}, Event.GIVEN_UP),
        (COHERE, {"type": "content-delta", "delta": {"message": {"content": {"text": "message-end"}}}}, Event.USUAL),
        (ANTHROPIC, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, Event.CLOSING),
        (ANTHROPIC, {"type": "message_delta", "delta": {"stop_reason": None}}, Event.GIVEN_UP),
        *((ANTHROPIC, {"type": "message_delta", "delta": {"stop_reason": reason}}, Event.GIVEN_UP) for reason in UNSET),
        (ANTHROPIC, {"type": "message_delta", "delta": {"stop_reason": "a new one"}}, Event.CLOSING),
        (ANTHROPIC, {"type": "message_delta", "usage": {"output_tokens": 1}}, Event.USUAL),
        (ANTHROPIC, {"usage": {}, "type": "error", "error": {"type": "api_error"}}, Event.ERROR),
        (ANTHROPIC, {"type": "content_block_delta", "delta": {"text": "x"}, "error": None}, Event.USUAL),
        *((COHERE, {"type": "message-end", "delta": {"finish_reason": reason}}, Event.GIVEN_UP) for reason in UNSET),
        (COHERE, {"type": "message-end", "delta": {"finish_reason": "TIMEOUT"}}, Event.GIVEN_UP),
        (COHERE, {"type": "message-end"}, Event.GIVEN_UP),
        *((RESPONSE, {"type": "response.completed", "response": {"status": it}}, Event.GIVEN_UP) for it in UNSET),
        (RESPONSE, {"type": "response.completed", "response": {"status": "in_progress"}}, Event.GIVEN_UP),
        (RESPONSE, {"type": "response.completed", "response": {"status": "completed", "error": None}}, Event.LAST),
        (RESPONSE, {"sequence_number": 3, "type": "response.failed", "response": {"error": {"code": "x"}}}, Event.ERROR),
        (RESPONSE, {"type": "error", "code": "server_error", "message": "x"}, Event.ERROR),
        (StreamEnd.DONE, {"id": "a", "choices": [], "error": {"message": "x"}}, Event.ERROR),
        (StreamEnd.DONE, {"id": "a", "error": "x"}, Event.ERROR),
        (StreamEnd.DONE, {"object": "error", "message": "x", "code": 400}, Event.ERROR),
        (StreamEnd.DONE, {"object": "chat.completion.chunk", "choices": [{"delta": {"content": '"error"'}}]}, Event.USUAL),
        *((StreamEnd.DONE, {"error": unset, "choices": []}, Event.USUAL) for unset in (None, "", "null", {}, [])),
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
        *((ANTHROPIC, {"type": "message", "stop_reason": reason}, True) for reason in UNSET),
        *((COHERE, {"finish_reason": reason}, True) for reason in (*UNSET, None, "TIMEOUT")),
        (COHERE, {"message": {}}, False),
        *((RESPONSE, {"status": reason}, True) for reason in (*UNSET, None)),
        (RESPONSE, {"id": "resp_1"}, False),
        (RESPONSE, {"status": "in_progress"}, False),
        (StreamEnd.DONE, {"choices": [{"finish_reason": "abort"}]}, True),
        (StreamEnd.DONE, {"choices": [{"finish_reason": "error"}]}, True),
        (StreamEnd.DONE, {"choices": [{"finish_reason": ""}]}, False),
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
    assert all(any(mark in sign for mark in MARKS[end]) for sign in SIGNS[end])


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
            if fast and tracker.output and decoder.at_boundary and tracker.between_events:
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


# --- Whether a stream is whole: the tracker, with and without the fast path, and an oracle of few lines agree. ---

ABSENT = "absent"
GIVEN = (None, "", "null", 7, ABSENT, "abort", "error", "a new one")
REASONS: dict[StreamEnd, tuple[Any, ...]] = {
    StreamEnd.DONE: (*GIVEN, "stop", "length", "tool_calls"),
    ANTHROPIC: (*GIVEN, "end_turn", "max_tokens"),
    RESPONSE: (*GIVEN, "completed", "incomplete", "cancelled", "failed", "in_progress"),
    COHERE: (*GIVEN, "COMPLETE", "MAX_TOKENS", "ERROR", "TIMEOUT"),
}
Told = dict[str, Any] | str


def field(name: str, value: Any) -> dict[str, Any]:
    return {} if value == ABSENT else {name: value}


def drawn_events(end: StreamEnd) -> st.SearchStrategy[Told]:
    reason = st.sampled_from(REASONS[end])
    done: st.SearchStrategy[Told] = st.just("[DONE]")
    error: st.SearchStrategy[Told] = st.sampled_from([None, "", "null", {}, {"code": 500}, "x"]).map(
        lambda it: {"type": "x", "choices": [], "error": it}
    )
    word: st.SearchStrategy[Told]
    last: st.SearchStrategy[Told]
    match end:
        case StreamEnd.DONE:
            index = st.integers(0, 1)
            word = index.map(lambda n: {"choices": [{"index": n, "delta": {"content": "abort"}}]})
            last = st.tuples(index, reason).map(
                lambda it: {"choices": [{"index": it[0], "delta": {}, **field("finish_reason", it[1])}]}
            )
        case StreamEnd.MESSAGE_STOP:
            word = st.just({"type": "content_block_delta", "delta": {"text": "message_stop"}})
            last = reason.map(lambda it: {"type": "message_delta", "delta": field("stop_reason", it)})
            last |= st.just({"type": "message_stop"})
        case StreamEnd.RESPONSE_COMPLETED:
            word = st.just({"type": "response.output_text.delta", "delta": "response.completed"})
            kinds = st.sampled_from(["response.completed", "response.incomplete", "response.failed"])
            last = st.tuples(kinds, reason).map(
                lambda it: {"type": it[0], "response": field("status", it[1])}
            )
        case StreamEnd.MESSAGE_END:
            word = st.just({"type": "content-delta", "delta": {"text": "message-end"}})
            last = reason.map(lambda it: {"type": "message-end", "delta": field("finish_reason", it)})
    return st.one_of(word, word, last, last, done, error)


def is_set(value: Any) -> bool:
    return isinstance(value, str) and value not in {"", "null", ABSENT}


def is_whole(end: StreamEnd, events: list[Told], choices: int) -> bool:  # noqa: C901, PLR0911, PLR0912  an oracle
    closing, finished = False, set[int]()
    for it in events:
        if it == "[DONE]":
            if end is StreamEnd.DONE or (end is COHERE and closing):
                return True
            if end is COHERE:
                return False
            continue
        assert isinstance(it, dict)
        if it.get("error") not in (None, "", "null", {}):
            return False
        kind = it.get("type")
        if end is StreamEnd.DONE:
            for choice in it["choices"]:
                reason = choice.get("finish_reason")
                if reason in ("abort", "error"):
                    return False
                if reason in ("stop", "length", "tool_calls"):
                    finished.add(choice["index"])
        elif end is RESPONSE and kind == "response.failed":
            return False
        elif end is RESPONSE and kind in ("response.completed", "response.incomplete"):
            return it["response"].get("status", "completed") in ("completed", "incomplete")
        elif kind in ("message_delta", "message-end"):
            reason = it["delta"].get("stop_reason" if end is ANTHROPIC else "finish_reason", ABSENT)
            if end is ANTHROPIC and reason == ABSENT:
                continue
            if not is_set(reason) or reason in ("abort", "error", "ERROR", "TIMEOUT"):
                return False
            closing = True
        elif kind == "message_stop":
            return closing
    return len(finished) >= choices if end is StreamEnd.DONE else closing


@st.composite
def drawn_streams(draw: st.DrawFn) -> tuple[StreamEnd, list[Told], int, bool, list[int] | None]:
    end = draw(st.sampled_from(list(StreamEnd)))
    events = draw(st.lists(drawn_events(end), max_size=7))
    cuts = draw(st.none() | st.lists(st.integers(0, 3000), max_size=6))
    return end, events, draw(st.integers(1, 2)), draw(st.booleans()), cuts


def framed(it: Told, *, spaced: bool) -> bytes:
    text = it if isinstance(it, str) else json.dumps(it, separators=None if spaced else (",", ":"))
    told = f"data: {text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(told), told)


def found_whole(end: StreamEnd, reads: list[bytes], choices: int, *, fast: bool) -> bool:
    tracker, decoder, path = EventTracker(end, choices=choices), ChunkedDecoder(), FastPath()
    for data in reads:
        if path.data_received(data):
            continue
        path.disarm()
        tracker.feed(decoder.feed(data))
        if fast and tracker.output and decoder.at_boundary and tracker.between_events:
            path.arm_any(lambda _: None, end=end)
    tracker.missing_end(tracker.rest())
    return tracker.done


@settings(derandomize=True, max_examples=examples(500))
@given(drawn_streams())
def test_what_is_whole_is_what_an_oracle_says(
    drawn: tuple[StreamEnd, list[Told], int, bool, list[int] | None],
) -> None:
    end, events, choices, spaced, cuts = drawn
    reads = [framed(it, spaced=spaced) for it in events]
    if cuts is not None:
        whole = b"".join(reads)
        edges = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
        reads = [whole[a:b] for a, b in pairwise(edges)]
    expected = is_whole(end, events, choices)
    assert found_whole(end, reads, choices, fast=False) is expected
    assert found_whole(end, reads, choices, fast=True) is expected


NOTHING_YET = (
    (StreamEnd.DONE, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}),
    (StreamEnd.DONE, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": ""}]}),
    (StreamEnd.DONE, {"choices": [{"index": 1, "delta": {"role": "assistant", "tool_calls": []}, "logprobs": None}]}),
    (StreamEnd.DONE, {"choices": [{"index": 0, "text": "", "finish_reason": "null"}]}),
    (StreamEnd.DONE, {"choices": [], "prompt_filter_results": [{"prompt_index": 0}]}),
    (ANTHROPIC, {"type": "message_start", "message": {"id": "a", "content": [], "usage": {"input_tokens": 3}}}),
    (ANTHROPIC, {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
    (ANTHROPIC, {"type": "content_block_start", "content_block": {"type": "thinking", "thinking": "", "signature": "x"}}),
    (StreamEnd.DONE, {"choices": None, "usage": None}),
    (ANTHROPIC, {"type": "message_delta", "delta": {"stop_reason": ""}}),
    (ANTHROPIC, {"type": "content_block_stop", "index": 0}),
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
def test_a_ping_is_nothing(ping: bytes) -> None:
    word = b'data: {"delta":{"type":"ping","ping":"ping"},"type":"x"}\n\n'
    for end, before in product(StreamEnd, (b"", word)):
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
def test_a_ping_is_nothing_to_the_fast_path(ping: bytes) -> None:
    for end in StreamEnd:
        fast, sent = FastPath(), list[bytes]()
        fast.arm_any(sent.append, end=end)
        assert not fast.data_received(b"%x\r\n%b\r\n" % (len(ping), ping)), end
