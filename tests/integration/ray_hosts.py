"""Hosts of a fleet on one machine: a network namespace each, with its own folder at the same path on all of them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from integration.conftest import FAKE_ENGINE, SOON_S, eventually

BRIDGE = "nlfleet"
# `ray start --head` refuses an address that a head anywhere on this kernel has.
NET = "10.78.0"
PORT = 8000
RAY = ("ray start", "ray::", "site-packages/ray/")
"""What command lines of its processes have; the first starts it again."""


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


class Network:
    """A bridge, and the hosts' wires to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared = folder / "host"
        self.shared.mkdir()
        # Ray of all hosts, and those who ask it, find the token there.
        self.home = folder / "home"
        (self.home / ".ray").mkdir(parents=True)
        (self.home / ".ray" / "auth_token").write_text(secrets.token_hex(32))
        ip("link", "del", BRIDGE, check=False)
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        self.hosts: list[Host] = []

    def host(self, name: str) -> Host:
        host = Host(self, name, f"{NET}.{len(self.hosts) + 1}")
        self.hosts.append(host)
        return host

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        ip("link", "del", BRIDGE, check=False)


class Host:
    """One namespace. `folder` is seen by its programs as Network.shared."""

    def __init__(self, network: Network, name: str, address: str) -> None:
        self.name, self.address, self.shared, self.home = name, address, network.shared, network.home
        self.folder = network.folder / name
        self.folder.mkdir()
        self._namespace, self.wire = f"nl-{name}", f"nlw-{name}"
        ip("netns", "del", self._namespace, check=False)
        ip("netns", "add", self._namespace)
        ip("link", "add", self.wire, "type", "veth", "peer", "name", "eth0", "netns", self._namespace)
        ip("link", "set", self.wire, "master", BRIDGE, "up")
        ip("-n", self._namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", self._namespace, "link", "set", "eth0", "up")
        ip("-n", self._namespace, "link", "set", "lo", "up")
        # Parent of the host's programs, whichever test starts them.
        self._shell = subprocess.Popen(
            self.argv(["sh"]), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def argv(self, words: Sequence[str]) -> list[str]:
        # `ip netns exec` has a mount namespace of its own.
        mount = f'mount --bind {self.folder} {self.shared} && exec "$@"'
        return ["ip", "netns", "exec", self._namespace, "sh", "-c", mount, "sh", *words]

    def start(self, *words: str, log: str, environ: dict[str, str] | None = None) -> None:
        line = ["env", *(f"{name}={value}" for name, value in (environ or {}).items()), *words]
        assert self._shell.stdin is not None
        self._shell.stdin.write(
            f"setsid {shlex.join(line)} </dev/null >>{self.shared}/{log} 2>&1 &\n".encode()
        )
        self._shell.stdin.flush()

    def run(self, *words: str, timeout: float = 2 * SOON_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(words), check=False, capture_output=True, text=True, timeout=timeout,
            env=os.environ | {"HOME": str(self.home)},
        )  # fmt: skip

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "launcher", *words)

    def daemon(self, instances: int = 1) -> None:
        """A real daemon with fake engines, on the host's address."""
        engine = [sys.executable, str(FAKE_ENGINE), "--uds", "{uds}", "--model", "{name}"]
        (self.folder / "config.toml").write_text(
            f'[[models]]\nname = "fake"\npath = "fake"\n[layout]\ninstances_per_socket = {instances}\n'
            f'[engine]\nkind = "command"\ncommand = {json.dumps(engine)}\n'
            f'[proxy]\nlisten = ["0.0.0.0:{PORT}"]\n[control]\nsocket = "{self.shared}/c.sock"\n'
        )
        self.start(
            sys.executable, "-m", "launcher", "serve", "-c", f"{self.shared}/config.toml", log="daemon.log",
            environ={"STATE_DIRECTORY": f"{self.shared}/state"},
        )  # fmt: skip

    def ray(self, head: Host) -> None:
        """`ray start`, again whenever it ends, as its systemd unit does."""
        where = f"--address={head.address}:6379"
        if head is self:
            where = "--head --port=6379 --include-dashboard=false"
        command = f"{Path(sys.executable).with_name('ray')} start --block {where}"
        # It would refuse the address: it takes the raylets of the other namespaces for its own.
        known = self.shared / "ray" / "ray_current_cluster"
        self.start(
            "sh", "-c", f'while :; do rm -f {known}; {command} "$@"; sleep 1; done', "sh",
            f"--node-ip-address={self.address}", f"--node-name={self.name}",
            "--num-cpus=0", '--resources={"numa_host": 1}', "--disable-usage-stats",
            "--include-log-monitor=false", "--object-store-memory=80000000", f"--temp-dir={self.shared}/ray",
            log="ray.log", environ={
                "HOME": str(self.home),
                "RAY_AUTH_MODE": "token",
                "RAY_gcs_storage": "rocksdb",
                "RAY_gcs_storage_path": f"{self.shared}/gcs",
            },
        )  # fmt: skip

    def stop_ray(self) -> None:
        """Kill all of it, and what would start it again."""
        eventually(self._without_ray, what=f"Ray on {self.name} ends")

    def _without_ray(self) -> bool:
        for word in RAY:
            self.kill(word)
        return not any(self.pids(word) for word in RAY)

    def cut(self) -> None:
        """No packet reaches the host."""
        ip("link", "set", self.wire, "down")

    def join(self) -> None:
        ip("link", "set", self.wire, "up")

    def pids(self, *words: str) -> list[int]:
        """Of this host's processes whose command line has all words."""
        own = subprocess.run(
            ["ip", "netns", "pids", self._namespace], check=True, capture_output=True, text=True
        ).stdout.split()
        found = []
        for pid in map(int, own):
            try:
                line = " ".join(psutil.Process(pid).cmdline())
            except psutil.NoSuchProcess:
                continue
            if all(word in line for word in words):
                found.append(pid)
        return found

    def kill(self, *words: str) -> None:
        for pid in self.pids(*words):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def members(self) -> dict[str, Any]:
        """The member list in its file; {} while there is none."""
        file = self.folder / "fleet" / "members.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def close(self) -> None:
        """End everything that runs there."""
        eventually(self._ended, what=f"processes of {self.name} end")
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait()
        ip("netns", "del", self._namespace, check=False)

    def _ended(self) -> bool:
        self.kill()
        return not self.pids()
