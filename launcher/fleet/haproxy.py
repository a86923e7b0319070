"""HAProxy on an ingress host: its files, and its servers set to the member list while it runs. HAProxy 2.6 or later."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Final

from launcher.errors import LauncherError, reason
from launcher.fleet.config import FleetConfig
from launcher.fleet.members import Member, MemberState
from launcher.proxy.errors import error_body

_HERE: Final = Path(__file__)
COMMAND_S: Final = 5.0  # longest wait for an answer of the runtime API
_BATCH: Final = 100  # commands in a line, which has room for tune.bufsize bytes
_MAINT, _DRAIN = 0x23, 0x18  # in srv_admin_state; HAProxy's management guide, "show servers state"
_ERRORS: Final[Mapping[int, tuple[str, str, str, str]]] = {
    400: ("Bad Request", "malformed request", "invalid_request_error", "invalid_request"),
    404: ("Not Found", "no such route on the ingress of a fleet", "invalid_request_error", "not_found"),
    408: ("Request Timeout", "the request took too long to arrive", "invalid_request_error", "timeout"),
    429: ("Too Many Requests", "every host is at its limit", "rate_limit_error", "queue_full"),
    500: ("Internal Server Error", "internal error of the ingress", "api_error", "internal_error"),
    502: ("Bad Gateway", "the host failed before its response", "api_error", "upstream_error"),
    503: ("Service Unavailable", "no host can take the request", "service_unavailable", "no_host_ready"),
    504: ("Gateway Timeout", "the host did not respond in time", "api_error", "timeout"),
}


def _error_file(status: int) -> str:
    title, message, type_, code = _ERRORS[status]
    retry = "Retry-After: 1\r\n" if status in {429, 502, 503} else ""
    body = error_body(message, type_, code=code).decode()
    head = f"HTTP/1.1 {status} {title}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{retry}"
    return f"{head}Cache-Control: no-store\r\n\r\n{body}"


def files(config: FleetConfig, folder: Path, *, exporter: bool) -> dict[str, str]:
    """Names in `folder` -> texts; haproxy.cfg is the one to start with. `exporter`: this build serves Prometheus."""
    ingress, hosts, where = config.ingress, config.hosts, shlex.quote(str(folder))
    names = [f"[{host}]" if ":" in host else host for host in ingress.hosts]
    pickers = [
        f"  server p{n} {host}:{ingress.picker_port}{' backup' if n > 1 else ''}"
        for n, host in enumerate(names, 1)
    ]
    tls = f" ssl crt {shlex.quote(ingress.tls_cert)} alpn h2,http/1.1" if ingress.tls_cert else ""
    # A check is a TCP connection alone: TLS handshakes with 200 hosts every 300 ms would keep a core busy.
    ca = f" ssl verify required ca-file {shlex.quote(hosts.ca)} no-check-ssl" if hosts.ca else ""
    text = Template(_HERE.with_name("haproxy.cfg").read_text()).substitute(
        folder=where,
        logs="\n".join(
            f"  log {host}:{ingress.picker_port + 1} len 2048 format raw local0" for host in names
        ),
        errors="\n".join(f"  errorfile {status} {where}/{status}.http" for status in _ERRORS),
        listen=ingress.listen + tls,
        host_tls=ca,
        most=hosts.most,
        pickers="\n".join(pickers),
        metrics_port=ingress.picker_port + 2,
        exporter="" if exporter else "# ",
    )
    spoe = _HERE.with_name("spoe.cfg").read_text()
    return {"haproxy.cfg": text, "spoe.cfg": spoe} | {
        f"{status}.http": _error_file(status) for status in _ERRORS
    }


def binary() -> str:
    """Raises LauncherError where HAProxy is not installed."""
    if found := shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin"):
        return found
    raise LauncherError("cannot find haproxy", "install version 2.6 or later: apt-get install haproxy")


def has_exporter() -> bool:
    """Whether this host's HAProxy can serve Prometheus. Raises LauncherError."""
    build = subprocess.run([binary(), "-vv"], capture_output=True, text=True, check=False)
    return "prometheus-exporter" in build.stdout


@dataclass(frozen=True, slots=True)
class Server:
    """One of HAProxy's servers."""

    address: str
    """IP address and port, with a space between them."""
    unused: bool
    draining: bool
    up: bool
    streams: int


def changes(
    servers: Mapping[str, Server], wanted: Mapping[str, tuple[str, bool]], names: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Commands that bring `servers` (by name) nearer to `wanted`, and host -> server.

    `wanted`: host -> address, and whether it gets new requests. `names`: host -> server so far, or nothing, after a
    restart: then a server belongs to the host whose address it has. A server without a host is drained, and free when
    its last stream has ended. Raises LauncherError when there are too few servers.
    """
    held = {host: name for host, name in names.items() if host in wanted or not servers[name].unused}
    by_address = {server.address: name for name, server in servers.items() if not server.unused}
    commands: list[str] = []
    for host, (address, is_open) in wanted.items():
        taken = set(held.values())
        name = held.get(host) or by_address.get(address)
        if host not in held and (name is None or name in taken):
            name = next((one for one, server in servers.items() if server.unused and one not in taken), None)
        if name is None:
            raise LauncherError(
                f"cannot add host {host}: all {len(servers)} servers of HAProxy are in use",
                "raise [hosts] most in fleet.toml and restart HAProxy",
            )
        held[host] = name
        commands += _server_commands(name, servers[name], address, is_open=is_open)
    keep = {held[host] for host in wanted}
    for name, server in servers.items():
        if name not in keep and not server.unused and not (server.draining and server.streams):
            commands.append(f"set server hosts/{name} state {'maint' if server.draining else 'drain'}")
    return commands, held


def _server_commands(name: str, server: Server, address: str, *, is_open: bool) -> Iterator[str]:
    if server.address != address:
        ip, port = address.split()
        yield f"set server hosts/{name} addr {ip} port {port}"
    if server.unused or server.draining == is_open:
        yield f"set server hosts/{name} state {'ready' if is_open else 'drain'}"


class Servers:
    """The servers of a running HAProxy."""

    def __init__(self, admin_socket: Path) -> None:
        self._socket = admin_socket
        self._names: dict[str, str] = {}

    async def apply(self, members: Sequence[Member]) -> dict[str, str]:
        """Sets them to the list; nothing where they are. Returns host -> server. Raises LauncherError.

        A host whose name has no address now keeps its server as it is.
        """
        wanted = {}
        for member in members:
            with contextlib.suppress(OSError):
                wanted[member.host] = (
                    await _resolved(member.address),
                    member.state is not MemberState.DRAINING,
                )
        answer = ""
        # Address and state, a drained server freed, then nothing to do.
        for _ in range(4):
            commands, names = changes(await self.read(), wanted, self._names)
            self._names = names
            if not commands:
                return {host: names[host] for host in wanted}
            for begin in range(0, len(commands), _BATCH):
                answer = await self._ask("; ".join(commands[begin : begin + _BATCH]))
        raise LauncherError(f"cannot set the servers of HAProxy: {answer.strip()}", "restart HAProxy")

    async def read(self) -> dict[str, Server]:
        """By name, as they are now. Raises LauncherError."""
        columns: list[str] = []
        streams, found = {}, {}
        for line in (await self._ask("show servers conn hosts; show servers state hosts")).splitlines():
            if line.startswith("#"):
                columns = line[1:].split()
            row = dict(zip(columns, line.split(), strict=False))
            if line.startswith("hosts/"):
                streams[row["bkname/svname"].removeprefix("hosts/")] = int(row["used_cur"])
            elif row.get("be_name") == "hosts":
                admin, name = int(row["srv_admin_state"]), row["srv_name"]
                found[name] = Server(
                    address=f"{row['srv_addr']} {row['srv_port']}",
                    unused=bool(admin & _MAINT),
                    draining=bool(admin & _DRAIN),
                    up=row["srv_op_state"] != "0",
                    streams=streams.get(name, 0),
                )
        return found

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


async def _resolved(address: str) -> str:
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return f"{found[0][4][0]} {port}"
