"""Every request is bounded in size and time: clients that are slow, silent or too big, on raw sockets."""

from __future__ import annotations

import asyncio
import grp
import json
import os
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web
from support.budgets import partly_gated
from support.fake_operations import FakeOperations
from support.fakes import until
from support.flooding import WORST_S, Asker, least_wait, pipeline

from launcher.control import server as control
from launcher.control.connections import Bound, Peer
from launcher.control.messages import SlotCommand
from launcher.control.server import ANSWERS_OF_USER, ControlServer

READERS = next(group for group in grp.getgrall() if group.gr_gid != os.getegid())
ONE = b"GET /v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
# The bound in these tests, and far more than it takes to see that it holds.
BOUND_S, SOON_S = 0.5, 60.0


@pytest.fixture
def operations() -> FakeOperations:
    return FakeOperations()


@pytest.fixture
async def path(
    tmp_path: Path, operations: FakeOperations, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[str]:
    """A server whose times are short."""
    monkeypatch.setattr(control, "HEADERS_S", BOUND_S)
    monkeypatch.setattr(control, "REQUEST_S", BOUND_S)
    monkeypatch.setattr(control, "STALL_S", BOUND_S)
    server = ControlServer(str(tmp_path / "c.sock"), None, operations)
    await server.start()
    yield str(tmp_path / "c.sock")
    await server.stop()


async def said(path: str, data: bytes) -> bytes:
    """Send, then wait for the daemon to end the connection; all that it answered."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        async with asyncio.timeout(SOON_S):
            writer.write(data)
            return await reader.read()
    finally:
        writer.close()


async def status(path: str) -> Any:
    answer = await said(path, b"GET /v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return json.loads(answer.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET /v1/sta",
        b"GET /v1/status HTTP/1.1\r\nHost: x\r\nX-Slow: 1",
        b"POST /v1/slots/0/stop HTTP/1.1\r\nHost: x\r\n",
    ],
    ids=["nothing", "half a line", "half a header", "no end of headers"],
)
async def test_a_request_that_does_not_come_is_not_waited_for(
    path: str, operations: FakeOperations, begun: bytes
) -> None:
    assert await said(path, begun) == b""
    assert operations.asked == []


async def test_a_body_that_does_not_come(path: str, operations: FakeOperations) -> None:
    answer = await said(path, b'POST /v1/slots/0/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{"a":')
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"it took more than" in answer
    assert operations.asked == []


async def test_a_body_of_a_megabyte(
    path: str, operations: FakeOperations, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("HEADERS_S", "REQUEST_S", "STALL_S"):  # its size is refused, however slowly it comes
        monkeypatch.setattr(control, limit, SOON_S)
    head = (
        b"POST /v1/slots/0/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 1048576\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_unix_connection(path)
    async with asyncio.timeout(SOON_S):
        writer.write(head + b"x" * 1048576)
        answer = await reader.readuntil(b"}}")
    writer.close()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert operations.asked == []


@pytest.mark.parametrize(
    "huge",
    [
        b"GET /v1/status?" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /v1/status HTTP/1.1\r\nX-Huge: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /v1/status HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(5000)) + b"\r\n",
        b"x" * 1_000_000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 100,
    ],
    ids=["query", "header", "headers", "a line without end", "TLS"],
)
async def test_what_is_no_request_is_refused(path: str, huge: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    async with asyncio.timeout(SOON_S):
        writer.write(huge)
        answer = await reader.read(1000)
    writer.close()
    assert answer == b"" or answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert (await status(path))["ready"] == 2, "and the next one is answered"


async def test_a_reader_that_does_not_read_is_cut_off(path: str, operations: FakeOperations) -> None:
    """A follower that sleeps holds lines, and would hold them for ever."""
    operations.lines = ["x" * 10_000] * 2000
    reader, writer = await asyncio.open_unix_connection(path, limit=1024)
    writer.write(b"GET /v1/slots/0/logs?tail=2000&follow=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(SOON_S):
        await until(lambda: operations.following == 1)
        await until(lambda: operations.following == 0)
        received = len(await reader.read())
    writer.close()
    assert received < 10_000 * 2000


async def test_many_silent_clients_do_not_lock_others_out(path: str) -> None:
    silent = [await asyncio.open_unix_connection(path) for _ in range(100)]
    assert (await status(path))["ready"] == 2
    async with asyncio.timeout(SOON_S):
        assert [await reader.read() for reader, _ in silent] == [b""] * 100
    for _, writer in silent:
        writer.close()


async def test_requests_in_a_row_on_one_connection(path: str, operations: FakeOperations) -> None:
    """Pipelined, as a client may: each is answered, none is bounded by the one before."""
    one = b"POST /v1/slots/%d/stop HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = await said(path, b"".join(one % (n % 2) for n in range(20)))
    assert answer.count(b"HTTP/1.1 200 OK") == 20
    assert operations.asked == [(n % 2, SlotCommand.STOP) for n in range(20)]


def get(path: bytes) -> bytes:
    return b"GET /v1/%b HTTP/1.1\r\nHost: x\r\n\r\n" % path


# What is sent, and what comes last of the answers.
FLOODS = {
    "requests": (get(b"config") * 2000 + get(b"slots/0/logs?tail=1"), b'"last"'),
    "a body of small chunks": (
        b"POST /v1/slots/0/stop HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100_000
        + b"0\r\n\r\n" + get(b"slots/0/logs?tail=1"), b'"last"'
    ),
    "lines to follow": (get(b"slots/0/logs?tail=20000&follow=1"), b'"last"'),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "reader"), partly_gated(product(FLOODS, (False, True)), [(kind, False) for kind in FLOODS])
)
@pytest.mark.bounded
def test_one_client_holds_up_no_other(tmp_path: Path, kind: str, *, reader: bool) -> None:
    """Nor the tokens of the proxy, which are passed on by the same event loop."""
    sent, last = FLOODS[kind]
    path = str(tmp_path / "c.sock")

    async def measure() -> float:
        size = 2000 if kind == "lines to follow" and reader else 20
        lines = FakeOperations(
            lines=["a line of words" + " and words" * size] * (150 if reader else 20_000) + ["last"]
        )
        everybody = Peer(1, 4_000_001 if reader else 0, READERS.gr_gid)
        server = ControlServer(path, None, lines, read_group=READERS.gr_name, peer_of=lambda _: everybody)
        await server.start()
        ask = Asker(path, get(b"config"))
        try:
            return await least_wait(ask, lambda: pipeline(path, sent, 1, last, may_close=reader))
        finally:
            ask.close()
            await server.stop()

    assert uvloop.run(measure()) <= WORST_S


@pytest.mark.parametrize("group", [0, READERS.gr_gid], ids=["operator", "reader"])
async def test_a_follower_that_leaves_at_a_line_is_no_longer_fed(
    tmp_path: Path,
    operations: FakeOperations,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    group: int,
) -> None:
    """Its connection may close between two steps of its handler; nothing is logged, and nothing else ends its feed."""

    async def refused(_response: web.StreamResponse, _data: bytes) -> None:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(web.StreamResponse, "write", refused)
    path = str(tmp_path / "c.sock")
    who = 0 if group == 0 else 4_000_001
    server = ControlServer(
        path, None, operations, read_group=READERS.gr_name, peer_of=lambda _: Peer(1, who, group)
    )
    await server.start()
    try:
        _reader, writer = await asyncio.open_unix_connection(path)
        writer.write(get(b"slots/0/logs?tail=1&follow=1"))
        await until(lambda: operations.fed)
        await until(lambda: operations.following == 0)
        writer.close()
    finally:
        await server.stop()
    assert "Traceback" not in caplog.text


async def test_a_reading_user_has_a_share_of_followers_and_connections(
    tmp_path: Path, operations: FakeOperations
) -> None:
    """Others have theirs; root and operators need none."""
    path, who = str(tmp_path / "c.sock"), 0

    def peer(_transport: object) -> Peer:
        return Peer(1, who, READERS.gr_gid)

    server = ControlServer(
        path,
        None,
        operations,
        read_group=READERS.gr_name,
        peer_of=peer,
        connections=Bound(4, 6),
        followers=Bound(2, 3),
    )
    await server.start()
    writers = []

    async def first_line(request: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(path)
        writers.append(writer)
        writer.write(request)
        async with asyncio.timeout(SOON_S):
            return await reader.readline()

    follow = get(b"slots/0/logs?tail=1&follow=1")
    told = {}
    for who, times in ((4_000_001, 3), (4_000_002, 2), (0, 4), (4_000_001, 2), (4_000_003, 2), (0, 1)):
        told.setdefault(who, []).extend([(await first_line(follow)).split()[1] for _ in range(times)])
    # By user: followers up to two of one and three in all, then connections up to four and six.
    assert told == {
        4_000_001: [b"200", b"200", b"503", b"503", b"503"], 4_000_002: [b"200", b"503"],
        0: [b"200"] * 5, 4_000_003: [b"503", b"503"],
    }  # fmt: skip
    for writer in writers:
        writer.close()
    await until(lambda: operations.following == 0)
    who = 4_000_003
    assert (await first_line(follow)).split()[1] == b"200", "what is given back may be taken again"
    writers[-1].close()
    await server.stop()


async def test_a_reading_user_has_a_share_of_answers(tmp_path: Path) -> None:
    """Many slow reports of one user: the others' are answered meanwhile."""
    path, who = str(tmp_path / "c.sock"), 4_000_001
    over = asyncio.Event()

    class Slow(FakeOperations):
        begun = 0

        async def usage_today(self) -> None:
            self.begun += 1
            await over.wait()

    operations = Slow()
    users: dict[int, int] = {}

    def peer(transport: asyncio.BaseTransport | None) -> Peer:
        assert transport is not None
        connection = transport.get_extra_info("socket").fileno()
        return Peer(1, users.setdefault(connection, who), READERS.gr_gid)

    server = ControlServer(path, None, operations, read_group=READERS.gr_name, peer_of=peer)
    await server.start()
    asking = [asyncio.create_task(said(path, ONE)) for _ in range(10)]
    await until(lambda: len(users) == len(asking) and operations.begun == ANSWERS_OF_USER)
    who = 4_000_002
    other = asyncio.create_task(said(path, ONE))
    await until(lambda: operations.begun == ANSWERS_OF_USER + 1)
    over.set()
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in await asyncio.gather(*asking, other))
    await server.stop()
