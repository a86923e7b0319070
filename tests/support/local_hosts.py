"""The hosts of a fleet without Ray: real control sockets and files on this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.accounts.spending import Known
from launcher.control.client import TIMEOUT_S, ControlClient, UnreachableError
from launcher.fleet.hosts import SPENT, Hosts, kept_spent
from launcher.fleet.members import Member, MemberState
from launcher.keys import key_file


class LocalHosts(Hosts):
    """`sockets`: of each host's daemon; `folder` has a keys file HOST.keys of each host."""

    def __init__(
        self, sockets: Mapping[str, str], folder: Path, addresses: Mapping[str, str] | None = None
    ) -> None:
        self.sockets = dict(sockets)
        self.folder = folder
        self.states = dict.fromkeys(sockets, MemberState.READY)
        self.addresses = addresses or {}
        self.away: set[str] = set()
        """Hosts whose agents do not answer."""
        self.held: list[tuple[str, bool]] = []
        self.ran: list[tuple[str, tuple[str, ...]]] = []

    def call(self, name: str, method: str, *given: Any, timeout_s: float = 0.0) -> Any:
        raise NotImplementedError

    def members(self) -> Sequence[Member]:
        return [
            Member(
                host=host, address=self.addresses.get(host, f"{host}:8000"),
                state=MemberState.LOST if host in self.away else state,
            )
            for host, state in sorted(self.states.items())
        ]  # fmt: skip

    def ask(self, host: str, method: str, path: str, body: bytes = b"", timeout_s: float = TIMEOUT_S) -> Any:
        self._reach(host)
        client = ControlClient(self.sockets[host], exact=True)
        return client.get(path, timeout_s) if method == "GET" else client.post(path, timeout_s, body)

    def run(self, host: str, words: Sequence[str], timeout_s: float) -> tuple[int, str]:
        self._reach(host)
        self.ran.append((host, tuple(words)))
        done = subprocess.run(
            [*words], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
            env={"HOST": host, "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        return done.returncode, done.stdout

    def ingress_hosts(self) -> Sequence[str]:
        """The first one keeps the fleet's files."""
        return [host for host in sorted(self.states)[:1] if host not in self.away]

    def keep_spent(self, host: str, known: Known) -> Known:
        return kept_spent(self.folder / f"{host}-state" / SPENT, known)

    def hold(self, host: str, *, draining: bool) -> None:
        self.held.append((host, draining))
        self.states[host] = MemberState.DRAINING if draining else MemberState.READY

    def key_stamp(self, host: str) -> str:
        self._reach(host)
        return key_file.stamp_of(str(self.folder / f"{host}.keys"))

    def key_file(self, host: str, text: str | None = None) -> str:
        self._reach(host)
        return key_file.stored(str(self.folder / f"{host}.keys"), text)

    def _reach(self, host: str) -> None:
        if host in self.away:
            raise UnreachableError(f"cannot reach the agent of '{host}'", "see `numa-launcher fleet status`")
