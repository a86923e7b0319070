"""A client's head: parsed strictly, and written again for an upstream."""

from __future__ import annotations

import re
from collections.abc import Container

from launcher.base.api_errors import HttpError
from launcher.proxy.http1.fields import (
    FIELD,
    HOP_BY_HOP,
    LINE,
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    MAX_LINE_BYTES,
    TOKEN,
    Span,
    all_values,
    bad,
    first_value,
    lines_of,
    tokens,
    too_large,
    without,
)

# --- What is wrong with a request's head: for the few that the one expression does not match. ---

_REQUEST_LINE = re.compile(rb"(%s+) ([^ ]+) (HTTP/[0-9]\.[0-9])" % TOKEN)
_VERSIONS = (b"HTTP/1.0", b"HTTP/1.1")
_TARGET = re.compile(rb"[!-\x22$-~]+")
_BEGINNING = re.compile(rb"(?:\r\n)*[!-~]+ ([!-~]{1,%d})" % MAX_LINE_BYTES)
_FIELD = re.compile(FIELD)
_NAME = re.compile(rb"%s+" % TOKEN)


def too_much(head: bytes) -> bool:
    """Whether a well-formed head is larger than allowed; `why_not` says in what."""
    if len(head) > MAX_LINE_BYTES and any(len(line) > MAX_LINE_BYTES for line in head.split(b"\r\n")):
        return True
    return len(head) > MAX_HEAD_BYTES or head.lstrip(b"\r\n").count(b"\n") - 2 > MAX_FIELDS


def why_not(head: bytes) -> HttpError:
    """The error for a head that is too large or malformed."""
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


def sent_target(buffer: bytes, start: int) -> str | None:
    """The target of the head that begins at `start`, as far as it can be read; the head may be malformed or incomplete."""
    found = _BEGINNING.match(buffer, start)
    return None if found is None else found[1].decode()


REPEATED_BYTES = 4096  # larger heads are not kept for the next request: a connection may be idle for long
MAX_LENGTH_DIGITS = 18  # below 2**63, and above any body
ALLOW = "GET, HEAD, POST"  # what some route takes

_HEAD = re.compile(
    rb"(?:\r\n)*+([!#$%%&'*+\-.^_`|~0-9A-Za-z]{1,32}) ([!-\x22$-~]+) HTTP/1\.([01])\r\n(?:%s)*+\r\n" % FIELD
)
# The lines that are read; none of them passes but content-encoding.
_OURS = re.compile(
    rb"\r\n(accept-encoding|content-(?:length|encoding)|expect|forwarded|host|origin"
    rb"|x-(?:forwarded-[^:]*+|real-ip|request-id|numa-slot|conversation-id)|%s):[ \t]*+([^\r]*)" % HOP_BY_HOP
)
_ABSOLUTE = re.compile(rb"https?://([^/?]+)", re.IGNORECASE)
# RFC 3986 3.2 without userinfo (RFC 9110 4.2.4) and without the comma, which some read as a list of hosts.
_HOST = re.compile(
    rb"(?:\[[0-9A-Fa-f:.]{2,45}\]|(?:[A-Za-z0-9._~!$&'()*+;=-]|%[0-9A-Fa-f]{2}){0,255})(?::[0-9]{0,5})?"
)
FORWARDED_FIELDS = re.compile(rb"forwarded|x-forwarded-[^:]*|x-real-ip")  # a proxy's word on its client
_DIGITS = re.compile(rb"[0-9]+")
_GOOD_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_SMALL = 4 * MAX_FIELDS  # bytes: a head that is no larger has no line too long and no field too many

_STAY = [b"keep-alive"]

_Found = dict[bytes, list[bytes]]


class _Repeated:
    """What the next heads of a connection have in common with one: all but the digits of Content-Length."""

    __slots__ = ("after", "before", "passing")

    def __init__(self, before: bytes, after: bytes) -> None:
        self.before = before
        self.after = after
        self.passing: dict[tuple[bytes, ...], bytes] = {}  # see RequestHead.passing, by `but`


class RequestHead:
    __slots__ = (
        "_repeated", "chunked", "cuts", "expect_continue", "http_1_0", "keep_alive", "length", "lines", "lowered",
        "method", "sent_id", "target",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917
        self,
        method: str,
        target: str,
        http_1_0: bool,
        length: int | None,
        chunked: bool,
        keep_alive: bool,
        expect_continue: bool,
        sent_id: str | None,
        lines: bytes,
        lowered: bytes,
        cuts: tuple[Span, ...],
        repeated: _Repeated | None = None,
    ) -> None:
        self.method = method
        self.target = target  # origin form, or "*" of OPTIONS; an absolute form has lost scheme and authority
        self.http_1_0 = http_1_0
        self.length = length  # bytes of the body that were announced; None: nothing was, or it is chunked
        self.chunked = chunked
        self.keep_alive = keep_alive
        self.expect_continue = expect_continue  # the client waits for 100 Continue before it sends its body
        self.sent_id = sent_id  # its own X-Request-Id, where there is one good one
        # CRLF, then the field lines as they came, each ended by CRLF; Content-Length may be an earlier request's.
        self.lines = lines
        self.lowered = lowered  # the same in lower case: names compare without case
        self.cuts = cuts  # where in `lines` the fields are that do not pass, in order
        self._repeated = repeated

    def __repr__(self) -> str:
        """Without the fields: they hold secrets."""
        return f"RequestHead({self.method} {self.target}, length={self.length}, chunked={self.chunked})"

    def again(self, head: bytes) -> RequestHead | None:
        """A later head of the same connection, where it is the same but for the body's length; else None.

        Clients repeat their heads, and a comparison costs a fifth of a parse.
        """
        repeated = self._repeated
        if repeated is None or not head.startswith(repeated.before) or not head.endswith(repeated.after):
            return None
        digits = head[len(repeated.before) : len(head) - len(repeated.after)]
        if not digits.isdigit() or len(digits) > MAX_LENGTH_DIGITS:
            return None
        return RequestHead(
            self.method, self.target, self.http_1_0, int(digits), self.chunked, self.keep_alive, self.expect_continue,
            self.sent_id, self.lines, self.lowered, self.cuts, repeated,
        )  # fmt: skip

    def passing(self, but: tuple[bytes, ...] = ()) -> bytes:
        """The field lines that pass to an instance, between CRLFs; without those of the names `but`, in lower case."""
        repeated = self._repeated
        found = None if repeated is None else repeated.passing.get(but)
        if found is None:
            cuts = sorted({*self.cuts, *lines_of(self.lowered, but)}) if but else self.cuts
            found = without(self.lines, cuts)
            if repeated is not None:
                repeated.passing[but] = found
        return found

    def get(self, name: bytes) -> str | None:
        return first_value(self.lines, self.lowered, name)

    def all(self, name: bytes) -> list[str]:
        return all_values(self.lines, self.lowered, name)


def parse_request(head: bytes, last: RequestHead | None = None) -> RequestHead:
    """Judge a whole head, from its request line (or empty lines before it) to the empty line at its end.

    `last`: that of the request before it on the connection, where it had no more than REPEATED_BYTES.

    Raises HttpError with the status that RFC 9110 and 9112 want, and close=True: 400 malformed, or framing or
    Host in doubt; 405 CONNECT; 413 a length beyond any; 414, 431 lines too long or too many; 415 a coded
    body; 417 an expectation other than 100-continue; 501 a coding or method that nobody has; 505 a version.
    """
    again = None if last is None else last.again(head)
    if again is not None:
        return again
    matched = _HEAD.fullmatch(head)
    if matched is None or (len(head) > _SMALL and too_much(head)):
        raise why_not(head)
    http_1_0 = matched[3] == b"0"
    start = matched.end(3)
    lines = head[start:-2]
    lowered = lines.lower()
    cuts: list[Span] = []
    found: _Found = {}
    repeated: _Repeated | None = None
    for line in _OURS.finditer(lowered):
        name, value = line.group(1, 2)
        if name in found:
            found[name].append(value.rstrip())
        else:
            found[name] = [value.rstrip()]
        if name != b"content-encoding":
            cuts.append(line.span())
        if name == b"content-length" and len(head) <= REPEATED_BYTES:
            repeated = _Repeated(head[: start + line.start(2)], head[start + line.end(2) :])
    method = matched[1].decode()
    target = _target(method, matched[2])
    _check_host(found.get(b"host"), http_1_0)
    length, chunked = _framing(found, http_1_0)
    keep_alive = not http_1_0
    if found.get(b"connection", _STAY) != _STAY or http_1_0:
        options = set(tokens(found.get(b"connection", ())))
        keep_alive = b"close" not in options and (keep_alive or b"keep-alive" in options)
        nominated = options - {b"close", b"keep-alive"}
        if nominated:
            cuts = sorted({*cuts, *lines_of(lowered, nominated)})
    if b"content-encoding" in found or b"expect" in found:
        _check_content(found)
        repeated = None
    expect_continue = b"expect" in found and not http_1_0 and (chunked or bool(length))
    sent_id = _sent_id(lines, lowered) if b"x-request-id" in found else None
    return RequestHead(
        method, target, http_1_0, length, chunked, keep_alive, expect_continue, sent_id, lines, lowered, tuple(cuts),
        repeated,
    )  # fmt: skip


def _target(method: str, sent: bytes) -> str:
    """The target in origin form (RFC 9112 3.2)."""
    if method == "CONNECT":
        raise HttpError(
            405, "CONNECT is not supported", code="method_not_allowed", headers={"Allow": ALLOW}, close=True
        )
    if sent.startswith(b"/") or (sent == b"*" and method == "OPTIONS"):
        return sent.decode()
    absolute = _ABSOLUTE.match(sent)
    if absolute is None or not _HOST.fullmatch(absolute[1]) or absolute[1].startswith(b":"):
        raise bad("its target is neither a path nor an http URL", 400, "bad_target")
    rest = sent[absolute.end() :].decode()
    return rest if rest.startswith("/") else "/" + rest


def _check_host(hosts: list[bytes] | None, http_1_0: bool) -> None:
    """RFC 9112 3.2: one Host that is a host; HTTP/1.0 may have none. (Of an absolute form it means nothing.)"""
    if hosts is None:
        if not http_1_0:
            raise _bad_host("this one has none")
    elif len(hosts) > 1:
        raise _bad_host(f"this one has {len(hosts)}")
    elif not _HOST.fullmatch(hosts[0]):
        raise _bad_host("this one's is not a host")


def _bad_host(why: str) -> HttpError:
    return HttpError(400, f"a request has one Host header, {why}", code="bad_host", close=True)


def _framing(found: _Found, http_1_0: bool) -> tuple[int | None, bool]:
    """`(length, chunked)` by RFC 9112 6.1 to 6.3; what two readers could take in two ways is refused."""
    lengths = found.get(b"content-length")
    codings = found.get(b"transfer-encoding")
    if codings is not None:
        if http_1_0:
            raise _bad_framing("Transfer-Encoding is not part of HTTP/1.0")
        if lengths is not None:
            raise _bad_framing("it has both Content-Length and Transfer-Encoding")
        if codings != [b"chunked"]:
            raise _bad_coding(codings)
        return None, True
    if lengths is None:
        return None, False
    if len(lengths) > 1:
        raise _bad_framing("it has more than one Content-Length")
    if not _DIGITS.fullmatch(lengths[0]):
        raise _bad_framing("its Content-Length is not a number")
    if len(lengths[0]) > MAX_LENGTH_DIGITS:
        raise HttpError(413, "the announced body is too large", code="too_large", close=True)
    return int(lengths[0]), False


def _bad_coding(codings: list[bytes]) -> HttpError:
    """RFC 9112 6.1: 501 for a coding that is not understood; 400 where the body's end can't be known."""
    names = [coding.partition(b";")[0].strip() for coding in tokens(codings)]
    if names and names[-1] == b"chunked" and names.count(b"chunked") == 1 and len(names) > 1:
        return bad(
            "transfer codings are not decoded: send Transfer-Encoding: chunked alone", 501, "bad_framing"
        )
    return _bad_framing("its Transfer-Encoding is not exactly 'chunked'")


def _bad_framing(why: str) -> HttpError:
    return bad(why, 400, "bad_framing")


def _check_content(found: _Found) -> None:
    codings = b",".join(found.get(b"content-encoding", ()))
    if codings not in {b"", b"identity"}:
        shown = codings.decode("utf-8", "replace")[:60]
        raise HttpError(
            415, f"encoded request bodies are not supported: Content-Encoding {shown!r}", close=True
        )
    expected = found.get(b"expect", [b"100-continue"])
    if expected != [b"100-continue"]:
        shown = expected[0].decode("utf-8", "replace")[:60]
        raise HttpError(417, f"unsupported expectation {shown!r}", close=True)


def _sent_id(lines: bytes, lowered: bytes) -> str | None:
    sent = all_values(lines, lowered, b"x-request-id")
    return sent[0] if len(sent) == 1 and _GOOD_ID.fullmatch(sent[0].encode()) else None


def upstream_head(
    head: RequestHead,
    request_id: str,
    length: int,
    *,
    host: bytes,
    extra: bytes = b"",
    method: str | None = None,
    but: tuple[bytes, ...] = (),
) -> bytes:
    """The head that an instance gets: request line, Host, the fields that pass, X-Request-Id, Content-Length.

    Not passed: hop-by-hop fields (RFC 9110 7.6.1), Host, Expect, X-Request-Id, X-Numa-Slot and the client's framing (the
    body is sent complete, `length` bytes); FORWARDED_FIELDS, which any client can make up (downstream.forwarded gives them
    in `extra` where the peer is trusted); Accept-Encoding: a stream that a layer in front of the engine compressed could be
    neither watched nor continued. `extra`: field lines of ours, each ended by CRLF. `method`: another than the client's (GET
    for HEAD). `but`: names in lower case of further fields that do not pass, as those of an API key that was for this
    server.
    """
    verb = method or head.method
    framing = b"" if length == 0 and verb in {"GET", "HEAD"} else b"Content-Length: %d\r\n" % length
    return b"%b %b HTTP/1.1\r\nHost: %b%bX-Request-Id: %b\r\n%b%b\r\n" % (
        verb.encode(), head.target.encode(), host, head.passing(but), request_id.encode(), framing, extra,
    )  # fmt: skip


def field_lines(head: RequestHead, names: re.Pattern[bytes], *, but: Container[bytes] = ()) -> bytes:
    """The field lines as they came, each ended by CRLF, whose name in lower case matches and is not in `but`."""
    found = (
        head.lines[line.start() + 2 : line.end()] + b"\r\n"
        for line in LINE.finditer(head.lowered)
        if names.fullmatch(line[1]) and line[1] not in but
    )
    return b"".join(found)


def selected_head(
    head: RequestHead,
    request_id: str,
    length: int,
    *,
    target: bytes,
    host: bytes,
    names: Container[bytes],
    extra: bytes,
) -> bytes:
    """The head of a POST for somebody else's endpoint: of the client's fields those named here alone.

    A field that the client's `Connection` names is for this hop and does not pass. `extra` as in `upstream_head`.
    """
    kept = (
        head.lines[start:end] for start, end in lines_of(head.lowered, names) if (start, end) not in head.cuts
    )
    return b"POST %b HTTP/1.1\r\nHost: %b%b\r\nX-Request-Id: %b\r\nContent-Length: %d\r\n%b\r\n" % (
        target, host, b"".join(kept), request_id.encode(), length, extra,
    )  # fmt: skip
