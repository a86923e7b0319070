"""The fast path relays usual events as the slow path would, and leaves all other reads alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.plain_engine import CHAT, COMPLETIONS, PlainEngine, event
from support.token_engine import TokenEngine

from launcher.proxy.continuation.transcript import Transcript
from launcher.proxy.http1.chunks import ChunkedDecoder
from launcher.proxy.sse.ends import StreamEnd
from launcher.proxy.sse.fast_path import NEVER, EventPattern, FastPath, take_list
from launcher.proxy.sse.tracker import EventTracker


def chunk(delta: dict[str, Any], ids: list[int] | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": None, "token_ids": ids, **more}
    return event({"id": "x", "created": 1, "model": "m", "choices": [choice]})


def words(text: str, ids: list[int] | None = None, **more: Any) -> bytes:
    return chunk({"content": text}, ids, **more)


def framed(*payloads: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(payload), payload) for payload in payloads)


class Armed:
    """A fast path, its client and its text."""

    def __init__(self, *, ids: bool = False) -> None:
        self.fast, self.sent, self.text = FastPath(), list[bytes](), bytearray()
        pattern = EventPattern()
        assert pattern.learn(words("a"))
        self.fast.arm(pattern, self.text, self.sent.append, ids=ids)

    def counted(self) -> tuple[int, int]:
        return self.fast.events, self.fast.bytes


# --- plain streams -------------------------------------------------------------------------------


def test_one_chunk_with_one_usual_event_passes_as_it_came() -> None:
    armed = Armed()
    reads = [framed(words(text)) for text in ("b", "", "cde" * 50)]
    assert all(armed.fast.data_received(read) for read in reads)
    assert armed.sent == reads
    assert all(sent is read for sent, read in zip(armed.sent, reads, strict=True))
    assert armed.text == b'b""' + b"cde" * 50 + b'"'
    assert armed.counted() == (3, sum(map(len, reads)))


@pytest.mark.parametrize("texts", [['a "quoted" word'], ["b", "", "c" * 3000, "\\"]])
def test_quotation_marks_and_several_chunks_in_one_read_pass_too(texts: list[str]) -> None:
    armed = Armed()
    read = framed(*(words(text) for text in texts))
    assert armed.fast.data_received(read)
    assert armed.sent == [read]
    assert armed.text == "".join(json.dumps(text)[1:] for text in texts).encode()
    assert armed.counted() == (len(texts), len(read))


UNUSUAL = [
    framed(words("b") * 2),
    framed(words("b"), words("b"), words("b"))[:-1],
    framed(words("b"), words("b", finish_reason="stop")),
    framed(words("b")) + words("b") + b"\r\n",
    framed(words("b")) + b"0" + framed(words("b")),
    framed(words("b")) + framed(words("b")).upper(),
    framed(chunk({"role": "assistant", "content": "b"})),
    framed(words("b", finish_reason="stop")),
    framed(chunk({"content": "b", "reasoning": "c"})),
    framed(words("b" * 100_000)),
    framed(words("b"))[:-1],
    framed(words("b")) + b"0\r\n\r\n",
    b"0" + framed(words("b")),
    words("b"),
    framed(b"x"),
    b"",
]


@pytest.mark.parametrize("read", UNUSUAL)
def test_any_other_read_changes_nothing(read: bytes) -> None:
    for ids in (False, True):
        armed = Armed(ids=ids)
        assert not armed.fast.data_received(read), ids
        assert (armed.sent, armed.text, armed.counted()) == ([], b"", (0, 0)), ids


def test_nothing_passes_before_it_is_armed_or_after_it_is_disarmed() -> None:
    fast, sent = FastPath(), list[bytes]()
    for learn in (lambda: None, lambda: fast.arm(EventPattern(), bytearray(), sent.append)):
        learn()
        assert fast._prefix is NEVER
        assert not fast.data_received(framed(words("a")))
    armed = Armed()
    armed.fast.disarm()
    assert not armed.fast.data_received(framed(words("b")))
    references = sys.getrefcount(armed.text)
    assert references == 2  # this test's alone: an idle connection keeps no text


# --- with token ids ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "told"), [(["b"], [[7]]), ([""], [[]]), (["bc", "d", 'e"'], [[1, 2], [3], [456789]])]
)
def test_token_ids_are_kept_and_not_sent(texts: list[str], told: list[list[int]]) -> None:
    armed = Armed(ids=True)
    read = framed(*(words(text, ids) for text, ids in zip(texts, told, strict=True)))
    assert armed.fast.data_received(read)
    assert armed.sent == [framed(*(words(text) for text in texts))]
    kept = [
        json.dumps(text)[1:] + json.dumps(ids, separators=(",", ":"))[1:]
        for text, ids in zip(texts, told, strict=True)
    ]
    assert armed.text == "".join(kept).encode()
    assert armed.counted() == (len(texts), len(armed.sent[0]))


@pytest.mark.parametrize(
    "read",
    [
        framed(words("b")),  # null
        framed(words("b", [1], finish_reason="stop")),
        framed(words("b", [1]).replace(b"[1]", b"[[1]]")),
        framed(words("b", [1]), words("b")),
        framed(words("b", [1]))[:-1],
    ],
)
def test_events_with_other_ids_change_nothing(read: bytes) -> None:
    armed = Armed(ids=True)
    assert not armed.fast.data_received(read)
    assert (armed.sent, armed.text, armed.counted()) == ([], b"", (0, 0))


def test_without_a_place_for_ids_it_is_not_armed() -> None:
    fast, pattern = FastPath(), EventPattern()
    assert pattern.learn(event({"choices": [{"delta": {"content": "a"}}]}))
    fast.arm(pattern, bytearray(), lambda _: None, ids=True)
    assert fast._prefix is NEVER


# --- streams of any events -----------------------------------------------------------------------

NAMED = b'event: response.output_text.delta\ndata: {"delta":" wor","sequence_number":3}\n\n'


def any_events(
    *, without_ids: bool = False, end: StreamEnd = StreamEnd.RESPONSE_COMPLETED
) -> tuple[FastPath, list[bytes]]:
    fast, sent = FastPath(), list[bytes]()
    fast.arm_any(sent.append, without_ids=without_ids, end=StreamEnd.DONE if without_ids else end)
    return fast, sent


@pytest.mark.parametrize(
    ("read", "events"),
    [
        (framed(NAMED), 1),
        (framed(b'data: {"delta":1}\n\n'), 1),
        (framed(b'id: 1\nretry: 2\nevent: x\ndata: {\ndata: "delta":1\ndata: }\n\n'), 1),
        (framed(NAMED * 2), 2),
        (framed(b'data: {"delta":1}\n\n' * 2), 2),
        (framed(*[NAMED] * 60), 60),  # more than the table of size lines
    ],
)
def test_whole_chunks_of_whole_events_pass(read: bytes, events: int) -> None:
    fast, sent = any_events()
    assert fast.data_received(read)
    assert sent == [read]
    assert (fast.events, fast.bytes) == (events, len(read))


@pytest.mark.parametrize(
    "read",
    [
        *(
            framed(NAMED, b"data: {" + sign + b"}\n\n")
            for sign in (b"error", b"failed", b"[DONE]", b'"finish_reason":"abort"', b'"usage"')
        ),
        # No JSON objects, which the slow path looks at.
        framed(b": comment\n\n"),
        framed(b": {}\n\n"),
        framed(NAMED, NAMED, b": {}\n\n"),
        framed(b": comment\n\n" + NAMED),
        framed(b"data: a\n\n"),
        framed(NAMED[:-3] + b"\n\n"),
        framed(NAMED[:-3] + b"\n\n" + NAMED),
        framed(NAMED, NAMED[:40] + b"\xff\n\n", NAMED),
        framed(NAMED)[:-1],
        framed(NAMED[:-1]),
        framed(NAMED[:20], NAMED[20:]),
        framed(NAMED.replace(b"\n", b"\r\n")),
        framed(NAMED) + b"0\r\n\r\n",
        NAMED,
        b"\n\n\r\n",
        b"",
    ],
)
@pytest.mark.parametrize("without_ids", [False, True])
def test_all_else_takes_the_slow_path(read: bytes, without_ids: bool) -> None:
    fast, sent = any_events(without_ids=without_ids)
    assert not fast.data_received(read)
    assert (sent, fast.events, fast.bytes) == ([], 0, 0)


def test_reasoning_that_gets_a_second_name_takes_the_slow_path() -> None:
    fast, sent = FastPath(), list[bytes]()
    fast.arm_any(sent.append)
    thought = [framed(chunk({name: "x"})) for name in ("reasoning", "reasoning_content")]
    assert [fast.data_received(read) for read in thought] == [True, False]
    assert sent == thought[:1]


def test_ids_of_any_events_are_left_out() -> None:
    fast, sent = any_events(without_ids=True)
    thought = [chunk({"reasoning": text}, ids) for text, ids in (("a", [1]), ("b", [2, 3]), ("c", None))]
    assert fast.data_received(framed(*thought))
    assert sent == [framed(*(chunk({"reasoning": text}) for text in "abc"))]
    assert (fast.events, fast.bytes) == (3, len(sent[0]))


@pytest.mark.parametrize(
    "payload",
    [chunk({}, [1]), chunk({"reasoning": "a"}, [1]) * 2, chunk({"a": 1}, [1], prompt_token_ids=[1, 2])],
)
def test_what_has_more_to_take_out_takes_the_slow_path(payload: bytes) -> None:
    fast, sent = any_events(without_ids=True)
    assert not fast.data_received(framed(payload))
    assert not sent


# --- patterns ------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [b"data: {}", b'data: {"content":"a', b'data: {"content":"a\\'])
def test_a_pattern_is_only_learned_from_text(raw: bytes) -> None:
    pattern = EventPattern()
    assert not pattern.learn(raw)
    assert not pattern.known


def test_a_list_is_replaced_by_null() -> None:
    assert take_list(b'{"a":[1,2],"b":[3]}', b'"b":[') == (b'{"a":[1,2],"b":null}', b"3")
    assert take_list(b'{"a":[1,2]}', b'"b":[') == (b'{"a":[1,2]}', None)
    assert take_list(b'{"a":[1,2', b'"a":[') == (b'{"a":[1,2', b"")


# --- as the slow path ----------------------------------------------------------------------------


class Reader:
    """The slow path of an upstream connection, and the fast path before it where it is wanted."""

    def __init__(self, transcript: Transcript | None, *, fast: bool) -> None:
        self.transcript, self.wanted = transcript, fast
        self.decoder, self.tracker, self.fast = ChunkedDecoder(), EventTracker(), FastPath()
        self.sent: list[bytes] = []

    def read(self, data: bytes) -> None:
        if self.fast.data_received(data):
            return
        self.fast.disarm()
        passed = self.tracker.feed(self.decoder.feed(data))
        told = passed if self.transcript is None else self.transcript.feed(passed)
        if told:
            self.sent.append(framed(told))
        if not self.tracker.output:  # as in dispatch/streaming.py
            return
        if self.wanted and told and self.decoder.at_boundary and self.tracker.between_events:
            if self.transcript is None:
                self.fast.arm_any(self.sent.append)
            else:
                self.transcript.arm(self.fast, self.sent.append)

    def result(self) -> list[object]:
        client, tracker, said = ChunkedDecoder(), self.tracker, self.transcript
        told: list[object] = [client.feed(b"".join(self.sent)), client.at_boundary, tracker.rest()]
        told += [tracker.events + self.fast.events, tracker.done, tracker.error, tracker.error_first]
        if said is not None:
            told += [said.odd, said.pieces(), said.tokens(), said.done, said.finish_reason, said.usage_seen]
        return told


def answers(path: str, said: tuple[str, ...], *, ids: bool) -> list[bytes]:
    engine = TokenEngine(path, said, merged=frozenset({2, 5}), parser=True)
    more: dict[str, Any] = {"return_token_ids": True} if ids else {}
    return [told for told in engine.answer(engine.request(max_tokens=99, **more)) if told]


ODD = [
    NAMED, b": comment\n\n", b"data: {}\n\n", b"data: a\r\n\r\n", chunk({"reasoning": "x"}, [5]), chunk({}, [6]),
    words('q"', [7, 8]), words("z"), words("error", [9]), event({"error": {"message": "no", "code": 400}}),
    event({"error": "died"}), event({"id": "x", "choices": [], "usage": {"prompt_tokens": 1}}), b"data: [DONE]\n\n",
]  # fmt: skip


# A comment comes first, and an event that is no JSON later: usual events between them may not hide it.
@example(
    path=CHAT, said=("",), ids=False, kept=False, odd=[(0, ODD[1]), (2, ODD[3])], chunks=None, reads=None
)
@given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    said=st.lists(st.text(max_size=4), min_size=1, max_size=14).map(tuple),
    ids=st.booleans(),
    kept=st.booleans(),
    odd=st.lists(st.tuples(st.integers(0, 20), st.sampled_from(ODD)), max_size=3),
    chunks=st.lists(st.integers(0, 30), max_size=12) | st.none(),
    reads=st.lists(st.integers(0), max_size=12) | st.none(),
)
def test_the_client_and_the_transcript_get_what_the_slow_path_gives(
    *,
    path: str,
    said: tuple[str, ...],
    ids: bool,
    kept: bool,
    odd: list[tuple[int, bytes]],
    chunks: list[int] | None,
    reads: list[int] | None,
) -> None:
    """`chunks`: after how many events a chunk ends; `reads`: after how many bytes a read does; None: each one."""
    events = answers(path, said, ids=ids)
    for at, unusual in odd:
        events.insert(at % (len(events) + 1), unusual)
    one_each: list[bytes] = events if chunks is None else _split(events, chunks, b"".join)
    stream = [framed(payload) for payload in one_each if payload]
    if reads is not None:
        stream = _split(b"".join(stream), reads, lambda part: part)

    def run(*, fast: bool) -> Reader:
        reader = Reader(Transcript(token_ids=ids) if kept else None, fast=fast)
        for data in stream:
            reader.read(data)
        return reader

    assert run(fast=True).result() == run(fast=False).result()


def _split(whole: Any, marks: list[int], join: Callable[[Any], bytes]) -> list[bytes]:
    edges = sorted({0, len(whole), *(mark % (len(whole) + 1) for mark in marks)})
    return [join(whole[a:b]) for a, b in pairwise(edges)]


def test_a_usual_stream_takes_the_fast_path() -> None:
    """That the test above compares something."""
    for ids in (False, True):
        for engine in (PlainEngine(CHAT, ("a",) * 100), TokenEngine(COMPLETIONS, ("a",) * 100)):
            more: dict[str, Any] = {"return_token_ids": True} if ids else {}
            told = engine.answer(engine.request(max_tokens=200, **more))
            with_ids = ids and isinstance(engine, TokenEngine)
            for transcript in (Transcript(token_ids=with_ids), None if not with_ids else Transcript()):
                reader = Reader(transcript, fast=True)
                for payload in told:
                    reader.read(framed(payload))
                assert reader.fast.events >= 95


@pytest.mark.parametrize("colon", [b":", b": "])
@pytest.mark.parametrize(
    ("reasons", "usual"),
    [
        ([b"null"], True),
        ([b"null"] * 3, True),
        ([b'"stop"'], False),
        ([b"null", b'"stop"'], False),
        ([b'""'], True),
        ([b'"null"'] * 2, True),
        ([b'""', b'"stop"'], False),
        ([b'""', b"null"], False),  # no server writes both
    ],
)
def test_an_event_in_which_a_choice_ends_takes_the_slow_path(
    reasons: list[bytes], usual: bool, colon: bytes
) -> None:
    choices = b",".join(b'{"delta":{"a":1},"finish_reason"%b%b}' % (colon, reason) for reason in reasons)
    fast, _ = any_events(end=StreamEnd.DONE)
    assert fast.data_received(framed(b'data: {"choices":[%b]}\n\n' % choices)) is usual
