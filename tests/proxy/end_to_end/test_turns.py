"""However much one connection holds, the proxy serves the others meanwhile: each takes one turn of the event loop."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from itertools import product
from pathlib import Path

import pytest
import uvloop
from support.budgets import ALONE, partly_gated
from support.flooding import HEALTH, WORST_S, Address, Asker, least_wait, pipeline

from launcher.base.address import UnixAddress
from launcher.config.schema import Model, Proxy
from launcher.proxy.server import ProxyServer

pytestmark = pytest.mark.bounded

ASKED = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]}'
CHAT = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    % (len(ASKED), ASKED)
)
UNKNOWN = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'1b\r\n{"model":"z","messages":[]}\r\n0\r\n\r\n'
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(delta: bytes) -> bytes:
    return (
        b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{%b},'
        b'"logprobs":null,"finish_reason":null}]}\n\n' % delta
    )


def framed(data: bytes, size: int | None = None) -> bytes:
    """In chunks of `size`; None: one for each event."""
    pieces = [each + b"\n\n" for each in data.split(b"\n\n")[:-1]]
    if size is not None:
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


def run(tmp_path: Path, flood: Callable[[Address], object], answer: bytes = b"") -> float:
    async def measure() -> float:
        async with AsyncExitStack() as stack:
            stack.enter_context(engine(tmp_path / "engine.sock", answer))
            server = ProxyServer(
                Proxy(listen=("127.0.0.1:0",)), models=[Model(name="m", path="/x")],
                on_idle=lambda *_: None, on_suspect=lambda *_: None,
            )  # fmt: skip
            await server.start()
            stack.push_async_callback(server.stop, 0.0)
            server.add_upstream(0, 1, "m", UnixAddress(str(tmp_path / "engine.sock")), 8)
            host, port = server.endpoint.removeprefix("http://").rsplit(":", 1)
            ask = Asker((host, int(port)))
            stack.callback(ask.close)
            return await least_wait(ask, lambda: flood((host, int(port))))

    return uvloop.run(measure())


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        pytest.param(HEALTH, b"200", id="pages"),
        pytest.param(UNKNOWN, b"404", id="chunked bodies", marks=pytest.mark.budget),
        pytest.param(
            b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"200", id="metrics", marks=pytest.mark.budget
        ),
    ],
)
def test_pipelined_requests(tmp_path: Path, request_: bytes, status: bytes) -> None:
    """One read holds up to 256 KiB of them."""
    count = (512 << 10) // len(request_) // (10 if b"metrics" in request_ else 1)
    worst = run(tmp_path, lambda address: pipeline(address, request_ * count, count, b"HTTP/1.1 " + status))
    assert worst <= WORST_S


EVENTS = {
    "usual": event(b'"content":"w"'),
    "tool calls": event(b'"tool_calls":[{"index":0,"function":{"arguments":"w"}}]'),
    "of errors": event(b'"content":"error \\"abort\\" failed"'),
    "several choices": event(b'"content":"w"').replace(b'"index":0', b'"index":1'),
    "comments": b": x\n\n",
    "small": b"data: {}\n\n",
    "with usage": event(b'"content":"w"').replace(b"null}]", b'null}],"usage":{"prompt_tokens":1,"completion_tokens":1}'),
}  # fmt: skip


# In one turn of the loop so many are beyond ten times the bound, too.
CHUNKS = 200_000
FIRST = event(b'"role":"assistant","content":""') + event(b'"content":"w"')


# Usual events, small and as they are, and those that are looked at most closely.
GATED = {*product(("usual", "of errors", "with usage"), (None,)), ("usual", 3), ("comments", 60_000)}


@pytest.mark.parametrize(("kind", "size"), partly_gated(product(EVENTS, (None, 3, 60_000)), GATED))
def test_events_of_an_instance_that_come_at_once(tmp_path: Path, kind: str, size: int | None) -> None:
    one = EVENTS[kind]
    total = (4 << 20) if size != 3 else 1 << 20
    if size is None and not ALONE:
        total = min(total, CHUNKS * len(one))
    stream = FIRST + one * (total // len(one)) + DONE
    answer = HEAD + framed(stream, size) + b"0\r\n\r\n"
    worst = run(
        tmp_path,
        lambda address: pipeline(address, CHAT, 1, b"[DONE]" if size != 3 else b"\r\n0\r\n\r\n"),
        answer,
    )
    assert worst <= WORST_S


@pytest.mark.parametrize(
    "framing", [b"Connection: close", b"Content-Length: %d"], ids=["until close", "length"]
)
@pytest.mark.parametrize(
    "one",
    [
        pytest.param(b": x\n\n", id="comments"),
        pytest.param(b"\n\n", id="blank lines", marks=pytest.mark.budget),
        pytest.param(event(b'"content":"w"'), id="usual"),
    ],
)
def test_events_of_an_instance_without_chunks(tmp_path: Path, one: bytes, framing: bytes) -> None:
    stream = FIRST + one * ((256 << 10) // len(one)) + DONE
    head = HEAD.replace(b"Transfer-Encoding: chunked", framing)
    head = head % len(stream) if b"%" in head else head
    assert run(tmp_path, lambda address: pipeline(address, CHAT, 1, b"[DONE]"), head + stream) <= WORST_S


# JSON of a MiB that takes 90 ms to build, and the marks by which fields are looked for.
ARRAYS = b"[0" + b",[]" * 340_000 + b"]"
MARKS = b"[0" + b',"usage"' * 120_000 + b"]"


@pytest.mark.parametrize("value", [ARRAYS, MARKS], ids=["arrays", "marks"])
@pytest.mark.parametrize(
    "before", [b'"choices":[', b'"error":{"code":400},"choices":[', b'"usage":{},"choices":[']
)
def test_a_large_event_of_an_instance(tmp_path: Path, before: bytes, value: bytes) -> None:
    large = b"data: {" + before + b'],"z":' + value + b"}\n\n"
    answer = HEAD + framed(FIRST + large + DONE, 60_000) + b"0\r\n\r\n"
    assert run(tmp_path, lambda address: pipeline(address, CHAT, 1, b"\r\n0\r\n\r\n"), answer) <= WORST_S


@pytest.mark.parametrize(
    ("path", "said", "value"),
    [
        (b"chat/completions", b'"usage":null', MARKS),
        (b"responses", b'"status":"failed"', ARRAYS),
        (b"messages", b'"type":"message"', ARRAYS),
    ],
    ids=["chat", "responses", "messages"],
)
def test_a_large_whole_answer_of_an_instance(tmp_path: Path, path: bytes, said: bytes, value: bytes) -> None:
    body = b'{"z":%b,%b}' % (value, said)
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    asked = CHAT.replace(b"chat/completions", path).replace(b'"stream":true,', b'"stream":null,')
    assert run(tmp_path, lambda address: pipeline(address, asked, 1, b"HTTP/1.1 "), answer + body) <= WORST_S


def test_interim_heads_of_an_instance(tmp_path: Path) -> None:
    answer = b"HTTP/1.1 100 Continue\r\n\r\n" * 40_000
    assert run(tmp_path, lambda address: pipeline(address, CHAT, 1, b"HTTP/1.1 502"), answer) <= WORST_S


@contextmanager
def engine(path: Path, answer: bytes) -> Iterator[None]:
    """Gives any request the same answer, all of it at once."""
    path.unlink(missing_ok=True)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(path))
        listener.listen()
        threading.Thread(target=serve, args=(listener, answer), daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


def serve(listener: socket.socket, answer: bytes) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        with sock, suppress(OSError):  # the proxy may close first
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
            wanted = sock.recv(65536).startswith(b"POST /v1/")
            sock.sendall(answer if wanted else b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
