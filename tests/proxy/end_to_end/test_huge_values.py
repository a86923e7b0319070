"""What a client or an engine sends is quoted in part: no answer, log line, field or label is as long as it is."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon_logs import Logs, collected
from support.keys import new_key
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import Call

MIB = 1 << 20
ANSWER_BYTES = 2048
LINE = 1024
FIELD = 512
LONG = "A" * 8000  # of a header or a path


def check(logs: Logs) -> None:
    """No line, field or event is as long as what was sent."""
    assert logs.entries
    for entry in logs.entries:
        assert len(entry.pop("MESSAGE")) <= LINE
        assert all(len(str(value)) <= FIELD for value in entry.values()), entry.keys()
    lines = logs.text.getvalue().splitlines()
    assert all(len(line) <= LINE + len("00:00:00 WARNING ") and line.isprintable() for line in lines)
    assert all(len(json.dumps(event)) <= 3 * LINE for event in logs.ring.last(1000))


@pytest.fixture
def logs() -> Iterator[Logs]:
    with collected(logging.DEBUG) as made:
        yield made


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": [], **fields}).encode()


def form(model: str) -> tuple[bytes, str]:
    text = f'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n--b--\r\n'
    return text.encode(), "multipart/form-data; boundary=b"


def post(path: str, data: bytes, *lines: str, kind: str = "application/json") -> bytes:
    head = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        "Connection: close",
        f"Content-Type: {kind}",
        f"Content-Length: {len(data)}",
        *lines,
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def get(path: str, *lines: str, method: str = "GET", host: str = "x") -> bytes:
    return (
        "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *lines]).encode()
        + b"\r\n\r\n"
    )


CHAT = "/v1/chat/completions"
HUGE: dict[str, bytes] = {
    "model": post(CHAT, body(model="A" * (10 * MIB))),
    "model with line ends and escapes": post(
        CHAT, body(model="no\n00:00:00 INFO forged\x1b[2J\u202e\x9b" * 9000)
    ),
    "model of a form": post("/v1/audio/transcriptions", form("A" * 60_000)[0], kind=form("")[1]),
    "model under a wrong type": post(CHAT, body(model=["A" * MIB])),
    "previous_response_id": post("/v1/responses", body(input="x", previous_response_id="A" * MIB)),
    "stream, n, user and more": post(
        CHAT, body(stream="A" * MIB, n="A" * MIB, user="A" * MIB, priority="A" * MIB)
    ),
    "a name": post(CHAT, body(**{"A" * MIB: 1})),
    "no JSON": post(CHAT, b"A" * MIB),
    "model in the path": get("/v1/models/" + "%0A" * 300),
    "long model in the path": get("/v1/models/" + "A" * 990),
    "method of a long path": get("/v1/models/" + "A" * 990, method="POST"),
    "path": get("/" + LONG),
    "overlong path": get("/" + LONG * 3),
    "query": get("/v1/nothing?" + LONG),
    "request id": get("/v1/models", f"X-Request-Id: {LONG}"),
    "method": get("/v1/models", method="A" * 300),
    "host": get("/v1/models", host="%" + LONG),
    "target": get("http://[" + LONG),
    "coding": post(CHAT, body(), f"Content-Encoding: {LONG}"),
    "expectation": post(CHAT, body(), f"Expect: {LONG}"),
    "transfer coding": get("/v1/models", f"Transfer-Encoding: {LONG}"),
    "header name": get("/v1/models", f"{LONG} : x"),
    "origin": get("/v1/models", f"Origin: https://{LONG}"),
    "preflight": get(
        CHAT,
        "Origin: https://a.example",
        "Access-Control-Request-Method: POST",
        f"Access-Control-Request-Headers: {LONG}",
        method="OPTIONS",
    ),
    "priority": post(CHAT, body(), f"X-Vllm-Priority: {'9' * 4000}"),
    "bad chunk": get(CHAT, "Transfer-Encoding: chunked", method="POST") + LONG.encode() + b"\r\n",
    "form without boundary": post(
        "/v1/audio/transcriptions", b"", kind=f"multipart/form-data; boundary={LONG}"
    ),
}


async def answer_of(proxy: ProxyUnderTest, request: bytes) -> bytes:
    reader, writer = await proxy.raw(request)
    await writer.drain()
    return await reader.read()


@pytest.mark.parametrize("what", HUGE)
async def test_a_clients_values(build: Build, logs: Logs, what: str) -> None:
    proxy = await build("m", "other", cors_origins=("https://a.example",))
    await proxy.engine(0)
    answer = await answer_of(proxy, HUGE[what])
    assert answer.startswith(b"HTTP/1.1 ")
    assert len(answer) <= ANSWER_BYTES
    page = await answer_of(proxy, get("/metrics"))
    assert b"AAAA" not in page
    assert b"forged" not in page
    await until(lambda: proxy.sums()["in_flight"] == 0)
    check(logs)


@pytest.mark.parametrize(
    "line", [f"Authorization: Bearer {LONG}", f"X-Api-Key: {LONG}", f"Authorization: {LONG}"]
)
async def test_an_api_key_is_never_said(build: Build, tmp_path: Path, logs: Logs, line: str) -> None:
    new_key(tmp_path / "keys", "ann")
    proxy = await build(api_keys_file=str(tmp_path / "keys"))
    answer = await answer_of(proxy, get("/v1/models", line))
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"AAAA" not in answer
    assert "AAAA" not in str(logs.entries)
    check(logs)


@pytest.mark.parametrize(
    "said",
    [
        LONG.encode() * 4 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + LONG.encode() + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + LONG.encode() * 4 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"A" * 100_000,
    ],
)
async def test_an_engines_answer_that_is_none(build: Build, logs: Logs, said: bytes) -> None:
    proxy = await build(park_timeout_s=0.1, queue_timeout_s=1.0)

    async def script(call: Call) -> None:
        await call.raw(said)
        call.cut()

    await proxy.engine(0, script)
    answer = await answer_of(proxy, post(CHAT, body()))
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert len(answer) <= ANSWER_BYTES
    check(logs)
    assert all(len(reason) < LINE for _, _, reason in proxy.suspects)
