"""Bodies that come in drops: the time for all of one is bounded, not only its silences."""

from __future__ import annotations

import asyncio
import json

import pytest
from support.fakes import SOON_S
from support.proxy_under_test import Build

HEADS = {
    "length": b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n",
    "chunked": b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n",
}
DROPS = {"length": b"x", "chunked": b"1\r\nx\r\n"}


@pytest.mark.parametrize("framing", HEADS)
async def test_a_body_in_drops_is_given_up(build: Build, framing: str) -> None:
    """Each drop comes long before `body_timeout_s` of silence."""
    proxy = await build(body_timeout_s=0.3, body_min_bytes_per_s=1000)
    reader, writer = await proxy.raw(HEADS[framing])
    answer = asyncio.create_task(reader.read())
    async with asyncio.timeout(SOON_S):
        while not answer.done():
            writer.write(DROPS[framing])
            await asyncio.sleep(0.02)
    head, _, body = (await answer).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert "fewer than 1000 a second" in json.loads(body)["error"]["message"]
    assert proxy.sums() | {"rejected": 1, "in_flight": 0} == proxy.sums()


@pytest.mark.parametrize("framing", HEADS)
async def test_a_large_beginning_buys_no_time(build: Build, framing: str) -> None:
    """Else 50 KB at once would pay for 50 s of drops, and 64 MiB for 18 hours."""
    proxy = await build(body_timeout_s=0.3, body_min_bytes_per_s=1000)
    beginning = b"x" * 50_000 if framing == "length" else b"c350\r\n" + b"x" * 50_000 + b"\r\n"
    reader, writer = await proxy.raw(HEADS[framing] + beginning)
    answer = asyncio.create_task(reader.read())
    drops = 0
    async with asyncio.timeout(SOON_S):
        while not answer.done():
            writer.write(DROPS[framing])
            drops += 1
            await asyncio.sleep(0.02)
    assert (await answer).startswith(b"HTTP/1.1 408 ")
    assert drops < 1000, "20 s of them"


async def test_silence_is_called_silence(build: Build) -> None:
    proxy = await build(body_timeout_s=0.2, body_min_bytes_per_s=1)
    reader, writer = await proxy.raw(HEADS["length"] + b"x" * 1000)
    async with asyncio.timeout(SOON_S):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"no byte of the body came for 0.2 s" in answer


async def test_a_slow_body_above_the_rate_comes_whole(build: Build) -> None:
    """It takes longer than `body_timeout_s`, and more than the least rate comes."""
    proxy = await build(body_timeout_s=0.9, body_min_bytes_per_s=1000)
    engine = await proxy.engine(0)
    body = json.dumps({"model": "m", "prompt": "x" * 40_000}).encode()
    reader, writer = await proxy.raw(HEADS["length"].replace(b"100000", b"%d" % len(body)))
    for at in range(0, len(body), 2000):
        writer.write(body[at : at + 2000])
        await asyncio.sleep(0.05)
    async with asyncio.timeout(SOON_S):
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
    writer.close()
    assert engine.calls[0].body == body
