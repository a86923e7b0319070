"""Answers of another shape than the client was promised, and clients that take nothing: who is at fault, and the end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from support.continuations import ENGINE, streams
from support.fakes import SOON_S
from support.plain_engine import QUESTION
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import DONE, Call, Script, answer_chat


async def read(proxy: ProxyUnderTest, **more: object) -> bytes:
    async with proxy.chat(**more) as answer:  # type: ignore[arg-type]
        return await answer.read()


async def test_a_cut_stream_that_waits_shows_that_it_lives(build: Build) -> None:
    """Until another instance goes on with it the client hears comments, between events."""
    proxy = await build(keepalive_comment_s=0.05)
    asked = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    await proxy.engine(0, streams(ENGINE, 5))
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True, **asked) as answer:
        while b" and" not in await answer.content.readuntil(b"\n\n"):
            pass
        proxy.server.remove_upstream(0, 1, "signal 9")
        for _ in range(2):
            assert await answer.content.readuntil(b"\n\n") == b": waiting\n\n"
        await proxy.engine(1, streams(ENGINE))
        rest = (await answer.content.read()).replace(b": waiting\n\n", b"")
    assert rest.startswith(b"data: ")
    assert b'"role"' not in rest
    assert rest.endswith(DONE)
    assert proxy.sums()["completed"] == 1


async def test_a_stream_that_is_answered_with_something_else_is_not_put_together(
    proxy: ProxyUnderTest,
) -> None:
    """A large answer that is no stream, cut after its first bytes: nothing can follow them."""

    async def half(call: Call) -> None:
        await call.raw(b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nContent-Length: 4000000\r\n\r\n")
        await call.raw(b"x" * 3_000_000)
        call.cut()

    engines = [await proxy.engine(slot, half) for slot in range(2)]
    with pytest.raises(aiohttp.ClientError):
        await read(proxy, stream=True, messages=[{"role": "user", "content": "?"}])
    await until(lambda: proxy.sums()["failed"] == 1)
    assert sum(len(engine.calls) for engine in engines) == 1


@pytest.mark.parametrize("size", [100, 3_000_000])
async def test_an_answer_that_is_no_stream_is_not_put_into_one(build: Build, size: int) -> None:
    """The client has got comments, so an event stream; what comes is whole, small or in pieces."""
    proxy = await build(keepalive_comment_s=0.03)
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nContent-Length: {size}\r\n\r\n"
        await call.raw(head.encode() + b"x" * size)

    await proxy.engine(0, script)
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True) as answer:
        assert await answer.content.readuntil(b"\n\n") == b": waiting\n\n"
        go.set()
        rest = (await answer.content.read()).replace(b": waiting\n\n", b"")
    assert "no stream" in json.loads(rest.removeprefix(b"data: "))["error"]["message"]
    assert proxy.sums()["failed"] == 1
    assert proxy.suspects == []


async def test_a_client_that_leaves_its_answer_is_given_up_not_its_instance(
    build: Build, tmp_path: Path
) -> None:
    """Two requests in a row; the answer to the first fills all buffers, and nobody reads: the second is not begun."""
    path = tmp_path / "proxy.sock"  # a UNIX socket holds 200 KiB, TCP's grow to megabytes
    proxy = await build(
        listen=(f"unix:{path}",), client_stall_timeout_s=1.0, idle_timeout_s=0.5, first_token_timeout_s=0.5
    )

    async def script(call: Call) -> None:
        await call.json({"x": "x" * 1_000_000})

    engine = await proxy.engine(0, script)

    def ask(user: str) -> bytes:
        body = json.dumps({"model": "m", "user": user}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    _, writer = await asyncio.open_unix_connection(path)
    proxy.stack.callback(writer.close)
    writer.write(ask("first") + ask("second"))
    await until(lambda: proxy.sums()["completed"] == 1)
    await until(lambda: "timeout" in proxy.server.slow_clients.given_up)
    assert len(engine.calls) == 1
    assert proxy.suspects == []
    assert proxy.balanced()


async def test_the_present_attempt_alone_is_heard(proxy: ProxyUnderTest) -> None:
    """An instance that is gone gets a moment for what it has sent; what it says later changes nothing."""
    asked = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    first = await proxy.engine(0, streams(ENGINE, 5))
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True, **asked) as answer:
        await answer.content.readuntil(b"\n\n")
        proxy.server.remove_upstream(
            0, 1, "signal 9"
        )  # its attempt is told 0.2 s later, when it has moved on
        await proxy.engine(1, streams(ENGINE))
        await asyncio.sleep(0.4)
        body = await answer.content.read()
    assert body.endswith(DONE)
    assert b'"error"' not in body
    assert len(first.calls) == 1
    assert proxy.server.readings.stats()["continued"] == 1
    assert proxy.sums()["completed"] == 1


async def test_a_small_answer_comes_with_its_length(proxy: ProxyUnderTest) -> None:
    await proxy.engine(0, answer_chat)
    async with proxy.chat() as answer:
        assert int(answer.headers["Content-Length"]) == len(await answer.read())


# --- events that are none ------------------------------------------------------------------------

PINGS = (b": ping\n\n", b":\n\n", b":\r\n\r\n", b": {}\n\n")
TOOL = {"tools": [{"type": "function", "function": {"name": "f"}}]}
ASKED: dict[str, object] = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}


def calls(number: int) -> bytes:
    """An event of a stream that nothing can continue."""
    delta = {"tool_calls": [{"index": 0, "function": {"arguments": f'{{"n": {number}}}'}}]}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


def pinging(ping: bytes, *before: bytes) -> Script:
    async def script(call: Call) -> None:
        await call.start_stream()
        for each in before:
            await call.chunk(each)
        while not call.left.is_set():
            await call.chunk(ping)
            await asyncio.sleep(0.02)

    return script


@pytest.mark.parametrize("ping", PINGS)
async def test_comments_of_an_instance_are_no_first_byte(build: Build, ping: bytes) -> None:
    proxy = await build(first_token_timeout_s=0.4, first_token_timeout_per_1k_s=0.0)
    await proxy.engine(0, pinging(ping))
    asked = asyncio.create_task(read(proxy, stream=True, **ASKED))
    await until(lambda: proxy.server.in_flight(0, 1) == 1)
    await proxy.engine(1, streams(ENGINE))
    async with asyncio.timeout(SOON_S):
        body = await asked
    assert body.startswith(b"data: ")
    assert body.endswith(DONE)
    assert proxy.server.progress(0, 1) <= 1  # its head
    assert proxy.server.readings.stats()["retried"] == 1
    assert proxy.sums()["completed"] == 1


async def test_framing_without_data_is_no_progress(build: Build) -> None:
    """An API server may write the size of a chunk by itself; the read brings nothing of the response."""
    proxy = await build(idle_timeout_s=0.5)
    first = calls(0)

    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(first)
        while not call.left.is_set():
            for part in (b"8\r\n", b": ping\n\n", b"\r\n"):
                await call.raw(part)
                await asyncio.sleep(0.02)

    await proxy.engine(0, script)
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True, **ASKED, **TOOL) as answer:
        body = await answer.content.readuntil(first)
        seen = proxy.server.progress(0, 1)
        body += await answer.content.readuntil(b": ping\n\n")
        assert proxy.server.progress(0, 1) == seen
        body += await answer.content.read()
    assert b"no further byte within 0.5 s" in body


@pytest.mark.parametrize("stream", ["plain", "tools"])
@pytest.mark.parametrize("ping", PINGS)
async def test_comments_of_an_instance_are_no_progress(build: Build, ping: bytes, stream: str) -> None:
    proxy = await build(idle_timeout_s=0.5)
    before = ENGINE.answer(json.dumps({**ASKED, "stream": True}).encode())[:5]
    if stream == "tools":
        before = [calls(number) for number in range(4)]
    await proxy.engine(0, pinging(ping, *before))
    more = TOOL if stream == "tools" else {}
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True, **ASKED, **more) as answer:
        body = await answer.content.readuntil(before[-1])
        seen = proxy.server.progress(0, 1)
        for _ in range(3):  # a client hears them once its stream has begun
            body += await answer.content.readuntil(ping)
        assert proxy.server.progress(0, 1) == seen
        await proxy.engine(1, streams(ENGINE))
        body += await answer.content.read()
    if stream == "plain":
        assert body.endswith(DONE)
        assert proxy.server.readings.stats()["continued"] == 1
    else:
        assert b"no further byte within 0.5 s" in body
        assert DONE not in body


@pytest.mark.parametrize("more", [TOOL, {}])
async def test_a_reset_after_done_is_a_whole_response(proxy: ProxyUnderTest, more: dict[str, object]) -> None:
    async def script(call: Call) -> None:
        await call.start_stream()
        for number in range(3):
            await call.chunk(calls(number))
        await call.chunk(DONE)
        await asyncio.sleep(0.02)
        call.cut()

    await proxy.engine(0, script)
    async with asyncio.timeout(SOON_S):
        body = await read(proxy, stream=True, **ASKED, **more)
    assert body == b"".join(calls(number) for number in range(3)) + DONE
    await until(lambda: proxy.sums()["in_flight"] == 0)
    assert proxy.sums()["completed"] == 1


async def test_the_end_of_the_proxy_after_done_is_a_whole_response(proxy: ProxyUnderTest) -> None:
    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(b"".join(calls(number) for number in range(4)))
        await call.chunk(DONE)
        await call.until_left()

    await proxy.engine(0, script)
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True, **ASKED, **TOOL) as answer:
        await answer.content.readuntil(DONE)
        await proxy.server.stop(0.0)
        assert await answer.content.read() == b""
    assert proxy.sums()["completed"] == 1


BROKEN = (
    b'data: {"id": "x", "choi\xff\n\n',
    b'data: {"id":"x","choices":[{"index":0,"delta":{"content":" wor\n\n',
    b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"\xff"}}]}\n\n',
    b"data: \xff\x00\n\n",
    b"data: {}}\n\n",
    b'ata: {"id":"x"}\n\n',
    b'data: {"id":"x"\n\ndata: {"id":"x"\n\n',
)
IN_ONE = ("alone", "with the one before", "in one read")


def breaks(events: list[bytes], broken: bytes, together: str, go: asyncio.Event) -> Script:
    """A stream that goes on after an event that is no JSON, which comes once it may."""

    async def script(call: Call) -> None:
        await call.start_stream()
        *first, last = events
        for each in first:
            await call.chunk(each)
        await go.wait()
        if together == "with the one before":
            await call.chunk(last + broken)
        elif together == "in one read":
            await call.raw(b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in (last, broken, last)))
        else:
            await call.chunk(last)
            await call.chunk(broken)
        while not call.left.is_set():
            await call.chunk(last)
            await asyncio.sleep(0.01)

    return script


@pytest.mark.parametrize("together", IN_ONE)
@pytest.mark.parametrize("broken", BROKEN)
async def test_a_plain_stream_goes_on_elsewhere_after_an_event_that_is_no_json(
    proxy: ProxyUnderTest, broken: bytes, together: str
) -> None:
    whole = ENGINE.answer(json.dumps({**ASKED, "stream": True}).encode())
    go = asyncio.Event()
    await proxy.engine(0, breaks(whole[:6], broken, together, go))
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True, **ASKED) as answer:
        body = await answer.content.readuntil(whole[4])
        await proxy.engine(1, streams(ENGINE))
        go.set()
        body += await answer.content.read()
    texts = [json.loads(part[6:])["choices"][0]["delta"]["content"] for part in body.split(b"\n\n")[:-2]]
    assert "".join(texts) == "".join(ENGINE.tokens)
    assert body.endswith(DONE)
    assert proxy.server.readings.stats()["continued"] == 1


# Nothing is parsed of an event whose data begins and ends as an object does (sse/fast_path.py).
CUT = tuple(broken for broken in BROKEN if not (broken.startswith(b"data: {") and broken.endswith(b"}\n\n")))


@pytest.mark.parametrize("together", IN_ONE)
@pytest.mark.parametrize("broken", CUT)
async def test_any_other_stream_ends_honestly_at_an_event_that_is_no_json(
    proxy: ProxyUnderTest, broken: bytes, together: str
) -> None:
    go = asyncio.Event()
    await proxy.engine(0, breaks([calls(number) for number in range(6)], broken, together, go))
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True, **ASKED, **TOOL) as answer:
        body = await answer.content.readuntil(calls(4))
        go.set()
        body += await answer.content.read()
    *passed, error, rest = body.split(b"\n\n")
    assert [part + b"\n\n" for part in passed] == [calls(number) for number in range(6)]
    assert "not JSON" in json.loads(error.removeprefix(b"data: "))["error"]["message"]
    assert rest == b""
    assert proxy.sums()["failed"] == 1


async def test_a_first_event_that_is_no_json_is_asked_for_elsewhere(proxy: ProxyUnderTest) -> None:
    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(BROKEN[0])
        await call.until_left()

    bad = await proxy.engine(0, script)
    await proxy.engine(1, streams(ENGINE))
    for _ in range(3):
        async with asyncio.timeout(SOON_S):
            assert (await read(proxy, stream=True, **ASKED)).endswith(DONE)
    assert bad.calls
    assert proxy.server.readings.stats()["retried"] == len(bad.calls)


@pytest.mark.parametrize("last", [b'data: {"type":"response.comp', b'event: x\ndata: {"type"'])
async def test_half_an_event_is_no_end_of_a_stream(proxy: ProxyUnderTest, last: bytes) -> None:
    """Of a route without [DONE] a clean end of the body is an end."""
    first = b'event: response.output_text.delta\ndata: {"delta":"x"}\n\n'

    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(first)
        await call.chunk(last)
        await call.end_stream()

    await proxy.engine(0, script)
    asked = json.dumps({"model": "m", "input": "x", "stream": True})
    async with asyncio.timeout(SOON_S), proxy.client.post("/v1/responses", data=asked) as answer:
        body = await answer.read()
    assert body.startswith(first + b"event: response.failed\ndata: ")
    told = json.loads(body.removeprefix(first + b"event: response.failed\ndata: "))
    assert "not JSON" in told["response"]["error"]["message"]
    assert proxy.sums()["failed"] == 1


async def test_streams_of_other_data_pass(proxy: ProxyUnderTest) -> None:
    """An engine of the operator's own may send anything."""
    said = b"data: words\n\nid: 4\ndata: more\ndata: of them\n\n" * 2 + DONE

    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(said)
        await call.end_stream()

    await proxy.engine(0, script)
    async with asyncio.timeout(SOON_S):
        assert await read(proxy, stream=True, **ASKED) == said
