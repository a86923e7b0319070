"""A daemon with a low limit of open files, and clients that open as many connections as they can."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.certificates import certify
from support.daemon_process import SOON_S, DaemonProcess, eventually

from launcher.control.client import ControlClient

FILES = 400
CLIENTS = 600  # of each kind: more than the daemon may open files
ASK = b"GET %b HTTP/1.1\r\nHost: h\r\n%b\r\n"
ENVIRON = {"NUMA_LAUNCHER_PROXY__HEADER_TIMEOUT_S": "4", "NUMA_LAUNCHER_PROXY__CLIENT_KEEPALIVE_S": "4"}


@pytest.fixture
def few_files() -> Iterator[None]:
    """Child processes get a low limit of open files, this process a high one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4 * CLIENTS:
        pytest.skip(f"this machine's hard limit of open files is {hard}: too few for the clients")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4 * CLIENTS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def tls_settings(folder: Path) -> dict[str, str]:
    chain, key = certify(folder, "c")
    return {
        "NUMA_LAUNCHER_PROXY__TLS_CERTIFICATE": str(chain),
        "NUMA_LAUNCHER_PROXY__TLS_KEY": str(key),
    }


def files_of(daemon: DaemonProcess) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))  # noqa: PTH208 - numbers, no paths


def connect_all(port: int, count: int) -> list[socket.socket]:
    """Connections that send nothing."""
    found = []
    for _ in range(count):
        sock = socket.socket()
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect(("127.0.0.1", port))
        found.append(sock)
    return found


class Watch:
    """Polls the control socket and compares the daemon's open files with its limit."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon
        self.answers = 0
        self.most = 0

    def look(self) -> None:
        assert ControlClient(str(self._daemon.socket)).get("/status")["ready"] == 1
        self.answers += 1
        self.most = max(self.most, files_of(self._daemon))


async def pages(port: int, count: int) -> int:
    """Requests this many metrics pages at once; returns how many were answered."""

    async def one() -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASK % (b"/metrics", b"Connection: close\r\n"))
            whole = (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
        except OSError:
            return False  # refused: too many are connected
        return whole

    async with asyncio.timeout(SOON_S):
        return sum(await asyncio.gather(*(one() for _ in range(count))))


@pytest.mark.usefixtures("few_files")
@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_silent_clients_do_not_block_others(
    start: Callable[..., DaemonProcess], tmp_path: Path, kind: str
) -> None:
    """The control socket always answers; after the silent connections time out, clients are served again."""
    daemon = limited(start, ENVIRON | (tls_settings(tmp_path) if kind == "tls" else {}))
    before = files_of(daemon)
    watch = Watch(daemon)
    clients = connect_all(daemon.port, CLIENTS)
    try:
        for _ in range(20):
            watch.look()
        assert watch.most < FILES - 50  # what it needs to look at its instances
    finally:
        for sock in clients:
            sock.close()
    eventually(lambda: files_of(daemon) <= before + 2, what="descriptors are given back")
    assert "Too many open files" not in daemon.log.read_text()


@pytest.mark.usefixtures("few_files")
@pytest.mark.long
def test_many_metrics_pages_at_once(start: Callable[..., DaemonProcess]) -> None:
    daemon = limited(start, ENVIRON)
    before = files_of(daemon)
    watch = Watch(daemon)
    for _ in range(3):
        assert asyncio.run(pages(daemon.port, CLIENTS)) >= 50
        watch.look()
    assert watch.most < FILES - 50
    assert asyncio.run(pages(daemon.port, 20)) == 20
    eventually(lambda: files_of(daemon) <= before + 2, what="descriptors are given back")
    assert "Too many open files" not in daemon.log.read_text()


def limited(start: Callable[..., DaemonProcess], environ: dict[str, str]) -> DaemonProcess:
    """A daemon with one instance and a limit of FILES open files."""
    daemon = start(instances=1, environ=environ)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
    daemon.wait_ready(1)
    eventually(lambda: "clients can connect" in daemon.log.read_text())
    # The usage ledger's files stay open from its first batch on.
    state = daemon.folder / "state"
    eventually((state / "usage" / "usage.db-shm").exists, what="the usage ledger is written")
    return daemon
