"""A strict decoder of the chunked transfer coding (RFC 9112 section 7.1)."""

from __future__ import annotations

import re
from enum import Enum

from launcher.proxy.http1.fields import FIELD, ODD, TOKEN, VALUE

MAX_SIZE_LINE_BYTES = 1024
MAX_TRAILER_BYTES = 8192
MANY_CHUNKS = 16384  # from so many on, the mean size of a request's chunks is checked
MIN_MEAN_CHUNK_BYTES = 64  # of a request; each chunk costs as much time as 1 KiB of data
MAX_EXCESS_BYTES = 16384  # of size lines beyond 16 bytes + 2 x their chunk's size; Go's rule, CVE-2023-39326

# RFC 9112 7.1.1; the space around ";" and "=" is that of the errata's BWS.
_QUOTED = rb'"(?:[\t \x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t \x21-\x7e\x80-\xff])*+"'
_EXTENSION = rb"[ \t]*+;[ \t]*+%s++(?:[ \t]*+=[ \t]*+(?:%s++|%s))?" % (TOKEN, TOKEN, _QUOTED)
# Not possessive: before 3.11.5 Python takes half an extension for a whole one (gh-106052).
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:%s)*\r\n" % _EXTENSION)
_PLAIN = re.compile(rb"([0-9A-Fa-f]{1,15})\r\n")
_TRAILER = re.compile(FIELD)
_PART_OF_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}(?:[ \t;]%s*)?\r?" % VALUE)


class _State(Enum):
    SIZE = 0  # a chunk's size line
    DATA = 1  # bytes of a chunk
    CRLF = 2  # the end of a chunk's data
    TRAILER = 3  # a trailer field, or the empty line that ends the body


class BadFraming(Exception):  # noqa: N818 - the peer's fault, not ours
    """Invalid chunked framing; the start of the next message is unknown."""


class ChunkedDecoder:
    """One body. Trailers are checked and left out (RFC 9112 7.1.2 allows that)."""

    __slots__ = (
        "_chunks", "_excess", "_left", "_mean", "_passed", "_pending", "_state", "_trailer_bytes", "ended", "rest",
    )  # fmt: skip

    def __init__(self, min_mean: int = 0) -> None:
        """`min_mean`: bytes that chunks must have on average once there are MANY_CHUNKS of them; 0: any."""
        self._mean = min_mean
        self._chunks = 0  # without those that came alone, whole, in one read
        self._passed = 0  # their bytes
        self.ended = False  # the last chunk and its trailers have come
        self.rest = b""  # what came after the end
        self._pending = b""  # an incomplete line
        self._left = 0  # bytes of the chunk still to come
        self._state = _State.SIZE
        self._excess = 0
        self._trailer_bytes = 0

    @property
    def at_boundary(self) -> bool:
        """Whether no part of an unfinished chunk has come; also before the first and after the last."""
        return self.ended or (self._state is _State.SIZE and not self._pending)

    def feed(self, data: bytes) -> bytes:
        """The payload in these bytes. Raises BadFraming; then the decoder is unusable."""
        if self._state is _State.SIZE and not self._pending:  # most reads are one whole chunk
            line = _PLAIN.match(data)
            if line is not None:
                start = line.end()
                size = int(line[1], 16)
                if size and start + size + 2 == len(data) and data.endswith(b"\r\n"):
                    return data[start:-2]
        return self._walk(data)

    def _walk(self, data: bytes) -> bytes:
        if self.ended:
            self.rest += data
            return b""
        buffer = self._pending + data
        payload: list[bytes] = []
        at = 0
        while not self.ended:
            if self._state is _State.DATA:
                piece = buffer[at : at + self._left]
                payload.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
                self._state = _State.CRLF
                continue
            if self._state is _State.SIZE:
                before = len(payload)
                at = _whole_chunks(buffer, at, payload)
                if self._mean and (whole := payload[before:]):
                    self._judge_mean(len(whole), sum(map(len, whole)))
            end = self._line(buffer, at)
            if end < 0:
                break
            at = end
        if self.ended:
            self.rest = buffer[at:]
            self._pending = b""
        else:
            self._pending = buffer[at:]
        return payload[0] if len(payload) == 1 else b"".join(payload)

    def _line(self, buffer: bytes, at: int) -> int:
        """Read the line at `at`. Returns the index after it, or -1: it is incomplete."""
        if self._state is _State.CRLF:
            return self._after_data(buffer, at)
        limit = MAX_SIZE_LINE_BYTES if self._state is _State.SIZE else MAX_TRAILER_BYTES - self._trailer_bytes
        end = buffer.find(b"\r\n", at, at + limit)
        if end < 0:
            if len(buffer) - at >= limit:
                raise BadFraming("a chunk's size line, or the trailers, are too long")
            part = buffer[at:]
            if ODD.search(part) or (
                self._state is _State.SIZE and part and not _PART_OF_SIZE.fullmatch(part)
            ):
                raise BadFraming(f"not a chunk's size: {part[:40]!r}")
            return -1
        if self._state is _State.SIZE:
            self._size(buffer[at : end + 2])
        else:
            self._trailer(buffer[at : end + 2])
        return end + 2

    def _after_data(self, buffer: bytes, at: int) -> int:
        end = buffer[at : at + 2]
        if end == b"\r\n":
            self._state = _State.SIZE
            return at + 2
        if end in {b"", b"\r"}:
            return -1
        raise BadFraming("a chunk's data is longer than its size says")

    def _size(self, line: bytes) -> None:
        matched = _SIZE_LINE.fullmatch(line)
        if matched is None:
            raise BadFraming(f"not a chunk's size: {line[:40]!r}")
        self._left = int(matched[1], 16)
        self._state = _State.DATA if self._left else _State.TRAILER
        self._excess = max(0, self._excess + len(line) - 16 - 2 * self._left)
        if self._excess > MAX_EXCESS_BYTES:
            raise BadFraming("there are more chunk extensions than data")
        if self._mean and self._left:
            self._judge_mean(1, self._left)

    def _judge_mean(self, chunks: int, size: int) -> None:
        self._chunks += chunks
        self._passed += size
        if self._chunks > MANY_CHUNKS and self._passed < self._chunks * self._mean:
            raise BadFraming(f"its chunks have less than {self._mean} bytes on average")

    def _trailer(self, line: bytes) -> None:
        if line == b"\r\n":
            self.ended = True
            return
        if not _TRAILER.fullmatch(line):
            raise BadFraming(f"not a trailer field: {line[:40]!r}")
        self._trailer_bytes += len(line)


def _whole_chunks(buffer: bytes, at: int, payload: list[bytes]) -> int:
    """Take whole chunks without extensions, up to MANY_CHUNKS. Returns the index after them."""
    for _ in range(MANY_CHUNKS):
        line = _PLAIN.match(buffer, at)
        if line is None:
            break
        start = line.end()
        end = start + int(line[1], 16)
        if end == start or buffer[end : end + 2] != b"\r\n":
            break
        payload.append(buffer[start:end])
        at = end + 2
    return at
