"""Requests that are judged by their heads, and GET with a body."""

from __future__ import annotations

import json

import pytest
from support.proxy_under_test import ProxyUnderTest
from support.scripted_engine import Call

HEAD = "{} {} HTTP/1.1\r\nHost: h\r\n{}\r\n\r\n"
LENGTH, CHUNKED, CLOSE = "Content-Length: {}", "Transfer-Encoding: chunked", "Connection: close"
LAST = b"0\r\n\r\n"
SMUGGLED = b"GET /version?smuggled HTTP/1.1\r\nHost: h\r\n\r\n"
PATHS = ("/health", "/v1/models", "/v1/models/m", "/metrics", "/metrics/host", "/load", "/version")


async def said(proxy: ProxyUnderTest, *requests: bytes) -> bytes:
    """All that comes back on one connection."""
    reader, _ = await proxy.raw(b"".join(requests))
    return await reader.read()


async def engine_of(proxy: ProxyUnderTest) -> list[Call]:
    async def script(call: Call) -> None:
        await call.json({"object": "list", "data": [{"id": "m"}]})

    return (await proxy.engine(0, script)).calls


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    ("framing", "body"),
    [(CHUNKED, LAST), (CHUNKED, b"0;x=y\r\nX-Trailer: 1\r\n\r\n"), (LENGTH.format(0), b"")],
)
async def test_an_empty_body_is_no_content(
    proxy: ProxyUnderTest, method: str, framing: str, body: bytes
) -> None:
    """RFC 9112 7.1: gateways that do not know a body's length send it chunked, also where it is empty."""
    calls = await engine_of(proxy)
    for path in PATHS:
        calls.clear()
        first = HEAD.format(method, path, framing).encode() + body
        second = HEAD.format("GET", "/version?next", CLOSE).encode()
        answer = await said(proxy, first, second)
        assert answer.startswith(b"HTTP/1.1 200 "), (path, answer)
        assert answer.count(b"HTTP/1.1 200 ") == 2, path
        assert calls[-1].target == "/version?next", path
        assert all(call.body == b"" for call in calls), path


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (LENGTH.format(len(SMUGGLED)), SMUGGLED),
        (CHUNKED, b"%x\r\n%b\r\n" % (len(SMUGGLED), SMUGGLED) + LAST),
        (CHUNKED, b"1\r\n"),  # the rest of it never comes
    ],
)
async def test_content_is_refused_and_never_the_next_request(
    proxy: ProxyUnderTest, method: str, framing: str, body: bytes
) -> None:
    calls = await engine_of(proxy)
    for path in PATHS:
        sent = HEAD.format(method, path, framing).encode() + body + (b"x" if body == b"1\r\n" else SMUGGLED)
        head, _, error = (await said(proxy, sent)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 "), path
        assert b"connection: close" in head.lower(), path
        if method == "GET":
            assert json.loads(error)["error"]["code"] == "bad_content", path
        assert calls == [], path


async def test_bad_chunks_of_a_get_are_bad_framing(proxy: ProxyUnderTest) -> None:
    await engine_of(proxy)
    _, _, error = (await said(proxy, HEAD.format("GET", "/health", CHUNKED).encode() + b"zz\r\n")).partition(
        b"\r\n\r\n"
    )
    assert json.loads(error)["error"]["code"] == "bad_framing"
