"""Comments that keep a silent stream's connection alive, before its first event and after it."""

from __future__ import annotations

import asyncio
import json

import pytest
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import DONE, Call, Script, event

pytestmark = pytest.mark.virtual_time

COMMENT = b": waiting\n\n"
TOOLS = {"tools": [{"type": "function"}]}
DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n'
COMPLETED = b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"resp_1"}}\n\n'
BLOCK = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n'
STOPPED = b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
WORD = event("a")
TOOL = b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"id":"t"}]},"finish_reason":null}]}\n\n'
Part = bytes | float


def says(*parts: Part) -> Script:
    """Chunks, and seconds of silence between them."""

    async def answer(call: Call) -> None:
        await call.start_stream()
        for part in parts:
            if isinstance(part, bytes):
                await call.chunk(part)
            else:
                await asyncio.sleep(part)
        await call.end_stream()

    return answer


async def ask(proxy: ProxyUnderTest, path: str, **more: object) -> bytes:
    body = {"model": "m", "stream": True, "messages": [], "input": "x", **more}
    async with proxy.client.post(path, data=json.dumps(body)) as got:
        return await got.read()


@pytest.mark.parametrize(
    ("path", "word", "end"),
    [
        ("/v1/chat/completions", WORD, (DONE,)),
        ("/v1/chat/completions", TOOL, (DONE,)),
        ("/v1/responses", DELTA, (COMPLETED,)),
        ("/v1/messages", BLOCK, (STOPPED, STOP)),
    ],
    ids=["chat", "tools", "responses", "messages"],
)
async def test_comments_go_whenever_nothing_went_for_the_interval(
    build: Build, path: str, word: bytes, end: tuple[bytes, ...]
) -> None:
    """Also while events take the fast path, and not beside events that flow."""
    proxy = await build(keepalive_comment_s=10.0)
    flow: list[Part] = [2.0, word] * 20
    await proxy.engine(0, says(25.0, word, 15.0, word, *flow, 8.0, word, 35.0, *end))
    expected = COMMENT * 2 + word + COMMENT + word + word * 20 + word + COMMENT * 3 + b"".join(end)
    assert await ask(proxy, path) == expected
    assert proxy.sums()["completed"] == 1


async def test_no_comment_goes_within_an_event_or_behind_the_last(build: Build) -> None:
    """An event of more than a mebibyte passes as it comes."""
    proxy = await build(keepalive_comment_s=10.0)
    large = event("x" * (2 << 20))
    cut = 3 << 19
    await proxy.engine(0, says(WORD, large[:cut], 35.0, large[cut:], 15.0, DONE, 35.0))
    assert await ask(proxy, "/v1/chat/completions", **TOOLS) == WORD + large + COMMENT + DONE


async def test_no_comment_goes_into_what_is_no_event_stream(build: Build) -> None:
    proxy = await build(keepalive_comment_s=10.0)
    body = b'{"x":"' + b"x" * (2 << 20) + b'"}'

    async def answer(call: Call) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        await call.raw(head % len(body) + body[: 3 << 19])
        await asyncio.sleep(35)
        await call.raw(body[3 << 19 :])

    await proxy.engine(0, answer)
    assert await ask(proxy, "/v1/chat/completions") == body


async def test_no_comment_is_piled_up_for_a_client_that_does_not_read(build: Build) -> None:
    proxy = await build(keepalive_comment_s=10.0, idle_timeout_s=1000.0)
    word = event("x" * 60_000)
    go = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.start_stream()
        for _ in range(200):
            await call.chunk(word)
        await go.wait()
        await call.chunk(DONE)
        await call.end_stream()

    await proxy.engine(0, answer)
    body = b'{"model":"m","stream":true,"tools":[1]}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, _ = await proxy.raw(head.encode() + body)
    await until(lambda: any(client.paused for client in proxy.server._clients))
    await asyncio.sleep(45)
    go.set()
    got = b""
    while not got.endswith(b"0\r\n\r\n"):
        got += await reader.read(1 << 20)
    assert got.count(b"x" * 60_000) == 200
    assert COMMENT not in got
