"""From an upstream's bytes to the client's: the same response and the same transcript, however the bytes are cut."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import pairwise
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from support.plain_engine import CHAT, COMPLETIONS
from support.recording_sink import HEAD, NoTransport
from support.token_engine import TokenEngine

from launcher.balancing.balancer import Balancer
from launcher.balancing.upstreams import Upstream
from launcher.base.address import UnixAddress
from launcher.config.schema import Policy
from launcher.proxy.continuation.transcript import Transcript
from launcher.proxy.dispatch.streaming import Streaming
from launcher.proxy.downstream import response
from launcher.proxy.http1.chunks import ChunkedDecoder
from launcher.proxy.http1.requests import parse_request
from launcher.proxy.openai.models import ModelNames, ModelTraits
from launcher.proxy.openai.stream_options import UsageAsk
from launcher.proxy.request.events import AnswerCompleted, BytesArrived, Event, PromptComputed, StreamStarted
from launcher.proxy.request.ports import Downstream
from launcher.proxy.request.record import Request
from launcher.proxy.routes import Match, match
from launcher.proxy.upstream.attempt import Attempt
from launcher.proxy.upstream.connection import UpstreamConnection
from launcher.proxy.upstream.pool import ConnectionPool, Endpoint
from launcher.telemetry.timings import Timings

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)


class Client:
    """A client's connection that takes everything."""

    paused = False
    body_missing = False

    def __init__(self) -> None:
        self.got = bytearray()
        self.kept: bool | None = None

    def write(self, data: bytes) -> None:
        self.got += data

    def answered(self, *, keep: bool) -> None:
        assert self.kept is None
        self.kept = keep


class Relayed:
    """One stream from an upstream to a client, with the real connection, attempt and streaming between them."""

    def __init__(self, path: str, transcript: Transcript | None, *, version: int) -> None:
        found = match("POST", path)
        assert isinstance(found, Match)
        head = parse_request(
            b"POST %b HTTP/1.%d\r\nHost: h\r\nContent-Length: 2\r\n\r\n" % (path.encode(), version)
        )
        self.client = Client()
        self.request = Request(
            cast("Downstream", self.client), head, found, path=path, request_id="r", started=0.0
        )
        self.request.transcript = transcript
        self.events: list[Event] = []
        self._inbox: deque[Event] = deque()
        traits = ModelTraits(ModelNames(("m",)))
        self._streaming = Streaming(Balancer(Policy.ROUND_ROBIN, lambda _: 0), traits, Timings(), self.post)
        pool = ConnectionPool(Endpoint(UnixAddress("/nowhere")), 1.0)
        self.connection = UpstreamConnection(pool)
        self.connection.connection_made(NoTransport())
        pool.keep(self.connection)
        upstream = Upstream(0, 1, "m", cast("Any", None), 8)
        self.attempt = Attempt(self.request, upstream, self.post, self._streaming, 0.0)
        self.request.attempt = self.attempt
        self.attempt.send(pool, "POST", HEAD, b"{}", 0.0)

    def post(self, request: Request, event: Event) -> None:
        """What the executor does of it: nothing is re-entered."""
        assert request is self.request
        self._inbox.append(event)
        if len(self._inbox) > 1:
            return
        while self._inbox:
            event = self._inbox[0]
            if isinstance(event, BytesArrived):
                self.attempt.read(event.data)
            else:
                self.events.append(event)
                self._do(event)
            self._inbox.popleft()

    def _do(self, event: Event) -> None:
        request = self.request
        if isinstance(event, StreamStarted):
            self._streaming.start(request, event, 0.0)
        elif isinstance(event, AnswerCompleted):
            request.tail = event.last
            response.finish(request, event, 0.0)
        else:
            assert isinstance(event, PromptComputed)

    def result(self) -> list[object]:
        """What must not depend on how the bytes were cut."""
        head, _, body = bytes(self.client.got).partition(b"\r\n\r\n")
        payload = body
        if b"chunked" in head:
            decoder = ChunkedDecoder()
            payload = decoder.feed(body)
            assert decoder.ended
        said = self.request.transcript
        told: list[object] = [payload, [type(event) for event in self.events], self.attempt.events]
        if said is not None:
            told += [said.odd, said.pieces(), said.tokens(), said.done, said.finish_reason, said.usage_seen]
        return told


async def relayed(
    path: str,
    reads: list[bytes],
    *,
    transcript: Transcript | None,
    version: int = 1,
    ask: UsageAsk = UsageAsk.NO,
) -> Relayed:
    made = Relayed(path, transcript, version=version)
    made.request.usage_ask = ask
    for data in reads:
        made.connection.data_received(data)
    return made


def cut(whole: bytes, marks: list[int]) -> list[bytes]:
    edges = sorted({0, len(whole), *(mark % (len(whole) + 1) for mark in marks)})
    return [whole[a:b] for a, b in pairwise(edges)]


def framed(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def events_of(path: str, said: tuple[str, ...], *, ids: bool, usage: bool = False) -> list[bytes]:
    engine = TokenEngine(path, said, merged=frozenset({2, 5}), parser=True)
    more: dict[str, Any] = {"return_token_ids": True} if ids else {}
    more |= {"stream_options": {"include_usage": True}} if usage else {}
    return [told for told in engine.answer(engine.request(max_tokens=99, **more)) if told]


WORDS = tuple(f" w{number}" for number in range(30))


any_stream = given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    said=st.lists(st.text(max_size=4), min_size=1, max_size=14).map(tuple) | st.just(WORDS),
    ids=st.booleans(),
    kept=st.booleans(),
    marks=st.lists(st.integers(0), max_size=20) | st.none(),
)
"""However its bytes are cut; `kept`: with a transcript."""


@any_stream
def test_any_chunking_gives_the_same_bytes_and_the_same_transcript(
    *, path: str, said: tuple[str, ...], ids: bool, kept: bool, marks: list[int] | None
) -> None:
    """A client of HTTP/1.0 gets no chunks: its stream never takes the fast path, and is what others are held against."""
    chunks = [*map(framed, events_of(path, said, ids=ids)), b"0\r\n\r\n"]
    reads = chunks if marks is None else cut(b"".join(chunks), marks)

    def run(reads: list[bytes], version: int) -> Relayed:
        transcript = Transcript(token_ids=ids) if kept else None
        return asyncio.run(relayed(path, [STREAM_HEAD, *reads], transcript=transcript, version=version))

    slow = run([b"".join(chunks)], 0)
    assert slow.connection.events == 0
    assert run(reads, 1).result() == slow.result()
    if marks is None and said is WORDS and not (ids and not kept):
        assert run(reads, 1).connection.events > len(WORDS) / 2  # that the test compares something


def test_byte_by_byte() -> None:
    chunks = b"".join(map(framed, events_of(CHAT, WORDS, ids=True))) + b"0\r\n\r\n"
    whole = STREAM_HEAD + chunks
    single = [whole[at : at + 1] for at in range(len(whole))]
    made = asyncio.run(relayed(CHAT, single, transcript=Transcript(token_ids=True)))
    other = asyncio.run(relayed(CHAT, [whole], transcript=Transcript(token_ids=True)))
    assert made.result() == other.result()


@any_stream
def test_a_usage_that_its_client_does_not_want_is_hidden_however_the_bytes_are_cut(
    *, path: str, said: tuple[str, ...], ids: bool, kept: bool, marks: list[int] | None
) -> None:
    told = events_of(path, said, ids=ids)
    *events, usage, done = events_of(path, said, ids=ids, usage=True)
    assert [*events, done] == told
    chunks = [*map(framed, [*events, usage, done]), b"0\r\n\r\n"]
    reads = chunks if marks is None else cut(b"".join(chunks), marks)

    def run(reads: list[bytes], ask: UsageAsk) -> Relayed:
        transcript = Transcript(token_ids=ids) if kept else None
        return asyncio.run(relayed(path, [STREAM_HEAD, *reads], transcript=transcript, ask=ask))

    hidden = run(reads, UsageAsk.ADDED)
    unasked = run([*map(framed, told), b"0\r\n\r\n"], UsageAsk.NO)
    assert hidden.result()[0] == unasked.result()[0]
    assert hidden.request.usage is not None
    if kept:
        assert hidden.request.transcript is not None
        assert not hidden.request.transcript.usage_seen
        if ids:
            assert hidden.request.transcript.counted() == hidden.request.usage[:2]
