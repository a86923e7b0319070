"""The control socket: aiohttp on a UNIX socket, peers checked, every request bounded, every change logged."""

from __future__ import annotations

import asyncio
import grp
import logging
import os
import pwd
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
from aiohttp import web

from launcher.control.messages import PREFIX, Request, Verb
from launcher.errors import BusyError, LauncherError, NotFoundError, RefusedError

log = logging.getLogger("launcher.control")

SOCKET_MODE: Final = 0o660
# Where a second group may read: who may connect is then decided by SO_PEERCRED alone.
SHARED_MODE: Final = 0o666
# The longest that one request may take; `verify` of a large instance takes seconds.
REQUEST_S: Final = 60.0
# Nobody sends a body here but by mistake.
MAX_BODY_BYTES: Final = 64 * 1024
MAX_TAIL_LINES: Final = 100_000
MAX_OVERRIDES: Final = 64
MAX_DEADLINE_S: Final = 86_400.0
# Followers of logs at once.
MAX_FOLLOWERS: Final = 64
# Errors to HTTP statuses; any other LauncherError is a bad argument.
_STATUS_OF: Final[dict[type[LauncherError], int]] = {NotFoundError: 404, RefusedError: 409, BusyError: 503}


class Operations(Protocol):
    """What the daemon does for an operator."""

    def status(self) -> Any:
        """The whole state."""
        ...

    def act(self, slot: int, request: Request) -> None:
        """Ask for a change. Returns at once; raises NotFoundError for an unknown slot, RefusedError."""
        ...

    async def reload(
        self, overrides: Sequence[str], *, dry_run: bool = False, force: bool = False
    ) -> dict[str, Any]:
        """Re-read the configuration and begin to go there. Raises LauncherError; nothing has changed then."""
        ...

    def reloading(self) -> dict[str, Any]:
        """How far the last reload has come."""
        ...

    def events(self, count: int, after: int) -> list[dict[str, Any]]:
        """The last events with a number above `after`, oldest first."""
        ...

    def plan(self) -> dict[str, Any]:
        """The plan that is running, as `plan --json` prints it."""
        ...

    def log_tail(self, slot: int, lines: int) -> list[dict[str, Any]]:
        """The last lines of a slot, oldest first. Raises LauncherError for an unknown slot."""
        ...

    def log_follow(self, slot: int, lines: int) -> AsyncIterator[dict[str, Any]]:
        """The last lines and then those that come, none lost between. Raises LauncherError for an unknown slot."""
        ...

    async def verify(self, slot: int) -> None:
        """Look at a slot's placement now; the result is in `status`."""
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, by SO_PEERCRED."""

    pid: int
    uid: int
    gid: int

    @property
    def user(self) -> str:
        """Login name, or the number."""
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return str(self.uid)


def peer_of(transport: asyncio.BaseTransport | None) -> Peer | None:
    """Credentials of a UNIX-socket peer when it connected (unix(7), SO_PEERCRED)."""
    raw = transport.get_extra_info("socket") if transport is not None else None
    if raw is None or raw.family != socket.AF_UNIX:
        return None
    size = struct.calcsize("3i")
    return Peer(*struct.unpack("3i", raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)))


def group_id(name: str | None, key: str = "group") -> int | None:
    """The id of a configured group. Raises LauncherError when there is none of that name."""
    if name is None:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise LauncherError(
            f"cannot use control.{key} = '{name}': no such group", f"run: groupadd --system {name}"
        ) from None


def may_use(peer: Peer, owner: int, group: int) -> bool:
    """Root, the daemon's own user, and members of the socket's group. The file's mode says the same."""
    return peer.uid in {0, owner} or peer.gid == group or group in os.getgrouplist(peer.user, peer.gid)


class ControlServer:
    """Serves Operations on a UNIX socket."""

    def __init__(
        self, path: str, group: str | None, operations: Operations, *, read_group: str | None = None
    ) -> None:
        self._path = Path(path)
        self._group = group_id(group)
        self._group_name = group
        self._readers = group_id(read_group, "read_group")
        self._followers = 0
        # Without one, the file has the daemon's own group, and its members may use it.
        self._allowed_group = os.getegid() if self._group is None else self._group
        self._operations = operations
        self._runner: web.AppRunner | None = None
        self._bound = False
        """The file at `path` is ours."""

    async def start(self, ready: Sequence[socket.socket] = ()) -> None:
        """Serve on `ready` listening sockets, which are systemd's and stay; else bind.

        Raises LauncherError when the path can't be used or another daemon answers there.
        """
        if not ready:
            await self._check_free()
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.get(f"{PREFIX}/status", self._status),
                web.get(f"{PREFIX}/plan", self._plan),
                web.get(f"{PREFIX}/events", self._events),
                web.get(f"{PREFIX}/reload", self._reloading),
                web.post(f"{PREFIX}/reload", self._reload),
                web.get(PREFIX + "/slots/{slot}/logs", self._logs),
                web.post(PREFIX + "/slots/{slot}/verify", self._verify),
                web.post(PREFIX + "/slots/{slot}/{verb}", self._act),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        mask = os.umask(0o777 - (SOCKET_MODE if self._readers is None else SHARED_MODE))
        try:
            for sock in ready:
                self._path = Path(sock.getsockname())
                await web.SockSite(self._runner, sock).start()
                self._path.chmod(SOCKET_MODE if self._readers is None else SHARED_MODE)
            if not ready:
                await web.UnixSite(self._runner, str(self._path)).start()
                self._bound = True
            if self._group is not None:
                os.chown(self._path, -1, self._group)
        except OSError as error:
            await self.stop()
            raise LauncherError(
                f"cannot open the control socket '{self._path}': {error.strerror or error}",
                "choose another control.socket, or another control.group",
            ) from None
        finally:
            os.umask(mask)

    async def _check_free(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        except OSError as error:
            raise LauncherError(
                f"cannot open the control socket '{self._path}': {error.strerror}",
                "run as a user who may write there, or set control.socket",
            ) from None
        try:
            _, writer = await asyncio.open_unix_connection(str(self._path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:  # nobody listens: left by a daemon that was killed
            if self._path.is_socket():
                self._path.unlink(missing_ok=True)
            return
        except OSError as error:  # somebody's, and not ours to remove
            raise LauncherError(
                f"cannot open the control socket '{self._path}': {error.strerror or error}",
                "run as a user who may use it, or set control.socket",
            ) from None
        writer.close()
        raise LauncherError(
            f"cannot open the control socket '{self._path}': another numa-launcher answers there",
            "stop that one first, or set control.socket",
        )

    async def stop(self) -> None:
        """Close the socket and remove it."""
        if self._runner is not None:
            await self._runner.cleanup()
            if self._bound:
                self._path.unlink(missing_ok=True)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the peer, bound the time, log changes, and turn errors into the wire's form."""
        peer = peer_of(request.transport)
        if (refusal := self._refusal(peer, change=request.method != "GET")) is not None:
            log.warning("refused %s %s of %s", request.method, request.path, peer)
            return refusal
        assert peer is not None  # noqa: S101  refused above
        response: web.StreamResponse | None = None
        why = ""
        try:
            response = await self._answer(request, handler)
        except LauncherError as error:
            why = error.message
            response = _error(_status_of(error), error.message, error.remedy)
        except web.HTTPException as error:
            why = error.reason
            what = f"cannot answer {request.method} {request.path}: {why}"
            response = _error(error.status, what, "see docs/control.md")
        finally:
            if request.method != "GET":
                _audit(request, peer, response.status if response is not None else 500, why)
        return response

    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if _follows(request):
            return await handler(request)
        try:
            async with asyncio.timeout(REQUEST_S):
                if request.can_read_body:
                    await request.read()  # nothing is read of it, but a body past the limit is refused
                return await handler(request)
        except TimeoutError:
            raise BusyError(
                f"cannot answer {request.method} {request.path}: it took more than {REQUEST_S:.0f} s",
                "look at `numa-launcher status`, and ask again",
            ) from None

    def _refusal(self, peer: Peer | None, *, change: bool) -> web.Response | None:
        if peer is not None and may_use(peer, os.geteuid(), self._allowed_group):
            return None
        ask = f"ask an administrator to add you to {self._change_group}"
        if peer is None or self._readers is None or not may_use(peer, os.geteuid(), self._readers):
            user = "your user" if peer is None else f"user '{peer.user}'"
            return _error(403, f"cannot use the control socket: {user} is not in its group", ask)
        if change:
            return _error(403, f"cannot change anything here: user '{peer.user}' may only read", ask)
        return None

    @property
    def _change_group(self) -> str:
        return f"group '{self._group_name}' (control.group)" if self._group_name else "control.group"

    async def _status(self, _request: web.Request) -> web.Response:
        return _json(self._operations.status())

    async def _plan(self, _request: web.Request) -> web.Response:
        return _json(self._operations.plan())

    async def _events(self, request: web.Request) -> web.Response:
        count, after = _number(request, "tail", "100"), _number(request, "after", "0", digits=12)
        return _json({"events": self._operations.events(count, after)})

    async def _reloading(self, _request: web.Request) -> web.Response:
        return _json(self._operations.reloading())

    async def _reload(self, request: web.Request) -> web.Response:
        overrides = request.query.getall("set", [])
        if len(overrides) > MAX_OVERRIDES:
            raise LauncherError(f"cannot reload with {len(overrides)} overrides: too many", "use the file")
        begun = await self._operations.reload(
            overrides, dry_run=_flag(request, "dry_run"), force=_flag(request, "force")
        )
        return _json(begun)

    async def _act(self, request: web.Request) -> web.Response:
        slot = _slot(request)
        try:
            verb = Verb(request.match_info["verb"])
        except ValueError:
            raise NotFoundError(
                f"cannot '{request.match_info['verb']}' a slot: no such verb", f"verbs are {', '.join(Verb)}"
            ) from None
        asked = Request(verb, force=_flag(request, "force"), deadline_s=_deadline(request, verb))
        self._operations.act(slot, asked)
        await asyncio.sleep(0)  # the slot's owner takes the event before we report
        return _json(self._slot_status(slot))

    async def _verify(self, request: web.Request) -> web.Response:
        slot = _slot(request)
        await self._operations.verify(slot)
        return _json(self._slot_status(slot))

    def _slot_status(self, slot: int) -> Any:
        return next(status for status in self._operations.status().slots if status.slot == slot)

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        slot = _slot(request)
        tail = _number(request, "tail", "100")
        if not _follows(request):
            return _json({"lines": self._operations.log_tail(slot, tail)})
        if self._followers >= MAX_FOLLOWERS:
            raise BusyError(f"cannot follow slot '{slot}': {self._followers} do", "end some of them")
        feed = self._operations.log_follow(slot, tail)
        self._followers += 1
        try:
            response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
            await response.prepare(request)
            async for line in feed:
                await response.write(msgspec.json.encode(line) + b"\n")
        finally:
            self._followers -= 1
        return response


def _slot(request: web.Request) -> int:
    text = request.match_info["slot"]
    if not text.isdecimal() or len(text) > 6:
        raise LauncherError(
            f"cannot use slot '{text[:80]}': not a number", "give a slot number from `numa-launcher status`"
        )
    return int(text)


def _number(request: web.Request, name: str, default: str, digits: int = 6) -> int:
    text = request.query.get(name, default)
    if not text.isdecimal() or len(text) > digits or (digits == 6 and int(text) > MAX_TAIL_LINES):
        raise LauncherError(
            f"cannot show '{text[:80]}' lines: not a number up to {MAX_TAIL_LINES}", f"give {name}={default}"
        )
    return int(text)


def _flag(request: web.Request, name: str) -> bool:
    return request.query.get(name, "0") in {"1", "true"}


def _follows(request: web.Request) -> bool:
    return request.method == "GET" and _flag(request, "follow")


def _deadline(request: web.Request, verb: Verb) -> float | None:
    text = request.query.get("deadline")
    if text is None:
        return None
    if verb is not Verb.DRAIN:
        raise LauncherError(f"cannot {verb} with a deadline: only drain has one", "leave deadline away")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_DEADLINE_S:  # nan is neither
        raise LauncherError(
            f"cannot drain with deadline '{text[:80]}': not seconds from 0 to {MAX_DEADLINE_S:.0f}",
            "give deadline=30",
        )
    return seconds


def _status_of(error: LauncherError) -> int:
    return _STATUS_OF.get(type(error), 400)


def _audit(request: web.Request, peer: Peer, status: int, why: str) -> None:
    """One line for each change that was asked for: who, what, and what became of it."""
    words = f": {why}" if why else ""
    log.info(
        "%s %s by %s (uid %d, pid %d): %d%s",
        request.method, request.path_qs, peer.user, peer.uid, peer.pid, status, words,
        extra={
            "audit": "refused" if status >= 400 else "done",
            "verb": request.match_info.get("verb", request.path.rpartition("/")[2]),
            "slot": request.match_info.get("slot", ""),
            "peer_user": peer.user, "peer_uid": peer.uid, "peer_gid": peer.gid, "peer_pid": peer.pid,
            "path": request.path_qs, "status": status,
        },
    )  # fmt: skip


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value) + b"\n", status=status, content_type="application/json"
    )


def _error(status: int, message: str, remedy: str) -> web.Response:
    return _json({"error": {"message": message, "remedy": remedy}}, status)
