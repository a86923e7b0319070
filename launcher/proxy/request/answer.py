"""A whole response, of an upstream or of the proxy's own."""

from __future__ import annotations

from http import HTTPStatus

from launcher.proxy.http1.responses import ResponseHead
from launcher.proxy.openai.answers import JSON

_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}


class Answer:
    __slots__ = ("body", "head")

    def __init__(self, head: ResponseHead, body: bytes) -> None:
        self.head = head
        self.body = body


def own_head(status: int, content_type: str = JSON, lines: bytes = b"") -> ResponseHead:
    """The head of a response of the proxy's own; `lines` are further fields, each ended by CRLF."""
    kind = content_type.encode()
    fields = b"\r\nContent-Type: %b\r\n%b" % (kind, lines)
    reason = _PHRASES.get(status, b"")
    return ResponseHead(
        status, reason, None, False, False, True, kind.partition(b";")[0], fields, fields.lower(), ()
    )


def own_answer(status: int, body: bytes, content_type: str = JSON) -> Answer:
    """A whole response of the proxy's own."""
    return Answer(own_head(status, content_type), body)
