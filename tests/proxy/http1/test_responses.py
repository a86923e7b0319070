"""An instance's head: what is refused, what is read from it, and what goes on."""

from __future__ import annotations

import pytest

from launcher.proxy.http1 import responses
from launcher.proxy.http1.responses import BadResponse, client_head, parse_response


def answer(*lines: str, first: str = "HTTP/1.1 200 OK") -> bytes:
    return b"".join(line.encode() + b"\r\n" for line in (first, *lines, ""))


STREAM = answer(
    "date: d",
    "server: uvicorn",
    "Content-Type: Text/Event-Stream; charset=utf-8",
    "transfer-encoding: chunked",
)


def test_a_stream() -> None:
    head = parse_response(STREAM, "POST")
    assert (head.status, head.reason, head.content_type) == (200, b"OK", b"text/event-stream")
    assert (head.length, head.chunked, head.until_close, head.keep_alive) == (None, True, False, True)
    assert head.get(b"content-type") == "Text/Event-Stream; charset=utf-8"
    assert head.get(b"date") == "d"
    assert head.lines[2:].startswith(b"date: d\r\n")


def test_other_field_lines_pass_in_place_of_the_first() -> None:
    head = parse_response(STREAM, "POST").with_lines(b"\r\nX-A: b\r\n")
    assert (head.status, head.chunked, head.get(b"x-a"), head.get(b"date")) == (200, True, "b", None)


@pytest.mark.parametrize(
    ("raw", "method", "expected"),
    [
        (answer("Content-Length: 5"), "GET", (5, False, False, True)),
        (answer("Content-Length: 5"), "HEAD", (0, False, False, True)),
        (answer("Content-Length: 5", first="HTTP/1.1 304 X"), "GET", (0, False, False, True)),
        (answer("Transfer-Encoding: chunked", first="HTTP/1.1 204 X"), "GET", (0, False, False, True)),
        (answer(first="HTTP/1.1 100 Continue"), "POST", (0, False, False, True)),
        (answer(), "GET", (None, False, True, False)),
        (answer("Content-Length: 5", "Connection: close"), "GET", (5, False, False, False)),
        (answer("Content-Length: 5", first="HTTP/1.0 200 OK"), "GET", (5, False, False, False)),
        (answer("Content-Length: 5", "Connection: keep-alive", first="HTTP/1.0 200 OK"), "GET", (5, False, False, True)),
        (answer("Content-Length: 0", first="HTTP/1.1 200 "), "GET", (0, False, False, True)),
        (answer("Content-Length: 0", first="HTTP/1.1 200"), "GET", (0, False, False, True)),
    ],
)  # fmt: skip
def test_framing(raw: bytes, method: str, expected: tuple[object, ...]) -> None:
    head = parse_response(raw, method)
    assert (head.length, head.chunked, head.until_close, head.keep_alive) == expected


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\r\n\r\n",
        answer(first="HTTP/1.2 200 OK"),
        answer(first="HTTP/2 200 OK"),
        answer(first="HTTP/1.1 099 OK"),
        answer(first="HTTP/1.1 600 OK"),
        answer(first="HTTP/1.1 2000 OK"),
        answer(first="HTTP/1.1 101 Switching Protocols"),
        answer("X : 1"),
        answer(" X: 1"),
        answer("X"),
        answer("X: \x00"),
        answer("Content-Length: 5", "Content-Length: 5"),
        answer("Content-Length: x"),
        answer("Content-Length:"),
        answer("Content-Length: 5", "Transfer-Encoding: chunked"),
        answer("Transfer-Encoding: gzip, chunked"),
        answer("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        answer("Transfer-Encoding: chunked", first="HTTP/1.0 200 OK"),
        answer("X: " + "y" * 65536),
    ],
)
def test_invalid_responses(raw: bytes) -> None:
    with pytest.raises(BadResponse) as caught:
        parse_response(raw, "GET")
    assert str(caught.value)


def test_fields_that_pass() -> None:
    head = parse_response(STREAM, "POST")
    assert client_head(head, "r", framing=b"Transfer-Encoding: chunked\r\n", keep_alive=True) == (
        b"HTTP/1.1 200 OK\r\ndate: d\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\nX-Request-Id: r\r\n"
        b"Server: numa-launcher\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    head = parse_response(
        answer("Connection: close, x-hop", "X-Hop: 1", "Set-Cookie: a", "Set-Cookie: b"), "GET"
    )
    assert client_head(head, "r", framing=b"", keep_alive=False, extra=b"A: b\r\n") == (
        b"HTTP/1.1 200 OK\r\nSet-Cookie: a\r\nSet-Cookie: b\r\nX-Request-Id: r\r\nServer: numa-launcher\r\n"
        b"Connection: close\r\nA: b\r\n\r\n"
    )


@pytest.mark.parametrize("name", ["content-length", "Content-Length"])
def test_repeated_heads_differ_in_length_alone(name: str) -> None:
    for length in (0, 12, 3456, 12):
        head = parse_response(answer("date: d", f"{name}: {length}", "x-a: content-length: 7"), "POST")
        assert (head.status, head.length, head.chunked, head.keep_alive) == (200, length, False, True)
        passed = client_head(head, "r", framing=b"", keep_alive=True)
        assert passed.count(b"ontent-") == 1
        assert b"date: d\r\n" in passed
    for method, wanted in (("HEAD", 0), ("POST", 12), ("HEAD", 0)):
        assert parse_response(answer("date: d", f"{name}: 12"), method).length == wanted
    streams = [parse_response(STREAM, "POST") for _ in range(2)]
    assert streams[0] is streams[1]


@pytest.mark.parametrize("digits", ["", "x", "1, 2", "9" * 19])
def test_a_bad_length_in_a_repeated_head_is_refused(digits: str) -> None:
    assert parse_response(answer("date: e", "content-length: 5"), "POST").length == 5
    with pytest.raises(BadResponse):
        parse_response(answer("date: e", f"content-length: {digits}"), "POST")


def test_few_heads_are_remembered() -> None:
    for number in range(200):
        assert parse_response(answer(f"x-number: {number}", "content-length: 5"), "POST").length == 5
    assert len(responses._SEEN) <= 64
