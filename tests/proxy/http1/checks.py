"""What must hold for any bytes at all; the properties and the fuzzer both call these."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from proxy.http1.reference import read_chunks, read_request, read_response

from launcher.base.api_errors import HttpError
from launcher.keys.api_keys import KEY_FIELDS
from launcher.proxy.http1.chunks import BadFraming, ChunkedDecoder
from launcher.proxy.http1.fields import all_values, head_end
from launcher.proxy.http1.requests import parse_request, upstream_head
from launcher.proxy.http1.responses import BadResponse, ResponseHead, client_head, parse_response

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_STAYS = {
    *(b"connection", b"expect", b"http2-settings", b"keep-alive", b"te", b"trailer", b"transfer-encoding"),
    *(b"upgrade", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
}


def check_head_end(data: bytes, cuts: Sequence[int]) -> None:
    """A head that comes in pieces, behind another request, ends where it ends when it comes whole, or is refused either
    way."""
    whole: int | None
    before = b"GET / "
    try:
        whole = head_end(data)
    except HttpError:
        whole = None
    found: int | None = -1
    scanned = 0
    for cut in [*sorted({min(cut, len(data)) for cut in cuts}), len(data)]:
        try:
            found = head_end(before + data[:cut], scanned, len(before))
        except HttpError:
            found = None
            break
        if found >= 0:
            found -= len(before)
            break
        scanned = cut
    if found is None or whole is None:
        # In pieces it may be refused before an end comes that makes it whole, and then wrong.
        assert whole is None or _refused(data[:whole])
    else:
        assert found == whole


def _refused(head: bytes) -> bool:
    try:
        parse_request(head)
    except HttpError:
        return True
    return False


def check_request(head: bytes) -> bool:
    """A head that is taken reads the same to h11, and so does what goes behind; whether it was taken."""
    try:
        request = parse_request(head)
    except HttpError as refusal:
        if not refusal.close or not 400 <= refusal.status <= 505:
            raise AssertionError(f"an odd refusal: {refusal.status} {refusal}") from refusal
        return False
    method, target, length, chunked = read_request(head)
    assert (method, length, chunked) == (request.method, request.length, request.chunked)
    assert target.endswith(request.target) or (target.lower().startswith("http") and request.target[0] == "/")
    assert head_end(head) == len(head)
    again = parse_request(head, request)
    assert (again.method, again.target, again.length, again.keep_alive) == (
        request.method, request.target, request.length, request.keep_alive,
    )  # fmt: skip
    for but in ((), KEY_FIELDS):
        _check_upstream(upstream_head(request, "id-1", 7, host=b"up", but=but), request.method)
        behind = parse_request(upstream_head(request, "id-1", 7, host=b"up", but=but))
        assert (behind.target, behind.length) == (request.target, 7)
        nominated = ",".join(request.all(b"connection")).lower().split(",")
        for option in nominated:
            name = option.strip(" \t")
            if _TOKEN.fullmatch(name) and name not in {"host", "content-length", "x-request-id"}:
                assert behind.get(name.encode()) is None
    return True


def _check_upstream(head: bytes, method: str) -> None:
    again = parse_request(head)
    assert head_end(head) == len(head)
    assert read_request(head) == (again.method, again.target, 7, False)
    assert (again.method, again.sent_id, again.keep_alive) == (method, "id-1", True)
    assert again.all(b"host") == ["up"]
    names = [line.partition(b":")[0].lower() for line in again.lines[2:].split(b"\r\n")]
    assert not _STAYS & set(names)


def sent(head: ResponseHead, name: bytes) -> list[str]:
    return all_values(head.lines, head.lowered, name)


def check_response(head: bytes, method: str) -> bool:
    """An answer's head that is taken reads the same to h11, and so does what the client gets."""
    try:
        answer = parse_response(head, method)
    except BadResponse:
        return False
    assert read_response(head, method) == answer.status
    framing = b"Content-Length: 0\r\n" if answer.status >= 200 else b""
    out = client_head(answer, "id-1", framing=framing, keep_alive=False)
    again = parse_response(out, method)
    assert read_response(out, method) == again.status == answer.status
    assert sent(again, b"x-request-id") == ["id-1"]
    assert sent(again, b"server") == ["numa-launcher"]
    assert sent(again, b"connection") == ["close"]
    assert not sent(again, b"transfer-encoding")
    assert again.content_type == answer.content_type or answer.get(b"connection") is not None
    return True


def decode(pieces: Sequence[bytes]) -> tuple[bytes, bool, bytes] | None:
    """`(payload, ended, rest)` of a body in pieces; None: refused."""
    decoder = ChunkedDecoder()
    try:
        payload = b"".join(decoder.feed(piece) for piece in pieces)
    except BadFraming:
        return None
    if decoder.ended:
        assert decoder.at_boundary
    return payload, decoder.ended, decoder.rest


def check_chunks(data: bytes, cuts: Sequence[int]) -> bool:
    """Any split gives what the whole gives, and what is taken is a body to the grammar; whether it was."""
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    whole = decode([data])
    assert decode([data[a:b] for a, b in pairwise(edges)]) == whole or not data
    if whole is None or not whole[1]:
        return False
    assert read_chunks(data) == (whole[0], whole[2])
    return True
