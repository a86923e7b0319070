"""10,000 idle connections, and one client that sends requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import cast

import aiohttp
import psutil
import pytest
import uvloop
from support.budgets import bound
from support.daemon_process import DaemonProcess

pytestmark = [pytest.mark.timeout(900), pytest.mark.bounded]

COUNT = 10_000
SPARE = 500  # files of the test itself
AT_ONCE = 200
BYTES_EACH = 4096  # of the daemon's memory; 1,500 were measured
ANSWERS = 21
CPU_S = (
    0.05  # of the daemon for an answer beside them, more than without them; 10,000 looked at would be more
)
# However long it takes to connect them all: they stay.
PATIENT = {"NUMA_LAUNCHER_PROXY__HEADER_TIMEOUT_S": "600", "NUMA_LAUNCHER_PROXY__CLIENT_KEEPALIVE_S": "600"}
ASK = b"GET /nothing HTTP/1.1\r\nHost: h\r\n\r\n"


@pytest.fixture
def low_limit() -> Iterator[Callable[[], None]]:
    """Child processes get a login's soft limit of open files; the returned call raises this process's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < COUNT + SPARE:
        pytest.skip(f"this machine's hard limit of open files is {hard}: too few for {COUNT} connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Client(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport
        self.answer: asyncio.Future[bytes] | None = None
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by class

    async def ask(self) -> bytes:
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(ASK)
        return await self.answer

    def data_received(self, data: bytes) -> None:
        assert self.answer is not None
        self.answer.set_result(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(ConnectionResetError("closed by the proxy"))


@contextlib.asynccontextmanager
async def connected(port: int, count: int) -> AsyncIterator[list[Client]]:
    """This many clients; every second one has sent a request on its connection."""
    loop = asyncio.get_running_loop()
    clients: list[Client] = []

    async def one(number: int) -> None:
        _, client = await loop.create_connection(Client, "127.0.0.1", port)
        clients.append(client)
        if number % 2:
            assert (await client.ask()).startswith(b"HTTP/1.1 404 ")

    try:
        for first in range(0, count, AT_ONCE):
            await asyncio.gather(*(one(number) for number in range(first, min(first + AT_ONCE, count))))
        yield clients
    finally:
        for client in clients:
            client.transport.abort()


async def answers_s(session: aiohttp.ClientSession, daemon: psutil.Process) -> tuple[float, float]:
    """The daemon's CPU time for one small completion on a new connection, and the median wall time."""
    body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 1})
    took, before = [], sum(daemon.cpu_times()[:2])
    for _ in range(ANSWERS):
        began = time.monotonic()
        async with session.post("/v1/completions", data=body, headers={"Connection": "close"}) as answer:
            assert answer.status == 200
            await answer.read()
        took.append(time.monotonic() - began)
    return (sum(daemon.cpu_times()[:2]) - before) / ANSWERS, statistics.median(took)


@pytest.mark.long
def test_10_000_idle_connections(low_limit: Callable[[], None], start: Callable[..., DaemonProcess]) -> None:
    daemon = start(instances=1, environ=PATIENT)
    daemon.wait_ready(1)
    low_limit()
    process = psutil.Process(daemon.process.pid)

    async def run() -> None:
        async with aiohttp.ClientSession(daemon.url) as session:
            alone, _ = await answers_s(session, process)
            async with connected(daemon.port, 500):  # what the first ones cost is not theirs
                pass
            before = process.memory_info().rss
            async with connected(daemon.port, COUNT) as clients:
                each = (process.memory_info().rss - before) / COUNT
                cpu, took = await answers_s(session, process)
                page = await (await session.get("/metrics")).text()
                print(
                    f"\n{each:.0f} bytes per idle connection, {took * 1000:.1f} ms for an answer beside them, "
                    f"{cpu * 1000:.1f} ms of CPU, {alone * 1000:.1f} ms without them"
                )
                (line,) = (
                    line for line in page.splitlines() if line.startswith("numa_launcher_connections ")
                )
                assert float(line.split()[1]) >= COUNT
                assert each < BYTES_EACH
                assert cpu - alone < bound(CPU_S)
                assert not any(client.lost for client in clients)
                for client in clients[:: COUNT // 100]:
                    assert (await client.ask()).startswith(b"HTTP/1.1 404 ")

    uvloop.run(run())
