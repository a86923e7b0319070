"""The agent of a host: attaches to its daemon. It starts nothing that must outlive it: Ray kills a worker's children."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec.structs import replace

from launcher.accounts.spending import Known
from launcher.base.address import in_url
from launcher.base.errors import LauncherError, reason
from launcher.base.files import own_folder
from launcher.control.client import ControlClient, UnreachableError
from launcher.fleet import hosts
from launcher.fleet.config import FleetConfig
from launcher.fleet.ingress import read_status
from launcher.fleet.members import MEMBERS, MemberList, Node, Report, read_members, write_members
from launcher.keys import key_file

REPORT_S: Final = 1.5
OUTPUT: Final = 4000
_ANY_ADDRESS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104  compared only


def tcp_address(endpoint: str, own: str, *, tls: bool) -> str:
    """host:port at which other hosts reach the daemon. `endpoint`: its first listener, as `status` names it; `own`: the
    host's address. Raises LauncherError."""
    url = urlsplit(endpoint)
    remedy = f'put "{own}:8000" first in [proxy] listen of its configuration, and reload'
    if url.hostname is None or url.port is None or url.scheme not in {"http", "https"}:
        raise LauncherError(f"cannot use the daemon's listener '{endpoint}' from other hosts", remedy)
    host = own if url.hostname in _ANY_ADDRESS else url.hostname
    if (host.startswith("127.") or host == "::1") and host != own:
        raise LauncherError(f"cannot reach the daemon at {url.netloc} from other hosts", remedy)
    if tls != (url.scheme == "https"):
        with_or_without = "without" if tls else "with"
        raise LauncherError(
            f"cannot use the daemon's listener '{endpoint}': it is {with_or_without} TLS",
            "set [hosts] ca of fleet.toml if the daemons have certificates, and remove it if they have none",
        )
    return f"{in_url(host)}:{url.port}"


class Agent:
    """Runs as an actor of Ray on its host."""

    def __init__(self, config: FleetConfig, spec: str, node: Node) -> None:
        self._config, self._spec, self._node = config, spec, node
        self._members = Path(config.state) / MEMBERS
        self._ingress = not node.names.isdisjoint(config.ingress.hosts)
        self._lock: int | None = None
        self._changing = threading.Lock()
        self._aside: list[str] = []

    def report(self) -> Report:
        """What is found now; never raises LauncherError."""
        found = Report(node=self._node.id, spec=self._spec)
        try:
            status = ControlClient(self._config.hosts.control).get("/status", REPORT_S)
            tls = self._config.hosts.ca is not None
            found = replace(found, address=tcp_address(status["endpoint"], self._node.address, tls=tls))
        except LauncherError as error:
            absent = isinstance(error, UnreachableError)
            found = replace(found, absent=absent, problem=error.message, remedy=error.remedy)
        try:
            found = replace(found, kept=self._kept()) if self._ingress else found
        except LauncherError as error:
            return replace(found, problem=error.message, remedy=error.remedy)
        if not self._aside:
            return found
        why = f"another user had made {' and '.join(self._aside)}, which is not used"
        return replace(found, problem=why, remedy=f"look at it on {self._node.host}, and remove it")

    def keep(self, members: MemberList) -> None:
        """Write the list, unless the file has a newer one. Raises LauncherError."""
        if members.newer_than(self._kept()):
            with self._writing():
                write_members(self._members, members)

    def keep_spent(self, known: Known) -> Known:
        """What the hosts spent, as `known` and the file say together. Raises LauncherError."""
        self._own_folder()
        with self._changing, self._writing():
            return hosts.kept_spent(self._members.with_name(hosts.SPENT), known)

    def _kept(self) -> MemberList:
        """What the file holds; one that cannot be read is written again. Raises LauncherError."""
        self._own_folder()
        try:
            return read_members(self._members)
        except LauncherError:
            return MemberList()

    def _own_folder(self) -> None:
        """Nobody else writes into it: no other user, no other agent. Raises LauncherError."""
        with self._changing, self._writing():
            self._aside = own_folder(self._members.parent)
            if self._lock is None:
                path = self._members.with_suffix(".lock")
                flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
                self._lock = os.open(path, flags, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """The file has one writer: after a partition a host may be in two clusters for a while."""
        try:
            yield
        except OSError as error:
            why = reason(error)
            remedy = (
                f"free space, or let the user of Ray write there: install -d -o USER {self._members.parent}"
            )
            if isinstance(error, BlockingIOError):
                why = "another agent on this host writes it"
                remedy = "run `ray stop` on this host, and `ray start` with the head that you want"
            raise LauncherError(f"cannot write '{self._members}': {why}", remedy) from None

    def run(self, words: list[str], timeout_s: float) -> tuple[int, str]:
        """A command, such as `systemctl start numa-launcher`: exit code and the end of its output. Raises LauncherError."""
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                timeout=timeout_s,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            why = reason(error) if isinstance(error, OSError) else f"no end within {timeout_s:g} s"
            raise LauncherError(
                f"cannot run '{words[0]}': {why}", "see [hosts] of fleet.toml, and the host"
            ) from None
        return done.returncode, done.stdout.decode(errors="replace")[-OUTPUT:]

    def ask(self, method: str, path: str, body: bytes, timeout_s: float) -> Any:
        """What the daemon answers. Raises LauncherError."""
        client = ControlClient(self._config.hosts.control, exact=True)
        return client.get(path, timeout_s) if method == "GET" else client.post(path, timeout_s, body)

    def ingress(self) -> dict[str, Any]:
        return read_status(self._config)

    def key_stamp(self) -> str:
        return key_file.stamp_of(self._config.hosts.keys)

    def key_file(self, text: str | None) -> str:
        return key_file.stored(self._config.hosts.keys, text)
