"""Floods a server, and asks it for something else meanwhile: how long the event loop lets the others wait.

Measured is the CPU time of the loop's own thread between two answers, 5 ms apart: what other programs on the machine take
is no stall of ours. Clients that flood are threads with sockets of their own.
"""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import closing

from support.budgets import bound

WORST_S = bound(0.050)  # of CPU, that anybody may add to another's wait
TRIALS = 3
_PAUSE_S = 0.005
_FLOOD_S = 60.0
_PIECE = 1 << 20

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"

Address = tuple[str, int] | str


async def worst_wait(ask: Callable[[], Awaitable[None]], flood: Callable[[], object]) -> float:
    """The longest that an answer to `ask` took, in CPU seconds of this loop's thread, while `flood` runs in another."""
    await ask()
    flooding = asyncio.create_task(asyncio.to_thread(flood))
    worst, before = 0.0, time.thread_time()
    while not flooding.done():
        await ask()
        now = time.thread_time()
        worst, before = max(worst, now - before), now
        await asyncio.sleep(_PAUSE_S)
    await flooding
    return max(worst, time.thread_time() - before)


async def least_wait(ask: Callable[[], Awaitable[None]], flood: Callable[[], object]) -> float:
    """Of a few trials: the kernel's work for fresh memory varies, a stall of ours comes back in each of them."""
    least = float("inf")
    for _ in range(TRIALS):
        least = min(least, await worst_wait(ask, flood))
        if least <= WORST_S:
            break
    print(f"worst wait {least * 1000:.1f} ms")
    return least


class Asker:
    """A connection that asks for one page again and again."""

    def __init__(self, address: Address, request: bytes = HEALTH) -> None:
        self._address = address
        self._request = request
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __call__(self) -> None:
        if self._streams is None:
            opened = (
                asyncio.open_unix_connection(self._address)
                if isinstance(self._address, str)
                else (asyncio.open_connection(*self._address))
            )
            self._streams = await opened
        reader, writer = self._streams
        writer.write(self._request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.split(b":")[1]))

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


def pipeline(
    address: Address, data: bytes, answers: int, mark: bytes = b"HTTP/1.1 200", *, may_close: bool = False
) -> None:
    """Send all of `data` as fast as it is taken, and read until so many marks of an answer have come.

    `may_close`: or until the connection is closed, as it is when the body of a refused request does not come in time."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with closing(socket.socket(family)) as sock:
        sock.connect(address)
        sock.setblocking(False)
        view, rest, late = memoryview(data), b"", time.monotonic() + _FLOOD_S
        while answers > 0:
            assert time.monotonic() < late, f"{answers} answers are missing"
            readable, writable, _ = select.select([sock], [sock] if view else [], [], 1.0)
            if writable:
                try:
                    view = view[sock.send(view[:_PIECE]) :]
                except OSError:
                    assert may_close
                    return
            if readable:
                got = _received(sock)
                if not got and may_close:
                    return
                assert got, f"the connection was closed, {answers} answers are missing"
                rest += got
                answers -= rest.count(mark)
                rest = rest[-(len(mark) - 1) :]


def _received(sock: socket.socket) -> bytes:
    """Nothing once the connection is closed."""
    try:
        return sock.recv(_PIECE)
    except ConnectionResetError:
        return b""
