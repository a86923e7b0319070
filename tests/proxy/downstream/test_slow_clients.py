"""Clients that take their answer slowly, or not at all, after it was handed to their connection."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.certificates import certify
from support.fakes import SOON_S
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import DONE, Call, FakeEngine, Script, event

from launcher.proxy.downstream import clients, connection, listener
from launcher.proxy.http1.chunks import ChunkedDecoder

ANSWER = b'{"x":"' + b"x" * 1_000_000 + b'"}'
LISTENERS = ("tcp", "unix", "tls")
WAYS = {"kept": ("1.1", ""), "close": ("1.1", "Connection: close\r\n"), "HTTP/1.0": ("1.0", "")}


@dataclass
class Slow:
    """A client with a blocking socket, as most have, that has asked and reads when told to."""

    sock: socket.socket

    async def read(self, pause_s: float, most: int = 1 << 30) -> int:
        """Bytes until the connection ends, or `most`; 64 KiB at most at a time, with pauses."""
        return await asyncio.to_thread(self._read, pause_s, most)

    def _read(self, pause_s: float, most: int) -> int:
        got = 0
        with suppress(OSError):
            while got < most and (data := self.sock.recv(65536)):
                got += len(data)
                time.sleep(pause_s * len(data) / 65536)
        return got


def connect(endpoint: str) -> socket.socket:
    """A connected socket, under TLS where the proxy has it; its kernel buffer is small."""
    scheme, _, place = endpoint.partition("://" if "://" in endpoint else ":")
    sock = socket.socket(socket.AF_UNIX if scheme == "unix" else socket.AF_INET)
    sock.settimeout(SOON_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    sock.connect(place if scheme == "unix" else ("127.0.0.1", int(place.rpartition(":")[2])))
    if scheme != "https":
        return sock
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(sock)


async def ask(
    build: Build, folder: Path, kind: str, way: str, **settings: object
) -> tuple[ProxyUnderTest, Slow]:
    """A proxy, and a client whose answer has been handed to its connection."""
    path = folder / "proxy.sock"
    if kind == "tls":
        chain, key = certify(folder, "cert")
        settings |= {"tls_certificate": str(chain), "tls_key": str(key)}
    proxy = await build(listen=(f"unix:{path}" if kind == "unix" else "127.0.0.1:0",), **settings)

    async def script(call: Call) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(
            ANSWER
        )
        await call.raw(head + ANSWER)

    await proxy.engine(0, script)
    sock = await asyncio.to_thread(connect, proxy.server.endpoint)
    proxy.stack.callback(sock.close)
    body = b'{"model":"m"}'

    def request(version: str, field: str) -> bytes:
        head = f"POST /v1/completions HTTP/{version}\r\nHost: h\r\n{field}Content-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    await asyncio.to_thread(sock.sendall, request(*WAYS[way]))
    await until(lambda: proxy.sums()["completed"] == 1)
    return proxy, Slow(sock)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is up long before a slow client has all of its answer, of which the kernel holds little."""
    bind = listener._bind_tcp

    def bind_small(*where: Any, both: bool) -> socket.socket:
        sock = bind(*where, both=both)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        return sock

    monkeypatch.setattr(listener, "_bind_tcp", bind_small)
    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    monkeypatch.setattr(clients, "FLUSH_S", 0.05)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("kind", LISTENERS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_slow_client_gets_all_of_its_answer(
    build: Build, tmp_path: Path, kind: str, way: str
) -> None:
    """Then its connection ends: at once where it said so, and when it has been idle."""
    proxy, slow = await ask(build, tmp_path, kind, way, client_keepalive_s=0.05, client_stall_timeout_s=5)
    async with asyncio.timeout(SOON_S):
        got = await slow.read(0.02)
    assert got > len(ANSWER)
    assert proxy.sums()["completed"] == 1


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("kind", LISTENERS)
async def test_a_stop_leaves_slow_clients_the_rest_of_its_grace(
    build: Build, tmp_path: Path, kind: str
) -> None:
    proxy, slow = await ask(build, tmp_path, kind, "kept")
    stop = asyncio.create_task(proxy.server.stop(SOON_S))
    async with asyncio.timeout(SOON_S / 2):
        assert await slow.read(0.02) > len(ANSWER)
        slow.sock.close()
        await stop


@pytest.mark.usefixtures("hasty")
async def test_a_stop_does_not_wait_for_idle_clients(build: Build, tmp_path: Path) -> None:
    proxy, slow = await ask(build, tmp_path, "tls", "kept")
    await slow.read(0, len(ANSWER))
    async with asyncio.timeout(SOON_S / 2):
        await proxy.server.stop(SOON_S)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("kind", LISTENERS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_client_that_reads_nothing_is_dropped(
    build: Build, tmp_path: Path, kind: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not before its time; the log says that an answer was lost which counts as completed."""
    caplog.set_level(logging.INFO, "launcher.proxy.downstream.connection")
    started = asyncio.get_running_loop().time()  # before its time begins, however long asking takes
    proxy, slow = await ask(build, tmp_path, kind, way, client_keepalive_s=0.05, client_stall_timeout_s=0.5)
    await until(lambda: "client did not take" in caplog.text)
    assert asyncio.get_running_loop().time() - started > 0.3
    (line,) = [record for record in caplog.records if "client did not take" in record.getMessage()]
    assert len(line.__dict__["request_id"]) > 20
    assert 0 < await slow.read(0) < len(ANSWER)
    assert proxy.sums()["completed"] == 1
    assert proxy.balanced()


@pytest.mark.usefixtures("hasty")
async def test_a_stop_does_not_outlast_its_grace(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "launcher.proxy.downstream.connection")
    proxy, slow = await ask(build, tmp_path, "unix", "kept")
    async with asyncio.timeout(SOON_S / 2):
        await proxy.server.stop(0.3)
    assert "client did not take" in caplog.text
    assert await slow.read(0) < len(ANSWER)


# --- what they hold of instances, and of memory ----------------------------------------------------

SEQS = 8  # of an engine of `ProxyUnderTest`
EVENTS = 40
EVENT = event("x" * 20_000)


async def stream_of_events(call: Call) -> None:
    """More than the kernel holds of a UNIX socket; to "next" a small answer."""
    if b"next" in call.body:
        await call.json({"ok": 1})
        return
    await call.start_stream()
    for _ in range(EVENTS):
        await call.chunk(EVENT)
    await call.chunk(DONE)
    await call.end_stream()


async def endless_stream(call: Call) -> None:
    if b"next" in call.body:
        await call.json({"ok": 1})
        return
    await call.start_stream()
    while True:
        await call.chunk(EVENT)


def body_of(answer: bytes) -> bytes:
    return ChunkedDecoder().feed(answer.partition(b"\r\n\r\n")[2])


def request_of(user: str, **more: object) -> bytes:
    body = json.dumps({"model": "m", "messages": [], "user": user, **more}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@dataclass
class Held:
    """A proxy, an instance that runs SEQS requests, and as many clients that have asked and do not read."""

    proxy: ProxyUnderTest
    engine: FakeEngine
    clients: list[socket.socket]

    async def next_one(self) -> bytes:
        """One more request, by a client that reads."""
        sock = await asyncio.to_thread(connect, self.proxy.server.endpoint)
        try:
            await asyncio.to_thread(sock.sendall, request_of("next"))
            return await asyncio.to_thread(sock.recv, 65536)
        finally:
            sock.close()

    def given_up(self) -> dict[str, int]:
        return dict(self.proxy.server.slow_clients.given_up)


async def held(
    build: Build, folder: Path, script: Script, asks: str = "slow", count: int = SEQS, **settings: object
) -> Held:
    proxy = await build(listen=(f"unix:{folder / 'front.sock'}",), **settings)
    engine = await proxy.engine(0, script)
    clients = []
    for _ in range(count):
        sock = await asyncio.to_thread(connect, proxy.server.endpoint)
        proxy.stack.callback(sock.close)
        await asyncio.to_thread(sock.sendall, request_of(asks, stream=True))
        clients.append(sock)
    await until(lambda: len(engine.calls) == min(count, SEQS))
    return Held(proxy, engine, clients)


async def test_instances_are_free_while_clients_do_not_read(build: Build, tmp_path: Path) -> None:
    """The rest of their answers is kept for them, and they get all of it, byte for byte."""
    made = await held(build, tmp_path, stream_of_events)
    async with asyncio.timeout(SOON_S):
        assert (await made.next_one()).startswith(b"HTTP/1.1 200 ")
    await until(lambda: made.proxy.sums()["completed"] == SEQS + 1)
    assert made.proxy.server.slow_clients.bytes > 0
    assert "\nnuma_launcher_slow_clients 8.0\n" in await made.proxy.server.metrics_page()
    for sock in made.clients:
        got = b""
        while not got.endswith(b"\r\n0\r\n\r\n"):
            got += await asyncio.to_thread(sock.recv, 1 << 20)
        assert body_of(got) == EVENT * EVENTS + DONE
    await until(lambda: not made.proxy.server.slow_clients.bytes)
    assert made.given_up() == {}


@pytest.mark.parametrize("drop_s", [None, 0.01], ids=["nothing", "drops"])
@pytest.mark.parametrize("buffer", [0, 1 << 20], ids=["no buffer", "full buffer"])
async def test_a_client_that_blocks_an_instance_is_dropped_when_others_wait(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture, buffer: int, drop_s: float | None
) -> None:
    caplog.set_level(logging.INFO, "launcher.access")
    made = await held(
        build, tmp_path, endless_stream, slow_client_buffer_bytes=buffer, client_grace_s=0.5,
        client_min_bytes_per_s=10_000,
    )  # fmt: skip
    stop = threading.Event()

    def trickle(sock: socket.socket) -> None:
        with suppress(OSError):
            while drop_s is not None and not stop.wait(drop_s) and sock.recv(1):
                pass

    readers = [threading.Thread(target=trickle, args=(sock,)) for sock in made.clients]
    for reader in readers:
        reader.start()
    try:
        async with asyncio.timeout(SOON_S):
            assert (await made.next_one()).startswith(b"HTTP/1.1 200 ")
    finally:
        stop.set()
    for sock in made.clients:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    for reader in readers:
        reader.join(SOON_S)
    assert made.given_up().get("waiting", 0) + made.given_up().get("memory", 0) > 0
    assert "timeout" not in made.given_up()
    assert made.proxy.balanced()
    assert made.proxy.suspects == []
    lines = [record.getMessage() for record in caplog.records if record.name == "launcher.access"]
    assert any("its client took fewer than 10000 bytes a second for 0.5 s while " in line for line in lines)


async def test_no_client_is_dropped_while_no_request_waits(build: Build, tmp_path: Path) -> None:
    made = await held(build, tmp_path, endless_stream, slow_client_buffer_bytes=0, client_grace_s=0.1)
    await asyncio.sleep(0.6)
    assert made.given_up() == {}
    assert made.proxy.sums()["in_flight"] == SEQS


async def test_a_slow_client_above_the_rate_gets_all_of_its_answer_while_others_wait(
    build: Build, tmp_path: Path
) -> None:
    made = await held(
        build, tmp_path, stream_of_events, slow_client_buffer_bytes=0, client_grace_s=0.5,
        client_min_bytes_per_s=20_000,
    )  # fmt: skip
    waiting = asyncio.create_task(made.next_one())
    slow, *others = made.clients
    got = b""
    async with asyncio.timeout(SOON_S):
        while not got.endswith(b"\r\n0\r\n\r\n"):  # 200,000 bytes a second at most, 4 s for all of it
            got += await asyncio.to_thread(slow.recv, 10_000)
            await asyncio.sleep(0.05)
        assert (await waiting).startswith(b"HTTP/1.1 200 ")
    assert body_of(got) == EVENT * EVENTS + DONE
    assert len(others) >= made.given_up()["waiting"] > 0


async def test_the_memory_for_slow_clients_is_bounded(build: Build, tmp_path: Path) -> None:
    """Who takes nothing of it is given up when it is full; the instance waits until then."""
    most = 1 << 20
    made = await held(build, tmp_path, endless_stream, slow_client_buffer_bytes=most, client_grace_s=60.0)
    slow = made.proxy.server.slow_clients
    await until(lambda: slow.bytes > most / 4)
    for _ in range(30):
        await asyncio.sleep(0.02)
        assert slow.bytes < 2 * most
    assert sum(client.buffered for client in made.proxy.server._clients) < 2 * most
    assert made.given_up() == {}


async def test_no_further_request_is_begun_for_a_client_that_does_not_read(
    build: Build, tmp_path: Path
) -> None:
    """Else one connection would hold an answer for each of the requests that it sent ahead."""

    async def large(call: Call) -> None:
        await call.json({"x": "x" * 900_000})

    proxy = await build(listen=(f"unix:{tmp_path / 'front.sock'}",))
    engine = await proxy.engine(0, large)
    sock = await asyncio.to_thread(connect, proxy.server.endpoint)
    proxy.stack.callback(sock.close)
    asks = 20
    await asyncio.to_thread(sock.sendall, request_of("ahead") * asks)
    await until(lambda: proxy.sums()["completed"] == 1)
    await asyncio.sleep(0.2)
    assert len(engine.calls) == 1
    got = 0
    async with asyncio.timeout(SOON_S):
        while got < asks * 900_000:
            got += len(await asyncio.to_thread(sock.recv, 1 << 20))
    assert len(engine.calls) == asks
