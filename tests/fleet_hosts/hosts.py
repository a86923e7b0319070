"""Hosts made of namespaces: network, processes, mounts and name of their own, on one bridge.

All of it lives in the network namespace of the calling process (`scripts/fleet-drill` runs it in a new one, a test within
`own_network`): when that process is killed, the kernel ends every process of every host and removes the network.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

NETWORK: Final = "10.77.0"
BRIDGE: Final = "fleet"
CLIENT_ADDRESS: Final = f"{NETWORK}.254"
# A hardware address that nobody has: what is sent to it is lost without an answer, as behind a broken switch.
NOBODY: Final = "02:00:00:00:00:ff"
STARTED_WITHIN_S: Final = 20.0
UNSHARE: Final = (
    "setpriv",
    "--pdeathsig",
    "KILL",
    "unshare",
    "--net",
    "--uts",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child=KILL",
    "--mount-proc",
)


def command(*words: str) -> str:
    """Runs a program to its end; its output. Raises RuntimeError with what it wrote."""
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)} exited with {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """Within it this thread, and what it starts, have a network namespace of their own. Raises OSError unless root."""
    libc, new_network = ctypes.CDLL(None, use_errno=True), 0x40000000  # CLONE_NEWNET of sched.h
    with Path("/proc/thread-self/ns/net").open() as before:
        if libc.unshare(new_network):
            raise OSError(ctypes.get_errno(), "cannot make a network namespace")
        try:
            yield
        finally:
            libc.setns(before.fileno(), 0)


def make_network() -> None:
    """The bridge; this process has an address on it. Raises RuntimeError outside a network namespace of its own."""
    others = {line.split()[0] for line in command("ip", "-br", "link").splitlines()} - {"lo"}
    if others:
        raise RuntimeError(f"not in a network namespace of its own: it has {sorted(others)}")
    command("ip", "link", "set", "lo", "up")
    # An address of its own: else it is the least of its ports', and another one when a host comes or goes.
    command("ip", "link", "add", BRIDGE, "address", "02:00:00:00:00:fe", "type", "bridge")
    command("ip", "addr", "add", f"{CLIENT_ADDRESS}/24", "dev", BRIDGE)
    command("ip", "link", "set", BRIDGE, "up")


class Host:
    """One host. `folder` keeps its logs and its disk (`disk`, seen there as /run/disk) over a loss of power."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.name = f"host{number}"
        self.address = f"{NETWORK}.{number}"
        self.folder = folder / self.name
        (self.folder / "disk").mkdir(parents=True)
        self._port = f"port{number}"
        self._init: subprocess.Popen[bytes] | None = None
        self._programs: list[subprocess.Popen[bytes]] = []
        self._pid = 0
        self.powered_off_at = 0.0

    @property
    def on(self) -> bool:
        return self._init is not None

    def power_on(self) -> None:
        """An empty host with a network. /run is its own and empty."""
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        # bash as process 1 reaps what its descendants leave behind.
        script = (
            f"set -e; hostname {self.name}; mount -t tmpfs run /run; mkdir -p /run/disk /run/lock;"
            f"mount --bind {shlex.quote(str(self.folder / 'disk'))} /run/disk; mount -t tmpfs shm /dev/shm;"
            f"ip link set lo up; touch {shlex.quote(str(ready))}; while :; do sleep 1000 & wait $!; done"
        )
        self._init = subprocess.Popen(
            [*UNSHARE, "bash", "-c", script],
            stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        _wait_for(ready.exists, f"{self.name} has not started")
        self._pid = psutil.Process(self._init.pid).children()[0].pid
        command(
            "ip", "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(self._pid)
        )
        command("ip", "link", "set", self._port, "master", BRIDGE, "up")
        # The same after a loss of power, as a network card has it.
        self.do("ip", "link", "set", "eth0", "address", f"02:00:00:00:00:{self.number:02x}")
        self.do("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.do("ip", "link", "set", "eth0", "up")

    def unplug(self) -> None:
        """No packet comes or goes."""
        command("ip", "link", "set", self._port, "down")

    def plug(self) -> None:
        command("ip", "link", "set", self._port, "up")

    def power_off(self) -> None:
        """The link goes down first: nobody is told that the host's connections have ended."""
        assert self._init is not None
        self.unplug()
        self.powered_off_at = time.monotonic()
        os.kill(self._pid, signal.SIGKILL)  # process 1: the kernel kills all others of the host
        for process in (self._init, *self._programs):
            process.wait(STARTED_WITHIN_S)
        self._init, self._programs = None, []
        with contextlib.suppress(RuntimeError):  # gone with the host's network
            command("ip", "link", "del", self._port)

    def inside(self, *words: str) -> list[str]:
        """The command line that runs a command on the host."""
        return ["nsenter", "--target", str(self._pid), "--net", "--uts", "--mount", "--pid", "--", *words]

    def do(self, *words: str) -> str:
        """Runs a command on the host to its end; its output. Raises RuntimeError."""
        return command(*self.inside(*words))

    def start(self, log: str, words: Sequence[str], environ: Mapping[str, str]) -> None:
        """Starts a program on the host; it ends with the host at the latest."""
        with (self.folder / f"{log}.log").open("ab") as out:
            self._programs.append(
                subprocess.Popen(
                    self.inside(*words), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=os.environ | environ
                )
            )  # fmt: skip

    def processes(self) -> Iterator[psutil.Process]:
        """All processes of the host but its first."""
        assert self._init is not None
        yield from psutil.Process(self._pid).children(recursive=True)
        # What nsenter starts is a child of nsenter, outside: found by its process namespace.
        own = os.stat(f"/proc/{self._pid}/ns/pid").st_ino  # noqa: PTH116
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.stat(f"/proc/{process.pid}/ns/pid").st_ino == own and process.pid != self._pid:  # noqa: PTH116
                    yield process

    def processes_of(self, *words: str) -> list[psutil.Process]:
        """Processes of the host whose command line has all these words in it; not the units that restart them."""
        found: dict[int, psutil.Process] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if (
                    all(word in line for word in words)
                    and "fleet_hosts.unit" not in line
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found[process.pid] = process
        return list(found.values())


def part(one: Host, other: Host) -> None:
    """Neither reaches the other: what they send is lost."""
    for host, peer in ((one, other), (other, one)):
        host.do("ip", "neigh", "replace", peer.address, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")


def join(one: Host, other: Host) -> None:
    """Both reach each other again."""
    for host, peer in ((one, other), (other, one)):
        host.do("ip", "neigh", "del", peer.address, "dev", "eth0")


def _wait_for(check: object, why: str) -> None:
    deadline = time.monotonic() + STARTED_WITHIN_S
    while not check():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise RuntimeError(why)
        time.sleep(0.01)
