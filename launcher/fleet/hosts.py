"""The hosts of a fleet as an operator reaches them, and one question to all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from launcher.control.client import TIMEOUT_S, ControlClient
from launcher.errors import LauncherError
from launcher.fleet.members import Member

T = TypeVar("T")


class Hosts(Protocol):
    """By the agents of the hosts. Every method blocks and raises LauncherError; UnreachableError where agent or daemon
    does not answer."""

    def members(self) -> Sequence[Member]:
        """All hosts, by name."""

    def ask(self, host: str, method: str, path: str, body: bytes = b"", timeout_s: float = TIMEOUT_S) -> Any:
        """What the host's daemon answers on its control socket. `path` is below /v1."""

    def run(self, host: str, words: Sequence[str], timeout_s: float) -> tuple[int, str]:
        """Exit code and last output of a command on the host. It goes on when the caller is interrupted."""

    def hold(self, host: str, *, draining: bool) -> None:
        """Begin or end sending no new requests to the host; returns when the ingress hosts know."""

    def key_stamp(self, host: str) -> str:
        """launcher.fleet.keys.stamp_of the host's API keys file."""

    def key_file(self, host: str, text: str | None = None) -> str:
        """launcher.fleet.keys.stored of the host's API keys file."""


def ask_socket(socket: str, method: str, path: str, body: bytes = b"", timeout_s: float = TIMEOUT_S) -> Any:
    """What an agent answers to `ask`."""
    client = ControlClient(socket, exact=True)
    return client.get(path, timeout_s) if method == "GET" else client.post(path, timeout_s, body)


def each(names: Iterable[str], work: Callable[[str], T]) -> tuple[dict[str, T], dict[str, LauncherError]]:
    """`work` for all hosts at once: results, and why there is none, by host in the order of `names`. The threads end with
    the process: an interrupt does not wait for hosts that hang."""
    names = tuple(names)
    done: dict[str, T] = {}
    failed: dict[str, LauncherError] = {}

    def one(name: str) -> None:
        try:
            done[name] = work(name)
        except LauncherError as error:
            failed[name] = error

    threads = [threading.Thread(target=one, args=(name,), daemon=True, name=f"ask {name}") for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: done[name] for name in names if name in done}, {
        name: failed[name] for name in names if name in failed
    }
