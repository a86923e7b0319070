"""Requests that leave this host: forwarded to `[proxy.overflow]` when the queue would reject them.

The client's key, cookies and other headers stay here; the model gets the name that it has there, and the
rest of the body goes on as it is. What comes back is passed on byte for byte, marked `X-Served-By: overflow`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from launcher.config import schema
from launcher.errors import LauncherError
from launcher.printable import quoted
from launcher.proxy.auth.watched_file import WatchedFile
from launcher.proxy.errors import HttpError
from launcher.proxy.openai.answers import JSON

OVERFLOW_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})
"""What every OpenAI-compatible endpoint has, and what keeps nothing between requests."""

SERVED_BY: Final = "X-Served-By"
MAX_WHY: Final = 500  # characters of an error: some quote what the other side sent
RETRY_AFTER_S: Final = 1  # at the cap: some request there ends soon

_PASSED: Final = ("Accept", "traceparent", "tracestate", "X-Request-Id")
_RETURNED: Final = ("Content-Type", "Retry-After")
# An answer that says more of our credentials, or of the way there, than of the client's request.
_OURS: Final = frozenset({401, 402, 403, 407, *range(300, 400)})
_FAULTS: Final = (aiohttp.ClientError, HttpProcessingError, OSError, TimeoutError)

_LOG = logging.getLogger(__name__)


class Ending(StrEnum):
    """How a request there ended; label `outcome` of its metric."""

    COMPLETED = "completed"
    CLIENT_ABORTED = "client_aborted"
    REJECTED = "rejected"  # over the cap
    FAILED = "failed"


class Overflow:
    """The external endpoint. Owned by the event loop; `close` ends its connections."""

    def __init__(
        self, settings: schema.Overflow, proxy: schema.Proxy, own_name: Callable[[str | None], str | None]
    ) -> None:
        """`own_name` turns a request's `model` (an alias, or None) into a model's own name.

        Raises LauncherError when the key's file can't be read.
        """
        self._settings = settings
        self._proxy = proxy
        self._own_name = own_name
        self._url = settings.url.rstrip("/")
        self._key_file = None if settings.api_key_file is None else WatchedFile(settings.api_key_file)
        self._key: str | None = None
        if self._key_file is not None:
            self._key_file.look()
            self._key = _read_key(self._key_file.path)
        self._session: aiohttp.ClientSession | None = None
        self.in_flight = 0
        self.sent: Counter[str] = Counter()
        """Requests by model."""
        self.ended: Counter[tuple[str, Ending]] = Counter()
        """The same by model and end."""

    @property
    def models(self) -> tuple[str, ...]:
        """Own names of the models that may go there."""
        return tuple(self._settings.models)

    def takes(self, path: str, model: str | None, *, local_only: bool) -> bool:
        """Whether a request that has no room here may go there now; `model` is its own name."""
        return (
            not local_only
            and path in OVERFLOW_PATHS
            and model in self._settings.models
            and self.in_flight < self._settings.max_requests
        )

    async def close(self) -> None:
        """Close its connections."""
        if self._session is not None:
            await self._session.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Forward a request that the front door has routed here. Raises HttpError."""
        body = await request.read()
        model, fields = self._read(body)
        if request.path not in OVERFLOW_PATHS or model not in self._settings.models:
            raise HttpError(404, f"{quoted(request.path)} does not overflow", type_="NotFoundError")
        if self.in_flight >= self._settings.max_requests:
            self.ended[model, Ending.REJECTED] += 1
            raise HttpError(
                429,
                "every instance is busy, and so is the endpoint that takes what overflows",
                type_="rate_limit_error",
                code="overflow_full",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        streams = bytes(fields.get("stream", msgspec.Raw(b""))).strip() == b"true"
        fields["model"] = msgspec.Raw(msgspec.json.encode(self._settings.models[model]))
        async with self._counted(model):
            return await self._forward(request, msgspec.json.encode(fields), streams=streams)

    def _read(self, body: bytes) -> tuple[str, dict[str, msgspec.Raw]]:
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            wanted = msgspec.json.decode(fields.get("model", b"null"), type=str | None)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise HttpError(400, f"cannot read the request: {error}", code="invalid_json") from None
        return self._own_name(wanted) or "", fields

    @asynccontextmanager
    async def _counted(self, model: str) -> AsyncIterator[None]:
        """Count a request there and its end."""
        self.in_flight += 1
        self.sent[model] += 1
        ending = Ending.FAILED
        try:
            yield
            ending = Ending.COMPLETED
        except (asyncio.CancelledError, ConnectionResetError):
            ending = Ending.CLIENT_ABORTED
            raise
        finally:
            self.in_flight -= 1
            self.ended[model, ending] += 1

    async def _forward(self, request: web.Request, body: bytes, *, streams: bool) -> web.StreamResponse:
        patience = self._proxy.first_token_timeout_s if streams else self._proxy.answer_timeout_s
        answer: aiohttp.ClientResponse | None = None
        try:
            try:
                async with asyncio.timeout(patience):
                    answer = await self._send(request, body)
                    if answer.status in _OURS:
                        raise _bad_gateway(f"it answered {answer.status}")
                    pieces = answer.content.iter_any()
                    first = await anext(pieces, b"")
            except _FAULTS as error:
                raise _bad_gateway(str(error) or type(error).__name__) from error
            response = web.StreamResponse(status=answer.status, headers=_headers(answer))
            if answer.content_length is not None and "Content-Encoding" not in answer.headers:
                response.content_length = answer.content_length
            await response.prepare(request)
            await response.write(first)
            await self._relay(request, response, pieces)
        finally:
            if answer is not None:
                answer.close()
        return response

    async def _send(self, request: web.Request, body: bytes) -> aiohttp.ClientResponse:
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        headers |= {"Content-Type": JSON, "Accept-Encoding": "identity", "User-Agent": "numa-launcher"}
        if (key := self._current_key()) is not None:
            headers["Authorization"] = f"Bearer {key}"
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, connect=self._proxy.connect_timeout_s),
            )
        url = self._url + request.path.removeprefix("/v1")
        return await self._session.post(url, data=body, headers=headers, allow_redirects=False)

    async def _relay(
        self, request: web.Request, response: web.StreamResponse, pieces: AsyncIterator[bytes]
    ) -> None:
        """Pass on what comes. An answer that breaks is broken off, so that nobody takes it for whole."""
        while True:
            try:
                # A limit of ours on each read: aiohttp's client may wait for ever after bad chunk framing.
                async with asyncio.timeout(self._proxy.idle_timeout_s):
                    piece = await anext(pieces, None)
            except _FAULTS as error:
                why = quoted(repr(error), MAX_WHY)
                _LOG.warning("the overflow endpoint broke an answer off: %s", why, extra={"reason": why})
                if request.transport is not None:
                    request.transport.abort()
                raise BrokenAnswerError from error
            if piece is None:
                break
            await response.write(piece)
        await response.write_eof()

    def _current_key(self) -> str | None:
        """The key sent there, read again when its file changes; a bad file keeps the old key."""
        if self._key_file is not None and self._key_file.changed(asyncio.get_running_loop().time()):
            try:
                self._key = _read_key(self._key_file.path)
            except LauncherError as error:
                _LOG.error("%s; the key read before stays in use (%s)", error.message, error.remedy)
        return self._key


class BrokenAnswerError(Exception):
    """An answer broke after its first byte; its connection is closed."""


def _headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    passed = {name: answer.headers[name] for name in _RETURNED if name in answer.headers}
    return {**passed, SERVED_BY: "overflow"}


def _bad_gateway(why: str) -> HttpError:
    why = quoted(why, MAX_WHY)
    _LOG.warning("the overflow endpoint failed: %s", why, extra={"reason": why})
    return HttpError(
        502, "the endpoint that takes what overflows failed", type_="upstream_error", code="overflow_failed"
    )


def _read_key(path: str) -> str:
    try:
        key = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)
        raise LauncherError(
            f"cannot read the overflow endpoint's key '{path}': {why}",
            "put the key, and nothing else, into the file of [proxy.overflow] api_key_file",
        ) from None
    if not key or not key.isprintable() or " " in key:
        raise LauncherError(
            f"cannot use the overflow endpoint's key '{path}': it is empty or more than one word",
            "put the key, and nothing else, into the file of [proxy.overflow] api_key_file",
        )
    return key
