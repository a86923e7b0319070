"""Whatever a body holds, and however it comes: the event loop serves everybody else meanwhile.

Measured is the CPU time of the loop's own thread between two looks at /health, 5 ms apart: what other programs on
the machine take is no stall of ours. But the kernel's work for fresh memory is in it, which in a virtual machine takes
from 5 to 100 ms for the same 64 MiB: a stall is what comes back in each of a few trials, and bodies of the largest size may
take what one copy of them takes on this machine besides. Client and engine are threads
with sockets of their own. The loop is uvloop's, the daemon's: asyncio's own transports copy what they send.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from itertools import product
from pathlib import Path

import pytest
import uvloop
from support.budgets import bound, partly_gated

from launcher.base.address import UnixAddress
from launcher.config.schema import Model, Proxy
from launcher.proxy.downstream.uploads import LARGE_BYTES
from launcher.proxy.server import ProxyServer

WORST_S = bound(0.050)
TRIALS = 3
SMALL = LARGE_BYTES - 64  # the most that is looked at when it is whole
LARGE = 16 << 20
MOST = 64 << 20  # [proxy] max_body_bytes as it is shipped
STEP = 1 << 20


pytestmark = pytest.mark.bounded

Body = Callable[[int], bytes]  # of about so many bytes


def filled(before: bytes, unit: bytes, after: bytes) -> Body:
    return lambda size: before + unit * ((size - len(before) - len(after)) // len(unit)) + after


def chunked(unit: bytes) -> Body:
    return lambda size: unit * (size // len(unit)) + b"0\r\n\r\n"


CHAT = b'{"model":"m","messages":[{"role":"user","content":"'
CHAT_END = b'"}]}'
BOUNDARY = b"B" * 67
PART = b"--" + BOUNDARY + b'\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n'

JSONS = {
    "media marks": filled(CHAT, b';base64,\\"', CHAT_END),
    "media keys": filled(b'{"model":"m","messages":["', b'","data":"' + b"A" * 1030, CHAT_END[:1] + b"]}"),
    "quotation marks": filled(CHAT, b'\\"', CHAT_END),
    "escapes": filled(CHAT, b"\\u00e9", CHAT_END),
    "letters": filled(CHAT, "é".encode(), CHAT_END),
    "one picture": filled(b'{"model":"m","messages":[{"image_url":{"url":"data:image/png;base64,', b"A", b'"}}]}'),
    "numbers": filled(b'{"model":"m","messages":[0', b",1", b"]}"),
    "small strings": filled(b'{"model":"m","messages":[0', b',""', b"]}"),
    "small arrays": filled(b'{"model":"m","messages":[0', b",[]", b"]}"),
    "small arrays, late": lambda size: (
        filled(b'{"model":"m","messages":[0', b",1", b"")(size - (120 << 10)) + b",[]" * (40 << 10) + b"]}"
    ),
    "small objects": filled(b'{"model":"m","user":[0', b',{"":0}', b"]}"),
    "one name": filled(b'{"model":"m"', b',"n":0', b"}"),
    "a long model": filled(b'{"model":"', b"m", b'"}'),
    "long tools": filled(b'{"model":"m","messages":[],"tools":["', b"t", b'"]}'),
    "deep": filled(b'{"model":"m","messages":', b"[", b"}"),
    "white space": filled(b'{"model":"m",', b" ", b'"messages":[]}'),
}  # fmt: skip
FORMS = {
    "parts": filled(b"", PART, b"--" + BOUNDARY + b"--"),
    "boundaries, nearly": filled(PART, b"\r\n--" + b"B" * 66 + b"C", b"\r\n--" + BOUNDARY + b"--"),
    "dashes": filled(PART, b"-", b"\r\n--" + BOUNDARY + b"--"),
}
CHUNKS = {
    "1 byte each": chunked(b"1\r\nx\r\n"),
    "extensions": chunked(b'1;a="\\""\r\nx\r\n'),
    "extensions, longer": chunked(b"40;" + b"a" * 120 + b"\r\n" + b"x" * 64 + b"\r\n"),
    "64 bytes each": chunked(b"40\r\n" + b"x" * 64 + b"\r\n"),
}  # fmt: skip


# Those that take the most of each kind of work: copying, decoding, building.
GATED = {
    ("small arrays", SMALL),
    *((name, LARGE) for name in ("escapes", "numbers", "small arrays")),
    ("one picture", MOST),
}


@pytest.mark.parametrize(
    ("name", "size"),
    partly_gated((*product(JSONS, (SMALL, LARGE)), ("one picture", MOST), ("numbers", MOST)), GATED),
)
def test_json(tmp_path: Path, name: str, size: int) -> None:
    fields = b"Content-Type: application/json\r\n"
    no_stall(tmp_path, "/v1/chat/completions", JSONS[name](size), fields)


@pytest.mark.parametrize(("name", "size"), [*((name, LARGE) for name in FORMS), ("dashes", MOST)])
def test_forms(tmp_path: Path, name: str, size: int) -> None:
    fields = b"Content-Type: multipart/form-data; boundary=" + BOUNDARY + b"\r\n"
    no_stall(tmp_path, "/v1/audio/transcriptions", FORMS[name](size), fields)


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks(tmp_path: Path, name: str) -> None:
    fields = b"Transfer-Encoding: chunked\r\n"
    no_stall(tmp_path, "/v1/chat/completions", CHUNKS[name](LARGE), fields)


def no_stall(tmp_path: Path, path: str, body: bytes, fields: bytes) -> None:
    bound_s = WORST_S + (copy_s(body) if len(body) > LARGE else 0.0)
    stalls = []
    for _ in range(TRIALS):
        stalls.append(uvloop.run(worst_stall(tmp_path, path, body, fields)))
        if stalls[-1] <= bound_s:
            break
    print(f"worst stall {min(stalls) * 1000:.1f} ms of at most {bound_s * 1000:.1f}")
    assert min(stalls) <= bound_s, stalls


def copy_s(body: bytes) -> float:
    """CPU seconds of one copy into fresh memory."""
    begin = time.thread_time()
    bytearray(body)
    return time.thread_time() - begin


async def worst_stall(tmp_path: Path, path: str, body: bytes, fields: bytes) -> float:
    """In seconds, while it is sent; no answer in particular is wanted, but one."""
    if b"chunked" not in fields:
        fields += b"Content-Length: %d\r\n" % len(body)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n".encode() + fields + b"\r\n"
    async with AsyncExitStack() as stack:
        stack.enter_context(engine(tmp_path / "engine.sock"))
        server = ProxyServer(
            Proxy(listen=("127.0.0.1:0",)), models=[Model(name="m", path="/x")],
            on_idle=lambda *_: None, on_suspect=lambda *_: None,
        )  # fmt: skip
        await server.start()
        stack.push_async_callback(server.stop, 0.0)
        server.add_upstream(0, 1, "m", UnixAddress(str(tmp_path / "engine.sock")), 8)
        host, port = server.endpoint.removeprefix("http://").rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        stack.callback(writer.close)
        await ask_health(reader, writer)
        sending = asyncio.create_task(asyncio.to_thread(send, (host, int(port)), head, body))
        worst, before = 0.0, time.thread_time()
        while not sending.done():
            await ask_health(reader, writer)
            now = time.thread_time()
            worst, before = max(worst, now - before), now
            await asyncio.sleep(0.005)
        worst = max(worst, time.thread_time() - before)
        assert await sending in {200, 400, 404, 429}
        return worst


async def ask_health(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.split(b":")[1]))


def send(address: tuple[str, int], head: bytes, body: bytes) -> int:
    """One request as fast as it is taken; the status of its answer."""
    with closing(socket.create_connection(address)) as sock:
        sock.settimeout(60)
        view = memoryview(body)
        try:
            sock.sendall(head)
            for at in range(0, len(body), STEP):
                sock.sendall(view[at : at + STEP])
        except OSError:  # it was answered before all of it was sent
            pass
        return int(sock.recv(65536).split()[1])


@contextmanager
def engine(path: Path) -> Iterator[None]:
    """Takes any request and says yes."""
    path.unlink(missing_ok=True)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(path))
        listener.listen()
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


def serve(listener: socket.socket) -> None:
    buffer = bytearray(STEP)
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        with sock:
            head = b""
            while b"\r\n\r\n" not in head and (data := sock.recv(65536)):
                head += data
            lines = head.lower().partition(b"\r\n\r\n")
            lengths = [
                int(line[15:]) for line in lines[0].split(b"\r\n") if line.startswith(b"content-length:")
            ]
            left = (lengths or [0])[0] - len(lines[2])
            while left > 0 and (size := sock.recv_into(buffer, min(left, STEP))):
                left -= size
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
