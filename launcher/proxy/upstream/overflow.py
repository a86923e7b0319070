"""The overflow endpoint: an external API that gets requests which the queue would reject.

The client's key, cookies and other fields stay here; `model` is replaced by the endpoint's name for it, and the rest of
the body passes as it is. Responses pass byte for byte, marked `X-Served-By: overflow`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, quote, urlsplit

import msgspec

from launcher.address import TcpAddress
from launcher.config import schema
from launcher.errors import LauncherError, reason
from launcher.proxy.balancing.demand import Ending
from launcher.proxy.errors import HttpError
from launcher.proxy.http1.fields import lines_of
from launcher.proxy.http1.requests import RequestHead, selected_head
from launcher.proxy.http1.responses import ResponseHead
from launcher.proxy.request.actions import Outcome
from launcher.proxy.upstream.endpoint import Endpoint
from launcher.proxy.upstream.pool import ConnectionPool
from launcher.proxy.watched_file import WatchedFile

OVERFLOW_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})
"""What every OpenAI-compatible endpoint has, and what keeps nothing between requests."""

MAX_REASON: Final = 500  # characters of an error: some quote what the other side sent
REFUSED: Final = frozenset({401, 402, 403, 407, *range(300, 400)})
"""Statuses that say more of our credentials, or of the way there, than of the client's request."""
_REQUEST_FIELDS: Final = frozenset({b"accept", b"traceparent", b"tracestate"})
_RESPONSE_FIELDS: Final = frozenset({b"content-type", b"retry-after"})
_ADDED: Final = b"X-Served-By: overflow\r\n"
_LINES: Final = (
    b"Content-Type: application/json\r\nAccept-Encoding: identity\r\nUser-Agent: numa-launcher\r\n"
)


_OUTCOMES: Final = {
    Ending.WHOLE: Outcome.COMPLETED,  # all of the endpoint's response, its errors too
    Ending.REFUSED: Outcome.COMPLETED,
    Ending.LEFT: Outcome.CLIENT_ABORTED,
    Ending.BROKEN: Outcome.FAILED,
}


class Overflow:
    """The overflow endpoint: what may go there, its connections and its sums."""

    def __init__(self, settings: schema.Overflow, connect_timeout_s: float) -> None:
        """Raises LauncherError when the key's file can't be read or the URL has no port or host."""
        self._settings = settings
        self._key: WatchedFile[str] | None = None
        if (path := settings.api_key_file) is not None:
            self._key = WatchedFile("key of the overflow endpoint", partial(_read_key, path), path)
        url = urlsplit(settings.url)
        self._authority, endpoint = _endpoint(url)
        self._base_path = quote(url.path.rstrip("/"), safe="/%!$&'()*+,;=:@~").encode()
        self.pool = ConnectionPool(endpoint, connect_timeout_s)
        self.in_flight = 0
        self.sent: Counter[str] = Counter()
        """Requests by model."""
        self.ended: Counter[tuple[str, Outcome]] = Counter()
        """The same by model and outcome; REJECTED: over the cap, never sent."""

    @property
    def models(self) -> tuple[str, ...]:
        """Own names of the models that may go there."""
        return tuple(self._settings.models)

    def takes(self, path: str, model: str | None, *, local_only: bool) -> bool:
        """Whether a request may be sent there now; `model` is its own name. One over the cap is counted."""
        if local_only or path not in OVERFLOW_PATHS or model not in self._settings.models:
            return False
        if self.in_flight < self._settings.max_requests:
            return True
        self.ended[model, Outcome.REJECTED] += 1
        return False

    def body(self, body: bytes | bytearray, model: str) -> bytes:
        """The body with the endpoint's name for `model`. Raises HttpError."""
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise HttpError(400, f"cannot read the request: {error}", code="invalid_json") from None
        fields["model"] = msgspec.Raw(msgspec.json.encode(self._settings.models[model]))
        return msgspec.json.encode(fields)

    def head(self, head: RequestHead, request_id: str, path: str, length: int) -> bytes:
        """The head of a request for `path` with a body of `length` bytes."""
        lines = _LINES
        if self._key is not None:
            key = self._key.latest(asyncio.get_running_loop().time())
            lines = b"%bAuthorization: Bearer %b\r\n" % (_LINES, key.encode())
        target = self._base_path + path.removeprefix("/v1").encode()
        return selected_head(
            head, request_id, length, target=target, host=self._authority, names=_REQUEST_FIELDS, extra=lines
        )

    def begin(self, model: str) -> None:
        self.in_flight += 1
        self.sent[model] += 1

    def end(self, model: str, ending: Ending) -> None:
        self.in_flight -= 1
        self.ended[model, _OUTCOMES[ending]] += 1


def unusable(head: ResponseHead) -> str | None:
    """Why the client can't have this response; None: it can."""
    if head.status in REFUSED:
        return f"it answered {head.status}"
    coding = head.get(b"content-encoding")
    if coding is not None and coding.lower() != "identity":  # not asked for; the client may not read it
        return f"it answered with Content-Encoding {coding}"
    return None


def passing(head: ResponseHead) -> ResponseHead:
    """The head that the client gets."""
    kept = b"".join(head.lines[start:end] for start, end in lines_of(head.lowered, _RESPONSE_FIELDS))
    return head.with_lines(b"%b\r\n%b" % (kept, _ADDED))


def _endpoint(url: SplitResult) -> tuple[bytes, Endpoint]:
    """`Host`, and where to connect."""
    tls = None
    if url.scheme.lower() == "https":
        tls = ssl.create_default_context()
        tls.set_alpn_protocols(["http/1.1"])
    try:
        port = url.port or (80 if tls is None else 443)
        host = (url.hostname or "").encode("idna").decode()
        return url.netloc.encode("idna"), Endpoint(TcpAddress(host, port), external=True, tls=tls)
    except ValueError as error:
        why = f"cannot use [proxy.overflow] url '{url.geturl()}': {error}"
        raise LauncherError(why, 'write "https://host/v1"') from None


def _read_key(path: str) -> str:
    remedy = "put the key, and nothing else, into the file of [proxy.overflow] api_key_file"
    try:
        key = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise LauncherError(f"cannot read the overflow endpoint's key '{path}': {why}", remedy) from None
    if not key or not key.isprintable() or " " in key:
        why = "it is empty or more than one word"
        raise LauncherError(f"cannot use the overflow endpoint's key '{path}': {why}", remedy)
    return key
