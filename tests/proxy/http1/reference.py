"""HTTP/1.1 read a second time, by others and in another way: what we accept must be the same to them."""

from __future__ import annotations

import re

import h11

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_QUOTED = r'"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*"'
_CHUNK = re.compile(
    rf"(?P<size>[0-9A-Fa-f]+)(?:[ \t]*;[ \t]*{_TOKEN}(?:[ \t]*=[ \t]*(?:{_TOKEN}|{_QUOTED}))?)*"
)
_TRAILER = re.compile(rf"{_TOKEN}:[\t -~\x80-\xff]*")


def read_chunks(data: bytes) -> tuple[bytes, bytes] | None:
    """`(payload, rest)` of a whole chunked body by RFC 9112 7.1's grammar; None: it is none, or not whole."""
    text = data.decode("latin-1")
    payload = ""
    while True:
        line, crlf, text = text.partition("\r\n")
        size = _CHUNK.fullmatch(line)
        if not crlf or size is None:
            return None
        length = int(size["size"], 16)
        if length == 0:
            break
        if text[length : length + 2] != "\r\n":
            return None
        payload += text[:length]
        text = text[length + 2 :]
    while True:
        line, crlf, text = text.partition("\r\n")
        if not crlf or (line and _TRAILER.fullmatch(line) is None):
            return None
        if not line:
            return payload.encode("latin-1"), text.encode("latin-1")


def read_request(head: bytes) -> tuple[str, str, int | None, bool]:
    """`(method, target, length, chunked)` as h11 reads a head. Raises h11.RemoteProtocolError."""
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    parser.receive_data(head.lstrip(b"\r\n"))
    event = parser.next_event()
    if not isinstance(event, h11.Request):
        raise h11.RemoteProtocolError(f"no request: {event}")
    fields = list(event.headers)
    lengths = [int(value) for name, value in fields if name == b"content-length"]
    chunked = any(name == b"transfer-encoding" and value == b"chunked" for name, value in fields)
    rest = parser.trailing_data[0]
    if rest:
        raise h11.RemoteProtocolError(f"more than one head: {rest!r}")
    return event.method.decode(), event.target.decode(), lengths[0] if lengths else None, chunked


def read_response(head: bytes, method: str) -> int:
    """The status, as h11 reads a head. Raises h11.RemoteProtocolError."""
    parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    parser.send(h11.Request(method=method, target="/", headers=[("Host", "h")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(head)
    event = parser.next_event()
    if not isinstance(event, h11.Response | h11.InformationalResponse):
        raise h11.RemoteProtocolError(f"no answer: {event}")
    if parser.trailing_data[0]:
        raise h11.RemoteProtocolError("more than one head")
    return event.status_code
