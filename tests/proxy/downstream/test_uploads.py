"""Bodies that many clients send at once: memory, keys and time hold before they are read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.keys import new_key
from support.proxy_under_test import Build, ProxyUnderTest, until

from launcher.proxy.openai.json_reader import JsonReader

MIB = 1 << 20
ROUTE = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


def metric(page: str, name: str) -> float:
    return float(page.partition(f"\nnuma_launcher_{name} ")[2].partition("\n")[0])


async def page_of(proxy: ProxyUnderTest) -> str:
    async with proxy.client.get("/metrics") as answer:
        return await answer.text()


def body_of(size: int) -> bytes:
    before, after = b'{"model":"m","messages":[{"role":"user","content":"', b'"}]}'
    return before + b"x" * (size - len(before) - len(after)) + after


async def answered(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split()[1]), head


async def test_bodies_wait_for_memory_and_all_complete(build: Build) -> None:
    """Twelve of 3 MiB where there is room for two and one more: each stops half-way, then sends the rest."""
    proxy = await build(max_body_bytes=4 * MIB, upload_max_bytes=8 * MIB)
    await proxy.engine(0)
    body = body_of(3 * MIB)
    half = len(body) // 2
    clients = [await proxy.raw(ROUTE + b"Content-Length: %d\r\n\r\n" % len(body)) for _ in range(12)]
    for _, writer in clients:
        writer.write(body[:half])
    await until(lambda: proxy.server.upload_memory.waiting > 4)
    assert proxy.server.upload_memory.used <= 8 * MIB
    page = await page_of(proxy)
    assert metric(page, "upload_bytes") <= 8 * MIB
    assert metric(page, "uploads_waiting") > 4
    for _, writer in clients:
        writer.write(body[half:])
    for reader, _ in clients:
        assert (await answered(reader))[0] == 200
    assert proxy.server.upload_memory.used == proxy.server.upload_memory.waiting == 0


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 3145728\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n300000\r\n"]
)
async def test_a_body_that_waits_in_vain_gets_503(build: Build, framing: bytes) -> None:
    proxy = await build(max_body_bytes=4 * MIB, upload_max_bytes=4 * MIB, upload_wait_s=0.2)
    await proxy.engine(0)
    body = body_of(3 * MIB)
    _, holder = await proxy.raw(ROUTE + b"Content-Length: %d\r\n\r\n" % len(body) + body[:MIB])
    await until(lambda: proxy.server.upload_memory.used > 0)
    reader, writer = await proxy.raw(ROUTE + framing + body[: MIB // 2])
    status, head = await answered(reader)
    assert status == 503
    assert b"retry-after: " in head.lower()
    async with proxy.chat() as answer:  # a small one waits for nobody
        assert answer.status == 200
    assert metric(await page_of(proxy), "uploads_refused_total") == 1
    holder.close()
    writer.close()
    await until(lambda: proxy.server.upload_memory.used == 0)
    assert proxy.balanced()


async def test_waiting_bodies_are_bounded(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds what came with its head; the next one is told at once."""
    monkeypatch.setattr("launcher.proxy.downstream.uploads.MAX_WAITING", 2)
    proxy = await build(max_body_bytes=4 * MIB, upload_max_bytes=4 * MIB)
    request = ROUTE + b"Content-Length: 3000000\r\n\r\n"
    for count in range(3):
        await proxy.raw(request)
        await until(lambda: proxy.server.upload_memory.waiting == max(0, count))  # noqa: B023
    reader, _ = await proxy.raw(request)
    assert (await answered(reader))[0] == 503
    assert proxy.server.upload_memory.waiting == 2


async def test_an_internal_error_in_a_large_body_ends_its_request_only(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = await build()
    await proxy.engine(0)
    monkeypatch.setattr(JsonReader, "feed", lambda *_: 1 / 0)
    body = body_of(3 * MIB)
    reader, writer = await proxy.raw(ROUTE + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert (await answered(reader))[0] == 502
    assert "ZeroDivisionError" in caplog.text
    writer.close()
    async with proxy.chat() as answer:
        assert answer.status == 200
    await until(lambda: proxy.server.upload_memory.used == 0)
    assert proxy.balanced()


async def test_a_client_that_leaves_gives_its_memory_back(build: Build) -> None:
    proxy = await build(max_body_bytes=4 * MIB, upload_max_bytes=4 * MIB)
    await proxy.engine(0)
    body = body_of(3 * MIB)
    request = ROUTE + b"Content-Length: %d\r\n\r\n" % len(body)
    _, leaver = await proxy.raw(request + body[:MIB])
    await until(lambda: proxy.server.upload_memory.used > 0)
    reader, waiter = await proxy.raw(request)
    await until(lambda: proxy.server.upload_memory.waiting == 1)
    leaver.transport.abort()
    waiter.write(body)
    assert (await answered(reader))[0] == 200


async def test_a_client_that_leaves_while_its_body_waits_for_memory(build: Build) -> None:
    """Its connection is not read: the end comes behind bytes that nobody takes."""
    proxy = await build(max_body_bytes=4 * MIB, upload_max_bytes=4 * MIB, upload_wait_s=300.0)
    await proxy.engine(0)
    body = body_of(3 * MIB)
    request = ROUTE + b"Content-Length: %d\r\n\r\n" % len(body)
    await proxy.raw(request + body[:MIB])
    await until(lambda: proxy.server.upload_memory.used > 0)
    _, leaver = await proxy.raw(request)
    await until(lambda: proxy.server.upload_memory.waiting == 1)
    leaver.write(body[:4096])
    leaver.close()
    await until(lambda: proxy.server.upload_memory.waiting == 0)
    assert proxy.sums()["client_aborted"] == 1


@pytest.mark.parametrize("limit", ["concurrency", "requests_per_minute"])
async def test_a_key_at_its_limit_sends_no_body(build: Build, tmp_path: Path, limit: str) -> None:
    keys = tmp_path / "keys"
    key = new_key(keys, "app", **{limit: 1})
    proxy = await build(api_keys_file=str(keys))
    await proxy.engine(0)
    body = body_of(3 * MIB)
    request = ROUTE + b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n" % (key.encode(), len(body))
    first = await proxy.raw(request + body[:MIB])
    await until(lambda: proxy.server.upload_memory.used > 0)
    others = [await proxy.raw(request + body[:1000]) for _ in range(5)]
    for reader, _ in others:
        status, head = await answered(reader)
        assert status == 429
        assert b"connection: close" in head.lower()
    first[1].write(body[MIB:])
    assert (await answered(first[0]))[0] == 200
    async with proxy.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}) as answer:
        assert answer.status == 200  # a page of our own is no request of its minute
    assert proxy.balanced()


async def test_without_a_key_no_body_is_received(build: Build, tmp_path: Path) -> None:
    new_key(tmp_path / "keys", "app")
    proxy = await build(api_keys_file=str(tmp_path / "keys"))
    reader, _ = await proxy.raw(ROUTE + b"Content-Length: 4000000\r\n\r\n" + b"x" * 100)
    assert (await answered(reader))[0] == 401
    assert proxy.server.upload_memory.used == 0


async def test_a_body_in_any_pieces_arrives_as_it_was_sent(build: Build) -> None:
    """A large one, chunked, with the next request behind it on the connection."""
    proxy = await build()
    engine = await proxy.engine(0)
    body = body_of(5 * MIB)
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in pieces(body, 70_001)) + b"0\r\n\r\n"
    small = json.dumps({"model": "m", "messages": []}).encode()
    plain = ROUTE + b"Content-Length: %d\r\n\r\n" % len(body) + body
    follows = ROUTE + b"Content-Length: %d\r\n\r\n" % len(small) + small
    reader, writer = await proxy.raw(ROUTE + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + plain + follows)
    for _ in range(3):
        status, head = await answered(reader)
        assert status == 200
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.split(b":")[1]))
    assert [call.body for call in engine.calls] == [body, body, small]
    writer.close()


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]
