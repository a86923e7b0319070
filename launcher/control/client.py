"""The CLI's side of the control socket: blocking, standard library only, so that commands start fast."""

from __future__ import annotations

import grp
import http.client
import json
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

from launcher.base.errors import BusyError, LauncherError, NotFoundError, TimedOutError, reason
from launcher.base.text import printable, printable_tree
from launcher.control.messages import PREFIX

TIMEOUT_S: Final = 30.0
_KIND_OF: Final[dict[int, type[LauncherError]]] = {
    http.client.SERVICE_UNAVAILABLE: BusyError,
    http.client.NOT_FOUND: NotFoundError,
}


class UnreachableError(LauncherError):
    """No daemon answers; one may do so again soon."""


class NoAnswerError(UnreachableError, TimedOutError):
    """A daemon is there, but does not answer in time."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class ControlClient:
    """Talks to the daemon behind one control socket.

    The texts of its answers are printable, as is what its errors say: they hold what instances and clients wrote. For
    JSON, which escapes by itself, `exact` leaves them as they came."""

    def __init__(self, path: str, *, exact: bool = False) -> None:
        self._path = path
        self._tree: Callable[[Any], Any] = (lambda value: value) if exact else printable_tree

    def get(self, path: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        return self._call("GET", path, timeout_s)

    def text(self, path: str, timeout_s: float = TIMEOUT_S) -> str:
        return self._read("GET", path, timeout_s).decode(errors="replace")

    def post(self, path: str, timeout_s: float = TIMEOUT_S, body: bytes = b"") -> dict[str, Any]:
        """`body`: JSON."""
        return self._call("POST", path, timeout_s, body)

    def lines(self, path: str) -> Iterator[dict[str, Any]]:
        """Objects of a reply that continues until one side closes it. Raises LauncherError, at once or, where
        the daemon breaks off, later."""
        return self._objects(*self._request("GET", path, timeout=None))

    def _objects(
        self, connection: _UnixConnection, response: http.client.HTTPResponse
    ) -> Iterator[dict[str, Any]]:
        try:
            for line in response:
                yield self._tree(json.loads(line))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UnreachableError(
                f"cannot read further from '{self._path}': {str(error) or type(error).__name__}",
                "the daemon has exited: see its log",
            ) from None
        finally:
            # Else the finalizer closes it, which drops what is raised meanwhile: Ctrl-C (iobase_finalize in CPython's
            # Modules/_io/iobase.c).
            response.close()
            connection.close()

    def _call(
        self, method: str, path: str, timeout_s: float = TIMEOUT_S, body: bytes = b""
    ) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = self._tree(json.loads(self._read(method, path, timeout_s, body)))
        except ValueError as error:
            raise unreadable(self._path, error) from None
        return reply

    def _read(self, method: str, path: str, timeout_s: float, body: bytes = b"") -> bytes:
        connection, response = self._request(method, path, timeout=timeout_s, body=body)
        try:
            return response.read()
        except TimeoutError:
            raise no_answer(self._path, timeout_s) from None
        except (OSError, http.client.HTTPException) as error:
            raise unreadable(self._path, error) from None
        finally:
            response.close()
            connection.close()

    def _request(
        self, method: str, path: str, timeout: float | None, body: bytes = b""
    ) -> tuple[_UnixConnection, http.client.HTTPResponse]:
        connection = _UnixConnection(self._path, timeout)
        try:
            connection.request(
                method, PREFIX + path, body or None, {"Content-Type": "application/json"} if body else {}
            )
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise unreachable(self._path, error, timeout) from None
        if response.status != http.client.OK:
            try:
                body = response.read()
            except (OSError, http.client.HTTPException):
                body = b""
            connection.close()
            raise refusal(f"{method} {path}", response.status, body)
        return connection, response


def no_answer(path: str, timeout_s: float | None) -> NoAnswerError:
    return NoAnswerError(
        f"cannot reach numa-launcher on '{path}': no answer within {timeout_s:g} s",
        "the daemon or the machine hangs: see its log, and `top` or `ps`",
    )


def unreadable(path: str, error: Exception) -> LauncherError:
    return LauncherError(f"cannot read the daemon's answer on '{path}': {error}", "see the daemon's log")


def unreachable(path: str, error: Exception, timeout_s: float | None) -> LauncherError:
    """What a failed connection or request on the socket `path` means."""
    where = f"cannot reach numa-launcher on '{path}'"
    match error:
        case FileNotFoundError():
            return UnreachableError(
                f"{where}: no such socket",
                "start it (`systemctl start numa-launcher`, or `numa-launcher serve -c FILE`), or name its socket "
                "with --socket or -c FILE",
            )
        case ConnectionRefusedError():
            return UnreachableError(
                f"{where}: connection refused: the daemon has exited",
                "see why (`journalctl -u numa-launcher -e`), and start it (`systemctl start numa-launcher`, "
                "or `numa-launcher serve -c FILE`)",
            )
        case PermissionError():
            return LauncherError(
                f"{where}: your user may not use this socket",
                f"ask an administrator to add you to {_group_of(path)}, and log in again",
            )
        case TimeoutError():
            return no_answer(path, timeout_s)
        case _:
            return UnreachableError(
                f"{where}: {reason(error) if isinstance(error, OSError) else error}",
                "check that the daemon runs and that you may use its socket (group of the file)",
            )


def refusal(asked: str, status: int, body: bytes) -> LauncherError:
    """The daemon's own error, from its reply to the request `asked`."""
    try:
        error = json.loads(body)["error"]
        message, remedy = (printable(str(error[part])) for part in ("message", "remedy"))
    except (ValueError, KeyError, TypeError):
        message, remedy = f"cannot {asked}: status {status}", "see the daemon's log"
    return _KIND_OF.get(status, LauncherError)(message, remedy)


def _group_of(path: str) -> str:
    """Whose members may use it, as far as this user can tell."""
    try:
        return f"group '{grp.getgrgid(os.stat(path).st_gid).gr_name}'"  # noqa: PTH116
    except (OSError, KeyError):
        return "the group of its file"
