"""Clients that take their answer slowly, or not at all, after it was handed to their connection."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes import SOON_S
from proxy.front_house import Build, House, until
from proxy.scripted_engine import Call
from proxy.test_tls import certify

from launcher.proxy import app, client, listener

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
    """A connected socket, under TLS where the front door has it; its kernel buffer is small."""
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


async def ask(build: Build, folder: Path, kind: str, way: str, **settings: object) -> tuple[House, Slow]:
    """A front door, and a client whose answer has been handed to its connection."""
    path = folder / "door.sock"
    if kind == "tls":
        chain, key = certify(folder, "cert")
        settings |= {"tls_certificate": str(chain), "tls_key": str(key)}
    house = await build(listen=(f"unix:{path}" if kind == "unix" else "127.0.0.1:0",), **settings)

    async def script(call: Call) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(
            ANSWER
        )
        await call.raw(head + ANSWER)

    await house.engine(0, script)
    sock = await asyncio.to_thread(connect, house.door.endpoint)
    house.stack.callback(sock.close)
    body = b'{"model":"m"}'

    def request(version: str, field: str) -> bytes:
        head = f"POST /v1/completions HTTP/{version}\r\nHost: h\r\n{field}Content-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    await asyncio.to_thread(sock.sendall, request(*WAYS[way]))
    await until(lambda: house.sums()["completed"] == 1)
    return house, Slow(sock)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is up long before a slow client has all of its answer, of which the kernel holds little."""
    bind = listener._bind_tcp

    def bind_small(*where: Any) -> socket.socket:
        sock = bind(*where)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        return sock

    monkeypatch.setattr(listener, "_bind_tcp", bind_small)
    monkeypatch.setattr(client, "LINGER_S", 0.05)
    monkeypatch.setattr(app, "LAST_WORDS_S", 0.05)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("kind", LISTENERS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_slow_client_gets_all_of_its_answer(
    build: Build, tmp_path: Path, kind: str, way: str
) -> None:
    """Then its connection ends: at once where it said so, and when it has been idle."""
    house, slow = await ask(build, tmp_path, kind, way, client_keepalive_s=0.05, client_stall_timeout_s=5)
    async with asyncio.timeout(SOON_S):
        got = await slow.read(0.02)
    assert got > len(ANSWER)
    assert house.sums()["completed"] == 1


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("kind", LISTENERS)
async def test_a_stop_leaves_slow_clients_the_rest_of_its_grace(
    build: Build, tmp_path: Path, kind: str
) -> None:
    house, slow = await ask(build, tmp_path, kind, "kept")
    stop = asyncio.create_task(house.door.stop(SOON_S))
    async with asyncio.timeout(SOON_S / 2):
        assert await slow.read(0.02) > len(ANSWER)
        slow.sock.close()
        await stop


@pytest.mark.usefixtures("hasty")
async def test_a_stop_does_not_wait_for_idle_clients(build: Build, tmp_path: Path) -> None:
    house, slow = await ask(build, tmp_path, "tls", "kept")
    await slow.read(0, len(ANSWER))
    async with asyncio.timeout(SOON_S / 2):
        await house.door.stop(SOON_S)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("kind", LISTENERS)
@pytest.mark.parametrize("way", WAYS)
async def test_a_client_that_takes_nothing_is_given_up(
    build: Build, tmp_path: Path, kind: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not before its time; the log says that an answer was lost which counts as completed."""
    caplog.set_level(logging.INFO, "launcher.proxy.client")
    house, slow = await ask(build, tmp_path, kind, way, client_keepalive_s=0.05, client_stall_timeout_s=0.5)
    started = asyncio.get_running_loop().time()
    await until(lambda: "has not taken" in caplog.text)
    assert asyncio.get_running_loop().time() - started > 0.3
    (line,) = [record for record in caplog.records if "has not taken" in record.getMessage()]
    assert len(line.__dict__["request_id"]) > 20
    assert 0 < await slow.read(0) < len(ANSWER)
    assert house.sums()["completed"] == 1
    assert house.balanced()


@pytest.mark.usefixtures("hasty")
async def test_a_stop_does_not_outlast_its_grace(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "launcher.proxy.client")
    house, slow = await ask(build, tmp_path, "unix", "kept")
    async with asyncio.timeout(SOON_S / 2):
        await house.door.stop(0.3)
    assert "has not taken" in caplog.text
    assert await slow.read(0) < len(ANSWER)
