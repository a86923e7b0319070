"""What the instance sends, in any pieces, and what may pass."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.proxy.sse import tracker as sse_tracker
from launcher.proxy.sse.ends import StreamEnd
from launcher.proxy.sse.tracker import EventTracker, event_data, event_ends, usage_apart

WORD = b'data: {"choices":[{"delta":{"content":"error [DONE] \\n\\n"}}]}\n\n'
COMMENT = b": still here\n\n"
NAMED = b"event: response.created\ndata: {}\n\n"
CRLF = b"data: a\r\n\r\n"
MULTI = b"data: a\ndata: b\nid: 4\n\n"
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'

# A stream is of JSON objects, or of other data.
whole_events = st.one_of(
    st.lists(st.sampled_from([WORD, COMMENT, NAMED]), max_size=8),
    st.lists(st.sampled_from([COMMENT, CRLF, MULTI]), max_size=8),
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(marks)]


def run(data: bytes, cuts: list[int]) -> tuple[EventTracker, bytes]:
    tracker = EventTracker()
    return tracker, b"".join(tracker.feed(piece) for piece in pieces(data, cuts))


@given(whole_events, st.lists(st.integers(min_value=0), max_size=12))
def test_a_good_stream_passes_byte_for_byte_in_any_pieces(events: list[bytes], cuts: list[int]) -> None:
    data = b"".join(events) + DONE
    tracker, passed = run(data, cuts)
    assert passed == data
    assert tracker.done
    assert tracker.error is None


@given(whole_events, st.lists(st.integers(min_value=0), max_size=12))
def test_comments_say_nothing(events: list[bytes], cuts: list[int]) -> None:
    tracker = EventTracker()
    tracker.feed(b"".join(events))
    before = tracker.events
    for piece in pieces(COMMENT * 2 + b":\r\n\r\n" + COMMENT, cuts):
        tracker.feed(piece)
        assert tracker.quiet or not piece
    assert tracker.events == before == sum(event != COMMENT for event in events)
    tracker.feed(COMMENT + NAMED)
    assert not tracker.quiet


@given(st.integers(1, len(NAMED) - 4), whole_events, st.lists(st.integers(min_value=0), max_size=12))
def test_nothing_passes_from_half_an_event_on(at: int, after: list[bytes], cuts: list[int]) -> None:
    half = WORD[: len(b"data: {") + at] + b"\n\n"
    tracker, passed = run(WORD + COMMENT + half + b"".join(after) + DONE, cuts)
    assert passed == WORD + COMMENT
    assert tracker.broken
    assert (tracker.done, tracker.error, tracker.rest()) == (False, None, b"")


@given(whole_events, whole_events, st.lists(st.integers(min_value=0), max_size=12))
def test_no_done_passes_after_an_error(before: list[bytes], after: list[bytes], cuts: list[int]) -> None:
    head = b"".join(before) + ERROR + b"".join(after)
    tracker, passed = run(head + DONE, cuts)
    assert passed == b"".join(before)  # the engine's own error is withheld: the stream may go on elsewhere
    assert not tracker.done
    assert tracker.error == ERROR
    assert tracker.engine_fault
    assert tracker.error_first == all(event == COMMENT for event in before)


@given(whole_events, st.lists(st.integers(min_value=0), max_size=12), st.integers(min_value=0))
def test_a_cut_stream_leaves_whole_events_only(events: list[bytes], cuts: list[int], at: int) -> None:
    data = b"".join(events)
    data = data[: at % (len(data) + 1)]
    tracker, passed = run(data, cuts)
    assert data.startswith(passed)
    assert passed == b"" or passed.endswith((b"\n\n", b"\r\n\r\n", b"\n\r\n"))
    assert tracker.break_off() == b""


@given(st.binary(max_size=300), st.lists(st.integers(min_value=0), max_size=12))
def test_any_bytes_pass_in_order(data: bytes, cuts: list[int]) -> None:
    tracker, passed = run(data, cuts)
    passed += tracker.rest()
    assert data.startswith(passed)
    assert passed == data or tracker.broken


@pytest.mark.parametrize(
    ("event", "is_error"),
    [
        (b'data: {"error":{"message":"x"}}\n\n', True),
        (b'data:{ "error" : {"message":"x"}}\n\n', True),
        (b'data: {"error": "out of memory"}\n\n', True),
        (b'event: error\ndata: {"type":"error"}\n\n', True),
        (b'event: response.failed\ndata: {"type":"response.failed"}\r\n\r\n', True),
        (b'data: {"error": null, "choices": []}\n\n', False),
        (b'data: {"choices":[], "error": {"message":"x"}}\n\n', True),
        *(
            (b'data: {"error": ' + unset + b', "choices": []}\n\n', False)
            for unset in (b'""', b'"null"', b"{}")
        ),
        (b'data: {"errors": {}}\n\n', False),
        (b"event: errors\ndata: {}\n\n", False),
        (b': data: {"error":{}}\n\n', False),
    ],
)
def test_what_is_an_error_event(event: bytes, is_error: bool) -> None:
    tracker = EventTracker()
    assert tracker.feed(event) == (b"" if is_error else event)
    assert tracker.error == (event if is_error else None)


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        (b'data: {"error":{"code":500}}\n\n', True),
        (b'data: {"error":{"message":"died"}}\n\n', True),
        (b'data: {"error":{"message":"too long","code":400}}\n\n', False),
        (b'data: {"error":{"message":"too long","code": "404"}}\n\n', False),
    ],
)
def test_errors_of_engine_and_request(event: bytes, fault: bool) -> None:
    tracker = EventTracker()
    tracker.feed(event)
    assert tracker.engine_fault == fault


def test_an_engine_that_aborts_a_request_has_failed() -> None:
    """vLLM 0.32 ends what comes to an engine that shuts down with this reason, [DONE], and status 200."""
    said = b'data: {"choices":[{"delta":{"content":"\\"finish_reason\\":\\"abort\\""},"finish_reason":null}]}\n\n'
    tracker = EventTracker()
    assert tracker.feed(said) == said
    assert (
        tracker.feed(b'data: {"choices":[{"text":"","finish_reason": "abort"}]}\n\ndata: [DONE]\n\n') == b""
    )
    assert tracker.engine_fault
    assert not tracker.done


def test_a_huge_event_passes_as_it_comes_and_is_ended_when_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse_tracker, "HOLD_BYTES", 10)
    tracker = EventTracker()
    data = b"data: " + b"x" * 20 + b"\n\n"
    passed = tracker.feed(data[:20])
    assert passed == data[:17]
    assert tracker.break_off() == b"\n\n"
    tracker = EventTracker()
    assert b"".join(tracker.feed(data[i : i + 1]) for i in range(len(data))) == data
    assert tracker.break_off() == b""


def test_a_huge_last_event_is_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last event of /v1/responses repeats the whole response."""
    monkeypatch.setattr(sse_tracker, "HOLD_BYTES", 100)
    for name, done in (("response.completed", True), ("response.output_item.done", False)):
        tracker = EventTracker(StreamEnd.RESPONSE_COMPLETED)
        data = f'event: {name}\ndata: {{"type":"{name}","response":{{"x":"{"x" * 300}"}}}}\n\n'.encode()
        assert b"".join(tracker.feed(data[i : i + 40]) for i in range(0, len(data), 40)) == data
        assert tracker.done is done


@pytest.mark.parametrize(("kind", "fault"), [("api_error", True), ("invalid_request_error", False)])
def test_anthropics_errors_of_engine_and_request(kind: str, fault: bool) -> None:
    tracker = EventTracker(StreamEnd.MESSAGE_STOP)
    event = f'event: error\ndata: {{"type":"error","error":{{"type":"{kind}","message":"x"}}}}\n\n'.encode()
    assert tracker.feed(event + DONE) == (b"" if fault else event)
    assert tracker.engine_fault is fault


def test_done_without_its_blank_line_counts() -> None:
    tracker = EventTracker()
    assert tracker.feed(b"data: a\n\ndata: [DONE]") == b"data: a\n\n"
    assert tracker.rest() == b"data: [DONE]"
    assert tracker.done


def test_data_of_an_event() -> None:
    assert event_data(b": comment\n\n") is None
    assert event_data(b"event: x\ndata: a\ndata:b\n\n") == b"a\nb"


@given(
    st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"x", b"data: {}", b"\n\n"]), max_size=12).map(b"".join)
)
def test_events_end_at_blank_lines(events: bytes) -> None:
    """However lines end; the shortest way is taken where no carriage return is in sight."""
    blank_lines = re.compile(rb"\r\n\r\n|\n\r\n|\n\n|\r\r")
    assert list(event_ends(events)) == [found.end() for found in blank_lines.finditer(events)]


@pytest.mark.parametrize("before", [b"", b": " + b"x" * 2048 + b"\n"], ids=["alone", "behind a comment"])
@pytest.mark.parametrize(
    "ping", [b"event: ping\ndata: {}\n\n", b'data: {"type": "ping"}\n\n'], ids=["name", "type"]
)
def test_a_ping_says_nothing(before: bytes, ping: bytes) -> None:
    tracker = EventTracker()
    assert tracker.feed(before + ping) == before + ping
    assert (tracker.quiet, tracker.events) == (True, 0)


def test_a_large_event_is_no_ping() -> None:
    tracker = EventTracker()
    tracker.feed(b'data: {"type": "ping", "text": "%b"}\n\n' % (b"x" * 8192))
    assert (tracker.quiet, tracker.events) == (False, 1)


# Build 11549, as it came from /v1/completions.
LLAMA_CPP = (
    b'data: {"choices":[{"text":"","index":0,"logprobs":null,"finish_reason":"length"}],"created":1795853083,"model":"m",'
    b'"object":"text_completion","usage":{"completion_tokens":3,"prompt_tokens":3,"total_tokens":6},"id":"c",'
    b'"timings":{"cache_n":0,"prompt_n":3}}\n\n'
)


def test_usage_of_llama_cpp_is_told_in_an_event_of_its_own() -> None:
    end, usage, done = usage_apart(WORD + LLAMA_CPP + DONE, keep=True).removeprefix(WORD).split(b"\n\n")[:3]
    assert json.loads(end[6:]) == {
        "choices": [{"text": "", "index": 0, "logprobs": None, "finish_reason": "length"}],
        "created": 1795853083, "model": "m", "object": "text_completion", "id": "c",
    }  # fmt: skip
    told = json.loads(usage[6:])
    assert (told["choices"], told["usage"]["total_tokens"], told["timings"]["prompt_n"]) == ([], 6, 3)
    assert (told["id"], done + b"\n\n") == ("c", DONE)
    assert usage_apart(LLAMA_CPP, keep=False) == end + b"\n\n", "a client that has not asked gets none"


@pytest.mark.parametrize(
    "events",
    [
        b'data: {"choices":[],"usage":{"total_tokens":6},"timings":{}}\n\n' + DONE,
        # vLLM's continuous_usage_stats.
        b'data: {"choices":[{"text":"a","finish_reason":"stop"}],"usage":{"total_tokens":6}}\n\n',
        b'data: {"choices":[{"text":"\\"timings\\" \\"usage\\""}]}\n\n',
        b'data: {"choices":[{"text":"a"}],"usage":null,"timings":{}}\n\n',
        b'data: {"timings":{},"usage":{}}\n\n: comment\n\n',
        b'data: {"timings":\n\n',
    ],
)
def test_usage_that_is_apart_stays_as_it_is(events: bytes) -> None:
    assert usage_apart(events, keep=True) is events


def test_usage_of_which_a_client_does_not_know_is_taken_out() -> None:
    usage = b'data: {"choices":[],"usage":{"total_tokens":6}}\n\n'
    assert usage_apart(WORD + usage + DONE, keep=False) == WORD + DONE
    for events in (WORD + DONE, b'data: {"choices":[{"text":"a"}],"usage":{"total_tokens":6}}\n\n'):
        assert usage_apart(events, keep=False) is events
