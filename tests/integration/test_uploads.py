"""Many large uploads at once: the daemon's memory is bounded, and it answers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import psutil
from support.daemon_process import DaemonProcess

MIB = 1 << 20
BODY = 63 * MIB
COUNT = 20
BUDGET = 128 * MIB
SLACK = 48 * MIB  # what was read with the heads, the allocator's own, other threads
CHUNK = bytes(MIB).replace(b"\0", b"x")


def head(size: int) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % size
    )


def drip(sock: socket.socket, over: threading.Event) -> None:
    """Sends all but the end of a body, as fast as it is accepted."""
    sent = 0
    with contextlib.suppress(OSError):
        sock.sendall(head(BODY) + b'{"model":"fake","prompt":"')
        while sent < BODY - 2 * MIB and not over.is_set():
            with contextlib.suppress(TimeoutError):
                sent += sock.send(CHUNK)


@contextlib.contextmanager
def uploads(port: int, count: int) -> Iterator[None]:
    over = threading.Event()
    socks = [socket.create_connection(("127.0.0.1", port), timeout=0.2) for _ in range(count)]
    threads = [threading.Thread(target=drip, args=(sock, over)) for sock in socks]
    for thread in threads:
        thread.start()
    yield
    over.set()
    for sock in socks:
        sock.close()
    for thread in threads:
        thread.join()


def metric(daemon: DaemonProcess, name: str) -> float:
    return float(daemon.metrics().partition(f"\nnuma_launcher_{name} ")[2].partition("\n")[0])


def test_20_uploads_of_63_mib_stay_within_the_memory_limit(start: Callable[..., DaemonProcess]) -> None:
    environ = {"NUMA_LAUNCHER_PROXY__UPLOAD_MAX_BYTES": str(BUDGET)}
    daemon = start(instances=1, environ=environ)
    daemon.wait_ready(1)
    process = psutil.Process(daemon.process.pid)
    before = process.memory_info().rss
    most = waiting = 0.0
    with uploads(daemon.port, COUNT):
        until = time.monotonic() + 60
        while time.monotonic() < until:
            most = max(most, process.memory_info().rss - before)
            waiting = metric(daemon, "uploads_waiting")
            used = metric(daemon, "upload_bytes")
            assert used <= BUDGET
            if waiting >= COUNT - 4 and used > BUDGET - 8 * MIB:
                break
            time.sleep(0.05)
        time.sleep(1)
        most = max(most, process.memory_info().rss - before)
        print(f"{most / MIB:.0f} MiB for {COUNT} uploads of {BODY / MIB:.0f} MiB, {waiting:.0f} wait")
        assert waiting >= COUNT - 4
        assert most < BUDGET + SLACK
    deadline = time.monotonic() + 60
    while metric(daemon, "upload_bytes") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert metric(daemon, "upload_bytes") == 0
