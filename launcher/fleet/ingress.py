"""The process on an ingress host: follows the member list, chooses instances for HAProxy, keeps HAProxy's servers right.

It is not on the way of a request: without it HAProxy chooses the host with the fewest, and it ends without ending HAProxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import shutil
import socket
import ssl
from asyncio.subprocess import DEVNULL
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from launcher.base.address import in_url
from launcher.base.background import Background, Running
from launcher.base.errors import LauncherError, TimedOutError, reason
from launcher.base.files import own_folder
from launcher.fleet import haproxy
from launcher.fleet.certificates import Certificates
from launcher.fleet.config import FleetConfig
from launcher.fleet.loads import Loads
from launcher.fleet.members import MEMBERS, MemberList, MemberState, read_members
from launcher.fleet.spoe import Decisions, serve

_LOG = logging.getLogger(__name__)


# --- Where the ingress is asked, and what it shows of itself: one JSON object to whoever connects to its socket.

SOCKET: Final = "ingress.sock"
ANSWER_S: Final = 1.5
# HAProxy opens a connection for each question that finds none free. One that waits for a second marks the picker down.
BACKLOG: Final = 4096


def status_socket(config: FleetConfig) -> Path:
    """The folder of the member list is closed to the group that may read the status."""
    shared = config.ingress.read_group is not None
    return Path(config.hosts.control).with_name(SOCKET) if shared else Path(config.state) / SOCKET


def read_status(config: FleetConfig) -> dict[str, Any]:
    """What the ingress process on this host knows; {} without one."""
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(str(Path(config.state) / SOCKET))
        with connection.makefile("rb") as answer:
            return dict(json.load(answer))
    return {}


def endpoints(config: FleetConfig) -> tuple[str, ...]:
    """What clients ask, one address per ingress host."""
    scheme = "https" if config.ingress.tls_cert else "http"
    port = config.ingress.listen.rpartition(":")[2]
    return tuple(f"{scheme}://{in_url(host)}:{port}" for host in config.ingress.hosts)


TURN_S: Final = 1.0  # between two looks at the member list and at HAProxy's servers
START_S: Final = 30.0  # longest start of HAProxy
ASKED_S: Final = 10.0  # since the last question: then another picker decides, or nobody asks
WORDS: Final = ("-D", "-f", "haproxy.cfg", "-p", "haproxy.pid")


def _bound(address: str, port: int) -> socket.socket:
    """A socket for datagrams. uvloop's error would not say why it cannot be bound."""
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    try:
        made.bind((address, port))
    except BaseException:
        made.close()
        raise
    return made


class Ingress:
    def __init__(self, config: FleetConfig) -> None:
        """Within the event loop. Raises LauncherError."""
        self._config = config
        self._folder = Path(config.state)
        self._decisions = Decisions()
        self._certificates = Certificates(config)
        self._loads = Loads(self._decisions, config.hosts.ca)
        self._servers = haproxy.Servers(self._folder / "admin.sock")
        self._members = MemberList()
        self._unread = ""  # why the member list could not be read
        self._differs = ""  # why HAProxy is to be started again
        self._adopted = False  # HAProxy, or started
        self._own: list[str] = []
        """Addresses of the ingress that are this host's."""
        self._following: Running | None = None

    async def run(self) -> None:
        """Until cancelled. Raises LauncherError where it cannot listen."""
        background = Background(_LOG, "fleet ingress")
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._loads.close)
            stack.push_async_callback(background.close)
            self._take_folder()
            await self._listen(stack)
            self._following = background.start(self._follow, "members and HAProxy")
            await asyncio.Event().wait()

    def _take_folder(self) -> None:
        """Raises LauncherError."""
        try:
            for aside in own_folder(self._folder):
                _LOG.warning("another user had made '%s': it is not used; look at it, then remove it", aside)
        except OSError as error:
            raise LauncherError(
                f"cannot use the folder '{self._folder}': {reason(error)}",
                "run it as a user who may write there, or set `state` in fleet.toml to another folder of that user",
            ) from None

    async def _listen(self, stack: contextlib.AsyncExitStack) -> None:
        """On those addresses of the ingress hosts that are this host's, and on a socket that shows the status."""
        loop, ingress = asyncio.get_running_loop(), self._config.ingress
        tls = None if self._certificates.picker is None else self._certificates.picker.context
        hosts = ", ".join(ingress.hosts)
        with _listening_on(hosts, "correct [ingress] hosts in fleet.toml"):
            found = [entry for host in ingress.hosts for entry in await loop.getaddrinfo(host, None)]
        self._decisions.peers = frozenset(str(entry[4][0]) for entry in found)
        peers = sorted(self._decisions.peers)
        self._own = [address for address in peers if await self._take_address(address, tls, stack)]
        await self._show_status(stack)
        if not self._own:
            raise TimedOutError(
                f"cannot listen on '{hosts}': none of them is an address of this host",
                "start the ingress on the hosts that [ingress] hosts names",
            )

    async def _take_address(
        self, address: str, tls: ssl.SSLContext | None, stack: contextlib.AsyncExitStack
    ) -> bool:
        """Listen on one address. False where it is not this host's."""
        port = self._config.ingress.picker_port
        remedy = (
            f"stop the other ingress, or what else listens there (ss -lntup 'sport = :{port} or sport = :{port + 1}'), "
            "or set [ingress] picker_port in fleet.toml to another port"
        )
        with _listening_on(f"{in_url(address)}:{port}", remedy):
            try:
                server = await asyncio.start_server(self._answer, address, port, ssl=tls, backlog=BACKLOG)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    return False
                raise
        await stack.enter_async_context(server)
        with _listening_on(f"{in_url(address)}:{port + 1} (UDP, [ingress] picker_port + 1)", remedy):
            transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                lambda: self._decisions, sock=_bound(address, port + 1)
            )
        stack.callback(transport.close)
        return True

    async def _show_status(self, stack: contextlib.AsyncExitStack) -> None:
        ingress, shared = self._config.ingress, status_socket(self._config)
        for path in {self._folder / SOCKET, shared}:
            key = "[hosts] control" if path.parent != self._folder else "`state`"
            remedy = f"run it as a user who may write there, or set {key} in fleet.toml to another folder"
            with _listening_on(f"unix:{path}", remedy):
                path.unlink(missing_ok=True)
                await stack.enter_async_context(await asyncio.start_unix_server(self._show, path))
        if ingress.read_group is None:
            return
        try:
            shutil.chown(shared, group=ingress.read_group)
            shared.chmod(0o660)
        except LookupError:
            raise LauncherError(
                f"cannot use [ingress] read_group = '{ingress.read_group}': no such group",
                f"run: groupadd --system {ingress.read_group}",
            ) from None
        except OSError as error:
            raise LauncherError(
                f"cannot use [ingress] read_group = '{ingress.read_group}': {reason(error)}",
                "run it as root, or as a user in that group",
            ) from None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")  # None: it has left already
        if peer is not None and self._decisions.knows(peer[0]):
            # asyncio of Python 3.11 logs an error for a connection's task that is cancelled, as all are at the end.
            with contextlib.suppress(asyncio.CancelledError):
                await serve(reader, writer, self._decisions.handle)
        else:
            writer.close()

    async def _show(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decisions, servers = self._decisions, None
        with contextlib.suppress(LauncherError):
            servers = await self._servers.read()
        shown = {
            "members": self._members,
            "servers": servers,
            "decides": asyncio.get_running_loop().time() - decisions.asked_at < ASKED_S,
            "asked": decisions.asked,
            "held": decisions.picker.held,
            "hosts": decisions.picker.status(),
            "shares": decisions.picker.shares(asyncio.get_running_loop().time()),
            "addresses": self._own,
            "files": self._certificates.states(),
            "troubles": self._troubles(),
        }
        writer.write(msgspec.json.encode(shown))
        writer.close()

    def _troubles(self) -> list[str]:
        """Reasons why it does not do as the member list and fleet.toml say."""
        failed = "" if self._following is None else self._following.failures.last
        return [trouble for trouble in (failed, self._unread, self._differs) if trouble]

    async def _follow(self) -> None:
        """Raises LauncherError; what was set before stays."""
        clock = asyncio.get_running_loop().time
        while True:
            self._certificates.look(clock())
            if (authority := self._certificates.authority(clock())) is not None:
                self._loads.believe(authority)
            await asyncio.to_thread(self._read_members)
            members = self._members.members
            self._loads.watch(members)
            hosts = {m.host: m.state is MemberState.DRAINING for m in members}
            self._decisions.picker.serve(hosts, asyncio.get_running_loop().time())
            self._decisions.turn()
            await self._start_haproxy()
            await self._servers.apply(members)
            await self._certificates.hand_on(self._servers, clock())
            if self._following is not None:
                self._following.failures.end()
            await asyncio.sleep(TURN_S)

    def _read_members(self) -> None:
        """The last list stays where the file cannot be read: HAProxy is watched all the same."""
        why = ""
        try:
            read = read_members(self._folder / MEMBERS)
            self._members = max(self._members, read, key=lambda its: (its.epoch, its.version))
        except LauncherError as error:
            why = error.message
        if why and why != self._unread:
            _LOG.error("%s; the hosts stay as they were", why)
        self._unread = why

    async def _start_haproxy(self) -> None:
        """Detached. One that runs keeps its configuration."""
        runs = False
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_unix_connection(self._folder / "admin.sock")
            writer.close()
            runs = True
        if runs and self._adopted:
            return
        self._adopted = True
        exporter = await asyncio.to_thread(haproxy.has_exporter)
        # From its first moment on: clients find its port before the first `apply`.
        members = await haproxy.addresses(self._members.members)
        texts = haproxy.files(self._config, exporter=exporter, members=members)
        if runs:
            path = self._folder / "haproxy.cfg"
            if not path.exists() or not haproxy.same_settings(path.read_text(), texts[path.name]):
                self._differs = (
                    "HAProxy runs with another configuration; it takes this one when it is restarted"
                )
                _LOG.warning("%s", self._differs)
            return
        for name, text in texts.items():
            (self._folder / name).write_text(text)
        said = self._folder / "haproxy.err"
        # Not a pipe: uvloop leaves a copy of it open in HAProxy, and it would never end.
        with said.open("wb") as output:
            child = await asyncio.create_subprocess_exec(
                haproxy.binary(), *WORDS, cwd=self._folder, stdin=DEVNULL, stderr=output
            )
        async with asyncio.timeout(START_S):
            await child.wait()
        if child.returncode:
            why = said.read_text(errors="replace").strip()
            raise LauncherError(f"cannot start HAProxy: {why}", "correct [ingress] and [hosts] in fleet.toml")
        self._certificates.started()
        self._differs = ""
        _LOG.info("HAProxy started")


@contextlib.contextmanager
def _listening_on(where: str, remedy: str) -> Iterator[None]:
    """Names what could not be listened on. systemd starts it again: an address may come, a port become free."""
    try:
        yield
    except OSError as error:
        raise TimedOutError(f"cannot listen on '{where}': {reason(error)}", remedy) from None
