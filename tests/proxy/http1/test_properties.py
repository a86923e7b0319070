"""Heads and chunked bodies, for any bytes: split anywhere, and read by others as we read them."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from proxy.http1.checks import check_chunks, check_head_end, check_request, check_response, decode
from support.examples import examples

_EXAMPLES = settings(max_examples=examples(400), deadline=None)
_CUTS = st.lists(st.integers(0, 400), max_size=6)

_METHODS = st.sampled_from([*[b"GET", b"POST"] * 8, b"OPTIONS", b"get", b"M" * 33, b"G T", b"CONNECT"])
_TARGETS = st.sampled_from(
    [
        *[b"/v1/completions", b"/", b"/?a=%zz"] * 4,
        *(b"*", b"http://h/a?b", b"http://h", b"/a#b", b"a", b"//x", b"/?\xc3", b"http://u@h/"),
    ]
)
_NAMES = st.sampled_from(
    [
        *(b"Host", b"Content-Length", b"Transfer-Encoding", b"Connection", b"Expect", b"Content-Encoding"),
        *(b"X-A", b"x-a", b"X-Request-Id", b"TE", b"Upgrade", b"Authorization", b"Keep-Alive", b"Trailer"),
        *(b"X A", b"X-A ", b"", b" X", b"Content-Length\x00", b"Transfer_Encoding", b"HTTP2-Settings"),
    ]
)
_VALUES = st.one_of(
    st.sampled_from(
        [
            *(b"h", b"5", b"5, 5", b"+5", b"0", b"chunked", b"Chunked ", b"gzip, chunked", b"identity", b"close"),
            *(b"x-a, close", b"keep-alive", b"X-A", b"100-continue", b"gzip", b"\t", b"a\r\n b", b"a\nb", b"a\x00"),
            *(b"\xff", "é".encode(), b"a\rb", b"a:b", b"9" * 30, b"host", b"content-length", b",,", b"h:80", b"a@b"),
        ]
    ),
    st.binary(max_size=8),
)  # fmt: skip
_COLONS = st.sampled_from([b": ", b":", b":\t", b" : "])
_ENDS = st.sampled_from([b"\r\n"] * 20 + [b"\n", b"\r", b"\r\n\r\n", b"\r\r\n", b""])
_LINES = st.tuples(_NAMES, _COLONS, _VALUES, _ENDS).map(b"".join)
_FRAMING = st.sampled_from(
    [
        *[b"", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n"] * 5,
        b"content-length:\t007 \r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
    ]
)
_GOOD_LINES = st.sampled_from(
    [
        *(b"X-A: 1\r\n", b"x-B:2\r\n", b"x-a:\r\n", b"Connection: x-a\r\n", b"Connection: close, X-B\r\n"),
        *(
            b"TE: trailers\r\n",
            b"Upgrade: h2c\r\n",
            b"Connection: host,content-length\r\n",
            b"X-Request-Id: a\r\n",
        ),
        *(
            b"Authorization: Bearer k\r\n",
            "X-C: é\r\n".encode(),
            b"Keep-Alive: timeout=5\r\n",
            b"Trailer: x\r\n",
        ),
    ]
)
_ALL_LINES = st.one_of(_GOOD_LINES, _GOOD_LINES, _GOOD_LINES, _GOOD_LINES, _GOOD_LINES, _GOOD_LINES, _LINES)


@st.composite
def _requests(draw: st.DrawFn) -> bytes:
    """Heads, most of them nearly right."""
    version = draw(st.sampled_from([b"HTTP/1.1"] * 9 + [b"HTTP/1.0", b"HTTP/1.2"]))
    first = b" ".join((draw(_METHODS), draw(_TARGETS), version))
    before = draw(st.sampled_from([b""] * 9 + [b"\r\n", b"\n"]))
    host = draw(st.sampled_from([b"Host: h\r\n"] * 9 + [b"", b"host: a b\r\n"]))
    lines = [host, draw(_FRAMING), *draw(st.lists(_ALL_LINES, max_size=5))]
    return before + first + b"\r\n" + b"".join(lines) + b"\r\n"


@st.composite
def _changed(draw: st.DrawFn, base: st.SearchStrategy[bytes]) -> bytes:
    """One of these with a few bytes changed, put in or left out."""
    data = bytearray(draw(base))
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2, 3]))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 2))] = draw(
            st.one_of(
                st.sampled_from([b"\r", b"\n", b"\r\n", b" ", b"\t", b"\0", b":", b",", b";", b"0", b"\x80"]),
                st.binary(max_size=2),
            )
        )
    return bytes(data)


@st.composite
def _bodies(draw: st.DrawFn) -> bytes:
    """Chunked bodies, most of them right."""
    out = b""
    for data in draw(st.lists(st.binary(min_size=1, max_size=40), max_size=5)):
        size = draw(st.sampled_from([b"%x", b"%X", b"0%x", b"00%x"])) % len(data)
        extension = draw(st.sampled_from([b""] * 6 + [b";a", b";a=b", b' ; a = "b\\"c"', b";\xff", b" "]))
        out += size + extension + b"\r\n" + data + b"\r\n"
    trailers = draw(st.sampled_from([b""] * 4 + [b"X: 1\r\n", b"X : 1\r\n", b"X: 1\r\nY:\r\n"]))
    return (
        out
        + draw(st.sampled_from([b"0", b"000", b"0;a"]))
        + b"\r\n"
        + trailers
        + b"\r\n"
        + draw(st.sampled_from([b"", b"GET "]))
    )


_ANSWER_LINES = st.sampled_from([b"Content-Type: a/b; c\r\n", b"Server: x\r\n", b"Set-Cookie: a\r\n"])
_ANSWERS = st.builds(
    lambda first, lines: first + b"\r\n" + b"".join(lines) + b"\r\n",
    st.sampled_from([b"HTTP/1.1 200 OK"] * 4 + [b"HTTP/1.1 204 ", b"HTTP/1.0 200 OK", b"HTTP/1.1 100 C",
     b"HTTP/1.1 503 \xff", b"HTTP/1.1 200"]),
    st.lists(st.one_of(_ALL_LINES, _ANSWER_LINES, _FRAMING), max_size=5),
)  # fmt: skip


@given(_changed(_requests()), _CUTS)
@_EXAMPLES
@example(b"\r\n\r\n\r\nGET / HTTP/1.1\r\n\r\n", [1, 2, 3, 4, 5])
@example(b"GET / HTTP/1.1\r\n\r\n", [15, 16, 17])
def test_a_head_ends_where_it_ends(data: bytes, cuts: list[int]) -> None:
    check_head_end(data, cuts)


@given(_changed(_requests()))
@_EXAMPLES
def test_a_request_that_is_taken_is_the_same_to_others(head: bytes) -> None:
    check_request(head)


@given(_requests())
@_EXAMPLES
def test_a_request_from_parts(head: bytes) -> None:
    check_request(head)


@given(_changed(_ANSWERS), st.sampled_from(["GET", "POST", "HEAD"]))
@_EXAMPLES
def test_an_answer_that_is_taken_is_the_same_to_others(head: bytes, method: str) -> None:
    check_response(head, method)


@given(_changed(_bodies()), _CUTS)
@_EXAMPLES
def test_chunks_split_anywhere(data: bytes, cuts: list[int]) -> None:
    check_chunks(data, cuts)


@given(_bodies())
@_EXAMPLES
def test_chunks_byte_by_byte(data: bytes) -> None:
    check_chunks(data, range(len(data)))


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=8), _CUTS)
@_EXAMPLES
def test_encoded_bodies_decode(pieces: list[bytes], cuts: list[int]) -> None:
    coded = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    assert check_chunks(coded, cuts)
    assert decode([coded]) == (b"".join(pieces), True, b"")
