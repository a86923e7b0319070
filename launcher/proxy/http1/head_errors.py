"""What is wrong with a request's head: for the few that the one expression does not match."""

from __future__ import annotations

import re

from launcher.proxy.errors import HttpError
from launcher.proxy.http1.fields import (
    FIELD,
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    MAX_LINE_BYTES,
    TOKEN,
    bad,
    too_large,
)

_REQUEST_LINE = re.compile(rb"(%s+) ([^ ]+) (HTTP/[0-9]\.[0-9])" % TOKEN)
_VERSIONS = (b"HTTP/1.0", b"HTTP/1.1")
_TARGET = re.compile(rb"[!-\x22$-~]+")
_FIELD = re.compile(FIELD)
_NAME = re.compile(rb"%s+" % TOKEN)


def too_much(head: bytes) -> bool:
    """Whether a well-formed head is larger than allowed; `why_not` says in what."""
    if len(head) > MAX_LINE_BYTES and any(len(line) > MAX_LINE_BYTES for line in head.split(b"\r\n")):
        return True
    return len(head) > MAX_HEAD_BYTES or head.lstrip(b"\r\n").count(b"\n") - 2 > MAX_FIELDS


def is_utf8(head: bytes) -> bool:
    try:
        head.decode()
    except UnicodeDecodeError:
        return False
    return True


def why_not(head: bytes) -> HttpError:
    """The error for a head that is too large, malformed or no UTF-8."""
    if len(head) > MAX_HEAD_BYTES:
        return too_large()
    lines = head.lstrip(b"\r\n").split(b"\r\n")
    return (
        _bad_request_line(lines[0])
        or _bad_fields(lines[1:-2])
        or bad("the head does not end with an empty line")
    )


def _bad_request_line(line: bytes) -> HttpError | None:
    if len(line) > MAX_LINE_BYTES:
        return bad(f"the request line is longer than {MAX_LINE_BYTES} bytes", 414, "target_too_long")
    parts = _REQUEST_LINE.fullmatch(line)
    if parts is None:
        return bad(f"the request line is not METHOD target HTTP/1.1: {_quoted(line)}")
    if parts[3] not in _VERSIONS:
        return HttpError(
            505, "unsupported HTTP version: this server speaks HTTP/1.1", code="http_version", close=True
        )
    if len(parts[1]) > 32:
        return bad(f"unknown method {_quoted(parts[1])}", 501, "unknown_method")
    if not _TARGET.fullmatch(parts[2]):
        return bad(
            f"the target must be visible ASCII without a fragment, not {_quoted(parts[2])}", 400, "bad_target"
        )
    return None


def _bad_fields(lines: list[bytes]) -> HttpError | None:
    if len(lines) > MAX_FIELDS:
        return bad(f"more than {MAX_FIELDS} header fields", 431, "too_many_headers")
    for line in lines:
        if len(line) > MAX_LINE_BYTES:
            return bad(f"a header field is longer than {MAX_LINE_BYTES} bytes", 431, "header_too_long")
        if not _FIELD.fullmatch(line + b"\r\n"):
            return bad(_fault_of(line), 400, "bad_header")
        if not is_utf8(line):
            return HttpError(400, "a header's value is not UTF-8", code="bad_header", close=True)
    return None


def _fault_of(line: bytes) -> str:
    """What is wrong with a field line. Its value is not quoted: it may be a secret."""
    if line[:1] in (b" ", b"\t"):
        return "obsolete line folding (RFC 9112 section 5.2)"
    name, colon, _ = line.partition(b":")
    if not colon:
        return "a header line has no colon"
    if not _NAME.fullmatch(name):
        return f"{_quoted(name)} is not a header name"
    return f"the header {_quoted(name)} has a control character in its value"


def _quoted(data: bytes) -> str:
    text = data[:60].decode("ascii", "backslashreplace")
    return repr(text + "…" if len(data) > 60 else text)
