"""Field lines: their syntax, their size, and Host."""

# ruff: noqa: E501 - a case is a line

from __future__ import annotations

from proxy.http_cases.model import (
    BODY,
    GOT,
    PATH,
    POSTED,
    SMUGGLED,
    Case,
    Outcome,
    Request,
    get,
    in_pieces,
    post,
    refused,
    served,
)

_OK = (served(GOT),)
_EITHER = (served(GOT), refused(400))


def _field(
    name: str, *fields: str | bytes, rfc: str = "9110 5.5", right: tuple[Outcome, ...] = (refused(400),)
) -> Case:
    return Case(
        f"field: {name}", rfc, (get(*fields) + SMUGGLED,) if right[0].closes else (get(*fields),), right
    )


def _passes(name: str, field: str | bytes, value: str, rfc: str = "9110 5.5") -> Case:
    text = field if isinstance(field, str) else field.decode("ascii", "ignore")
    key = text.partition(":")[0].lower()
    return Case(
        f"field: {name}", rfc, (get(field),), (served(Request("GET", "/version", has=((key, value),))),)
    )


def _opaque(name: str, value: bytes) -> Case:
    """Octets above ASCII reach the engine as they came, whatever their encoding."""
    return _passes(name, b"X-A: " + value, value.decode("utf-8", "surrogateescape"))


def _host(
    name: str, *hosts: str | bytes, right: tuple[Outcome, ...] = (refused(400),), rfc: str = "9112 3.2"
) -> Case:
    return Case(f"host: {name}", rfc, (get(*hosts, host=None),), right)


def _raw(name: str, raw: bytes, rfc: str, right: tuple[Outcome, ...] = (refused(400),)) -> Case:
    return Case(f"field: {name}", rfc, (raw,), right)


_START = b"GET /version HTTP/1.1\r\n"

CASES: tuple[Case, ...] = (
    _passes("passes as it came", "X-Odd_Name.1: a  b", "a  b"),
    _passes("space around is no part of it", "X-A: \t a \t", "a"),
    _passes("empty value", "X-A:", ""),
    _passes("no space after the colon", "X-A:b:c", "b:c"),
    _passes("every sign of a token", "!#$%&'*+-.^_`|~9: a", "a", "9110 5.6.2"),
    _passes("UTF-8", "X-A: é", "é"),
    _passes("tab inside", "X-A: a\tb", "a\tb"),
    _passes("a colon in front of the value", "X-A: :b", ":b"),
    Case("field: the same twice stays twice", "9110 5.3", (get("X-A: 1", "X-B: 2", "x-a: 3"),), (served(Request("GET", "/version", has=(("x-a", "1"), ("x-a", "3"), ("x-b", "2")))),)),
    Case("field: what looks like one inside a value", "9110 5.5", (get("X-A: Transfer-Encoding: chunked"),), (served(Request("GET", "/version", has=(("x-a", "Transfer-Encoding: chunked"),))),)),
    Case("field: what looks like a request inside a value", "9110 5.5", (get("X-A: GET /version?smuggled HTTP/1.1"),), (served(Request("GET", "/version", has=(("x-a", "GET /version?smuggled HTTP/1.1"),))),)),
    Case("field: an escaped CRLF stays escaped", "9110 5.5", (get("X-A: %0d%0aX-B: 1", "X-C: \\r\\nX-D: 1"),), (served(Request("GET", "/version", has=(("x-a", "%0d%0aX-B: 1"),), lacks=("x-b", "x-d"))),)),
    _field("NUL in the value", "X-A: a\x00b"),
    _field("NUL in the name", "X\x00A: b", rfc="9110 5.1"),
    _field("bell in the value", "X-A: a\x07b"),
    _field("escape in the value", "X-A: a\x1bb"),
    _field("backspace in the value", "X-A: a\x08b"),
    _field("delete in the value", "X-A: a\x7fb"),
    _field("vertical tab in the value", "X-A: a\x0bb"),
    _field("form feed in the value", "X-A: a\x0cb"),
    _field("bare CR in the value", "X-A: a\rb", rfc="9112 2.2"),
    _field("bare LF in the value", "X-A: a\nb", rfc="9112 2.2"),
    _field("bare LF and a field in the value", "X-A: a\nHost: evil", rfc="9112 2.2"),
    _field("bare CR at its end", "X-A: a\r", rfc="9112 2.2"),
    _opaque("Latin-1", "Jörg".encode("latin-1")),
    _opaque("no UTF-8", b"\xff\xfe"),
    _opaque("cut UTF-8", b"\xc3"),
    _opaque("a UTF-8 surrogate", b"\xed\xa0\x80"),
    _field("a high byte before a control character", b"X-A: \xff\x00"),
    _field("space before the colon", "X-A : b", rfc="9112 5.1"),
    _field("tab before the colon", "X-A\t: b", rfc="9112 5.1"),
    _field("space before the colon of Host", "Host : h", rfc="9112 5.1"),
    _field("space before the colon of Content-Length", f"Content-Length : {len(BODY)}", rfc="9112 5.1"),
    _field("space in the name", "X A: b", rfc="9110 5.1"),
    _field("empty name", ": b", rfc="9110 5.1"),
    _field("no colon", "nonsense", rfc="9112 5"),
    _field("only a space", " ", rfc="9112 5.2"),
    _field("slash in the name", "X/A: b", rfc="9110 5.6.2"),
    _field("bracket in the name", "X[A]: b", rfc="9110 5.6.2"),
    _field("quotes in the name", '"X-A": b', rfc="9110 5.6.2"),
    _field("semicolon in the name", "X;A: b", rfc="9110 5.6.2"),
    _field("equals sign in the name", "X=A: b", rfc="9110 5.6.2"),
    _field("at sign in the name", "X@A: b", rfc="9110 5.6.2"),
    _field("UTF-8 in the name", "X-é: b", rfc="9110 5.6.2"),
    _field("a high byte in the name", b"X-\xff: b", rfc="9110 5.6.2"),
    _field("control in the name", "X\x01A: b", rfc="9110 5.6.2"),
    _field("folded", "X-A: a", " b", rfc="9112 5.2"),
    _field("folded with a tab", "X-A: a", "\tb", rfc="9112 5.2"),
    _field("folded into nothing", "X-A: a", "  ", rfc="9112 5.2"),
    _field("folded Host", "X-A: a", " Host: evil", rfc="9112 5.2"),
    _raw("the first one begins with a space", _START + b" X-A: b\r\nHost: h\r\n\r\n", "9112 2.2"),
    _raw("the first one begins with a tab", _START + b"\tHost: h\r\n\r\n", "9112 2.2"),
    _raw("lines end in LF", b"GET /version HTTP/1.1\nHost: h\n\n", "9112 2.2", (refused(400),)),
    _raw("one line ends in LF", _START + b"Host: h\nX-A: b\r\n\r\n", "9112 2.2"),
    _raw("the head ends in LF LF", _START + b"Host: h\n\n", "9112 2.2"),
    _raw("the head ends in CRLF LF", _START + b"Host: h\r\n\n", "9112 2.2"),
    _raw("the head ends in LF CRLF", _START + b"Host: h\n\r\n", "9112 2.2"),
    _raw("lines end in CR", b"GET /version HTTP/1.1\rHost: h\r\r", "9112 2.2"),
    _raw("lines end in CR CRLF", b"GET /version HTTP/1.1\r\r\nHost: h\r\r\n\r\r\n", "9112 2.2"),
    _raw("the head ends in CR CR", _START + b"Host: h\r\n\r\r", "9112 2.2"),
    _raw("NUL for an empty line", _START + b"Host: h\r\n\x00\r\n\r\n", "9112 2.2"),
    Case("field: one of 8000 bytes", "9110 5.4", (get("X-A: " + "y" * 7900),), (served(Request("GET", "/version", has=(("x-a", "y" * 7900),))),)),
    Case("field: one of 9000 bytes", "6585 5", (get("X-A: " + "y" * 9000),), (refused(400, 431),)),
    Case("field: one of 1 MB", "6585 5", (get("X-A: " + "y" * 1_000_000),), (refused(400, 431),)),
    Case("field: a name of 9000 bytes", "6585 5", (get("y" * 9000 + ": a"),), (refused(400, 431),)),
    Case("field: 100 kB in many", "6585 5", (get(*["X-A: " + "y" * 1000] * 100),), (refused(400, 431),)),
    Case("field: a hundred", "9110 5.4", (get(*[f"X-{n}: {n}" for n in range(100)]),), (served(Request("GET", "/version", has=tuple((f"x-{n}", f"{n}") for n in range(100)))),)),
    Case("field: ten thousand", "6585 5", (get(*["a:"] * 10_000),), (refused(400, 431),)),
    Case("field: a million empty ones", "6585 5", (get(*[":"] * 500_000),), (refused(400, 431),)),
    Case("field: byte by byte", "9112 2.2", tuple(bytes([byte]) for byte in get("X-A: b")), (served(Request("GET", "/version", has=(("x-a", "b"),))),)),
    Case("field: cut between CR and LF", "9112 2.2", in_pieces(get(), 22, len(get()) - 1), _OK),
    # --- Host ---
    _host("missing", rfc="9112 3.2"),
    Case("host: missing in HTTP/1.0", "9112 3.2", (get(host=None, version="HTTP/1.0"),), (served(GOT, closes=True),)),
    _host("twice", "Host: h", "Host: evil"),
    _host("twice the same", "Host: h", "Host: h"),
    _host("twice, one empty", "Host: h", "Host:"),
    _host("twice in odd case", "Host: h", "hOST: h"),
    Case("host: twice in HTTP/1.0", "9112 3.2", (get("Host: h", "Host: evil", host=None, version="HTTP/1.0"),), (refused(400),)),
    _host("empty", "Host:", right=_EITHER),
    _host("with a port", "Host: h:8000", right=_OK),
    _host("with an empty port", "Host: h:", right=_EITHER),
    _host("IPv4", "Host: 127.0.0.1:8000", right=_OK),
    _host("IPv6", "Host: [::1]:8000", right=_OK),
    _host("any case", "hOsT: h", right=_OK),
    _host("escaped", "Host: a%20b", right=_EITHER),
    _host("a list", "Host: h, evil"),
    _host("a list without space", "Host: h,evil", right=_EITHER),
    _host("space inside", "Host: h evil"),
    _host("tab inside", "Host: h\tevil"),
    _host("userinfo", "Host: user@h"),
    _host("userinfo and password", "Host: user:pw@h"),
    _host("a path", "Host: h/path"),
    _host("a query", "Host: h?q"),
    _host("a fragment", "Host: h#f"),
    _host("a URL", "Host: http://h/"),
    _host("backslash", "Host: h\\evil"),
    _host("angle brackets", "Host: <script>"),
    _host("quotes", 'Host: "h"'),
    _host("curly brackets", "Host: {h}"),
    _host("a port of letters", "Host: h:http"),
    _host("two ports", "Host: h:80:80"),
    _host("a negative port", "Host: h:-1"),
    _host("a port of six digits", "Host: h:123456", right=_EITHER),
    _host("IPv6 that is open", "Host: [::1"),
    _host("IPv6 with junk after", "Host: [::1]evil"),
    _host("a bad escape", "Host: h%zz"),
    _host("UTF-8", "Host: é"),
    _host("a high byte", b"Host: \xff"),
    _host("NUL", "Host: h\x00"),
    _host("folded", "Host:", " h", rfc="9112 5.2"),
    _host("300 bytes", "Host: " + "h" * 300, right=_EITHER),
    _host("after a folded line", "X-A: b", " c", "Host: h", rfc="9112 5.2"),
    Case("host: never goes behind", "9110 7.2", (post("X-Forwarded-Host: evil", host="Host: evil.example"),), (served(Request("POST", PATH, BODY, lacks=("evil",))), served(POSTED))),
)  # fmt: skip
