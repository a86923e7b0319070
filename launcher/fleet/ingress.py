"""The process on an ingress host: follows the member list, chooses instances for HAProxy, keeps HAProxy's servers right.

It is not on the way of a request: without it HAProxy chooses the host with the fewest, and it ends without ending HAProxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import ssl
from asyncio.subprocess import DEVNULL
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from launcher.background import Background
from launcher.errors import LauncherError, reason
from launcher.fleet import haproxy
from launcher.fleet.config import FleetConfig
from launcher.fleet.loads import HostLoad, Loads
from launcher.fleet.members import MEMBERS, MemberList, MemberState, read_members
from launcher.fleet.picker import Choice, Picker
from launcher.fleet.spop import Value, serve
from launcher.proxy.request.beginning import read_asked

TURN_S: Final = 1.0  # between two looks at the member list and at HAProxy's servers
START_S: Final = 30.0  # longest start of HAProxy
ASKED_S: Final = 10.0  # since the last question: then another picker decides, or nobody asks
LEAST_S: Final = 0.001  # to the next turn
WORDS: Final = ("-D", "-f", "haproxy.cfg", "-p", "haproxy.pid")
_LOG = logging.getLogger(__name__)


class Decisions(asyncio.DatagramProtocol):
    """The picker on the event loop: what is held waits, time moves on."""

    def __init__(self) -> None:
        self.picker = Picker(Random().randrange)  # noqa: S311 - a choice among equals
        self.asked = 0
        self.asked_at = float("-inf")
        self.peers: frozenset[str] = frozenset()  # addresses of the ingress hosts
        self._clock = asyncio.get_running_loop().time
        self._held: dict[str, asyncio.Future[Choice | None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def handle(self, message: str, arguments: Mapping[str, Value]) -> Mapping[str, str]:
        """A message of HAProxy, as spop.Handler."""
        now = self._clock()
        if message == "first":
            self.picker.first(str(arguments.get("id")), _number(arguments.get("status")), now)
            self.turn()
            return {}
        self.asked, self.asked_at = self.asked + 1, now
        if (asked := read_asked(arguments)) is None:
            return {}
        choice = self.picker.offer(asked, now)
        if choice is None and self.picker.holds(asked.id):
            self._held[asked.id] = decided = asyncio.get_running_loop().create_future()
            self.turn()
            try:
                choice = await decided
            finally:
                if self._held.pop(asked.id, None) is not None:  # HAProxy has closed its connection
                    self.picker.ended(asked.id, 0, "C", self._clock())
        _LOG.debug("request %s: %s", asked.id, choice)
        return {} if choice is None else {"host": choice.host, "slot": str(choice.slot)}

    def datagram_received(self, data: bytes, address: tuple[Any, ...]) -> None:
        """HAProxy's log line `end ID STATUS SERVER TR TA TERMINATION`."""
        words = data.decode(errors="replace").partition("end ")[2].split()
        if len(words) == 6 and address[0] in self.peers:
            sent = words[2] != "<NOSRV>"
            self.picker.ended(words[0], _number(words[1]), words[5], self._clock(), sent=sent)
            self._decide(words[0], None)
            self.turn()

    def report(self, host: str, load: HostLoad, now: float) -> None:
        self.picker.report(host, load, now)
        self.turn()

    def lost(self, host: str) -> None:
        self.picker.lost(host)

    def turn(self) -> None:
        now = self._clock()
        for id_, choice in self.picker.turn(now):
            self._decide(id_, choice)
        for note in self.picker.notes():
            _LOG.warning("%s", note)
        if self._timer is not None:
            self._timer.cancel()
        when, loop = self.picker.next_turn(now), asyncio.get_running_loop()
        self._timer = None if when is None else loop.call_at(max(when, now + LEAST_S), self.turn)

    def _decide(self, id_: str, choice: Choice | None) -> None:
        decided = self._held.pop(id_, None)
        if decided is not None and not decided.done():
            decided.set_result(choice)


class Ingress:
    def __init__(self, config: FleetConfig) -> None:
        """Within the event loop. Raises LauncherError."""
        self._config = config
        self._folder = Path(config.state)
        self._decisions = Decisions()
        self._loads = Loads(self._decisions, config.hosts.ca)
        self._servers = haproxy.Servers(self._folder / "admin.sock")
        self._members = MemberList()
        self._adopted = False  # HAProxy, or started

    async def run(self) -> None:
        """Until cancelled. Raises LauncherError where it cannot listen."""
        background = Background(_LOG, "fleet ingress")
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._loads.close)
            stack.push_async_callback(background.close)
            await self._listen(stack)
            background.start(self._follow, "members and HAProxy")
            await asyncio.Event().wait()

    async def _listen(self, stack: contextlib.AsyncExitStack) -> None:
        """On those addresses of the ingress hosts that are this host's, and on a socket that shows the status."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        loop, ingress, opened, tls = asyncio.get_running_loop(), self._config.ingress, 0, None
        try:
            if ingress.picker_cert:
                tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                tls.load_cert_chain(ingress.picker_cert)
            found = [entry for host in ingress.hosts for entry in await loop.getaddrinfo(host, None)]
            self._decisions.peers = frozenset(str(entry[4][0]) for entry in found)
            for address in self._decisions.peers:
                try:
                    server = await asyncio.start_server(self._answer, address, ingress.picker_port, ssl=tls)
                except OSError as error:
                    if error.errno == errno.EADDRNOTAVAIL:
                        continue
                    raise
                await stack.enter_async_context(server)
                ends = (address, ingress.picker_port + 1)
                transport, _ = await loop.create_datagram_endpoint(lambda: self._decisions, local_addr=ends)
                stack.callback(transport.close)
                opened += 1
            status = self._folder / "ingress.sock"
            status.unlink(missing_ok=True)
            await stack.enter_async_context(await asyncio.start_unix_server(self._show, status))
        except OSError as error:
            raise LauncherError(
                f"cannot listen: {reason(error)}", "stop the other ingress, or change [ingress] in fleet.toml"
            ) from None
        if not opened:
            raise LauncherError(
                f"cannot listen: none of {', '.join(ingress.hosts)} is an address of this host",
                "start the ingress on the hosts that [ingress] hosts names",
            )

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if writer.get_extra_info("peername")[0] in self._decisions.peers:
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
        }
        writer.write(msgspec.json.encode(shown))
        writer.close()

    async def _follow(self) -> None:
        """Raises LauncherError; what was set before stays."""
        while True:
            read = await asyncio.to_thread(read_members, self._folder / MEMBERS)
            if read.newer_than(self._members):
                self._members = read
            members = self._members.members
            self._loads.watch(members)
            hosts = {m.host: m.state is MemberState.DRAINING for m in members}
            self._decisions.picker.serve(hosts, asyncio.get_running_loop().time())
            self._decisions.turn()
            await self._start_haproxy()
            await self._servers.apply(members)
            await asyncio.sleep(TURN_S)

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
        texts = haproxy.files(self._config, exporter=exporter)
        if runs:
            path = self._folder / "haproxy.cfg"
            if not path.exists() or path.read_text() != texts[path.name]:
                _LOG.warning(
                    "HAProxy runs with another configuration; it takes this one when it is restarted"
                )
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
        _LOG.info("HAProxy started")


def _number(value: Value) -> int:
    try:
        return int(value or 0)
    except ValueError:
        return 0
