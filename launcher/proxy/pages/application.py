"""What the front door answers itself: its own pages, and what goes out to [proxy.overflow].

What it needs of the front door is in `Sources`. The pages (own_pages.py brings them to clients):

    GET, HEAD /health            200 while an instance is ready, else 503
    GET, HEAD /metrics           ours, and every instance's
    GET, HEAD /v1/models[/ID]    models and aliases; those of the request's API key, where it has an allow-list

An OpenAI request that overflows is forwarded by an aiohttp server (`InProcess`), which the relay reaches over one
end of a socket pair, as it does an instance. There are at most `proxy.overflow.max_requests` of these.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from aiohttp import web

from launcher.config.schema import Model, Proxy
from launcher.printable import quoted
from launcher.proxy.auth.api_keys import ApiKeys, KeyEntry
from launcher.proxy.errors import HttpError
from launcher.proxy.http1 import KEY_ID
from launcher.proxy.openai.answers import JSON
from launcher.proxy.pages.models import MetricsPages, ModelList
from launcher.proxy.routes import Kind, Match, match, split_target
from launcher.proxy.upstream.overflow import BrokenAnswerError, Overflow
from launcher.proxy.upstream.scraper import Instance, PageFetcher
from launcher.telemetry import metrics
from launcher.telemetry.vllm_metrics import EngineMetrics, parse

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
KEEPALIVE_S: Final = 3600.0  # the relay decides how long a connection is worth keeping

_LOG = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Page:
    """An answer of our own, with status 200."""

    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Sources:
    """What the application asks the front door."""

    instances: Callable[[], Sequence[Instance]]
    """Those that live, ready or draining, ordered by slot."""
    values: Callable[[], metrics.Values]
    """The values of telemetry.metrics.TABLE, now."""
    timings: metrics.Timings
    stopping: Callable[[], bool]
    retry_after_s: Callable[[], int]
    """How long a client that finds no instance ready should wait."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Models by the names of their LoRA adapters, as instances bring them."""


class Application:
    """The pages and the overflow forwarder. `web_application()` once; `close` at the end."""

    def __init__(self, proxy: Proxy, models: Sequence[Model], keys: ApiKeys, sources: Sources) -> None:
        """Raises LauncherError when the overflow's key can't be read."""
        clock = asyncio.get_running_loop().time
        self._proxy = proxy
        self._keys = keys
        self._sources = sources
        self._fetcher = PageFetcher()
        self._rendering = asyncio.Lock()
        self._metrics = MetricsPages(self._fetcher, sources.instances, clock)
        self._models = ModelList(models, sources.adapters, self._fetcher, clock)
        self.overflow = (
            None if proxy.overflow is None else Overflow(proxy.overflow, proxy, self._models.own_name)
        )

    def web_application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[_in_openai_form], client_max_size=self._proxy.max_body_bytes)
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def loads(self) -> dict[tuple[int, int], EngineMetrics]:
        """What the ready instances say they work on, by slot and generation; without those that say nothing."""
        found = (
            ((instance.slot, instance.generation), parse(page))
            for instance, page in await self._metrics.latest()
            if instance.ready
        )
        return {key: load for key, load in found if load is not None}

    async def metrics_page(self) -> str:
        """Ours, and every instance's."""
        async with self._rendering:  # one in each turn of the loop, however many want it
            merged = await self._metrics.merged()
            await asyncio.sleep(0)
            return metrics.render(self._sources.values(), self._sources.timings) + merged

    async def close(self) -> None:
        """Close the connections to the overflow endpoint."""
        if self.overflow is not None:
            await self.overflow.close()

    async def page(self, found: Match, key_id: str | None) -> Page:
        """The page of a route; `key_id` names the API key that was let in. Raises HttpError."""
        match found.route.kind:
            case Kind.HEALTH:
                return self.health()
            case Kind.METRICS:
                return Page(TEXT, (await self.metrics_page()).encode())
            case Kind.MODELS:
                return await self._listed(self._keys.let_in(key_id))
            case Kind.MODEL:
                return await self._model(self._keys.let_in(key_id), found.item)
            case _:
                raise AssertionError(f"{found.route.path} is no page of ours")

    def health(self) -> Page:
        """200 while an instance is ready. Raises HttpError."""
        ready = sum(instance.ready for instance in self._sources.instances())
        if not ready or self._sources.stopping():
            raise self._unavailable("no instance is ready")
        return _json({"status": "ok", "ready": ready})

    async def _listed(self, key: KeyEntry | None) -> Page:
        """The models that the key may use."""
        entries = await self._models.entries(self._sources.instances())
        return _json({"object": "list", "data": [e for e in entries if self._usable(key, str(e["id"]))]})

    async def _model(self, key: KeyEntry | None, wanted: str) -> Page:
        if not self._usable(key, wanted):
            raise HttpError(
                404,
                f"The model `{quoted(wanted)}` does not exist.",
                type_="NotFoundError",
                param="model",
                code="model_not_found",
            )
        for entry in await self._models.entries(self._sources.instances()):
            if entry["id"] == wanted:
                return _json(entry)
        raise self._unavailable(f"no instance of {quoted(wanted)} is ready")

    def _usable(self, key: KeyEntry | None, wanted: str) -> bool:
        """Whether there is a model of this name, and the key may use it."""
        names = self._models.names_of(wanted)
        return bool(names) and (key is None or key.limits.allows(*names))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path, _ = split_target(request.raw_path)
        found = match(request.method, path)
        if self.overflow is None or not isinstance(found, Match) or found.route.kind is not Kind.JSON:
            raise HttpError(404, f"there is no {quoted(path)} here", type_="NotFoundError", code="not_found")
        key = self._keys.let_in(request.headers.get(KEY_ID.decode()))
        if key is not None and not key.may_overflow:  # the front door sends none of these; nor do we
            raise HttpError(
                403, "this API key's requests stay here", type_="permission_error", code="local_only"
            )
        return await self.overflow.handle(request)

    def _unavailable(self, message: str) -> HttpError:
        return HttpError(
            503,
            message,
            type_="service_unavailable",
            code="no_instance_ready",
            headers={"Retry-After": str(self._sources.retry_after_s())},
        )


class InProcess:
    """aiohttp's server without a listener: each connection is a socket pair."""

    def __init__(self, application: Application) -> None:
        self._runner = web.AppRunner(
            application.web_application(),
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=1.0,
        )

    async def start(self) -> None:
        """From now on `connect` works."""
        await self._runner.setup()

    async def connect(self) -> socket.socket:
        """The client's end of a new connection: a non-blocking UNIX stream socket, the caller's to close.

        Raises OSError when there are no file descriptors left.
        """
        if self._runner.server is None:
            raise RuntimeError("the application is not started")
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            theirs.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(self._runner.server, theirs)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        return ours

    async def close(self) -> None:
        """End its connections."""
        await self._runner.cleanup()


@web.middleware
async def _in_openai_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as OpenAI's clients read them. The one place where they become answers."""
    try:
        return await handler(request)
    except HttpError as refusal:
        return web.Response(
            status=refusal.status, body=refusal.body(), headers={"Content-Type": JSON, **refusal.headers}
        )
    except web.HTTPRequestEntityTooLarge:
        return await _in_openai_form(request, _refuse_size)
    except BrokenAnswerError:
        raise ConnectionResetError("an answer broke off") from None  # aiohttp ends the connection, silently


async def _refuse_size(_: web.Request) -> web.StreamResponse:
    raise HttpError(413, "the request's body is too large", code="request_too_large")


def _json(value: object) -> Page:
    return Page(JSON, msgspec.json.encode(value))
