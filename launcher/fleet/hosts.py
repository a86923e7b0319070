"""The hosts of a fleet as an operator reaches them, and one question to all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any, Final, TypeVar

from launcher.control.client import TIMEOUT_S
from launcher.errors import LauncherError
from launcher.fleet.members import Member, View

DIRECTOR: Final = "director"
AGENT: Final = "agent of "
"""Before the host's name: the name of its agent."""
T = TypeVar("T")


class Hosts(ABC):
    """By director and agents. Every method blocks and raises LauncherError; UnreachableError where who is asked, or the
    daemon, does not answer."""

    @abstractmethod
    def call(self, name: str, method: str, *given: Any, timeout_s: float = 0.0) -> Any:
        """What the actor's method returns. `timeout_s`: how long the method itself may take."""

    def view(self) -> View:
        found: View = self.call(DIRECTOR, "view")
        return found

    def members(self) -> Sequence[Member]:
        """All hosts, by name."""
        return self.view().members.members

    def hold(self, host: str, *, draining: bool) -> None:
        """Begin or end sending no new requests to the host; returns when the ingress hosts know."""
        self.call(DIRECTOR, "hold", host, draining)

    def ask(self, host: str, method: str, path: str, body: bytes = b"", timeout_s: float = TIMEOUT_S) -> Any:
        """What the host's daemon answers on its control socket. `path` is below /v1."""
        return self.call(AGENT + host, "ask", method, path, body, timeout_s, timeout_s=timeout_s)

    def run(self, host: str, words: Sequence[str], timeout_s: float) -> tuple[int, str]:
        """Exit code and last output of a command on the host. It goes on when the caller is interrupted."""
        found: tuple[int, str] = self.call(AGENT + host, "run", [*words], timeout_s, timeout_s=timeout_s)
        return found

    def key_stamp(self, host: str) -> str:
        """launcher.proxy.auth.key_version.stamp_of the host's API keys file."""
        return str(self.call(AGENT + host, "key_stamp"))

    def key_file(self, host: str, text: str | None = None) -> str:
        """launcher.proxy.auth.key_version.stored of the host's API keys file."""
        return str(self.call(AGENT + host, "key_file", text))


def each(names: Iterable[str], work: Callable[[str], T]) -> tuple[dict[str, T], dict[str, LauncherError]]:
    """`work` for all hosts at once: results, and why there is none, by host in the order of `names`. The pool's threads end
    with the process: an interrupt does not wait for hosts that hang."""

    def one(name: str) -> T | LauncherError:
        try:
            return work(name)
        except LauncherError as error:
            return error

    names = tuple(names)
    with ThreadPool(len(names) or 1) as pool:
        found = dict(zip(names, pool.map(one, names, chunksize=1), strict=True))
    done = {name: its for name, its in found.items() if not isinstance(its, LauncherError)}
    return done, {name: its for name, its in found.items() if isinstance(its, LauncherError)}
