"""Where a body ends: Content-Length and Transfer-Encoding."""

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
    Request,
    chunk,
    chunked,
    get,
    post,
    refused,
    served,
)

_N = len(BODY)
_CHUNKS = chunk(BODY) + LAST


def _length(name: str, *fields: str | bytes, rfc: str = "9110 8.6") -> Case:
    """A body of BODY under lengths that are none."""
    return Case(f"length: {name}", rfc, (post(*fields, length=False) + SMUGGLED,), (refused(400),))


def _coding(
    name: str, *fields: str | bytes, rfc: str = "9112 6.1", status: tuple[int, ...] = (400, 501)
) -> Case:
    """A well-formed chunked body under codings that are not exactly `chunked`."""
    raw = post(*fields, length=False, body=_CHUNKS)
    return Case(f"coding: {name}", rfc, (raw + SMUGGLED,), (refused(*status),))


def _both(name: str, *fields: str | bytes) -> Case:
    return Case(
        f"both: {name}", "9112 6.3", (post(*fields, length=False, body=_CHUNKS) + SMUGGLED,), (refused(400),)
    )


CASES: tuple[Case, ...] = (
    Case("length: a body of it", "9112 6.3", (post(),), (served(POSTED),)),
    Case("length: leading zeros", "9110 8.6", (post(f"Content-Length: 00{_N}", length=False),), (served(POSTED), refused(400))),
    Case("length: space around", "9110 5.5", (post(f"Content-Length: \t {_N} \t", length=False),), (served(POSTED),)),
    Case("length: no space", "9110 5.5", (post(f"Content-Length:{_N}", length=False),), (served(POSTED),)),
    Case("length: any case", "9110 5.1", (post(f"cOnTeNt-LeNgTh: {_N}", length=False),), (served(POSTED),)),
    Case("length: the same twice", "9112 6.3", (post(*[f"Content-Length: {_N}"] * 2, length=False),), (served(POSTED), refused(400))),
    Case("length: a list of the same", "9112 6.3", (post(f"Content-Length: {_N}, {_N}", length=False),), (served(POSTED), refused(400))),
    Case("length: none, no body", "9112 6.3", (get(),), (served(GOT),)),
    Case("length: none where one is wanted", "9110 8.6", (post(length=False, body=b""),), (refused(400, 411, closes=None),)),
    Case("length: 0 where a body is wanted", "9110 8.6", (post(body=b""),), (refused(400, closes=None),)),
    Case("length: beyond the limit", "9110 15.5.14", (post("Content-Length: 1001", length=False, body=b""),), (refused(413),), settings={"max_body_bytes": 1000}),
    Case("length: at the limit", "9110 15.5.14", (post(),), (served(POSTED),), settings={"max_body_bytes": _N}),
    Case("length: 2**31", "9110 8.6", (post("Content-Length: 2147483648", length=False, body=b"x"),), (refused(400, 413),)),
    Case("length: 2**32 + n", "9110 8.6", (post(f"Content-Length: {2**32 + _N}", length=False) + SMUGGLED,), (refused(400, 413),)),
    Case("length: 2**64 + n", "9110 8.6", (post(f"Content-Length: {2**64 + _N}", length=False) + SMUGGLED,), (refused(400, 413),)),
    Case("length: a thousand digits", "9110 8.6", (post("Content-Length: " + "9" * 1000, length=False) + SMUGGLED,), (refused(400, 413),)),
    Case("length: what follows is the next request", "9112 6.3", (post() + get(),), (served(POSTED, GOT),)),
    Case("length: shorter than what is sent", "9112 6.3", (post(f"Content-Length: {_N}", length=False, body=BODY + b"XX\r\n\r\n"),), (refused(400, after=(POSTED,)),)),
    _length("two that differ", f"Content-Length: {_N}", f"Content-Length: {_N + 1}", rfc="9112 6.3"),
    _length("two, 0 first", "Content-Length: 0", f"Content-Length: {_N}", rfc="9112 6.3"),
    _length("two, 0 last", f"Content-Length: {_N}", "content-length: 0", rfc="9112 6.3"),
    _length("a list that differs", f"Content-Length: {_N}, {_N + 1}"),
    _length("a list with an empty element", f"Content-Length: {_N},"),
    _length("plus sign", f"Content-Length: +{_N}"),
    _length("minus sign", f"Content-Length: -{_N}"),
    _length("minus zero", "Content-Length: -0"),
    _length("space inside", "Content-Length: 3 0"),
    _length("tab inside", "Content-Length: 3\t0"),
    _length("hex", f"Content-Length: 0x{_N:x}"),
    _length("octal prefix", f"Content-Length: 0o{_N:o}"),
    _length("underscore", "Content-Length: 3_0"),
    _length("decimal point", f"Content-Length: {_N}.0"),
    _length("exponent", "Content-Length: 3e1"),
    _length("empty", "Content-Length:"),
    _length("only space", "Content-Length:   "),
    _length("letters", "Content-Length: thirty"),
    _length("number and letters", f"Content-Length: {_N}bytes"),
    _length("semicolon", f"Content-Length: {_N};a=b"),
    _length("quoted", f'Content-Length: "{_N}"'),
    _length("Arabic digits", "Content-Length: ٣٠"),
    _length("full-width digits", "Content-Length: ３０"),
    _length("vertical tab before", f"Content-Length: \x0b{_N}", rfc="9110 5.5"),
    _length("NUL after", f"Content-Length: {_N}\x00", rfc="9110 5.5"),
    _length("no-break space before", b"Content-Length: \xa0%d" % _N, rfc="9110 5.5"),
    Case("coding: chunked", "9112 7.1", (chunked(_CHUNKS),), (served(POSTED),)),
    Case("coding: Chunked in any case", "9112 7", (post("Transfer-Encoding: cHuNkEd", length=False, body=_CHUNKS),), (served(POSTED),)),
    Case("coding: space around", "9110 5.5", (post("Transfer-Encoding: \t chunked \t", length=False, body=_CHUNKS),), (served(POSTED),)),
    Case("coding: name in any case", "9110 5.1", (post("tRANSFER-eNCODING: chunked", length=False, body=_CHUNKS),), (served(POSTED),)),
    Case("coding: an empty element", "9110 5.6.1.2", (post("Transfer-Encoding: chunked,", length=False, body=_CHUNKS),), (served(POSTED), refused(400, 501))),
    _coding("chunked twice in a list", "Transfer-Encoding: chunked, chunked"),
    _coding("chunked twice in two lines", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
    _coding("identity", "Transfer-Encoding: identity"),
    _coding("identity, chunked", "Transfer-Encoding: identity, chunked"),
    _coding("chunked, identity", "Transfer-Encoding: chunked, identity", status=(400,), rfc="9112 6.3"),
    _coding("gzip, chunked", "Transfer-Encoding: gzip, chunked"),
    _coding("gzip", "Transfer-Encoding: gzip"),
    _coding("chunked, gzip", "Transfer-Encoding: chunked, gzip", rfc="9112 6.3"),
    _coding("gzip and chunked in two lines", "Transfer-Encoding: gzip", "Transfer-Encoding: chunked"),
    _coding("chunked and unknown in two lines", "Transfer-Encoding: chunked", "Transfer-Encoding: x-odd"),
    _coding("unknown", "Transfer-Encoding: cow"),
    _coding("almost", "Transfer-Encoding: xchunked"),
    _coding("almost, longer", "Transfer-Encoding: chunkedx"),
    _coding("a parameter", "Transfer-Encoding: chunked;a=b"),
    _coding("quoted", 'Transfer-Encoding: "chunked"'),
    _coding("empty", "Transfer-Encoding:"),
    _coding("only a comma", "Transfer-Encoding: ,"),
    _coding("semicolon first", "Transfer-Encoding: ;chunked"),
    _coding("space inside", "Transfer-Encoding: chun ked"),
    _coding("vertical tab before", "Transfer-Encoding: \x0bchunked", rfc="9110 5.5", status=(400,)),
    _coding("form feed after", "Transfer-Encoding: chunked\x0c", rfc="9110 5.5", status=(400,)),
    _coding("NUL after", "Transfer-Encoding: chunked\x00", rfc="9110 5.5", status=(400,)),
    _coding("no-break space before", b"Transfer-Encoding: \xa0chunked"),
    _coding("a Kelvin sign", "Transfer-Encoding: chunKed".replace("K", "\u212a")),
    _coding("folded", "Transfer-Encoding:", " chunked", rfc="9112 5.2", status=(400,)),
    _coding("folded with a tab", "Transfer-Encoding:", "\tchunked", rfc="9112 5.2", status=(400,)),
    _coding("space before the colon", "Transfer-Encoding : chunked", rfc="9112 5.1", status=(400,)),
    _coding("CR before the colon", "Transfer-Encoding\r: chunked", rfc="9112 2.2", status=(400,)),
    _coding("bare LF before the name", "X: y\nTransfer-Encoding: chunked", rfc="9112 2.2", status=(400,)),
    _coding("bare CR before the name", "X: y\rTransfer-Encoding: chunked", rfc="9112 2.2", status=(400,)),
    Case("coding: in HTTP/1.0", "9112 6.1", (chunked(_CHUNKS, version="HTTP/1.0") + SMUGGLED,), (refused(400),)),
    Case("coding: in HTTP/1.0 that stays", "9112 6.1", (chunked(_CHUNKS, "Connection: keep-alive", version="HTTP/1.0") + SMUGGLED,), (refused(400),)),
    Case("coding: an underscore is another field", "9110 5.1", (post("Transfer_Encoding: chunked"),), (served(POSTED), refused(400))),
    Case("coding: a prefix is another field", "9110 5.1", (post("X-Transfer-Encoding: chunked", "Transfer-Encoding-X: chunked"),), (served(POSTED),)),
    _both("length first", f"Content-Length: {len(_CHUNKS)}", "Transfer-Encoding: chunked"),
    _both("coding first", "Transfer-Encoding: chunked", f"Content-Length: {len(_CHUNKS)}"),
    _both("length 0", "Content-Length: 0", "Transfer-Encoding: chunked"),
    _both("length of a part", "Content-Length: 4", "Transfer-Encoding: chunked"),
    _both("coding in odd case", "Content-Length: 4", "TRANSFER-ENCODING: CHUNKED"),
    Case("both: length and an unknown coding", "9112 6.3", (post("Transfer-Encoding: cow") + SMUGGLED,), (refused(400, 501),)),
    Case("both: length nominated away", "9110 7.6.1", (post("Connection: Content-Length", "Content-Length: 4", "Transfer-Encoding: chunked", length=False, body=_CHUNKS) + SMUGGLED,), (refused(400),)),
    Case("both: in HTTP/1.0", "9112 6.1", (post("Transfer-Encoding: chunked", version="HTTP/1.0") + SMUGGLED,), (refused(400),)),
    Case("smuggling: CL.TE", "9112 11.2", (post("Content-Length: 6", "Transfer-Encoding: chunked", length=False, body=LAST + b"G"),), (refused(400),)),
    Case("smuggling: TE.CL", "9112 11.2", (post("Content-Length: 4", "Transfer-Encoding: chunked", length=False, body=b"%x\r\n%b\r\n" % (len(SMUGGLED), SMUGGLED) + LAST),), (refused(400),)),
    Case("smuggling: in a body it stays a body", "9112 6.3", (post(body=BODY + b"\r\n\r\n" + SMUGGLED),), (served(Request("POST", PATH, BODY + b"\r\n\r\n" + SMUGGLED)), refused(400, closes=None))),
    Case("smuggling: in a chunk it stays a chunk", "9112 7.1", (chunked(chunk(b" " * 5) + chunk(BODY[:-1]) + chunk(b',"user":"GET /version?smuggled HTTP/1.1"}') + LAST),), (served(Request("POST", PATH, b" " * 5 + BODY[:-1] + b',"user":"GET /version?smuggled HTTP/1.1"}')),)),
    Case("smuggling: in the body of a path that is not there", "9112 9.3", (post(target="/nowhere", body=SMUGGLED),), (refused(404, closes=None),)),
    Case("smuggling: in the body of a method that is not there", "9112 9.3", (post(target="/version", body=SMUGGLED),), (refused(405, closes=None),)),
    Case("smuggling: in chunks for a path that is not there", "9112 9.3", (chunked(chunk(SMUGGLED) + LAST, target="/nowhere"),), (refused(404, closes=None),)),
    Case("smuggling: in the body of a GET", "9110 9.3.1", (get(f"Content-Length: {len(SMUGGLED)}") + SMUGGLED,), (refused(400, 413, closes=None), served(GOT), served(Request("GET", "/version", SMUGGLED)))),
    Case("smuggling: in the body of /health", "9110 9.3.1", (get(f"Content-Length: {len(SMUGGLED)}", target="/health") + SMUGGLED,), (refused(200, 400, 503, closes=None),)),
    Case("smuggling: in chunks of a GET", "9110 9.3.1", (get("Transfer-Encoding: chunked") + chunk(SMUGGLED) + LAST,), (refused(400, 413, closes=None), served(GOT), served(Request("GET", "/version", SMUGGLED)))),
    Case("coding: no chunks of a GET", "9112 7.1", (get("Transfer-Encoding: chunked") + LAST + get(),), (served(GOT, GOT),)),
    Case("coding: no chunks of a HEAD", "9112 7.1", (get("Transfer-Encoding: chunked", method="HEAD") + LAST + get(),), (served(GOT, GOT), served(Request("HEAD", "/version"), GOT)), methods=("HEAD", "GET")),
    Case("smuggling: behind no chunks of a GET", "9112 7.1", (get("Transfer-Encoding: chunked") + b"0\r\nX: y\r\n" + SMUGGLED,), (refused(400),)),
    Case("smuggling: in the body of OPTIONS", "9110 9.3.7", (get(f"Content-Length: {len(SMUGGLED)}", method="OPTIONS") + SMUGGLED,), (refused(200, 204, 400, 405, 501, closes=None),)),
    Case("smuggling: in the body of an unknown method", "9110 9.1", (get(f"Content-Length: {len(SMUGGLED)}", method="BREW") + SMUGGLED,), (refused(400, 405, 501, closes=None),)),
    Case("smuggling: a body that JSON refuses", "9112 9.3", (post(body=SMUGGLED),), (refused(400, closes=None),)),
    Case("smuggling: a body whose model is not there", "9112 9.3", (post(body=b'{"model":"x"}' + SMUGGLED),), (refused(400, 404, closes=None),)),
)  # fmt: skip
