"""The whole host is frozen for longer than every time-out: nobody is at fault, and nothing fails."""

from __future__ import annotations

import asyncio
import json
import time

from support.fakes import SOON_S
from support.proxy_under_test import Build, until
from support.scripted_engine import DONE, Call, event

FROZEN_S = 3.5
SHORT = dict.fromkeys(
    (
        "queue_timeout_s", "park_timeout_s", "first_token_timeout_s", "answer_timeout_s", "idle_timeout_s",
        "hung_timeout_s", "header_timeout_s", "body_timeout_s", "client_keepalive_s",
    ),
    2.0,
)  # fmt: skip
PLACES = 8


async def test_no_time_out_counts_the_time_of_a_freeze(build: Build) -> None:
    proxy = await build(**SHORT, body_min_bytes_per_s=50)
    thawed = asyncio.Event()
    streams = 0

    async def answer(call: Call) -> None:
        nonlocal streams
        asked = json.loads(call.body)
        if not asked["stream"]:
            await thawed.wait()
            await call.json({"id": "x", "choices": [{"message": {"content": "hi"}}]})
            return
        streams += 1
        await call.start_stream()
        if streams % 2:
            await call.chunk(event("one"))
        await thawed.wait()
        await call.chunk(event("two"))
        await call.chunk(DONE)
        await call.end_stream()

    engine = await proxy.engine(0, answer)

    async def ask(*, stream: bool) -> tuple[int, str]:
        async with proxy.chat(stream=stream) as response:
            return response.status, await response.text()

    asked = [asyncio.create_task(ask(stream=bool(number % 4))) for number in range(PLACES + 2)]
    body = json.dumps({"model": "m", "messages": [], "stream": False, "user": "x" * 1000}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
    uploads = [
        await proxy.raw(head),
        await proxy.raw(head + b"Content-Length: %d\r\n\r\n" % len(body) + body[:500]),
    ]
    await until(lambda: len(engine.calls) == PLACES and proxy.sums()["accepted"] >= PLACES + 2)
    time.sleep(FROZEN_S)  # noqa: ASYNC251  this process is the whole host
    # A few looks of the proxy's clock come before anything moves.
    await asyncio.sleep(0.6)
    thawed.set()
    uploads[0][1].write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
    uploads[1][1].write(body[500:])
    async with asyncio.timeout(SOON_S):
        for status, text in await asyncio.gather(*asked):
            assert status == 200, text
            assert "hi" in text or text.endswith("[DONE]\n\n"), text
        for reader, _ in uploads:
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    assert len(engine.calls) == PLACES + 2 + len(uploads), "nothing was tried again"
    assert proxy.suspects == []
