"""AUTHORIZE: what is judged before a request's body is read: route, origin, API key, size."""

from __future__ import annotations

from collections.abc import Callable

from launcher.accounts.budgets import Budgets
from launcher.base.api_errors import HttpError, unavailable, unrecorded
from launcher.base.text import quoted
from launcher.keys.api_keys import OPEN_PATHS, ApiKeys
from launcher.proxy.dispatch.registry import RequestRegistry
from launcher.proxy.downstream.origin import Cors
from launcher.proxy.downstream.uploads import FREE_BYTES, WITHOUT_BODY, takes_no_body, too_large
from launcher.proxy.request.events import Event, PageReady
from launcher.proxy.request.ports import Answer, own_head
from launcher.proxy.request.record import Post, Request
from launcher.proxy.routes import OWN_PAGES, REALTIME, NoMethod, match

_TEXT = "text/plain"


class Authorizer:
    """Judges requests by their heads."""

    def __init__(
        self,
        keys: ApiKeys,
        cors: Cors,
        registry: RequestRegistry,
        max_body_bytes: int,
        retry_after_s: Callable[[], int],
        *,
        budgets: Budgets | None,
        unrecorded: Callable[[], str | None] | None,
        post: Post,
    ) -> None:
        self._keys = keys
        self._budgets = budgets
        self._by_key = keys.required
        self._cors = cors
        self._by_origin = bool(cors.origins)
        self._registry = registry
        self._max_body_bytes = max_body_bytes
        self._retry_after_s = retry_after_s
        self._unrecorded = unrecorded
        self._post = post
        self._closing = False

    def close(self) -> None:
        """The proxy shuts down: from here on pages only."""
        self._closing = True

    def authorize(self, request: Request, _event: Event, now: float) -> None:
        """Note who calls, or answer a CORS preflight. Raises HttpError."""
        head = request.head
        if self._by_origin:
            answer = self._allow_origin(request)
            if answer is not None:
                self._post(request, PageReady(answer))
                return
        if request.match is None:
            raise _no_route(request)
        if self._by_key and request.path not in OPEN_PATHS:
            request.key = self._keys.check(head, now)
        self._registry.accept(request)
        page = request.match.route.kind in OWN_PAGES
        if not page and (self._closing or self._unrecorded is not None):
            self._check_open()
        if head.length is not None and head.length > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        bodiless = head.method in WITHOUT_BODY
        if head.length and bodiless:
            raise takes_no_body(head.method)
        if request.key is not None and not page:
            large = (head.chunked and not bodiless) or (head.length or 0) > FREE_BYTES
            request.grant = request.key.limits.begin(now, large=large)
            if large and self._budgets is not None:
                request.grant.check_budget(self._budgets, request.key.record.name, now)

    def _check_open(self) -> None:
        """Raises HttpError."""
        if self._closing:
            raise unavailable("the server is shutting down", self._retry_after_s(), close=True)
        if self._unrecorded is not None and (why := self._unrecorded()) is not None:
            raise unrecorded(why, self._retry_after_s())

    def _allow_origin(self, request: Request) -> Answer | None:
        """Note what a browser's page is told; a preflight's answer."""
        head = request.head
        origin = head.get(b"origin")
        if request.method == "OPTIONS":
            method = head.get(b"access-control-request-method")
            asked = head.get(b"access-control-request-headers")
            preflight = self._cors.preflight(origin, method, asked)
            if preflight is not None:
                return Answer(own_head(preflight[0], _TEXT, preflight[1]), b"")
        request.lines = self._cors.lines(origin)
        return None


def _no_route(request: Request) -> HttpError:
    path = request.path
    found = match(request.method, path)
    if isinstance(found, NoMethod):
        allow = ", ".join(found.allow)
        return HttpError(
            405, f"{quoted(path)} takes {allow}", code="method_not_allowed", headers={"Allow": allow}
        )
    if path == REALTIME:
        return HttpError(
            501,
            f"cannot open {path}: WebSockets are not served here; POST the audio to /v1/audio/transcriptions",
            type_="not_implemented_error",
            code="websocket_not_served",
            close=True,
        )
    return HttpError(404, f"there is no {quoted(path)} here", type_="NotFoundError", code="not_found")
