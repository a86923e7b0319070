"""TCP ports for servers of tests that bind them in a process of their own.

A port that was free a moment ago may be taken before the server binds it: by a connection (the kernel takes its ports
from 32768 up) or by a test of another worker. So every process that runs tests claims a block of ports below that range
for itself, with a lock that ends with the process, and gives out each port of it in turn.
"""

from __future__ import annotations

import fcntl
import functools
import os
import socket
import tempfile
from pathlib import Path
from typing import IO

FIRST, END = 20000, 32768
BLOCK = 128
_locks: list[IO[str]] = []


@functools.cache
def _claim() -> range:
    """A block that no other process of this user's tests has."""
    folder = Path(tempfile.gettempdir()) / f"numa-launcher-test-ports-{os.geteuid()}"
    folder.mkdir(exist_ok=True)
    for start in range(FIRST, END - BLOCK + 1, BLOCK):
        lock = (folder / str(start)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            continue
        _locks.append(lock)
        return range(start, start + BLOCK)
    raise AssertionError(f"all blocks of ports are claimed, see {folder}")


_next = 0


def _claim_another() -> None:
    """A forked process shares no block."""
    _claim.cache_clear()


os.register_at_fork(after_in_child=_claim_another)


def free_port(run: int = 1) -> int:
    """The first of `run` ports of loopback in a row that are free for TCP and UDP; other ones at each call."""
    global _next  # noqa: PLW0603  of the block of this process
    block = _claim()
    for _ in range(BLOCK):
        begin = _next if _next + run <= BLOCK else 0
        _next = begin + run
        if all(_is_free(block[begin + step]) for step in range(run)):
            return block[begin]
    raise AssertionError(f"no {run} free ports in a row in {block}")


def _is_free(port: int) -> bool:
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT do not hold it
        try:
            tcp.bind(("127.0.0.1", port))
            udp.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
