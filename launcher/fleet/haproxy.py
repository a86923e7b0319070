"""HAProxy on an ingress host: its files, and its servers set to the member list while it runs. HAProxy 2.6 or later."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Final

from msgspec import Struct

from launcher.base.address import in_url
from launcher.base.errors import LauncherError, RefusedError, reason
from launcher.fleet.config import FleetConfig
from launcher.fleet.members import Member, MemberState
from launcher.proxy.downstream.tls import fingerprints

_HERE: Final = Path(__file__)
COMMAND_S: Final = 5.0  # longest wait for an answer of the runtime API
MAP: Final = "hosts.map"
OLDEST: Final = (2, 6)
_ENTRY: Final = re.compile(r"^0x\S+ (\S+) (h\d+)$", re.MULTILINE)
_SHA1: Final = re.compile(r"^SHA1 FingerPrint: ([0-9A-Fa-f]{40})$", re.MULTILINE)
_START_AGAIN: Final = (
    "systemctl stop numa-launcher-ingress, then start it, on one ingress host after the other"
)
_NAME: Final = re.compile(r"\w[\w.:-]*")
_SERVERS: Final = re.compile(r"^  server(-template h|) h?\d.*\n", re.MULTILINE)
_NOBODY: Final[Mapping[str, tuple[str | None, bool]]] = {}
_BATCH: Final = 100  # commands in a line, which must fit in tune.bufsize
_MAINT, _DRAIN = 0x23, 0x18  # in srv_admin_state; HAProxy's management guide, "show servers state"
_ERRORS: Final[Mapping[int, tuple[str, str, str, str]]] = {
    400: ("Bad Request", "malformed request", "invalid_request_error", "invalid_request"),
    404: ("Not Found", "no such route on the ingress of a fleet", "invalid_request_error", "not_found"),
    408: ("Request Timeout", "the request took too long to arrive", "invalid_request_error", "timeout"),
    500: ("Internal Server Error", "internal error of the ingress", "api_error", "internal_error"),
    502: ("Bad Gateway", "the host failed before its response", "api_error", "upstream_error"),
    503: ("Service Unavailable", "no host can take the request", "service_unavailable", "no_host_ready"),
    504: ("Gateway Timeout", "the host did not respond in time", "api_error", "timeout"),
}


def _error_file(status: int) -> str:
    title, message, type_, code = _ERRORS[status]
    retry = "Retry-After: 1\r\n" if status in {502, 503} else ""
    body = json.dumps({"error": {"message": message, "type": type_, "param": None, "code": code}})
    head = f"HTTP/1.1 {status} {title}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{retry}"
    return f"{head}Cache-Control: no-store\r\n\r\n{body}"


def files(
    config: FleetConfig, *, exporter: bool, members: Mapping[str, tuple[str | None, bool]] = _NOBODY
) -> dict[str, str]:
    """Names -> texts of one folder; start `haproxy -f haproxy.cfg` in it. `exporter`: this build serves Prometheus.
    `members`, as `addresses` gives them: it has requests for them from its first moment on."""
    ingress, hosts = config.ingress, config.hosts
    known = [
        (host, place.replace(" ", ":")) for host, (place, is_open) in members.items() if place and is_open
    ]
    known = known[: hosts.most]
    servers = [f"  server h{n} {place}" for n, (_, place) in enumerate(known, 1)]
    if len(known) < hosts.most:
        servers.append(f"  server-template h {len(known) + 1}-{hosts.most} 127.0.0.1:1 disabled")
    names = [in_url(host) for host in ingress.hosts]
    ca = f" ssl verify required ca-file {shlex.quote(hosts.ca)}" if hosts.ca else ""
    asked = f":{ingress.picker_port}{ca if ingress.picker_cert else ''}"
    pickers = [f"  server p{n} {host}{asked}{' backup' * (n > 1)}" for n, host in enumerate(names, 1)]
    tls = f" ssl crt {shlex.quote(ingress.tls_cert)} alpn h2,http/1.1" if ingress.tls_cert else ""
    text = Template(_HERE.with_name("haproxy.cfg").read_text()).substitute(
        logs="\n".join(
            f"  log {host}:{ingress.picker_port + 1} len 2048 format raw local0" for host in names
        ),
        errors="\n".join(f"  errorfile {status} {status}.http" for status in _ERRORS),
        listen=ingress.listen + tls,
        # A check is a TCP connection alone: TLS handshakes with 200 hosts four times a second would keep a core busy.
        host_tls=ca and f"{ca} no-check-ssl",
        most=hosts.most,
        servers="\n".join(servers),
        pickers="\n".join(pickers),
        metrics_port=ingress.picker_port + 2,
        exporter="" if exporter else "# ",
    )
    spoe = _HERE.with_name("spoe.cfg").read_text()
    entries = "".join(f"{host} h{n}\n" for n, (host, _) in enumerate(known, 1))
    return {"haproxy.cfg": text, "spoe.cfg": spoe, MAP: entries} | {
        f"{status}.http": _error_file(status) for status in _ERRORS
    }


def same_settings(one: str, other: str) -> bool:
    """Whether two texts of haproxy.cfg are of one configuration; hosts come and go."""
    return _SERVERS.sub("", one) == _SERVERS.sub("", other)


def binary() -> str:
    """Raises LauncherError where HAProxy is not installed."""
    if found := shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin"):
        return found
    raise LauncherError("cannot find haproxy", "install version 2.6 or later: apt-get install haproxy")


def has_exporter() -> bool:
    """Whether this host's HAProxy can serve Prometheus. Raises LauncherError where it is too old."""
    found = binary()
    build = subprocess.run([found, "-vv"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"version (\d+)\.(\d+)\S*", build)
    if version and (int(version[1]), int(version[2])) < OLDEST:
        raise LauncherError(
            f"cannot use {found}: {version[0]} is too old",
            "install version 2.6 or later: https://haproxy.debian.net",
        )
    return "prometheus-exporter" in build


class Server(Struct, frozen=True):
    """One of HAProxy's servers."""

    key: str | None
    """Its entry in hosts.map: the name of its host, after a minus sign where it gets no new requests."""
    address: str
    """IP address and port, with a space between them."""
    unused: bool
    draining: bool
    up: bool
    streams: int

    @property
    def host(self) -> str | None:
        return self.key and self.key.removeprefix("-")


def changes(servers: Mapping[str, Server], wanted: Mapping[str, tuple[str | None, bool]]) -> list[str]:
    """Commands that bring `servers` (by name) nearer to `wanted`: host -> address, and whether it gets new requests. Without
    an address it keeps the one that it has. Hosts for which no server is free are left out.

    A server whose host is not wanted is drained, and free when its last stream has ended.
    """
    names = {server.host: name for name, server in servers.items()}
    free = (name for name, server in servers.items() if server.unused and not server.key)
    commands: list[str] = []
    for host, (address, is_open) in wanted.items():
        name = names.get(host) or (next(free, None) if address else None)
        if name is None:
            continue
        server = servers[name]
        if address and server.address != address:
            commands.append("set server hosts/{} addr {} port {}".format(name, *address.split()))
        if server.unused or server.draining == is_open:
            commands.append(f"set server hosts/{name} state {'ready' if is_open else 'drain'}")
        commands += _entry(server, name, host if is_open else f"-{host}")
    for name, server in servers.items():
        if (
            server.host in wanted
            or (server.unused and not server.key)
            or (server.draining and server.streams)
        ):
            continue
        freed = server.draining or server.unused
        commands.append(f"set server hosts/{name} state {'maint' if freed else 'drain'}")
        commands += _entry(server, name, None if freed or not server.host else f"-{server.host}")
    return commands


def _entry(server: Server, name: str, key: str | None) -> list[str]:
    if server.key == key:
        return []
    removed = [f"del map {MAP} {server.key}"] if server.key else []
    return removed + ([f"add map {MAP} {key} {name}"] if key else [])


class Servers:
    """The servers of a running HAProxy, which remembers them: this process may be restarted."""

    def __init__(self, admin_socket: Path) -> None:
        self._socket = admin_socket

    async def apply(self, members: Sequence[Member]) -> None:
        """Sets them to the list; does nothing where they are. Raises LauncherError.

        A host whose address has no IP address now keeps the one that it had.
        """
        wanted = await addresses(members)
        answer = ""
        # A host that leaves takes three turns: drained, freed, nothing left to do.
        for _ in range(4):
            servers = await self.read()
            if not (commands := changes(servers, wanted)):
                return self._check(members, servers)
            for begin in range(0, len(commands), _BATCH):
                answer = await self._ask("; ".join(commands[begin : begin + _BATCH]))
        raise LauncherError(f"cannot set the servers of HAProxy: {answer.strip()}", "restart HAProxy")

    async def renew(self, path: str, pem: str) -> None:
        """Send clients the certificate `pem` in place of the one that HAProxy has read from `path`; open connections stay.
        Raises LauncherError; then it goes on with the one before."""
        # An empty line ends the text for HAProxy.
        text = "\n".join(line for line in pem.splitlines() if line.strip())
        name = _escaped(path)
        said = await self._ask(f"set ssl cert {name} <<\n{text}\n")
        said += await self._ask(f"commit ssl cert {name}")
        if "Success!" not in said:
            await self._ask(f"abort ssl cert {name}")
            why = "; ".join(line.strip() for line in said.splitlines() if line.strip())
            raise LauncherError(f"cannot give '{path}' to HAProxy: {why}", _START_AGAIN)

    async def check_authority(self, path: str, pem: str) -> None:
        """Raises RefusedError unless HAProxy asks the daemons by `pem`: of servers it reads `path` at its start only."""
        said = await self._ask(f"show ssl ca-file {_escaped(path)}")
        has = {found.lower() for found in _SHA1.findall(said)}
        if has and has != fingerprints(pem):
            raise RefusedError(f"cannot give '{path}' to HAProxy, which reads it at its start", _START_AGAIN)

    def _check(self, members: Sequence[Member], servers: Mapping[str, Server]) -> None:
        """Raises LauncherError where a host is not served; the others are."""
        known = {server.host for server in servers.values()}
        for host in (member.host for member in members if member.host not in known):
            why, remedy = "its address is unknown", "see its listeners: [proxy] listen of its daemon"
            if not _NAME.fullmatch(host):
                why, remedy = "its name is no host name", "give it another one: ray start --node-name"
            elif not any(server.unused and not server.key for server in servers.values()):
                why = f"all {len(servers)} servers of HAProxy are in use"
                remedy = "raise [hosts] most in fleet.toml and restart HAProxy"
            raise LauncherError(f"cannot add host {host!r}: {why}", remedy)

    async def read(self) -> dict[str, Server]:
        """By name, as they are now. Raises LauncherError."""
        text = await self._ask(f"show map {MAP}; show servers conn hosts; show servers state hosts")
        keys = {found[2]: found[1] for found in _ENTRY.finditer(text)}
        columns: list[str] = []
        streams, servers = {}, {}
        for line in text.splitlines():
            if line.startswith("#"):
                columns = line[1:].split()
            row = dict(zip(columns, line.split(), strict=False))
            if line.startswith("hosts/"):
                streams[row["bkname/svname"].removeprefix("hosts/")] = int(row["used_cur"])
            elif row.get("be_name") == "hosts":
                name, admin = row["srv_name"], int(row["srv_admin_state"])
                servers[name] = Server(
                    key=keys.get(name),
                    address=f"{row['srv_addr']} {row['srv_port']}",
                    unused=bool(admin & _MAINT),
                    draining=bool(admin & _DRAIN),
                    up=row["srv_op_state"] != "0",
                    streams=streams[name],
                )
        return servers

    async def _ask(self, command: str) -> str:
        try:
            async with asyncio.timeout(COMMAND_S):
                reader, writer = await asyncio.open_unix_connection(self._socket)
                with contextlib.closing(writer):
                    writer.write(f"{command}\n".encode())
                    return (await reader.read()).decode()
        except OSError as error:
            raise LauncherError(
                f"cannot reach HAProxy at {self._socket}: {reason(error)}",
                "start `numa-launcher fleet ingress`",
            ) from None


def _escaped(path: str) -> str:
    return re.sub(r"([\\ ])", r"\\\1", path)


async def addresses(members: Sequence[Member]) -> dict[str, tuple[str | None, bool]]:
    """Host -> IP address and port, with a space between them, if there are any now, and whether it gets new requests."""
    return {
        member.host: (await _resolved(member.address), member.state is not MemberState.DRAINING)
        for member in members
        if _NAME.fullmatch(member.host)
    }


async def _resolved(address: str) -> str | None:
    name, _, port = address.rpartition(":")
    host = name.strip("[]")
    with contextlib.suppress(ValueError):
        return f"{ipaddress.ip_address(host)} {int(port)}"
    with contextlib.suppress(OSError, ValueError):
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        return f"{found[0][4][0]} {int(port)}"
    return None
