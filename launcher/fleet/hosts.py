"""The hosts of a fleet as an operator reaches them, and one question to all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from launcher.accounts.spending import Heard, Known, merged, recent, sums
from launcher.base.errors import LauncherError
from launcher.base.files import read_own, replace_file
from launcher.control.client import TIMEOUT_S
from launcher.fleet.members import Member, View
from launcher.keys import key_file

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

    def ingress_hosts(self) -> Sequence[str]:
        """The ingress hosts whose agents answer, which keep the fleet's files."""
        return [host for host, report in self.view().reports.items() if report.kept is not None]

    def keep_spent(self, host: str, known: Known) -> Known:
        """launcher.fleet.hosts.kept_spent of an ingress host's file."""
        found: Known = self.call(AGENT + host, "keep_spent", known)
        return found

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
        """launcher.keys.key_file.stamp_of the host's API keys file."""
        return str(self.call(AGENT + host, "key_stamp"))

    def key_file(self, host: str, text: str | None = None) -> str:
        """launcher.keys.key_file.stored of the host's API keys file."""
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


# --- One API keys file for all hosts. ---


def spread(hosts: Hosts) -> dict[str, LauncherError]:
    """Hand the fleet's file to the hosts that lack it, such as one that was away. Returns the hosts that have it not."""
    stamps, failed = each([member.host for member in hosts.members()], hosts.key_stamp)
    source = key_file.newest(stamps)
    behind = [host for host in stamps if source is not None and stamps[host] != stamps[source]]
    if source is None or not behind:
        return failed
    text, number = hosts.key_file(source), key_file.version(stamps[source])
    if any(key_file.version(stamps[host]) == number for host in behind):
        # Changed on both sides of a partition: one of the two is taken everywhere.
        text, behind = key_file.stamped(text, number + 1), list(stamps)
    return failed | each(behind, lambda host: hosts.key_file(host, text))[1]


# --- Budgets of API keys over all hosts: each daemon is told every few seconds what a key spent on the others.
#
# A daemon admits while its own spending and that of the others is below the budget. What was spent since the last exchange
# is not known elsewhere: a key spends at most that, and its running requests, more than its budget.
#
# What each host spent is kept in a file of the ingress hosts: a new director has not heard the hosts that are lost by then.

INTERVAL_S: Final = 5.0
SPENT: Final = "spent.json"
"""Its name in the folder `state` of fleet.toml."""


class Exchange:
    """What a director knows of the hosts' spending. A host that is lost keeps what it spent."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._known: Known = {}

    def turn(self) -> dict[str, LauncherError]:
        """Ask all hosts, and tell each what the others spent. Returns the hosts that could not be asked or told."""
        hosts = self._hosts
        names = [member.host for member in hosts.members()]
        found, failed = each(names, lambda host: _heard(hosts, host))
        self._known = recent(merged(self._known, found), found)
        kept, unkept = each(hosts.ingress_hosts(), lambda host: hosts.keep_spent(host, self._known))
        self._known = recent(merged(self._known, *kept.values()), found)
        bodies = {host: msgspec.json.encode(report) for host, report in sums(self._known, found).items()}
        asked = [host for host in found if found[host]]
        told = each(asked, lambda host: hosts.ask(host, "POST", "/budgets/elsewhere", bodies[host]))[1]
        return failed | unkept | told


def _heard(hosts: Hosts, host: str) -> tuple[Heard, ...]:
    return msgspec.convert(hosts.ask(host, "GET", "/budgets")["budgets"], tuple[Heard, ...])


def kept_spent(path: Path, known: Known) -> Known:
    """What the file at `path` and `known` say together, which the file has afterwards. Another director may write it, too. A
    file that cannot be read is written again. Raises OSError."""
    before: Mapping[str, tuple[Heard, ...]] = {}
    try:
        before = msgspec.json.decode(read_own(path), type=dict[str, tuple[Heard, ...]])
    except (FileNotFoundError, PermissionError, msgspec.DecodeError):
        before = {}
    both = recent(merged(before, known), known)
    if both != before:
        replace_file(path, msgspec.json.encode(both))
    return both
