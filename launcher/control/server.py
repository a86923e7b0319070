"""The control socket: aiohttp on a UNIX socket, peers checked, every request bounded, every change logged."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Final
from urllib.parse import unquote
from weakref import WeakValueDictionary

from aiohttp import web

from launcher.base.background import READ_BYTES
from launcher.base.errors import BusyError, LauncherError, NotFoundError, RefusedError, reason
from launcher.base.redaction import Redactor
from launcher.base.text import MAX_LINE, quoted
from launcher.control.connections import CONNECTIONS, Bound, Gate, Peer, Shares, group_id, may_use, peer_of
from launcher.control.handlers import (
    ASKING,
    FOLLOWERS,
    MAX_SHOWN,
    Answers,
    Asking,
    ControlAction,
    Handler,
    NotYet,
    Operations,
    command_of,
    follows,
    json_answer,
    unrecorded,
)
from launcher.control.messages import ENDPOINTS, PREFIX, REQUEST_S, Endpoint

log = logging.getLogger("launcher.control")

SOCKET_MODE: Final = 0o660
# Where a second group may read: who may connect is then decided by SO_PEERCRED alone.
SHARED_MODE: Final = 0o666
# From a connection, or an answer, to the next whole request line with its headers.
HEADERS_S: Final = 15.0
# Unread bytes of a refused body that are read after the response.
LINGER_S: Final = 1.0
# Of about 4,000 API keys' spending, the only body that is read.
MAX_BODY_BYTES: Final = 512 * 1024
# Connections that wait to be accepted; a client beyond them waits in connect(2).
BACKLOG: Final = 128
# A refusal is logged at most so often for each user; and so many users are remembered.
REFUSED_S: Final = 60.0
MAX_REFUSED: Final = 1000
# Requests of one user that are answered at once, of those who may only read: the others wait for them, so that neither the
# threads nor the ledger are all theirs.
ANSWERS_OF_USER: Final = 4
# A reader that takes nothing of its answer for so long has gone.
STALL_S: Final = 60.0
# Errors to HTTP statuses; any other LauncherError is a bad argument.
_STATUS_OF: Final[dict[type[LauncherError], int]] = {NotFoundError: 404, RefusedError: 409, BusyError: 503}


class ControlServer:
    def __init__(
        self,
        path: str,
        group: str | None,
        operations: Operations | NotYet,
        *,
        read_group: str | None = None,
        record: Callable[[ControlAction], None] = unrecorded,
        peer_of: Callable[[asyncio.BaseTransport | None], Peer | None] = peer_of,
        connections: Bound = CONNECTIONS,
        followers: Bound = FOLLOWERS,
    ) -> None:
        """`record`: told of each change that was asked for. `connections`, `followers`: of users who may only read."""
        self._path = Path(path)
        self._group = group_id(group)
        self._change_group = f"group '{group}' (control.group)" if group else "control.group"
        self._readers = group_id(read_group, "read_group")
        self._read_group = f"group '{read_group}' (control.read_group)"
        # Without one, the file has the daemon's own group, and its members may use it.
        self._allowed_group = os.getegid() if self._group is None else self._group
        self._answers = operations if isinstance(operations, NotYet) else Answers(operations, followers)
        self._record = record
        self._runner: web.AppRunner | None = None
        self._endpoints: dict[tuple[str, str], Endpoint] = {}
        self._listeners: list[asyncio.AbstractServer] = []
        self._peer_of = peer_of
        self._connections = Shares(connections)
        self._answering: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()
        """By user who may only read."""
        self._refused: dict[int | None, tuple[float, int]] = {}
        """By user: when a refusal was logged last, and how many were not since."""
        self._own: tuple[int, int] | None = None
        """The file at `path` that we have made: its device and inode."""

    async def start(self, ready: Sequence[socket.socket] = ()) -> None:
        """Serve on `ready` listening sockets, which are systemd's and stay; else bind.

        Raises LauncherError when the path can't be used or another daemon answers there."""
        if not ready:
            await self._check_free()
        self._runner = web.AppRunner(
            self._application(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0,
            keepalive_timeout=HEADERS_S, lingering_time=LINGER_S, read_bufsize=READ_BYTES,
        )  # fmt: skip
        await self._runner.setup()
        mask = os.umask(0o777 - (SOCKET_MODE if self._readers is None else SHARED_MODE))
        try:
            for sock in ready:
                self._path = Path(sock.getsockname())
                await self._listen(sock)
                self._path.chmod(SOCKET_MODE if self._readers is None else SHARED_MODE)
            if not ready:
                await self._listen(str(self._path))
                self._own = _identity(self._path)
            if self._group is not None:
                os.chown(self._path, -1, self._group)
        except OSError as error:
            await self.stop()
            raise LauncherError(
                f"cannot open the control socket '{self._path}': {reason(error)}",
                "choose another control.socket, or another control.group",
            ) from None
        finally:
            os.umask(mask)

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        handlers = self._answers.handlers
        for endpoint in ENDPOINTS:
            route = app.router.add_route(endpoint.method, PREFIX + endpoint.path, handlers[endpoint.name])
            assert route.resource is not None  # noqa: S101  add_route makes one
            self._endpoints[endpoint.method, route.resource.canonical] = endpoint
        app.router.add_route(
            "POST", PREFIX + "/slots/{slot}/{command}", self._answers.act
        )  # answers that there is no such command
        return app

    async def _listen(self, where: str | socket.socket) -> None:
        runner = self._runner
        assert runner is not None  # noqa: S101  set before
        server = runner.server
        assert server is not None  # noqa: S101  set up before
        loop = asyncio.get_running_loop()

        def gate() -> Gate:
            return Gate(
                server, self._connections, STALL_S, peer_of=self._peer_of, is_operator=self._may_change
            )

        if isinstance(where, str):
            listener = await loop.create_unix_server(gate, where, backlog=BACKLOG)
        else:  # not create_unix_server: from Python 3.13 on that removes the file in the end, and it is systemd's
            listener = await loop.create_server(gate, sock=where, backlog=BACKLOG)
        self._listeners.append(listener)

    async def _check_free(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        except OSError as error:
            raise LauncherError(
                f"cannot open the control socket '{self._path}': {reason(error)}",
                "run as a user who may write there, or set control.socket",
            ) from None
        try:
            _, writer = await asyncio.open_unix_connection(str(self._path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:  # left by a daemon that was killed
            if self._path.is_socket():
                self._path.unlink(missing_ok=True)
            return
        except OSError as error:  # not ours to remove
            raise LauncherError(
                f"cannot open the control socket '{self._path}': {reason(error)}",
                "run as a user who may use it, or set control.socket",
            ) from None
        writer.close()
        raise LauncherError(
            f"cannot open the control socket '{self._path}': another numa-launcher answers there",
            "stop that one first, or set another control.socket",
        )

    async def stop(self) -> None:
        """Remove the socket, then close it: the next daemon may bind while those that follow a log are cut off."""
        if self._own is not None and _identity(self._path) == self._own:
            self._path.unlink(missing_ok=True)
        for listener in self._listeners:
            listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        peer = self._peer_of(request.transport)
        await asyncio.sleep(
            0
        )  # from Python 3.12 on pipelined requests that wait for nothing have no turn between them
        change = request.method not in {"GET", "HEAD"}
        if (refusal := self._refusal(peer, change=change)) is not None:
            self._say_refused(peer, request)
            return refusal
        assert peer is not None  # noqa: S101  refused above
        ASKING.set(Asking(peer.uid, reads_only=not self._may_change(peer)))
        response: web.StreamResponse | None = None
        why = ""
        try:
            response = await self._answer(request, handler)
        except LauncherError as error:
            why = error.message
            response = _error(_STATUS_OF.get(type(error), 400), error.message, error.remedy)
        except web.HTTPException as error:
            why = error.reason
            what = f"cannot answer {request.method} {quoted(request.path)}: {why}"
            response = _error(error.status, what, "see docs/control-protocol.md")
        finally:
            done = response is not None and response.status < 400
            endpoint = self._endpoint_of(request)
            if change and not (done and endpoint is not None and endpoint.routine):
                action = _action_of(request, peer, response.status if response is not None else 500, why)
                self._record(action)
                _log(request, action)
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._check_options(request)
        if follows(request):
            return await handler(request)
        endpoint = self._endpoint_of(request)
        within_s = (endpoint.within_s if endpoint is not None else None) or REQUEST_S
        try:
            async with asyncio.timeout(within_s):
                if request.can_read_body:
                    await request.read()  # most requests take none, but a body past the limit is refused
                async with self._at_once(ASKING.get()):
                    return await self._answers.redacted(request, await handler(request), endpoint)
        except TimeoutError:
            raise BusyError(
                f"cannot answer {request.method} {quoted(request.path)}: it took more than {within_s:g} s",
                "see `numa-launcher status`, then try again",
            ) from None

    def _at_once(self, asking: Asking) -> AbstractAsyncContextManager[None]:
        if not asking.reads_only:
            return nullcontext()
        return self._answering.setdefault(asking.uid, asyncio.Semaphore(ANSWERS_OF_USER))

    def _check_options(self, request: web.Request) -> None:
        """A misspelt option must not be taken for none. Raises LauncherError."""
        endpoint = self._endpoint_of(request)
        if endpoint is None:
            return
        known = [option.name for option in endpoint.options]
        for name in request.query:
            if name not in known:
                what = f"{request.method} {quoted(request.path)}"
                raise LauncherError(
                    f"cannot use option '{quoted(name, MAX_SHOWN)}' of {what}: no such option",
                    f"options are {', '.join(known)}" if known else "it takes no options",
                )

    def _endpoint_of(self, request: web.Request) -> Endpoint | None:
        resource = request.match_info.route.resource
        return None if resource is None else self._endpoints.get((request.method, resource.canonical))

    def _say_refused(self, peer: Peer | None, request: web.Request) -> None:
        """Rate-limited for each user, so that refused requests fill neither journal, audit trail nor the ring of events."""
        uid = None if peer is None else peer.uid
        now = asyncio.get_running_loop().time()
        since, more = self._refused.get(uid, (-REFUSED_S, 0))
        if now - since < REFUSED_S:
            self._refused[uid] = since, more + 1
            return
        if len(self._refused) >= MAX_REFUSED:
            self._refused.clear()
        self._refused[uid] = now, 0
        before = f", and {more} more before" if more else ""
        log.warning("refused %s %s of %s%s", request.method, quoted(request.path), peer, before)
        if peer is not None:
            self._record(_action_of(request, peer, 403, f"{request.method} by a user who may not{before}"))

    def _may_change(self, peer: Peer) -> bool:
        return may_use(peer, os.geteuid(), self._allowed_group)

    def _refusal(self, peer: Peer | None, *, change: bool) -> web.Response | None:
        if peer is not None and self._may_change(peer):
            return None
        if peer is None or self._readers is None or not may_use(peer, os.geteuid(), self._readers):
            user = "your user" if peer is None else f"user '{peer.user}'"
            least = self._read_group if self._readers is not None else self._change_group
            return _error(403, f"cannot use the control socket: {user} is not in its group", _ask(least))
        if change:
            return _error(
                403,
                f"cannot change anything here: user '{peer.user}' may only read",
                _ask(self._change_group),
            )
        return None


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _ask(group: str) -> str:
    return f"ask an administrator to add you to {group}"


def _action_of(request: web.Request, peer: Peer, status: int, why: str) -> ControlAction:
    """Who asked for what, and what became of it."""
    redactor = Redactor()
    # Escaped once it has been decoded and masked: a line end in it would begin a log line of its own.
    path, why = (quoted(redactor.text(text), MAX_LINE) for text in (unquote(request.path_qs), why))
    slot = quoted(request.match_info.get("slot", ""))
    return ControlAction(quoted(command_of(request)), path, slot, peer, status, why)


def _log(request: web.Request, action: ControlAction) -> None:
    """One line for each change that was asked for."""
    peer = action.peer
    words = f": {action.reason}" if action.reason else ""
    log.info(
        "%s %s by %s (uid %d, pid %d): %d%s",
        request.method, action.arguments, peer.user, peer.uid, peer.pid, action.status, words,
        extra={
            "audit": action.result, "verb": action.verb, "user": peer.user,
            "peer_user": peer.user, "peer_uid": peer.uid, "peer_gid": peer.gid, "peer_pid": peer.pid,
            "path": action.arguments, "status": action.status, **_slot_field(action.slot),
        },
    )  # fmt: skip


def _slot_field(slot: str) -> dict[str, int]:
    """A number, as in every other event."""
    return {"slot": int(slot)} if slot.isascii() and slot.isdigit() and len(slot) <= MAX_SHOWN else {}


def _error(status: int, message: str, remedy: str) -> web.Response:
    return json_answer({"error": {"message": message, "remedy": remedy}}, status)
