"""Where the dashboard listens: a loopback port, or a UNIX socket."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

from launcher.base.address import Address, TcpAddress, UnixAddress, in_url
from launcher.base.background import InTurns
from launcher.base.errors import LauncherError, reason

DEFAULT: Final = "127.0.0.1:8430"
# The file's owner and group may look at the page.
SOCKET_MODE: Final = 0o660
BACKLOG: Final = 128
_WANTED: Final = f"give 127.0.0.1:PORT or unix:PATH, such as {DEFAULT}"


def parse(text: str) -> Address:
    """`127.0.0.1:PORT`, `localhost:PORT`, `[::1]:PORT` or `unix:PATH`. Raises LauncherError, also for an address that
    other machines can reach."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path:
            raise LauncherError(f"cannot listen on '{text}': the path is missing", _WANTED)
        return UnixAddress(os.path.abspath(path))  # noqa: PTH100  Path.resolve follows links
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise LauncherError(f"cannot listen on '{text}': not an address with a port", _WANTED)
    name = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
    try:
        is_loopback = ipaddress.ip_address(name).is_loopback
    except ValueError:
        raise LauncherError(
            f"cannot listen on '{text}': '{host}' is not a loopback address", _WANTED
        ) from None
    if not is_loopback:
        raise LauncherError(
            f"cannot listen on '{text}': other machines could reach it, and the page has neither TLS nor a login",
            "listen on 127.0.0.1:PORT or unix:PATH and use ssh -L, or put a web server with TLS and a login in front "
            "(docs/dashboard.md)",
        )
    return TcpAddress(name, int(port))


@contextmanager
def listening(address: Address) -> Iterator[socket.socket]:
    """A listening socket; its file is removed afterwards. Raises LauncherError."""
    with bind(address) as sock:
        try:
            yield sock
        finally:
            if isinstance(address, UnixAddress):
                Path(address.path).unlink(missing_ok=True)


def bind(address: Address) -> socket.socket:
    """A listening socket. Raises LauncherError."""
    try:
        return _bind_unix(address.path) if isinstance(address, UnixAddress) else _bind_tcp(address)
    except OSError as error:
        remedy = "choose another address with --listen" + (
            f"; 127.0.0.1:0 takes a free port, `ss -ltnp 'sport = :{address.port}'` shows who has this one"
            if isinstance(address, TcpAddress)
            else ", in a folder that exists and where your user may write"
        )
        raise LauncherError(f"cannot listen on '{address}': {reason(error)}", remedy) from None


def _bind_tcp(address: TcpAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)


def _bind_unix(path: str) -> socket.socket:
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o777 - SOCKET_MODE)
    try:
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(mask)
    return sock


def _remove_stale(path: str) -> None:
    """Removes the socket of a dashboard that was killed. Raises LauncherError when one answers there."""
    file = Path(path)
    try:
        if not stat.S_ISSOCK(file.lstat().st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            file.unlink(missing_ok=True)
            return
    raise LauncherError(
        f"cannot listen on 'unix:{path}': another process answers there",
        "stop that one first, or choose another address with --listen",
    )


def link(sock: socket.socket, token: str | None, view: str = "") -> str:
    """What to open. The token is in the fragment, which browsers send to nobody. `view`: the page's first one."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"http://{in_url(host)}:{port}/#token={token}{f'&view={view}' * bool(view)}"


def from_elsewhere(sock: socket.socket) -> str:
    """How to open the page on another machine."""
    if sock.family == socket.AF_UNIX:
        port = DEFAULT.rpartition(":")[2]
        return f"on your machine: ssh -L {port}:{sock.getsockname()} HOST, and open http://localhost:{port}/"
    host, port = sock.getsockname()[:2]
    return f"from another machine: ssh -L {port}:{in_url(host)}:{port} HOST, and open the same link there"


# --- How many connections the dashboard holds: one beyond them is answered 503 and closed. ---

MAX_CONNECTIONS: Final = 256
"""A browser opens up to six for a page: about forty people. A quarter of the 1,024 files that a process may usually open."""
# For a rejected client to send its request and get the answer; so many of these are held besides.
REFUSAL_S: Final = 1.0
MAX_REFUSALS: Final = 64
_BODY: Final = b'{"error":{"message":"cannot show the page: too many connections are open","remedy":"close other pages"}}\n'
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


class Connections:
    """Counts the connections; makes a `Gate` for each."""

    def __init__(self, make: Callable[[], asyncio.Protocol], most: int = MAX_CONNECTIONS) -> None:
        """`make`: the server's protocol for a connection that may be there."""
        self._make = make
        self._most = most
        self.open = 0
        self.refused = 0  # now

    def gate(self) -> asyncio.Protocol:
        return Gate(self)

    def take(self) -> asyncio.Protocol | None:
        """The protocol for one more; None: there are enough."""
        if self.open >= self._most:
            return None
        self.open += 1
        return InTurns(self._make())


class Gate(asyncio.Protocol):
    """Stands before a server's protocol and passes on all that happens to a connection that may be there."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._inner: asyncio.Protocol | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._inner = self._connections.take()
        if self._inner is not None:
            self._inner.connection_made(transport)
            return
        self._connections.refused += 1
        if self._connections.refused > MAX_REFUSALS:
            self._transport.abort()
        else:
            self._deadline = asyncio.get_running_loop().call_later(REFUSAL_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        """Answer a rejected client after its request: closed with the request unread, it would see a reset."""
        if self._inner is not None:
            self._inner.data_received(data)
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.write(_FULL)
            self._transport.close()

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._inner is not None:
            self._connections.open -= 1
            self._inner.connection_lost(exc)
            return
        self._connections.refused -= 1
        if self._deadline is not None:
            self._deadline.cancel()
