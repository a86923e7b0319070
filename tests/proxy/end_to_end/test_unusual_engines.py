"""Engines that answer in ways HTTP and server-sent events allow, and vLLM seldom does."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from support.fakes import SOON_S
from support.plain_engine import CHAT, QUESTION, PlainEngine
from support.proxy_under_test import ProxyUnderTest, until
from support.raw_engine import raw_engine
from support.scripted_engine import DONE, Call, Script, answer_chat, event

ASKED = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}


def large(size: int) -> io.BytesIO:
    """A request's body."""
    return io.BytesIO(json.dumps({"model": "m", "messages": [], "pad": "x" * size}).encode())


def text_of(stream: bytes) -> str:
    """What a client reads, whichever line ends the events have."""
    lines = stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    found = [json.loads(line[5:]) for line in lines if line.startswith(b"data:") and b"[DONE]" not in line]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in found if c.get("choices"))


async def test_interim_answers_are_skipped_wherever_they_are_cut(proxy: ProxyUnderTest) -> None:
    body = b'{"ok": 1}'
    answer = (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\nContent-Length: 5\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    ) + body
    cuts = [1, 20, 25, 26, 60, 97, 98, 120, len(answer) - 12, len(answer) - 1]

    async def script(call: Call) -> None:
        cut = cuts.pop()
        await call.raw(answer[:cut])
        await asyncio.sleep(0.002)
        await call.raw(answer[cut:])

    await proxy.engine(0, script)
    while cuts:
        async with asyncio.timeout(SOON_S), proxy.chat() as got:
            assert (got.status, await got.read()) == (200, body)
    assert proxy.sums()["completed"] == 10


@pytest.mark.parametrize("stream", [False, True])
async def test_no_layer_before_an_engine_compresses_what_must_be_read(
    proxy: ProxyUnderTest, stream: bool
) -> None:
    async def script(call: Call) -> None:
        if "gzip" not in (call.header("Accept-Encoding") or ""):
            await answer_chat(call)
            return
        kind = "text/event-stream" if stream else "application/json"
        data = gzip.compress(event("one") + event("two") + event("three") + DONE if stream else b"{}")
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Encoding: gzip\r\nContent-Length: {len(data)}"
        await call.raw(head.encode() + b"\r\n\r\n" + data)

    engine = await proxy.engine(0, script)
    async with asyncio.timeout(SOON_S), proxy.chat(stream=stream) as got:
        body = await got.read()
    assert got.status == 200
    assert body.endswith(DONE) or not stream
    assert proxy.sums()["completed"] == 1
    assert "gzip" in got.request_info.headers["Accept-Encoding"]
    assert engine.calls[0].header("Accept-Encoding") is None


def reasoning(delta: dict[str, object]) -> bytes:
    """As llama-server writes it: no spaces."""
    chunk = {
        "choices": [{"finish_reason": None, "index": 0, "delta": delta}],
        "id": "chatcmpl-1",
        "created": 1,
    }
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


THOUGHTS = ("Well", ' "reasoning_content":"', "\\", "\n", "é", " error", '"')


@pytest.mark.parametrize("together", [1, 3])
async def test_reasoning_of_llama_cpp_has_vllms_name_too(proxy: ProxyUnderTest, together: int) -> None:
    """In events and in a whole message; nothing else is changed."""
    events = [
        reasoning({"role": "assistant", "content": None}),
        *(reasoning({"reasoning_content": thought}) for thought in THOUGHTS * 3),
        reasoning({"content": "An answer"}),
        reasoning({"content": ' "reasoning_content":"'}),
    ]
    message = {"role": "assistant", "content": "An answer", "reasoning_content": "".join(THOUGHTS)}

    async def script(call: Call) -> None:
        if not json.loads(call.body)["stream"]:
            body = json.dumps({"choices": [{"index": 0, "message": message}]}, separators=(",", ":")).encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            await call.raw(head.encode() + body)
            return
        await call.start_stream()
        for first in range(0, len(events), together):
            await call.chunk(b"".join(events[first : first + together]))
            await asyncio.sleep(0.002)
        await call.chunk(DONE)
        await call.end_stream()

    await proxy.engine(0, script)
    async with asyncio.timeout(SOON_S), proxy.chat() as got:
        told = (await got.json())["choices"][0]["message"]
        assert int(got.headers["Content-Length"]) == len(await got.read())
    assert told == message | {"reasoning": message["reasoning_content"]}
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True) as got:
        parts = (await got.read()).split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""]
    deltas = [json.loads(part[6:])["choices"][0]["delta"] for part in parts[:-2]]
    assert deltas[1:-2] == [{"reasoning": thought, "reasoning_content": thought} for thought in THOUGHTS * 3]
    assert [parts[at] + b"\n\n" for at in (0, -4, -3)] == [events[at] for at in (0, -2, -1)]
    assert proxy.sums()["completed"] == 2


ENDS = {"lf": b"\n", "crlf": b"\r\n", "cr": b"\r", "both": b"\n"}


def cut_once(engine: PlainEngine, cut: int | None, write: Callable[[bytes], bytes]) -> Script:
    """Tells what `engine` does, each event as `write` has it; the first answer is cut after `cut` events."""
    cuts = [cut]

    async def script(call: Call) -> None:
        limit = cuts.pop() if cuts else None
        await call.start_stream()
        for number, told in enumerate(engine.answer(call.body)):
            if number == limit:
                await asyncio.sleep(0.01)
                call.cut()
                return
            await call.chunk(write(told))
        await call.end_stream()

    return script


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("cut", [None, 3, 9])
async def test_any_line_ends_and_comments(proxy: ProxyUnderTest, end: str, cut: int | None) -> None:
    words = tuple(f" wörd{n}" for n in range(12))
    engine = PlainEngine(CHAT, words, escaped=False)

    def write(told: bytes) -> bytes:
        data = (b": a comment\nid: 7\n" + told).replace(b"\n", ENDS[end])
        return data[:-1] + b"\r\n" if end == "both" else data

    script = cut_once(engine, cut, write)
    await proxy.engine(0, script)
    await proxy.engine(1, script)
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True, **ASKED) as got:
        body = await got.read()
    assert text_of(body) == "".join(words)
    assert body.count(b"[DONE]") == 1
    assert proxy.sums()["completed"] == 1


async def test_data_of_several_lines(proxy: ProxyUnderTest) -> None:
    words = tuple(f" w{n}" for n in range(12))
    engine = PlainEngine(CHAT, words)
    script = cut_once(engine, 8, lambda told: told.replace(b',"choices"', b'\ndata: ,"choices"'))
    await proxy.engine(0, script)
    await proxy.engine(1, script)
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True, **ASKED) as got:
        body = await got.read()
    joined = body.replace(b"\ndata: ,", b",")
    assert text_of(joined) == "".join(words)


@pytest.mark.parametrize("at", range(0, 14, 2))
async def test_a_cut_within_a_character(proxy: ProxyUnderTest, at: int) -> None:
    """The connection ends after some bytes of an emoji's: none of them reaches the client, all of it comes once."""
    words = ("Hello", " a", " b", " c", " d", " e", " f", " g", " h", " 🙂🙃", " i", " \u00e9", " k", ".")
    engine = PlainEngine(CHAT, words, escaped=False)
    cuts = [True]

    async def script(call: Call) -> None:
        first = bool(cuts and cuts.pop())
        await call.start_stream()
        for told in engine.answer(call.body):
            if first and "🙂".encode() in told:
                place = told.index("🙂".encode()) - 3 + at
                await call.raw(b"%x\r\n" % len(told) + told[:place])
                await asyncio.sleep(0.01)
                call.cut()
                return
            framed = b"%x\r\n" % len(told) + told + b"\r\n"
            for start, stop in pairwise([0, len(framed) // 3, 2 * len(framed) // 3, len(framed)]):
                await call.raw(framed[start:stop])
                await asyncio.sleep(0)
        await call.end_stream()

    await proxy.engine(0, script)
    await proxy.engine(1, script)
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True, **ASKED) as got:
        body = await got.read()
    body.decode()
    assert text_of(body) == "".join(words)
    assert body.endswith(DONE)


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("size", [1 << 10, 3 << 20, 15 << 20])
async def test_an_early_refusal_of_a_large_body_reaches_the_client(
    proxy: ProxyUnderTest, size: int, tcp: bool
) -> None:
    """The engine answers 413 when it has read the head, and closes with most of the body unread."""
    seen = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(
            b"HTTP/1.1 413 Too Large\r\nContent-Type: application/json\r\nContent-Length: 28\r\nConnection: close\r\n\r\n"
            b'{"error": {"message": "no"}}'
        )
        await writer.drain()
        writer.close()

    await raw_engine(proxy, serve, tcp=tcp)
    async with asyncio.timeout(SOON_S), proxy.client.post(CHAT, data=large(size)) as got:
        body = await got.read()
    assert (got.status, body) == (413, b'{"error": {"message": "no"}}'), len(seen)
    assert len(seen) == 1
    assert proxy.sums()["refused"] == 1


async def test_an_engine_that_dies_while_a_body_is_written(proxy: ProxyUnderTest) -> None:
    """Another one gets the whole of it, byte for byte."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(100_000)
        writer.transport.abort()

    await raw_engine(proxy, serve)
    other = await proxy.engine(1)
    bodies = set()
    for _ in range(4):
        async with asyncio.timeout(SOON_S), proxy.client.post(CHAT, data=large(9 << 20)) as got:
            assert got.status == 200
        bodies.add(other.calls[-1].body)
    assert len(bodies) == 1
    assert len(bodies.pop()) > 9 << 20
    assert proxy.sums()["completed"] == 4


async def test_kept_connections_that_close_as_a_request_comes(proxy: ProxyUnderTest) -> None:
    """As uvicorn does after its keep-alive time: the request goes on a new connection, the instance is not blamed."""
    served = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(44)
        served += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        await asyncio.sleep(0.001 * (served % 4))
        writer.close()

    await raw_engine(proxy, serve)
    for _ in range(60):
        async with asyncio.timeout(SOON_S), proxy.chat() as got:
            assert (got.status, await got.read()) == (200, b"{}")
    assert proxy.suspects == []
    assert proxy.server.readings.stats()["retried"] == 0
    await until(lambda: proxy.sums()["completed"] == 60)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\n",
    ],
    ids=["101", "two lengths", "no length"],
)
async def test_what_every_instance_would_answer_is_asked_of_one(
    proxy: ProxyUnderTest, answer: bytes, stream: bool
) -> None:
    async def script(call: Call) -> None:
        await call.raw(answer)

    engines = [await proxy.engine(slot, script) for slot in range(3)]
    async with asyncio.timeout(SOON_S), proxy.chat(stream=stream) as got:
        error = (await got.json())["error"]
    assert (got.status, error["type"]) == (502, "upstream_error")
    assert sum(len(engine.calls) for engine in engines) == 1
    assert proxy.sums()["failed"] == 1
    assert proxy.balanced()


async def test_what_is_no_http_may_be_one_instances_own_trouble(proxy: ProxyUnderTest) -> None:
    """Such as another program on its port: the next one is asked."""

    async def script(call: Call) -> None:
        await call.raw(b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n")

    odd = await proxy.engine(0, script)
    await proxy.engine(1)
    for _ in range(4):
        async with asyncio.timeout(SOON_S), proxy.chat() as got:
            assert got.status == 200
    assert odd.calls
    assert proxy.sums()["completed"] == 4
