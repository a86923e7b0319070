"""Answers of another shape than the client was promised, and clients that take nothing: who is at fault, and the end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from fakes import SOON_S
from proxy.end_to_end.test_continuation_failures import ENGINE, streams
from proxy.plain_engine import QUESTION
from proxy.proxy_under_test import Build, ProxyUnderTest, until
from proxy.scripted_engine import DONE, Call, answer_chat


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
