"""An instance's head: checked, and written again for the client."""

from __future__ import annotations

import re

from launcher.proxy.http1.fields import (
    FIELD,
    HOP_BY_HOP,
    MAX_HEAD_BYTES,
    SERVER,
    VALUE,
    Span,
    first_value,
    lines_of,
    tokens,
    without,
)

_HEAD = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: (%s*+))?\r\n(?:%s)*+\r\n" % (VALUE, FIELD))
# The lines that must be looked at; but for content-type none of them passes.
_OURS = re.compile(rb"\r\n(content-(?:length|type)|server|x-request-id|%s):[ \t]*+([^\r]*)" % HOP_BY_HOP)
_DIGITS = re.compile(rb"[0-9]{1,18}")

_LENGTH = b"\r\ncontent-length: "

_Found = dict[bytes, bytes]

_SEEN: dict[bytes, ResponseHead] = {}  # by their bytes without the digits of Content-Length
_MAX_SEEN = 64
_SEEN_BYTES = 1024


class BadResponse(Exception):  # noqa: N818 - it is an instance's answer, and none
    """An instance's head that is no HTTP/1.1, or whose framing is in doubt; its text says why.

    `deterministic`: the head is HTTP/1.1 otherwise, so every instance would answer this request the same way.
    """

    def __init__(self, reason: str, *, deterministic: bool = False) -> None:
        super().__init__(reason)
        self.deterministic = deterministic


class ResponseHead:
    __slots__ = (
        "_passing", "chunked", "content_type", "cuts", "keep_alive", "length", "lines", "lowered", "reason", "status",
        "until_close",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917
        self,
        status: int,
        reason: bytes,
        length: int | None,
        chunked: bool,
        until_close: bool,
        keep_alive: bool,
        content_type: bytes,
        lines: bytes,
        lowered: bytes,
        cuts: tuple[Span, ...],
    ) -> None:
        self.status = status
        self.reason = reason
        self.length = length  # bytes of the body; None: chunked, or until the connection is closed
        self.chunked = chunked
        self.until_close = until_close
        self.keep_alive = keep_alive  # another request may follow on this connection
        self.content_type = content_type  # lower case, without parameters; b"" when there is none
        # CRLF, then the field lines as they came, each ended by CRLF; Content-Length may be an earlier response's.
        self.lines = lines
        self.lowered = lowered  # the same in lower case
        self.cuts = cuts  # where in `lines` the fields are that do not pass, in order
        self._passing: bytes | None = None

    def with_length(self, length: int | None) -> ResponseHead:
        other = ResponseHead(
            self.status, self.reason, length, self.chunked, self.until_close, self.keep_alive, self.content_type,
            self.lines, self.lowered, self.cuts,
        )  # fmt: skip
        other._passing = self._passing
        return other

    def with_lines(self, lines: bytes) -> ResponseHead:
        """The same with other field lines, all of which pass."""
        return ResponseHead(
            self.status, self.reason, self.length, self.chunked, self.until_close, self.keep_alive, self.content_type,
            lines, lines.lower(), (),
        )  # fmt: skip

    @property
    def passing(self) -> bytes:
        """The field lines that pass to the client, between CRLFs."""
        if self._passing is None:
            self._passing = without(self.lines, self.cuts)
        return self._passing

    def get(self, name: bytes) -> str | None:
        return first_value(self.lines, self.lowered, name)


def parse_response(head: bytes, method: str) -> ResponseHead:
    """Judge a whole head of a response to `method`. Raises BadResponse.

    An interim response (1xx) is one of its status without a body; the final response comes after it.
    """
    # Instances repeat their heads: within a second they differ in Content-Length alone.
    at = head.find(_LENGTH) + len(_LENGTH)
    key, digits = head, None
    if at >= len(_LENGTH):
        end = head.find(b"\r", at)
        key, digits = head[:at] + head[end:], head[at:end]
    known = _SEEN.get(key)
    if known is not None and method != "HEAD":
        if digits is None:
            return known
        if _DIGITS.fullmatch(digits):
            return known.with_length(int(digits))
    parsed = _parse(head, method)
    if parsed.status == 200 and method != "HEAD" and len(head) <= _SEEN_BYTES:
        if len(_SEEN) >= _MAX_SEEN:
            _SEEN.clear()
        _SEEN[key] = parsed
    return parsed


def _parse(head: bytes, method: str) -> ResponseHead:
    matched = _HEAD.fullmatch(head)
    if matched is None or len(head) > MAX_HEAD_BYTES:
        raise BadResponse(f"not the head of an HTTP/1.1 response: {head[:60]!r}")
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
        raise BadResponse("it switches protocols unasked (101)", deterministic=True)
    until_close = length is None and not chunked
    keep_alive = not http_1_0
    if b"connection" in found:
        options = set(tokens((found[b"connection"],)))
        keep_alive = b"close" not in options and (keep_alive or b"keep-alive" in options)
        nominated = options - {b"close", b"keep-alive"}
        if nominated:
            cuts = sorted({*cuts, *lines_of(lowered, nominated)})
    content_type = found.get(b"content-type", b"").partition(b";")[0].rstrip(b" \t")
    return ResponseHead(
        status, reason, length, chunked, until_close, keep_alive and not until_close, content_type, lines, lowered,
        tuple(cuts),
    )  # fmt: skip


def _framing(found: _Found, http_1_0: bool) -> tuple[int | None, bool]:
    """`(length, chunked)` as the fields say it (RFC 9112 6.3); both None and False: until close."""
    codings = found.get(b"transfer-encoding")
    length = found.get(b"content-length")
    if codings is not None:
        if http_1_0 or length is not None or codings != b"chunked":
            raise BadResponse(
                "its Transfer-Encoding is not exactly 'chunked', or it has Content-Length, too",
                deterministic=True,
            )
        return None, True
    if length is None:
        return None, False
    if not _DIGITS.fullmatch(length):
        raise BadResponse(f"its Content-Length is not one number: {length[:60]!r}", deterministic=True)
    return int(length), False


def client_head(
    head: ResponseHead, request_id: str, *, framing: bytes, keep_alive: bool, extra: bytes = b""
) -> bytes:
    """The head that the client gets: status line, the fields that pass, X-Request-Id, Server, framing.

    `framing` and `extra` are field lines, each ended by CRLF, or b"". With `keep_alive` False it is told
    `Connection: close`; an HTTP/1.0 client that may stay needs `Connection: keep-alive` in `extra`.
    """
    return b"HTTP/1.1 %d %b%bX-Request-Id: %b\r\nServer: %b\r\n%b%b%b\r\n" % (
        head.status, head.reason, head.passing, request_id.encode(), SERVER, framing,
        b"" if keep_alive else b"Connection: close\r\n", extra,
    )  # fmt: skip
