"""The dashboard's HTTP server: static files for anyone who reaches it, data for those with the token."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import hmac
import http
import logging
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Struct

from launcher.base.background import READ_BYTES
from launcher.base.errors import LauncherError, NotFoundError, TimedOutError
from launcher.base.text import quoted
from launcher.control.client import UnreachableError
from launcher.dashboard import listen
from launcher.dashboard.api import Answers, ControlReader
from launcher.dashboard.fleet import Fleet, FleetAt
from launcher.dashboard.listen import Connections
from launcher.dashboard.poll import Packed, Poll

log = logging.getLogger(__name__)


# --- Which requests the dashboard answers, and the headers of every response. ---
#
# A page of another origin must neither read the data nor embed the page: the token is in no cookie, no response has CORS
# headers, and the Host header names this machine (against DNS rebinding).

HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    # Data is kept nowhere. Static files replace it with `no-cache`: kept, and compared by their ETag.
    "Cache-Control": "no-store",
}
DOCUMENT_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Of all but scripts and styles, which have no data: a view loads thirty of those."""
# Names under which a browser on this machine, or at the end of `ssh -L`, asks. The port may be ssh's.
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})


def is_own_host(host: str) -> bool:
    """Whether a Host header names this machine."""
    name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
    return name.lower() in _LOOPBACK and (not port or port.isdecimal())


def is_foreign(headers: Mapping[str, str]) -> bool:
    """Whether a page of another origin asks: another port of this machine is one, too."""
    site = headers.get("Sec-Fetch-Site")
    if site is not None:
        return site not in {"same-origin", "none"}
    origin = headers.get("Origin")
    return origin is not None and origin.partition("://")[2] != headers.get("Host")


def has_token(authorization: str, token: str) -> bool:
    """Whether the header Authorization is `Bearer TOKEN`, compared in constant time."""
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        given.strip().encode(errors="replace"), token.encode()
    )


# --- The page's files: read when they change, compressed once. ---

FOLDER: Final = Path(__file__).parent / "static"
_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class File(Struct, frozen=True):
    content_type: str
    body: bytes
    compressed: bytes
    etag: str
    changed_ns: int


class StaticFiles:
    """The files directly in `folder`, by name. Other names are no files, whatever they are."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._kept: dict[str, File] = {}

    def get(self, name: str) -> File | None:
        path = self._folder / name
        content_type = _TYPES.get(path.suffix)
        if content_type is None or path.name != name or name.startswith("."):
            return None
        try:
            changed_ns = path.stat().st_mtime_ns
            kept = self._kept.get(name)
            if kept is None or kept.changed_ns != changed_ns:
                kept = self._kept[name] = _file(content_type, path.read_bytes(), changed_ns)
        except (OSError, ValueError):  # ValueError: a NUL byte
            return None
        return kept


def _file(content_type: str, body: bytes, changed_ns: int) -> File:
    etag = hashlib.sha256(body).hexdigest()[:16]
    return File(content_type, body, gzip.compress(body, mtime=0), f'"{etag}"', changed_ns)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# No request has a body.
_MAX_BODY_BYTES: Final = 1024
_KEEPALIVE_S: Final = 30.0
# Unread bytes of a refused body that are read after the response.
_LINGER_S: Final = 1.0
# Requests in progress when the dashboard ends.
_SHUTDOWN_S: Final = 1.0
_METHODS: Final = ("GET", "HEAD")
_API: Final = "/api/"


class Dashboard:
    """The routes of the page, over one control socket, and the status of a fleet's ingress if there is one."""

    def __init__(
        self,
        control: ControlReader,
        token: str | None,
        files: StaticFiles | None = None,
        fleet: Fleet | None = None,
    ) -> None:
        """`token`: None where the permissions of a UNIX socket say who may look."""
        self._token = token
        self._files = files or StaticFiles()
        self._answers = Answers(control)
        self._poll = Poll(control, has_fleet=fleet is not None)
        self._fleet = fleet

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guard])
        app.on_response_prepare.append(_add_headers)
        app.on_cleanup.append(self._close)
        data = {
            "topology": lambda _: self._answers.topology(),
            "measurements": lambda _: self._answers.measurements(),
            "usage": lambda _: self._answers.usage(),
            "slots/{slot}": lambda request: self._answers.slot(request.match_info["slot"]),
            "requests/{id}": lambda request: self._answers.request(request.match_info["id"]),
            "history": lambda request: self._answers.history(
                request.query.get("span", "1h"),
                request.query.get("after", "0"),
                request.query.get("slots", "none"),
            ),
            "fleet": lambda _: self._all_hosts(),
            "now": lambda request: self._poll.frame(_number(request, "events_after")),
        }
        app.router.add_get("/", self._index)
        app.router.add_get("/static/{name}", self._static)
        for path, answer in data.items():
            app.router.add_get(_API + path, _packed_by(answer))
        return app

    async def _all_hosts(self) -> Packed:
        if self._fleet is None:
            raise NotFoundError(
                "cannot show a fleet: the dashboard was started without --fleet",
                "numa-launcher dashboard --fleet, on an ingress host",
            )
        return await self._fleet.frame()

    async def _close(self, _app: web.Application) -> None:
        await self._poll.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        await asyncio.sleep(
            0
        )  # from Python 3.12 on pipelined requests that wait for nothing have no turn between them
        if (refusal := self._refusal(request)) is not None:
            return refusal
        try:
            return await handler(request)
        except LauncherError as error:
            return _error(_status_of(error), error.message, error.remedy)
        except web.HTTPNotFound:
            return _error(
                404, f"cannot find '{quoted(request.path, 80)}'", "open the link that the dashboard printed"
            )

    def _refusal(self, request: web.Request) -> web.Response | None:
        if not is_own_host(request.headers.get(hdrs.HOST, "")):
            return _error(
                421, "cannot answer for this host name: it is not this machine's",
                "open the page as http://127.0.0.1:PORT/; a proxy in front sets the header Host to localhost",
            )  # fmt: skip
        if request.method not in _METHODS:
            refused = _error(405, f"cannot {quoted(request.method, 20)}: the dashboard only reads", "use GET")
            refused.headers[hdrs.ALLOW] = ", ".join(_METHODS)
            return refused
        if not request.path.startswith(_API):
            return None
        if is_foreign(request.headers):
            return _error(
                403, "cannot give data to a page of another origin", "open the dashboard's own page"
            )
        if self._token is not None and not has_token(
            request.headers.get(hdrs.AUTHORIZATION, ""), self._token
        ):
            refused = _error(
                401, "cannot give data without the token", "open the link that the dashboard printed"
            )
            refused.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
            return refused
        return None

    async def _index(self, request: web.Request) -> web.Response:
        return self._file(request, "index.html")

    async def _static(self, request: web.Request) -> web.Response:
        return self._file(request, request.match_info["name"])

    def _file(self, request: web.Request, name: str) -> web.Response:
        file = self._files.get(name)
        if file is None:
            raise web.HTTPNotFound
        headers: dict[str, str] = {
            hdrs.CACHE_CONTROL: "no-cache",
            hdrs.ETAG: file.etag,
            hdrs.VARY: hdrs.ACCEPT_ENCODING,
        }
        if request.headers.get(hdrs.IF_NONE_MATCH) == file.etag:
            return web.Response(status=304, headers=headers)
        return _body(request, file.content_type, file.body, file.compressed, headers)


def _packed_by(answer: Callable[[web.Request], Awaitable[Packed]]) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        packed = await answer(request)
        headers: dict[str, str] = {hdrs.AGE: str(int(packed.age_s)), hdrs.VARY: hdrs.ACCEPT_ENCODING}
        return _body(request, "application/json", packed.body, packed.compressed, headers)

    return handle


def _body(
    request: web.Request, content_type: str, body: bytes, compressed: bytes, headers: Mapping[str, str]
) -> web.Response:
    if "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, ""):
        body, headers = compressed, {**headers, hdrs.CONTENT_ENCODING: "gzip"}
    charset = None if content_type == "application/json" else "utf-8"
    return web.Response(body=body, content_type=content_type, charset=charset, headers=headers)


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdecimal()) or len(text) > 15:
        raise LauncherError(f"cannot use {name}='{quoted(text, 80)}': not a number", f"give {name}=0")
    return int(text)


def _status_of(error: LauncherError) -> int:
    if isinstance(error, NotFoundError):
        return http.HTTPStatus.NOT_FOUND
    unavailable = isinstance(error, UnreachableError | TimedOutError)
    return http.HTTPStatus.SERVICE_UNAVAILABLE if unavailable else http.HTTPStatus.BAD_REQUEST


def _error(status: int, message: str, remedy: str) -> web.Response:
    body = msgspec.json.encode({"error": {"message": message, "remedy": remedy}})
    return web.Response(body=body, status=status, content_type="application/json")


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    is_document = response.content_type not in {"text/javascript", "text/css"}
    for name, value in {**HEADERS, **(DOCUMENT_HEADERS if is_document else {})}.items():
        response.headers.setdefault(name, value)
    response.headers.popall(hdrs.SERVER, None)


def _is_ours(record: logging.LogRecord) -> bool:
    """Not the malformed request of a client: anyone who reaches the port could fill the log."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


log.addFilter(_is_ours)


async def serve(
    sock: socket.socket, control_path: str, say: Callable[[str], None], fleet: FleetAt | None = None
) -> None:
    """Serve on a listening socket until SIGINT or SIGTERM. `say`: told where, once it answers."""
    token = None if sock.family == socket.AF_UNIX else secrets.token_urlsafe(32)
    control = ControlReader(control_path)
    dashboard = Dashboard(control, token, fleet=None if fleet is None else Fleet(fleet))
    runner = web.AppRunner(
        dashboard.application(), access_log=None, handler_cancellation=False,
        keepalive_timeout=_KEEPALIVE_S, shutdown_timeout=_SHUTDOWN_S, lingering_time=_LINGER_S,
        read_bufsize=READ_BYTES, logger=log,
    )  # fmt: skip
    await runner.setup()
    assert runner.server is not None  # noqa: S101  set up before
    gate = Connections(runner.server).gate
    listener = await asyncio.get_running_loop().create_server(gate, sock=sock, backlog=listen.BACKLOG)
    try:
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        view = "" if fleet is None else "fleet"
        say(f"{listen.link(sock, token, view)}\n{listen.from_elsewhere(sock)}")
        await stopped.wait()
    finally:
        listener.close()
        await runner.cleanup()
        await control.close()
