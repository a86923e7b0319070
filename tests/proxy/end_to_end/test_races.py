"""The worst moments to leave, to die or to lose one's key: nothing is lost, and the sums add up."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace
from support.fakes import SOON_S, looked
from support.keys import new_key
from support.plain_engine import CHAT, QUESTION, PlainEngine
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import DONE, Call

from launcher.base.watched_file import LOOK_EVERY_S
from launcher.keys import key_file

ASKED = {"model": "m", "stream": True, "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]}
WORDS = tuple(f" wörd{n}" for n in range(24))
ENGINE = PlainEngine(CHAT, WORDS)


def request(body: bytes, *lines: str) -> bytes:
    head = [f"POST {CHAT} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


STREAM = request(json.dumps(ASKED).encode())
# More than the proxy reads ahead, and no more than the sockets' buffers hold besides: the end comes right behind it.
AHEAD = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n" * (90_000 // 33)


async def reset(writer: asyncio.StreamWriter) -> None:
    """RST, as of a client that was killed."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def says_and_waits(call: Call) -> None:
    await call.start_stream()
    await call.chunk(b"".join(ENGINE.answer(call.body)[:5]))
    await call.until_left()


@pytest.mark.parametrize("leave", ["fin", "half", "rst"])
@pytest.mark.parametrize("where", ["pause", "park", "cut", "stream", "held", "ahead"])
async def test_a_client_that_leaves(proxy: ProxyUnderTest, leave: str, where: str) -> None:
    """`pause`: between two rounds; `park`: no instance is left; `cut`: its stream is to go on elsewhere; `ahead`: with so
    many requests sent ahead that the proxy reads no more of them."""
    script = {"pause": Call.cut_now, "held": Call.until_left, "ahead": Call.until_left}.get(
        where, says_and_waits
    )
    engine = await proxy.engine(0, script)
    reader, writer = await proxy.raw(STREAM)
    await until(lambda: bool(engine.calls))
    if where == "ahead":
        writer.write(AHEAD)
        await writer.drain()
    if where in {"stream", "cut"}:
        await reader.readuntil(b"word".replace(b"o", "ö".encode()))
    if where in {"cut", "park"}:
        await engine.die()
        proxy.server.remove_upstream(0, 1, "killed")
    if where == "park":
        await until(lambda: proxy.server.readings.stats()["waiting"] == 1)
    if leave == "fin":
        writer.close()
    elif leave == "half":
        writer.write_eof()
    else:
        await reset(writer)
    await until(lambda: proxy.sums()["in_flight"] == 0)
    if where in {"stream", "held", "ahead"}:
        await until(lambda: all(call.left.is_set() for call in engine.calls))
    assert proxy.sums()["client_aborted"] == 1
    assert proxy.balanced()
    assert proxy.server.readings.stats()["waiting"] == 0


async def test_a_revoked_key_finishes_what_it_has_and_gets_no_more(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    secret = new_key(path, "ada")
    proxy = await build(api_keys_file=str(path))
    go = asyncio.Event()

    async def script(call: Call) -> None:
        events = ENGINE.answer(call.body)
        await call.start_stream()
        await call.chunk(events[0] + events[1])
        await go.wait()
        await call.chunk(b"".join(events[2:]))
        await call.end_stream()

    await proxy.engine(0, script)
    bearer = {"Authorization": f"Bearer {secret}"}
    async with proxy.client.post(CHAT, data=json.dumps(ASKED), headers=bearer) as answer:
        await answer.content.readuntil(b"\n\n")
        revoked = "2026-11-22T10:00:00Z"
        key_file.update(str(path), lambda old: tuple(replace(record, revoked=revoked) for record in old))
        await asyncio.to_thread(looked)
        proxy.server._keys.look(asyncio.get_running_loop().time() + LOOK_EVERY_S)
        await asyncio.to_thread(looked)
        async with proxy.client.post(CHAT, data=json.dumps(ASKED), headers=bearer) as late:
            assert late.status == 401
        go.set()
        body = await answer.read()
    assert body.endswith(DONE)
    assert proxy.balanced()
    sums = proxy.server._keys.sums["ada"]
    assert (sums.accepted, sums.in_flight, dict(sums.ended)) == (1, 0, {"completed": 1})
    assert sums.tokens > 0


@pytest.mark.parametrize("step", [1, 1000, 65536, 70_001, 1 << 20])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_16_mib_in_any_pieces(proxy: ProxyUnderTest, step: int, chunked: bool) -> None:
    size = (16 << 20) - 1000 if step > 1 else 5000
    body = json.dumps({"model": "m", "messages": [], "pad": "x" * size}).encode()
    engine = await proxy.engine(0)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: h\r\n"
    framing = (
        "Transfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n"
        if chunked
        else f"Content-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await proxy.raw((head + framing).encode())
    for at in range(0, len(body), step):
        piece = body[at : at + step]
        writer.write(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        await writer.drain()
    if chunked:
        writer.write(b"0\r\nX-Sum: 1\r\nContent-Length: 3\r\n\r\n")
    async with asyncio.timeout(SOON_S):
        answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    (call,) = engine.calls
    assert call.body == body
    assert call.header("X-Sum") is None
    assert call.header("Content-Length") == str(len(body))
    assert call.header("Transfer-Encoding") is None


async def test_requests_sent_ahead_are_answered_in_order_whatever_breaks(proxy: ProxyUnderTest) -> None:
    """Three streams on one connection; the engine of the second one breaks where it can't go on."""
    odd = request(json.dumps({**ASKED, "tools": [{}]}).encode())

    async def script(call: Call) -> None:
        events = ENGINE.answer(call.body)
        await call.start_stream()
        if b"tools" in call.body:
            await call.chunk(events[0] + events[1])
            await asyncio.sleep(0.01)
            call.cut()
            return
        await call.chunk(b"".join(events))
        await call.end_stream()

    await proxy.engine(0, script)
    reader, _ = await proxy.raw(STREAM + odd + STREAM.replace(b"Host: h", b"Host: h\r\nConnection: close"))
    async with asyncio.timeout(SOON_S):
        everything = await reader.read()
    assert everything.count(b"HTTP/1.1 200 OK") == 3
    assert everything.count(DONE) == 2
    assert everything.count(b'{"error":') == 1
    assert proxy.sums() | {"completed": 2, "failed": 1} == proxy.sums()
    assert proxy.balanced()


async def test_hundreds_of_clients_whose_engines_die(build: Build) -> None:
    """Each stream is cut once or more, at any place, by eight engines that do nothing else; each text is exact."""
    proxy = await build(policy="round-robin", queue_max_requests=2000)
    chance = Random(11)  # noqa: S311

    async def script(call: Call) -> None:
        if call.method == "GET":  # our own look at its load
            await call.json({}, 404)
            return
        events = ENGINE.answer(call.body)
        await call.start_stream()
        if chance.random() < 0.25:
            data = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
            await call.raw(data[: chance.randrange(len(data))])
            await asyncio.sleep(0)
            call.cut()
            return
        for at in range(0, len(events), 7):
            await call.chunk(b"".join(events[at : at + 7]))
            await asyncio.sleep(0)
        await call.end_stream()

    for slot in range(8):
        await proxy.engine(slot, script)

    async def one() -> bytes:
        async with proxy.client.post(CHAT, data=json.dumps(ASKED)) as answer:
            return await answer.read()

    bodies = await asyncio.gather(*(one() for _ in range(300)))
    wrong = []
    for body in bodies:
        lines = [line[6:] for line in body.split(b"\n\n") if line.startswith(b"data: {")]
        told = [json.loads(line) for line in lines]
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in told if c.get("choices"))
        ids = {c.get("id") for c in told}
        if text != "".join(WORDS) or not body.endswith(DONE) or body.count(DONE) != 1 or len(ids) != 1:
            wrong.append(body)
    assert not wrong, (len(wrong), wrong[0][-600:])
    assert proxy.sums()["completed"] == 300
    assert proxy.balanced()
