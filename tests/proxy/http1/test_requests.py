"""A client's head: what is refused, what is read from it, and what goes on."""

from __future__ import annotations

import re

import pytest

from launcher.base.api_errors import HttpError
from launcher.keys.api_keys import KEY_FIELDS
from launcher.proxy.http1.fields import MAX_FIELDS, MAX_HEAD_BYTES, MAX_LINE_BYTES, head_end
from launcher.proxy.http1.requests import (
    REPEATED_BYTES,
    RequestHead,
    field_lines,
    parse_request,
    selected_head,
    upstream_head,
)

SDK = b"""POST /v1/chat/completions HTTP/1.1\r
Host: 127.0.0.1:8000\r
Accept-Encoding: gzip, deflate\r
Connection: keep-alive\r
Content-Type: application/json\r
User-Agent: OpenAI/Python 2.8.1\r
Authorization: Bearer k\r
Content-Length: 12\r
\r
"""


def head(
    *lines: str | bytes, method: str = "GET", target: str = "/", version: str = "1.1", host: bool = True
) -> bytes:
    fields = [line if isinstance(line, bytes) else line.encode() for line in lines]
    first = [f"{method} {target} HTTP/{version}".encode(), *([b"Host: h"] if host else [])]
    return b"".join(line + b"\r\n" for line in (*first, *fields, b""))


def status_of(raw: bytes) -> int | None:
    """The status of the refusal; None when there is none."""
    try:
        parse_request(raw)
    except HttpError as refusal:
        return refusal.status if refusal.close and refusal.message else -1
    return None


def names(raw: bytes) -> list[str]:
    return [line.partition(b":")[0].decode() for line in raw.split(b"\r\n")[1:-2]]


# --- where a head ends ------------------------------------------------------------------------------


def test_where_a_head_ends() -> None:
    assert head_end(SDK + b"body") == len(SDK)
    assert head_end(b"\r\n\r\n" + SDK) == len(SDK) + 4
    for cut in range(len(SDK)):
        assert head_end(SDK[:cut]) == -1
        assert head_end(SDK, cut) == len(SDK)
    assert head_end(b"") == head_end(b"\r") == head_end(b"\r\n\r\n\r") == -1


@pytest.mark.parametrize(
    ("buffer", "status"),
    [
        (b"GET / HTTP/1.1\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\n\n", 400),
        (b"GET / HTTP/1.1\rHost", 400),
        (b"\n", 400),
        (b"\rG", 400),
        (b"\x16\x03\x01\x02\x00\x01", 400),
        (b"\r\n" * 5, 400),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * MAX_HEAD_BYTES, 431),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
    ],
)
def test_heads_that_never_become_one(buffer: bytes, status: int) -> None:
    with pytest.raises(HttpError) as caught:
        head_end(buffer)
    assert caught.value.status == status
    assert caught.value.close


# --- what is read -----------------------------------------------------------------------------------


def test_what_an_sdk_sends() -> None:
    request = parse_request(SDK)
    assert (request.method, request.target, request.http_1_0) == ("POST", "/v1/chat/completions", False)
    assert (request.length, request.chunked) == (12, False)
    assert request.keep_alive
    assert not request.expect_continue
    assert request.get(b"authorization") == "Bearer k"
    assert request.get(b"cookie") is None
    assert request.lines[2:] == SDK.partition(b"\r\n")[2][:-2]
    assert "Bearer" not in repr(request)


@pytest.mark.parametrize("name", ["Authorization", "Cookie", "User-Agent", "X-Request-Id", "Content-Type"])
def test_octets_above_ascii_are_opaque(name: str) -> None:
    """Node, Java and Python's http.client write header text in ISO-8859-1. RFC 9110 section 5.5."""
    value = "Jörg".encode("latin-1")
    request = parse_request(head(name.encode() + b": " + value))
    assert request.get(name.lower().encode()) == "J\ufffdrg"
    assert request.sent_id is None
    line = b"\r\n%s: %s\r\n" % (name.encode(), value)
    assert (line in request.passing()) is (name != "X-Request-Id")  # the proxy's own ID goes on


def test_fields_without_case_and_in_order() -> None:
    request = parse_request(head("X-A:1", "x-a: \t2 é \t", "X-AB: 3", "Y: x-a: 4"))
    assert request.all(b"x-a") == ["1", "2 é"]
    assert request.get(b"x-a") == "1"
    assert request.get(b"x") is None


@pytest.mark.parametrize(
    ("target", "origin"),
    [
        ("/a?b", "/a?b"),
        ("//a", "//a"),
        ("http://h/a?b", "/a?b"),
        ("HTTPS://h:443/", "/"),
        ("http://other", "/"),
        ("http://h?b", "/?b"),
        ("http://[::1]:80/a", "/a"),
        ("/%zz", "/%zz"),
    ],
)
def test_targets_become_origin_form(target: str, origin: str) -> None:
    assert parse_request(head(target=target)).target == origin


@pytest.mark.parametrize(
    ("raw", "keep"),
    [
        (head(), True),
        (head("Connection: close"), False),
        (head("Connection: x, Close"), False),
        (head("Connection: x", "connection: close"), False),
        (head(version="1.0"), False),
        (head("Connection: Keep-Alive", version="1.0"), True),
        (head("Connection: keep-alive, close", version="1.0"), False),
    ],
)
def test_whether_the_connection_is_kept(raw: bytes, keep: bool) -> None:
    assert parse_request(raw).keep_alive is keep


@pytest.mark.parametrize(
    ("raw", "waits"),
    [
        (head("Expect: 100-Continue", "Content-Length: 1"), True),
        (head("Expect: 100-continue", "Transfer-Encoding: Chunked"), True),
        (head("Expect: 100-continue"), False),
        (head("Expect: 100-continue", "Content-Length: 0"), False),
        (head("Expect: 100-continue", "Content-Length: 1", version="1.0"), False),
    ],
)
def test_clients_that_wait_for_100_continue(raw: bytes, waits: bool) -> None:
    assert parse_request(raw).expect_continue is waits


@pytest.mark.parametrize(
    ("sent", "used"),
    [
        ([], "f"),
        (["aBc-1"], "aBc-1"),
        (["a", "b"], "f"),
        (["a b"], "f"),
        (["é"], "f"),
        (["x" * 128], "x" * 128),
        (["x" * 129], "f"),
        ([""], "f"),
    ],
)
def test_request_ids(sent: list[str], used: str) -> None:
    request = parse_request(head(*[f"X-Request-ID: {each}" for each in sent]))
    assert (request.sent_id or "f") == used
    assert names(upstream_head(request, used, 0, host=b"h")) == ["Host", "X-Request-Id"]


def same(one: RequestHead, other: RequestHead) -> bool:
    names = ("method", "target", "http_1_0", "length", "chunked", "keep_alive", "expect_continue", "sent_id")
    return all(getattr(one, name) == getattr(other, name) for name in names)


@pytest.mark.parametrize("length", [b"0", b"7", b"12", b"123456789012345678"])
@pytest.mark.parametrize("but", [(), KEY_FIELDS])
def test_the_next_head_of_a_connection_is_compared_with_the_last(
    length: bytes, but: tuple[bytes, ...]
) -> None:
    last = parse_request(SDK)
    raw = SDK.replace(b"Content-Length: 12", b"Content-Length: " + length)
    for _ in range(3):
        again, fresh = parse_request(raw, last), parse_request(raw)
        assert again.lines is last.lines  # it was not parsed
        assert same(again, fresh)
        wanted = upstream_head(fresh, "r", 3, host=b"up", but=but)
        assert upstream_head(again, "r", 3, host=b"up", but=but) == wanted
        last = again


@pytest.mark.parametrize(
    "raw",
    [
        SDK.replace(b"k\r\n", b"other\r\n"),
        SDK.replace(b"POST", b"PUT"),
        SDK.replace(b"\r\n\r\n", b"\r\nX: 1\r\n\r\n"),
        SDK.replace(b": 12\r\n", b": 12\r\nExpect: 100-continue\r\n"),
        b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
    ],
)
def test_another_head_is_parsed(raw: bytes) -> None:
    assert same(parse_request(raw, parse_request(SDK)), parse_request(raw))
    assert same(parse_request(SDK, parse_request(raw)), parse_request(SDK))


@pytest.mark.parametrize("digits", [b"", b"x", b"-1", b"1, 1", b"1\r\nContent-Length: 1", b"1" * 19, b"\xb2"])
def test_a_bad_length_after_a_good_head_is_refused(digits: bytes) -> None:
    with pytest.raises(HttpError):
        parse_request(SDK.replace(b": 12\r\n", b": " + digits + b"\r\n"), parse_request(SDK))


def test_a_large_head_is_not_kept() -> None:
    raw = SDK.replace(b"\r\n\r\n", b"\r\nX: %b\r\n\r\n" % (b"x" * REPEATED_BYTES))
    last = parse_request(raw)
    assert parse_request(raw, last).lines is not last.lines


def test_a_head_with_expect_is_parsed_each_time() -> None:
    raw = SDK.replace(b": 12\r\n", b": 0\r\nExpect: 100-continue\r\n")
    assert parse_request(raw.replace(b": 0", b": 5"), parse_request(raw)).expect_continue


# --- what is refused --------------------------------------------------------------------------------


REFUSED: tuple[tuple[bytes, int | None], ...] = (
    (head(), None),
    (b"\r\n\r\n" + head(), None),
    (head(host=False, version="1.0"), None),
    (head("X: é"), None),
    (head(b"X: \xff"), None),
    (head(version="1.2"), 505),
    (head(version="0.9"), 505),
    (b"PRI * HTTP/2.0\r\n\r\n", 505),
    (head(version="1.10"), 400),
    (b"GET /\r\n\r\n", 400),
    (b"GET / http/1.1\r\nHost: h\r\n\r\n", 400),
    (b"GET  / HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    (b"GET / HTTP/1.1 \r\nHost: h\r\n\r\n", 400),
    (b" GET / HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    (b"GET\t/ HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: h\n\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: h\r\n", 400),
    (b"", 400),
    (head(method="G(T"), 400),
    (head(method="M" * 32), None),
    (head(method="M" * 33), 501),
    (head(target="/#a"), 400),
    (head(target="/é"), 400),
    (head(target="a"), 400),
    (head(target="*"), 400),
    (head(target="*", method="OPTIONS"), None),
    (head(target="ftp://h/"), 400),
    (head(target="http:///a"), 400),
    (head(target="http://u@h/"), 400),
    (head(target="http://:80/"), 400),
    (head(target="h:80", method="CONNECT"), 405),
    (head(target="/" + "a" * MAX_LINE_BYTES), 414),
    (head("X: " + "y" * MAX_LINE_BYTES), 431),
    (head(*["X: " + "y" * 8000] * 9), 431),
    (head(*["x:"] * (MAX_FIELDS - 1)), None),
    (b"\r\n\r\n" + head(*["x:"] * (MAX_FIELDS - 1)), None),
    (head(*["X: " + "y" * 1000] * 20), None),
    (head("X: " + "é" * 1000), None),
    (head(*["X: " + "y" * 1000] * 20, b"X: \xff"), None),
    (head(*["x:"] * MAX_FIELDS), 431),
    (head("X : 1"), 400),
    (head(" X: 1"), 400),
    (head("X: 1", "\tfolded"), 400),
    (head(": 1"), 400),
    (head("X"), 400),
    (head("X\x00: 1"), 400),
    (head("X: \x01"), 400),
    (head("X: a\rb"), 400),
    (head("X: a\nb"), 400),
    (head("X: a\x7f"), 400),
    (head("é: a"), 400),
    # Host
    (head(host=False), 400),
    (head("Host: h"), 400),
    (head("Host: a b", host=False), 400),
    (head("Host: a,b", host=False), 400),
    (head("Host: u@h", host=False), 400),
    (head("Host: h/x", host=False), 400),
    (head("Host: h:x", host=False), 400),
    (head("Host: [::1]:80", host=False), None),
    (head("Host:", host=False), None),
    # framing
    (head("Content-Length: 5"), None),
    (head("Content-Length: 005 "), None),
    (head("Content-Length: 5", "Content-Length: 5"), 400),
    (head("Content-Length: 5, 5"), 400),
    (head("Content-Length: +5"), 400),
    (head("Content-Length: -5"), 400),
    (head("Content-Length: 5_0"), 400),
    (head("Content-Length: 0x5"), 400),
    (head("Content-Length:"), 400),
    (head("Content-Length: ٣"), 400),
    (head("Content-Length: " + "9" * 19), 413),
    (head("Transfer-Encoding: CHUNKED"), None),
    (head("Transfer-Encoding: chunked", "Content-Length: 5"), 400),
    (head("Transfer-Encoding: chunked", version="1.0"), 400),
    (head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), 400),
    (head("Transfer-Encoding: chunked, chunked"), 400),
    (head("Transfer-Encoding: ,chunked"), 400),
    (head("Transfer-Encoding:"), 400),
    (head("Transfer-Encoding: identity"), 400),
    (head("Transfer-Encoding: chunked;a=b"), 400),
    (head("Transfer-Encoding: chunked, gzip"), 400),
    (head("Transfer-Encoding: gzip, chunked"), 501),
    (head("Transfer-Encoding: \x0bchunked"), 400),
    # content
    (head("Content-Encoding: identity"), None),
    (head("Content-Encoding: gzip"), 415),
    (head("Content-Encoding: identity", "Content-Encoding: gzip"), 415),
    (head("Expect: 100-Continue"), None),
    (head("Expect: 200-ok"), 417),
    (head("Expect: 100-continue", "Expect: 100-continue"), 417),
)  # fmt: skip


def test_refused() -> None:
    found = [(raw[:200], status_of(raw), status) for raw, status in REFUSED]
    assert [(raw, got, wanted) for raw, got, wanted in found if got != wanted] == []


# --- what goes on -----------------------------------------------------------------------------------


def passed(raw: bytes, **more: object) -> bytes:
    return upstream_head(parse_request(raw), "r", 3, host=b"up", **more)  # type: ignore[arg-type]


def test_fields_that_pass() -> None:
    assert passed(SDK) == (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: up\r\n"
        b"Content-Type: application/json\r\nUser-Agent: OpenAI/Python 2.8.1\r\nAuthorization: Bearer k\r\n"
        b"X-Request-Id: r\r\nContent-Length: 3\r\n\r\n"
    )
    ours = passed(
        SDK.replace(b"\r\n\r\n", b"\r\nX-Api-Key: k\r\nApi-Key: k\r\nX-Other: k\r\n\r\n"), but=KEY_FIELDS
    )
    assert not any(name in ours for name in (b"Authorization", b"X-Api-Key", b"Api-Key"))
    assert b"X-Other: k\r\n" in ours
    assert passed(SDK, method="GET", extra=b"A: b\r\n").endswith(b"Content-Length: 3\r\nA: b\r\n\r\n")
    bare = parse_request(head(host=False, version="1.0"))
    assert upstream_head(bare, "r", 0, host=b"h") == b"GET / HTTP/1.1\r\nHost: h\r\nX-Request-Id: r\r\n\r\n"


def test_hop_by_hop_and_nominated_fields_are_removed() -> None:
    raw = head(
        "Connection: keep-alive, X-Secret",
        "connection: x-more,, a b, authorization, te",
        "X-Secret: 1",
        "x-more: 2",
        "Keep-Alive: timeout=5",
        "TE: trailers",
        "Trailer: X",
        "Upgrade: h2c",
        "HTTP2-Settings: AAMAAABkAAQAAP__",
        "Proxy-Authorization: Basic x",
        "Proxy-Connection: close",
        "Transfer-Encoding: chunked",
        "Expect: 100-continue",
        "Authorization: Bearer k",
        "Accept-Encoding: br",
        "X-A: 1",
        "X-A: 2",
        "TEE: kept",
        "X-Request-Id: theirs",
        "x-numa-slot: 3",
        "X-Conversation-Id: c",
    )
    assert names(passed(raw)) == [
        "Host",
        "X-A",
        "X-A",
        "TEE",
        "X-Request-Id",
        "Content-Length",
    ]


def test_an_endpoint_elsewhere_gets_the_selected_fields_alone() -> None:
    raw = head(
        "Connection: tracestate",
        "Accept: a",
        "Authorization: b",
        "traceparent: c",
        "tracestate: d",
        "X-A: 1",
    )
    request = parse_request(raw)
    selected = frozenset({b"accept", b"traceparent", b"tracestate"})
    found = selected_head(
        request, "r", 5, target=b"/api/v1/x", host=b"there", names=selected, extra=b"Authorization: ours\r\n"
    )
    assert found == (
        b"POST /api/v1/x HTTP/1.1\r\nHost: there\r\nAccept: a\r\ntraceparent: c\r\nX-Request-Id: r\r\n"
        b"Content-Length: 5\r\nAuthorization: ours\r\n\r\n"
    )


def test_the_target_goes_on_in_origin_form() -> None:
    assert passed(head(target="http://evil/a")).startswith(b"GET /a HTTP/1.1\r\nHost: up\r\n")


def test_values_can_be_taken_apart() -> None:
    assert isinstance(parse_request(head()), RequestHead)


def test_field_lines_by_name() -> None:
    parsed = parse_request(head("X-Forwarded-For: 1.2.3.4", "Forwarded: for=a", "X-Other: 1"))
    names = re.compile(rb"forwarded|x-forwarded-[a-z]+")
    assert field_lines(parsed, names) == b"X-Forwarded-For: 1.2.3.4\r\nForwarded: for=a\r\n"
    assert field_lines(parsed, names, but={b"forwarded"}) == b"X-Forwarded-For: 1.2.3.4\r\n"
