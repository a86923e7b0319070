"""Whether a whole answer is the JSON that its route, or its Content-Type, promises. Pure.

An engine that ends in the middle of its work, or a layer in front of it, may answer 200 with half an object and a
Content-Length that fits it, or with a page for people. Nothing has been delivered then: another instance can be asked.
"""

from __future__ import annotations

import msgspec

from launcher.proxy.http1 import ResponseHead
from launcher.proxy.openai.body import HttpError
from launcher.proxy.routes import Kind, Route

_DECODER = msgspec.json.Decoder(msgspec.Raw)
_NO_BODY = frozenset({204, 205})


def promises_json(route: Route | None, head: ResponseHead) -> bool:
    """Whether the body of a good answer must be JSON: as it says itself, or where a route of JSON gets text.

    Not what the routes of JSON give as bytes (embeddings under `encoding_format: "bytes"`), nor the texts of audio.
    """
    if not 200 <= head.status < 300 or head.status in _NO_BODY:
        return False
    kind = head.content_type
    if kind == b"application/json" or kind.endswith(b"+json"):
        return True
    return route is not None and route.kind is Kind.JSON and (not kind or kind.startswith(b"text/"))


def is_json(body: bytes) -> bool:
    """Whether it is one JSON value, whole: 0.4 us for a chat of 1 KiB, 37 us for an embedding of 64 KiB."""
    try:
        _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def not_json() -> HttpError:
    """What a client gets where no instance had better to say."""
    return HttpError(
        502, "an instance's answer was not JSON, or not whole", type_="upstream_error", code="upstream_error"
    )
