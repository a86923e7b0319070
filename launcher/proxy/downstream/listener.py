"""Listening sockets, TCP and UNIX."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from launcher.base.address import in_url
from launcher.base.errors import LauncherError, PassingError, reason
from launcher.config.schema import Proxy
from launcher.proxy.downstream.tls import Handshakes

BACKLOG = 1024
# Connections accepted per turn of the loop: libuv accepts one per descriptor (since 1.45), and a turn takes tens of
# milliseconds with a thousand streams, so that a thousand new clients would wait for seconds.
ACCEPTS = 8
# linux/in.h, linux/in6.h; socket has no names for them.
_IP_FREEBIND: Final = 15
_IPV6_FREEBIND: Final = 78


class Listener:
    """The listening sockets; each connection gets a protocol of `make`. With TLS, TCP sockets belong to `handshakes`."""

    def __init__(self, make: Callable[[], asyncio.Protocol], handshakes: Handshakes | None = None) -> None:
        self._make = make
        self._handshakes = handshakes
        self._listening: list[asyncio.Server] = []
        self._paths: list[Path] = []
        self._places: dict[str, tuple[int, tuple[Any, ...]]] = {}
        """Families and addresses of the TCP sockets, by endpoint."""
        self.endpoints: list[str] = []

    async def open(self, listen: str, others: Sequence[str] = ()) -> None:
        """Listen on "HOST:PORT", "[V6]:PORT" or "unix:/path"; `others`: all of [proxy] listen. Raises LauncherError."""
        for sock in bind(listen, others):
            if sock.family == socket.AF_UNIX:
                self._paths.append(Path(sock.getsockname()))
            await self.take(sock)

    async def take(self, sock: socket.socket) -> None:
        """Serve on a listening socket. In one of systemd's, clients queue after our copy is closed."""
        secure = sock.family != socket.AF_UNIX and self._handshakes is not None
        sock.setblocking(False)
        if self._handshakes is not None and secure:
            self._handshakes.listen(sock)
        else:
            loop = asyncio.get_running_loop()
            create = loop.create_unix_server if sock.family == socket.AF_UNIX else loop.create_server
            for one in (sock, *(sock.dup() for _ in range(ACCEPTS - 1))):
                self._listening.append(await create(self._make, sock=one, backlog=BACKLOG))
        self.endpoints.append(endpoint(sock, tls=secure))
        if sock.family != socket.AF_UNIX:
            self._places[self.endpoints[-1]] = (sock.family, sock.getsockname())

    @property
    def absent(self) -> list[str]:
        """Endpoints whose address no interface of this host has now. Each costs two system calls."""
        return [one for one, place in self._places.items() if not is_here(*place)]

    def close(self) -> None:
        for server in self._listening:
            server.close()
        if self._handshakes is not None:
            self._handshakes.close()
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._paths.clear()


def endpoint(sock: socket.socket, *, tls: bool = False) -> str:
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://{in_url(host)}:{port}"


def unused(listens: Sequence[str], endpoints: Sequence[str]) -> list[str]:
    """Entries of a configured `[proxy] listen` that are not served, because systemd's sockets take precedence."""
    found = {endpoint.partition("://")[2] or endpoint for endpoint in endpoints}
    return [] if tuple(listens) == Proxy().listen else [one for one in listens if one not in found]


def bind(listen: str, others: Sequence[str] = ()) -> list[socket.socket]:
    """Bound sockets for one entry of `[proxy] listen`; a name may have several addresses.

    An address that no interface has yet is bound all the same (`FreeBind=` of systemd.socket(5), ip(7) IP_FREEBIND), as in
    numa-launcher.socket: at boot before the network, and with a floating address (VRRP), the daemon starts its instances,
    which takes minutes, and serves the address from the moment that it comes. Retrying bind(2) would serve it later, and
    refusing to start would make a late address a failure for good. The price, that a typing error binds as well, is paid by
    `Listener.absent`, which `status` reports.

    `[::]:PORT` takes IPv4 too, as in a socket unit (BindIPv6Only=default of systemd.socket(5), net.ipv6.bindv6only = 0), but
    where this entry or one of `others` has an IPv4 address of that port, which could not be bound then."""
    if listen.startswith("unix:"):
        return [_bind_unix(listen, listen.removeprefix("unix:"))]
    places = _places(listen)
    port = places[0][1][1]
    ipv4 = any(family == socket.AF_INET for other in (listen, *others) for family in _families(other, port))
    both = not ipv4 and socket.has_dualstack_ipv6()
    with ExitStack() as bound:
        sockets = [
            bound.enter_context(_bind_tcp(listen, family, address, both=both and address[0] == "::"))
            for family, address in places
        ]
        bound.pop_all()
    return sockets


def require_names(listens: Sequence[str]) -> None:
    """Raise PassingError while the name of an entry of `[proxy] listen` cannot be looked up, LauncherError for an entry that
    is no address. Nothing is bound."""
    for listen in listens:
        if not listen.startswith("unix:"):
            _places(listen)


def _families(listen: str, port: int) -> set[int]:
    """Of the addresses of an entry with this port; empty for one that cannot be used, which says so when it is opened."""
    if listen.startswith("unix:") or not listen.endswith(f":{port}"):
        return set()
    try:
        return {int(family) for family, _ in _places(listen)}
    except LauncherError:
        return set()


def _places(listen: str) -> Sequence[tuple[int, tuple[Any, ...]]]:
    """Families and addresses. Raises LauncherError, and PassingError where a name cannot be looked up now."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise LauncherError(
            f"cannot listen on '{listen}': not an address",
            'write "HOST:PORT", "[V6]:PORT" or "unix:/path" in [proxy] listen',
        )
    bare = host.removeprefix("[").removesuffix("]") or None
    try:
        found = socket.getaddrinfo(bare, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        # The server of names is not reachable, as at a boot before the network.
        kind = PassingError if error.errno == socket.EAI_AGAIN else LauncherError
        raise kind(
            f"cannot listen on '{listen}': {reason(error)}",
            "set [proxy] listen to an address of this machine",
        ) from error
    places = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    return places[:1] if int(port) == 0 else places


def _bind_tcp(listen: str, family: int, address: tuple[Any, ...], *, both: bool) -> socket.socket:
    try:
        return _listening(family, address, both=both)
    except OSError as error:
        raise _cannot_listen(listen, error) from error


def _listening(family: int, address: tuple[Any, ...], *, both: bool) -> socket.socket:
    with ExitStack() as opened:
        sock = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        opened.pop_all()
    return sock


def is_here(family: int, address: tuple[Any, ...]) -> bool:
    """Whether an interface of this host has the address; always with net.ipv4.ip_nonlocal_bind, which hides it."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def _bind_unix(listen: str, path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        sock.bind(path)
        Path(path).chmod(0o660)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _cannot_listen(listen, error) from error
    return sock


def _remove_stale(path: str) -> None:
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "the file exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
        except BlockingIOError:
            pass  # its backlog is full: it is in use
    raise OSError(errno.EADDRINUSE, "address in use")


def _cannot_listen(listen: str, error: OSError) -> LauncherError:
    remedies = {
        errno.EADDRINUSE: "stop what listens there (ss -ltnp), or set [proxy] listen to another address",
        errno.EACCES: "choose a port above 1023 or a folder that this user may write, in [proxy] listen",
    }
    why = "address in use" if error.errno == errno.EADDRINUSE else reason(error)
    return LauncherError(
        f"cannot listen on '{listen}': {why}",
        remedies.get(error.errno or 0, "set [proxy] listen to another address"),
    )


# --- Sockets that systemd opened for us: they outlive the daemon, and clients queue in them while it restarts.
#
# Source: sd_listen_fds_with_names(3), systemd.socket(5) FileDescriptorName=.

HTTP: Final = "http"
"""FileDescriptorName= of numa-launcher.socket."""
CONTROL: Final = "control"
"""FileDescriptorName= of numa-launcher-control.socket."""

NOT_HANDED_OVER: Final = "cannot serve clients: systemd handed over the control socket and no listener"
"""numa-launcher.socket has failed: its address is missing or in use."""
NOT_HANDED_OVER_REMEDY: Final = (
    "see systemctl status numa-launcher.socket; then systemctl restart numa-launcher.socket numa-launcher"
)

_handed_over: dict[str, list[socket.socket]] | None = None


def sockets() -> dict[str, list[socket.socket]]:
    """Listening sockets by their FileDescriptorName=, non-blocking and not inherited by children; {} without systemd.

    They can be taken once; later calls return the same. Their paths are systemd's: whoever serves on one closes it in
    the end and unlinks nothing."""
    global _handed_over  # noqa: PLW0603  descriptors can be taken only once
    if _handed_over is None:
        _handed_over = _take()
    return _handed_over


def _take() -> dict[str, list[socket.socket]]:
    if "LISTEN_FDS" not in os.environ:
        return {}
    try:
        from systemd import daemon  # noqa: PLC0415  scripts/quickstart leaves it out for llama.cpp
    except ImportError as error:
        raise LauncherError(
            f"cannot take the sockets that systemd passes: {error}", "pip install systemd-python"
        ) from None
    found: dict[str, list[socket.socket]] = {}
    for fd, name in daemon.listen_fds_with_names().items():
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        sock.set_inheritable(False)
        found.setdefault(name, []).append(sock)
    return found
