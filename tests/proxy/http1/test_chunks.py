"""The chunked transfer coding, taken apart."""

from __future__ import annotations

import pytest

from launcher.proxy.http1.chunks import MANY_CHUNKS, MIN_MEAN_CHUNK_BYTES, BadFraming, ChunkedDecoder


def read(data: bytes, step: int) -> tuple[bytes, ChunkedDecoder]:
    decoder = ChunkedDecoder()
    return b"".join(decoder.feed(data[at : at + step]) for at in range(0, len(data), step)), decoder


@pytest.mark.parametrize(
    ("data", "payload"),
    [
        (b"0\r\n\r\n", b""),
        (b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
        (b"5\r\nhello\r\n00a\r\n, wide wor\r\n2\r\nld\r\n000\r\n\r\n", b"hello, wide world"),
        (b"A\r\n\r\n\r\n\r\n\r\n\r\n\r\n0\r\n\r\n", b"\r\n" * 5),
        (b'5;a;b=c ; d="e\\";f" \r\nhello\r\n0\r\n\r\n', None),
        (b'5;a;b=c ; d="e\\";f"\r\nhello\r\n0;last\r\n\r\n', b"hello"),
        (b"5 ;a\r\nhello\r\n0\r\nX: 1\r\nY: 2\r\n\r\n", b"hello"),
    ],
)
def test_bodies(data: bytes, payload: bytes | None) -> None:
    for step in (1, 2, 3, 7, 1000):
        if payload is None:
            with pytest.raises(BadFraming):
                read(data, step)
            continue
        found, decoder = read(data, step)
        assert found == payload, step
        assert decoder.ended, step
        assert decoder.at_boundary, step
        assert decoder.rest == b"", step


def test_one_whole_chunk_in_one_read() -> None:
    decoder = ChunkedDecoder()
    assert decoder.feed(b"5\r\nhello\r\n") == b"hello"
    assert decoder.feed(b"5\r\nhello") == b"hello"
    assert decoder.feed(b"\r\n0\r\n\r\n") == b""
    assert decoder.ended


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_what_follows_is_kept(step: int) -> None:
    found, decoder = read(b"1\r\nx\r\n0\r\n\r\nGET / HTTP/1.1", step)
    assert (found, decoder.rest) == (b"x", b"GET / HTTP/1.1")


def test_boundaries() -> None:
    decoder = ChunkedDecoder()
    assert decoder.at_boundary
    seen = []
    for byte in b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n":
        decoder.feed(bytes([byte]))
        seen.append(decoder.at_boundary)
    assert [at for at, yes in enumerate(seen) if yes] == [6, 12, 17]
    assert decoder.ended


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"x\r\n",
        b"0x5\r\nhello\r\n",
        b"+5\r\nhello\r\n",
        b"-1\r\n",
        b" 5\r\nhello\r\n",
        b"5 \r\nhello\r\n",
        b"5_0\r\n",
        b"5\nhello\n0\n\n",
        b"5\n",
        b"5\rhello",
        b"5\r\r\nhello",
        b"5;a\nb\r\nhello",
        b"5;\r\nhello\r\n",
        b"5;=b\r\nhello\r\n",
        b"5;a=\r\nhello\r\n",
        b'5;a="b\r\nhello\r\n',
        b"5;a\x00\r\n",
        b"5,a\r\n",
        b"F" * 16 + b"\r\n",
        b"5;" + b"a" * 2000,
        b"5\r\nhelloX\r\n",
        b"5\r\nhello\n",
        b"5\r\nhello\rX",
        b"5\r\nhello0\r\n\r\n",
        b"0\r\nX\r\n\r\n",
        b"0\r\n X: 1\r\n\r\n",
        b"0\r\nX : 1\r\n\r\n",
        b"0\r\nX: 1\n\r\n\r\n",
        b"0\r\nX: " + b"y" * 9000,
        b"0\r\n" + b"X: y\r\n" * 2000,
        b"0\r\n\n",
        b"1;%b\r\nx\r\n" % (b"a" * 1000) * 20,
    ],
)
def test_invalid_chunked_bodies(data: bytes) -> None:
    for step in (1, 1000):
        with pytest.raises(BadFraming):
            read(data, step)


@pytest.mark.parametrize("chunk", [b"1\r\nx\r\n", b"1;a=b\r\nx\r\n"])
def test_a_request_of_tiny_chunks_alone_ends(chunk: bytes) -> None:
    reader = ChunkedDecoder(MIN_MEAN_CHUNK_BYTES)
    assert reader.feed(chunk * MANY_CHUNKS) == b"x" * MANY_CHUNKS  # some are nobody's harm
    with pytest.raises(BadFraming):
        reader.feed(chunk * 2)
    assert (
        len(ChunkedDecoder().feed(chunk * 2 * MANY_CHUNKS)) == 2 * MANY_CHUNKS
    )  # an instance's may be small


def test_a_large_chunk_in_small_reads_is_no_small_chunk() -> None:
    reader = ChunkedDecoder(MIN_MEAN_CHUNK_BYTES)
    reader.feed(b"fffff\r\n")
    for _ in range(2 * MANY_CHUNKS):
        assert reader.feed(b"x") == b"x"
