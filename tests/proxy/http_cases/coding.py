"""What a chunked body may look like."""

# ruff: noqa: E501 - a case is a line

from __future__ import annotations

from proxy.http_cases.model import (
    BODY,
    GOT,
    LAST,
    PATH,
    POSTED,
    SMUGGLED,
    Case,
    Outcome,
    Request,
    chunk,
    chunked,
    get,
    in_pieces,
    refused,
    served,
)

_SIZE = b"%x" % len(BODY)
_OK = (served(POSTED),)
_EITHER = (served(POSTED), refused(400))


def _bad(name: str, body: bytes, rfc: str = "9112 7.1") -> Case:
    return Case(f"chunks: {name}", rfc, (chunked(body) + SMUGGLED,), (refused(400),))


def _good(name: str, body: bytes, rfc: str = "9112 7.1", right: tuple[Outcome, ...] = _OK) -> Case:
    return Case(f"chunks: {name}", rfc, (chunked(body),), right)


_WHOLE = chunked(chunk(BODY[:7]) + chunk(BODY[7:], extension=b";a=b") + b"0\r\nX-T: 1\r\n\r\n")

CASES: tuple[Case, ...] = (
    _good("one", chunk(BODY) + LAST),
    _good("each byte its own", b"".join(chunk(bytes([byte])) for byte in BODY) + LAST),
    _good("upper-case hex", chunk(b" " * 0xAB) .replace(b"ab\r\n", b"AB\r\n", 1) + chunk(BODY) + LAST, right=(served(Request("POST", PATH, b" " * 0xAB + BODY)),)),
    _good("leading zeros", chunk(BODY, b"000" + _SIZE) + b"000\r\n\r\n", right=_EITHER),
    _good("very many leading zeros", chunk(BODY, b"0" * 300 + _SIZE) + LAST, right=_EITHER),
    _good("CRLF inside the data", chunk(b"\r\n\r\n") + chunk(BODY) + LAST, right=(served(Request("POST", PATH, b"\r\n\r\n" + BODY)),)),
    _good("what looks like the end inside the data", chunk(b'{"model":"m","prompt":"\\r\\n0",') + chunk(b'\r\n0\r\n\r\n"a":1}') + LAST, right=(served(Request("POST", PATH, b'{"model":"m","prompt":"\\r\\n0",\r\n0\r\n\r\n"a":1}')), refused(400, closes=None))),
    _good("an extension", chunk(BODY, extension=b";a=b") + LAST, "9112 7.1.1"),
    _good("an extension without a value", chunk(BODY, extension=b";a") + LAST, "9112 7.1.1"),
    _good("two extensions", chunk(BODY, extension=b";a=b;c=d") + LAST, "9112 7.1.1"),
    _good("a quoted extension", chunk(BODY, extension=b';a="b;c\\"d"') + LAST, "9112 7.1.1", _EITHER),
    _good("an extension with space around", chunk(BODY, extension=b" ; a = b") + LAST, "9112 7.1.1", _EITHER),
    _good("an extension on the last chunk", chunk(BODY) + b"0;a=b\r\n\r\n", "9112 7.1.1"),
    _good("a trailer", chunk(BODY) + b"0\r\nX-Checksum: 1\r\n\r\n", "9112 7.1.2", (served(Request("POST", PATH, BODY, lacks=("x-checksum",))),)),
    _good("two trailers", chunk(BODY) + b"0\r\nX-A: 1\r\nX-B: 2\r\n\r\n", "9112 7.1.2"),
    _good("trailer Content-Length", chunk(BODY) + b"0\r\nContent-Length: 5\r\n\r\n", "9110 6.5.1", _EITHER),
    _good("trailer Transfer-Encoding", chunk(BODY) + b"0\r\nTransfer-Encoding: chunked\r\n\r\n", "9110 6.5.1", _EITHER),
    _good("trailer Host", chunk(BODY) + b"0\r\nHost: evil\r\n\r\n", "9110 6.5.1", _EITHER),
    _good("trailer Authorization", chunk(BODY) + b"0\r\nAuthorization: Bearer x\r\n\r\n", "9110 6.5.1", (served(Request("POST", PATH, BODY, lacks=("authorization",))), refused(400))),
    _good("trailer X-Request-Id", chunk(BODY) + b"0\r\nX-Request-Id: x\r\n\r\n", "9110 6.5.1", _EITHER),
    Case("chunks: in two writes", "9112 7.1", in_pieces(_WHOLE, len(_WHOLE) // 2), _OK),
    Case("chunks: cut inside the first size line", "9112 7.1", in_pieces(_WHOLE, _WHOLE.index(b"\r\n\r\n") + 5), _OK),
    Case("chunks: cut between CR and LF", "9112 7.1", in_pieces(_WHOLE, _WHOLE.index(b"7\r\n{") + 2), _OK),
    Case("chunks: cut after the data", "9112 7.1", in_pieces(_WHOLE, _WHOLE.index(b";a=b") - 4, _WHOLE.index(b";a=b") - 3), _OK),
    Case("chunks: cut inside the trailer", "9112 7.1", in_pieces(_WHOLE, len(_WHOLE) - 6, len(_WHOLE) - 1), _OK),
    Case("chunks: what follows is the next request", "9112 7.1", (chunked(chunk(BODY) + LAST) + get(),), (served(POSTED, GOT),)),
    Case("chunks: a trailer, then the next request", "9112 7.1.2", (chunked(chunk(BODY) + b"0\r\nX-T: 1\r\n\r\n") + get(),), (served(POSTED, GOT),)),
    Case("chunks: beyond the limit", "9110 15.5.14", (chunked(chunk(b" " * 600) * 2 + chunk(BODY) + LAST),), (refused(413),), settings={"max_body_bytes": 1000}),
    Case("chunks: one beyond the limit, announced only", "9110 15.5.14", (chunked(b"fffff\r\n" + b" " * 5000),), (refused(413),), settings={"max_body_bytes": 1000}),
    Case("chunks: nothing in them", "9112 7.1", (chunked(LAST),), (refused(400, closes=None),)),
    _bad("no size", b"\r\n" + BODY + b"\r\n" + LAST),
    _bad("no hex", chunk(BODY, b"xyz") + LAST),
    _bad("hex and junk", chunk(BODY, _SIZE + b"g") + LAST),
    _bad("0x before", chunk(BODY, b"0x" + _SIZE) + LAST),
    _bad("plus before", chunk(BODY, b"+" + _SIZE) + LAST),
    _bad("minus before", chunk(BODY, b"-" + _SIZE) + LAST),
    _bad("underscore", chunk(BODY, b"1_e") + LAST),
    _bad("space before", chunk(BODY, b" " + _SIZE) + LAST),
    _bad("tab before", chunk(BODY, b"\t" + _SIZE) + LAST),
    _bad("space inside", chunk(BODY, b"1 e") + LAST),
    _bad("comma", chunk(BODY, _SIZE + b",") + LAST),
    _bad("full-width digit", chunk(BODY, "１e".encode()) + LAST),
    _bad("NUL after", chunk(BODY, _SIZE + b"\x00") + LAST),
    _bad("vertical tab after", chunk(BODY, _SIZE + b"\x0b") + LAST),
    _bad("2**64 + n", chunk(BODY, b"1" + _SIZE.rjust(16, b"0")) + LAST),
    _bad("2**63", chunk(BODY, b"8" + b"0" * 15) + LAST),
    _bad("sixteen F", chunk(BODY, b"F" * 16) + LAST),
    _bad("2**32 + n in 17 digits", chunk(BODY, (b"1" + _SIZE.rjust(8, b"0")).rjust(17, b"0")) + LAST),
    _bad("bare LF after the size", _SIZE + b"\n" + BODY + b"\r\n" + LAST, "9112 2.2"),
    _bad("bare LF everywhere", _SIZE + b"\n" + BODY + b"\n0\n\n", "9112 2.2"),
    _bad("bare CR after the size", _SIZE + b"\r" + BODY + b"\r\n" + LAST, "9112 2.2"),
    _bad("CR CR LF after the size", _SIZE + b"\r\r\n" + BODY + b"\r\n" + LAST, "9112 2.2"),
    _bad("bare LF after the data", _SIZE + b"\r\n" + BODY + b"\n" + LAST, "9112 2.2"),
    _bad("bare CR after the data", _SIZE + b"\r\n" + BODY + b"\r" + LAST, "9112 2.2"),
    _bad("no CRLF after the data", _SIZE + b"\r\n" + BODY + LAST),
    _bad("two bytes more than the size", chunk(BODY + b"XX", _SIZE) + LAST),
    _bad("one byte less than the size", chunk(BODY[:-1], _SIZE) + LAST),
    _bad("bare LF in an extension", chunk(BODY, extension=b";a\nb") + LAST, "9112 7.1.1"),
    _bad("bare LF ends the extension (TE.TE by LF)", _SIZE + b";\n" + BODY + b"\r\n" + LAST, "9112 7.1.1"),
    _bad("bare CR in an extension", chunk(BODY, extension=b";a\rb") + LAST, "9112 7.1.1"),
    _bad("NUL in an extension", chunk(BODY, extension=b";a=\x00") + LAST, "9112 7.1.1"),
    _bad("an open quote", chunk(BODY, extension=b';a="b') + LAST, "9112 7.1.1"),
    _bad("CRLF in a quoted extension", chunk(BODY, extension=b';a="\r\n') + LAST, "9112 7.1.1"),
    _bad("an extension of 100 kB", chunk(BODY, extension=b";a=" + b"b" * 100_000) + LAST, "9112 7.1.1"),
    _bad("extensions of 1 kB for each byte", b"".join(chunk(b" ", extension=b";" + b"a" * 1000) for _ in range(100)) + chunk(BODY) + LAST, "9112 7.1.1"),
    _bad("a size line that does not end", b"0" * 100_000),
    _bad("a trailer without a colon", chunk(BODY) + b"0\r\nX-T\r\n\r\n", "9112 7.1.2"),
    _bad("a folded trailer", chunk(BODY) + b"0\r\nX-T: 1\r\n 2\r\n\r\n", "9112 5.2"),
    _bad("a trailer with space before the colon", chunk(BODY) + b"0\r\nX-T : 1\r\n\r\n", "9112 5.1"),
    _bad("a trailer with a bare LF", chunk(BODY) + b"0\r\nX-T: 1\n\r\n\r\n", "9112 2.2"),
    _bad("a trailer with NUL", chunk(BODY) + b"0\r\nX-T: \x00\r\n\r\n", "9110 5.5"),
    _bad("a trailer of 100 kB", chunk(BODY) + b"0\r\nX-T: " + b"y" * 100_000 + b"\r\n\r\n", "9112 7.1.2"),
    _bad("trailers without end", chunk(BODY) + b"0\r\n" + b"X-T: 1\r\n" * 20_000, "9112 7.1.2"),
    _bad("the last chunk without its empty line, then a request", chunk(BODY) + b"0\r\n"),
    _bad("bare LF for the empty line at the end", chunk(BODY) + b"0\r\n\n", "9112 2.2"),
)  # fmt: skip
