"""An instance's head: judged, and written anew for the client."""

from __future__ import annotations

import re
from typing import NamedTuple

from launcher.proxy.http1.fields import (
    FIELD,
    HOP_BY_HOP,
    MAX_HEAD_BYTES,
    SERVER,
    VALUE,
    Span,
    all_values,
    first_value,
    lines_of,
    tokens,
    without,
)

_HEAD = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: (%s*+))?\r\n(?:%s)*+\r\n" % (VALUE, FIELD))
# The lines that must be looked at; but for content-type none of them passes.
_OURS = re.compile(rb"\r\n(content-(?:length|type)|server|x-request-id|%s):[ \t]*+([^\r]*)" % HOP_BY_HOP)
_DIGITS = re.compile(rb"[0-9]{1,18}")

_Found = dict[bytes, bytes]


class BadResponse(Exception):  # noqa: N818 - it is an instance's answer, and none
    """An instance's head that is no HTTP/1.1, or whose framing is in doubt; `reason` says why.

    `meant`: it is HTTP/1.1 otherwise, so its program answers this request so, and would on another instance.
    """

    def __init__(self, reason: str, *, meant: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.meant = meant


class ResponseHead(NamedTuple):
    """An instance's head that was found good."""

    status: int
    reason: bytes
    length: int | None  # bytes of the body; None: chunked, or until the connection is closed
    chunked: bool
    until_close: bool
    keep_alive: bool  # another request may follow on this connection
    content_type: bytes  # lower case, without parameters; b"" when there is none
    lines: bytes  # CRLF, then the field lines as they came, each ended by CRLF
    lowered: bytes  # the same in lower case
    cuts: tuple[Span, ...]  # where in `lines` the fields are that do not pass, in order

    @property
    def fields(self) -> bytes:
        """The field lines as they came, each ended by CRLF."""
        return self.lines[2:]

    def get(self, name: bytes) -> str | None:
        """The first value of a field, without the space around it; `name` in lower case."""
        return first_value(self.lines, self.lowered, name)

    def all(self, name: bytes) -> list[str]:
        """Every value of a field, in order; `name` in lower case."""
        return all_values(self.lines, self.lowered, name)


def parse_response(head: bytes, method: str) -> ResponseHead:
    """Judge a whole head of an answer to `method`. Raises BadResponse.

    An interim answer (1xx) is one of its status and without a body; what it announces comes after it.
    """
    matched = _HEAD.fullmatch(head)
    if matched is None or len(head) > MAX_HEAD_BYTES:
        raise BadResponse(f"this is no head of an HTTP/1.1 answer: {head[:60]!r}")
    status = int(matched[2])
    http_1_0 = matched[1] == b"0"
    reason = matched[3] or b""
    lines = head[matched.end(3 if matched[3] is not None else 2) : -2]
    lowered = lines.lower()
    cuts: list[Span] = []
    found: _Found = {}
    for line in _OURS.finditer(lowered):
        name = line[1]
        value = line[2].rstrip(b" \t")
        found[name] = b"%b,%b" % (found[name], value) if name in found else value
        if name != b"content-type":
            cuts.append(line.span())
    length, chunked = _framing(found, http_1_0)
    if status < 200 or status in {204, 304} or method == "HEAD":
        length, chunked = 0, False
    if status == 101:
        raise BadResponse("it switches protocols, which nobody asked for", meant=True)
    until_close = length is None and not chunked
    keep_alive = not http_1_0
    if b"connection" in found:
        options = set(tokens((found[b"connection"],)))
        keep_alive = b"close" not in options and (keep_alive or b"keep-alive" in options)
        nominated = options - {b"close", b"keep-alive"}
        if nominated:
            cuts = sorted({*cuts, *lines_of(lowered, nominated)})
    return ResponseHead(
        status,
        reason,
        length,
        chunked,
        until_close,
        keep_alive and not until_close,
        found.get(b"content-type", b"").partition(b";")[0].rstrip(b" \t"),
        lines,
        lowered,
        tuple(cuts),
    )


def _framing(found: _Found, http_1_0: bool) -> tuple[int | None, bool]:
    """`(length, chunked)` as the fields say it (RFC 9112 6.3); both None and False: until close."""
    codings = found.get(b"transfer-encoding")
    length = found.get(b"content-length")
    if codings is not None:
        if http_1_0 or length is not None or codings != b"chunked":
            raise BadResponse(
                "its Transfer-Encoding is not exactly 'chunked', or Content-Length is there too", meant=True
            )
        return None, True
    if length is None:
        return None, False
    if not _DIGITS.fullmatch(length):
        raise BadResponse(f"its Content-Length is not one number: {length[:60]!r}", meant=True)
    return int(length), False


def client_head(
    head: ResponseHead, request_id: str, *, framing: bytes, keep_alive: bool, extra: bytes = b""
) -> bytes:
    """The head that the client gets: status line, the fields that pass, X-Request-Id, Server, framing.

    `framing` and `extra` are field lines, each ended by CRLF, or b"". With `keep_alive` False it is told
    `Connection: close`; an HTTP/1.0 client that may stay needs `Connection: keep-alive` in `extra`.
    """
    return b"HTTP/1.1 %d %b%bX-Request-Id: %b\r\nServer: %b\r\n%b%b%b\r\n" % (
        head.status,
        head.reason,
        without(head.lines, head.cuts),
        request_id.encode(),
        SERVER,
        framing,
        b"" if keep_alive else b"Connection: close\r\n",
        extra,
    )
