"""Syntax and limits of a head, its end, and its field lines."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence

from launcher.base.api_errors import HttpError

MAX_HEAD_BYTES = 65536  # nginx allows 4 x 8 KiB, vLLM (h11) 64 KiB
MAX_LINE_BYTES = 8190  # of one line; RFC 9112 3 asks for 8000 at least, nginx and Apache have the same
MAX_FIELDS = 256
MAX_EMPTYLINES = 4  # before a request line (RFC 9112 2.2)
SERVER = b"numa-launcher"

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"  # RFC 9110 5.6.2
VALUE = rb"[^\x00-\x08\x0a-\x1f\x7f]"  # RFC 9110 5.5: visible, space, tab, obs-text; that is opaque, in any encoding
FIELD = rb"%s++:%s*+\r\n" % (TOKEN, VALUE)  # no space before the colon (RFC 9112 5.1), no obs-fold (5.2)
# Hop-by-hop fields (RFC 9110 7.6.1; HTTP2-Settings: RFC 7540 3.2.1).
HOP_BY_HOP = (
    rb"connection|http2-settings|keep-alive|proxy-(?:authenticate|authorization|connection)"
    rb"|te|trailer|transfer-encoding|upgrade"
)
LINE = re.compile(rb"\r\n([^:\r]+):[^\r]*")
ODD = re.compile(rb"\x00|(?<!\r)\n|\r(?!\n|\Z)")  # RFC 9112 2.2: neither CR nor LF stands alone

Span = tuple[int, int]


def head_end(buffer: bytes, scanned: int = 0, start: int = 0) -> int:
    """The index after the head that begins at `start`, its empty line included; -1: it is incomplete.

    A few empty lines before it belong to it (RFC 9112 2.2). `scanned`: bytes that an earlier call has seen, so that a
    head that comes byte by byte is not scanned again. Raises HttpError: 431 past MAX_HEAD_BYTES; 400 for too many empty
    lines, and in an incomplete head for a lone CR or LF or a NUL (else `parse_request` finds them).
    """
    first = start
    while buffer.startswith(b"\r\n", first):
        first += 2
    if first > start + 2 * MAX_EMPTYLINES:
        raise bad("more than a few empty lines before the request")
    end = buffer.find(b"\r\n\r\n", max(first, start + scanned - 3))
    if end >= 0:
        end += 4
        if end - start > MAX_HEAD_BYTES:
            raise too_large()
        return end
    if ODD.search(buffer, max(first, start + scanned - 1)):
        raise bad("a control character, or a line that does not end in CRLF")
    if len(buffer) - start >= MAX_HEAD_BYTES:
        raise too_large()
    return -1


def bad(why: str, status: int = 400, code: str | None = "bad_request") -> HttpError:
    """An error after which the connection is closed: the start of the next message is unknown."""
    return HttpError(status, f"cannot read the request: {why}", code=code, close=True)


def too_large() -> HttpError:
    return HttpError(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes", close=True)


def tokens(values: Iterable[bytes]) -> list[bytes]:
    """The elements of a comma-separated list in lower case (RFC 9110 5.6.1); empty ones are left out."""
    return [token for value in values for each in value.split(b",") if (token := each.strip(b" \t"))]


def lines_of(lowered: bytes, names: Container[bytes]) -> list[Span]:
    """Where the field lines of these names are: spans of `CRLF name: value`. One pass, however many names."""
    return [line.span() for line in LINE.finditer(lowered) if line[1] in names]


def first_value(lines: bytes, lowered: bytes, name: bytes) -> str | None:
    """The first value of a field, without the space around it; `name` in lower case."""
    at = lowered.find(b"\r\n%s:" % name)
    if at < 0:
        return None
    return lines[at + 3 + len(name) : lines.index(b"\r\n", at + 2)].strip(b" \t").decode("utf-8", "replace")


def all_values(lines: bytes, lowered: bytes, name: bytes) -> list[str]:
    """Every value of a field, in order; `name` in lower case."""
    skip = 3 + len(name)
    values = (lines[start + skip : end].strip(b" \t") for start, end in lines_of(lowered, (name,)))
    return [value.decode("utf-8", "replace") for value in values]


def without(lines: bytes, cuts: Sequence[Span]) -> bytes:
    """`CRLF line CRLF line ... CRLF` without the lines at these spans, which are in order."""
    kept: list[bytes] = []
    done = 0
    for start, end in cuts:
        kept.append(lines[done:start])
        done = end
    kept.append(lines[done:])
    return b"".join(kept)
