"""What clients and pages may hold of the process's file descriptors: counted from the accept, given back."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest
from support.certificates import certify
from support.fakes import SOON_S
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.raw_engine import raw_engine
from support.scripted_engine import Call, answer_chat

from launcher.proxy.upstream import pool

MOST = 20


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - numbers, no paths


def refused(proxy: ProxyUnderTest) -> int:
    return proxy.server.counters.connections_refused


async def secure_proxy(
    build: Build, folder: Path, **settings: object
) -> tuple[ProxyUnderTest, tuple[str, int]]:
    chain, key = certify(folder, "cert")
    proxy = await build(tls_certificate=str(chain), tls_key=str(key), most_clients=MOST, **settings)
    host, _, port = proxy.server.endpoint.removeprefix("https://").rpartition(":")
    return proxy, (host, int(port))


async def ask_securely(address: tuple[str, int], path: str) -> int:
    """The status of a page."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(*address, ssl=context)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


async def test_tls_connections_count_before_their_handshake(build: Build, tmp_path: Path) -> None:
    """And when their time is up, others have their place."""
    proxy, address = await secure_proxy(build, tmp_path, header_timeout_s=5.0)
    silent = [socket.create_connection(address) for _ in range(2 * MOST)]
    for sock in silent:
        proxy.stack.callback(sock.close)
    async with asyncio.timeout(SOON_S):
        await until(lambda: refused(proxy) == MOST)
        with pytest.raises(OSError):  # noqa: PT011 - reset or end of file, as the kernel has it
            await ask_securely(address, "/health")
        while True:
            try:
                assert await ask_securely(address, "/health") == 503
                break
            except OSError:
                await asyncio.sleep(0.05)
    await until(lambda: len(proxy.server._clients) == 0)
    assert "\nnuma_launcher_connections 0.0\n" in await proxy.server.metrics_page()


async def test_as_many_tls_clients_as_may_connect(build: Build, tmp_path: Path) -> None:
    """One that shakes hands is not counted twice."""
    proxy, address = await secure_proxy(build, tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with asyncio.timeout(SOON_S):
        clients = [await asyncio.open_connection(*address, ssl=context) for _ in range(MOST)]
        for reader, writer in clients:
            writer.write(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
            assert await reader.readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
    assert refused(proxy) == 0
    for _, writer in clients:
        writer.close()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"])
async def test_no_tls_and_half_of_it_end(build: Build, tmp_path: Path, said: bytes) -> None:
    """A client that speaks no TLS is closed at once, one that stops in the middle after `header_timeout_s`."""
    _, address = await secure_proxy(build, tmp_path, header_timeout_s=0.3)
    reader, writer = await asyncio.open_connection(*address)
    writer.write(said)
    async with asyncio.timeout(SOON_S):
        await reader.read()
    writer.close()
    assert await ask_securely(address, "/health") == 503


async def test_a_stop_ends_handshakes(build: Build, tmp_path: Path) -> None:
    proxy, address = await secure_proxy(build, tmp_path)
    reader, writer = await asyncio.open_connection(*address)
    await until(lambda: len(proxy.server._clients) == 1)
    async with asyncio.timeout(SOON_S):
        await proxy.server.stop(0)
        assert await reader.read() == b""
    writer.close()


async def test_a_request_behind_the_handshakes_last_bytes(build: Build, tmp_path: Path) -> None:
    """They arrive together: TLS 1.3's client may send at once."""
    _, address = await secure_proxy(build, tmp_path)

    def ask() -> bytes:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        end = context.wrap_bio(incoming, outgoing)
        with socket.create_connection(address, timeout=SOON_S) as sock:
            while True:
                try:
                    end.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    sock.sendall(outgoing.read())
                    incoming.write(sock.recv(65536))
            end.write(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
            sock.sendall(outgoing.read())  # its Finished, and the request
            while True:
                try:
                    return end.read(65536)
                except ssl.SSLWantReadError:
                    incoming.write(sock.recv(65536))

    assert (await asyncio.to_thread(ask)).startswith(b"HTTP/1.1 503 ")


async def test_pages_cost_no_descriptors(proxy: ProxyUnderTest) -> None:
    """However many want one at once: those of the connections that ask, and of one look at the instances."""
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await answer_chat(call)

    engine = await proxy.engine(0, script, metrics=script)
    before = open_files()
    asks = [
        await proxy.raw(b"GET %b HTTP/1.1\r\nHost: h\r\n\r\n" % path)
        for path in (b"/metrics", b"/v1/models", b"/v1/models/m") * 20
    ]
    await until(lambda: len(engine.calls) >= 1)
    assert open_files() - before <= 2 * len(asks) + 8  # both ends of each are ours, and of two to the engine
    go.set()
    for reader, writer in asks:
        async with asyncio.timeout(SOON_S):
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()
    await until(lambda: open_files() <= before)


async def test_heads_of_pages_have_no_body(proxy: ProxyUnderTest) -> None:
    await proxy.engine(0)
    for path in ("/health", "/metrics", "/v1/models"):
        async with proxy.client.head(path) as answer:
            assert (answer.status, await answer.read()) == (200, b"")
            assert int(answer.headers["Content-Length"]) > 0


async def test_a_client_that_leaves_ends_its_page(proxy: ProxyUnderTest) -> None:
    async def script(call: Call) -> None:
        await call.until_left()

    engine = await proxy.engine(0, script)
    _, writer = await proxy.raw(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n")
    await until(lambda: bool(engine.calls))
    writer.transport.abort()
    await until(lambda: not [task for task in asyncio.all_tasks() if task.get_name() == "page"])


async def test_idle_connections_to_an_instance_are_closed(
    proxy: ProxyUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a burst's, also while later requests reuse the youngest again and again."""
    monkeypatch.setattr(pool, "REUSE_S", 0.3)
    open_now: set[asyncio.StreamWriter] = set()
    together = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_now.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                await together.wait()
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
                )
        finally:
            open_now.discard(writer)

    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.post("/v1/completions", data=b'{"model":"m"}') as answer:
            assert answer.status == 200

    await raw_engine(proxy, serve)
    burst = asyncio.gather(*(ask(proxy.client) for _ in range(8)))
    await until(lambda: len(open_now) == 8)
    together.set()
    await burst
    async with asyncio.timeout(SOON_S):
        while len(open_now) > 1:
            await ask(proxy.client)
            await asyncio.sleep(0.02)
