"""Sockets, and what aiohttp's server alone would let through."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import subprocess
import sys
import time
from itertools import chain, repeat
from pathlib import Path

import pytest
import uvloop
from support.fakes import SOON_S
from support.ports import free_port
from support.proxy_under_test import Build, ProxyUnderTest

from launcher.base.errors import LauncherError
from launcher.proxy.downstream.listener import ACCEPTS, Listener, _cannot_listen, bind, unused


def test_listen_entries_replaced_by_systemds_sockets() -> None:
    both = ["http://127.0.0.1:8000", "unix:/run/x.sock"]
    assert unused(("127.0.0.1:8000",), ["http://10.0.0.1:80"]) == []  # nobody has set that
    assert unused(("127.0.0.1:8000", "unix:/run/x.sock"), both) == []
    assert unused(("[::]:8000", "unix:/run/x.sock"), both) == ["[::]:8000"]


def served(sock: socket.socket, host: str) -> bool:
    """Whether a client reaches it at this address."""
    try:
        socket.create_connection((host, sock.getsockname()[1]), timeout=SOON_S).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize(
    ("listen", "ipv4", "ipv6"),
    [
        ("[::]:0", True, True),
        ("[::1]:0", False, True),
        ("127.0.0.1:0", True, False),
        ("0.0.0.0:0", True, False),
    ],
)
def test_one_address_has_one_meaning_here_and_in_a_socket_unit(
    listen: str, *, ipv4: bool, ipv6: bool
) -> None:
    [sock] = bind(listen)
    with sock:
        assert (served(sock, "127.0.0.1"), served(sock, "::1")) == (ipv4, ipv6)


@pytest.mark.parametrize("other", ["0.0.0.0", "127.0.0.1"])
def test_ipv4_that_is_listed_itself_is_left_to_its_entry(other: str) -> None:
    port = free_port()
    listens = (f"[::]:{port}", f"{other}:{port}")
    found = [sock for listen in listens for sock in bind(listen, listens)]
    assert [sock.family for sock in found] == [socket.AF_INET6, socket.AF_INET]
    for sock in found:
        sock.close()


@pytest.mark.parametrize("address", ["192.0.2.7", "[2001:db8::7]"])  # RFC 5737, RFC 3849
async def test_an_address_that_is_not_here_yet_is_bound_and_named(address: str) -> None:
    listen = f"{address}:{free_port()}"
    listener = Listener(asyncio.Protocol)
    here = f"127.0.0.1:{free_port()}"
    for one in (listen, here, "[::]:0"):
        await listener.open(one)
    assert len(listener.endpoints) == 3
    assert listener.absent == [f"http://{listen}"]
    listener.close()


async def test_an_address_of_systemds_that_is_not_here_is_named_too() -> None:
    listen = f"192.0.2.7:{free_port()}"
    [late] = bind(listen)
    listener = Listener(asyncio.Protocol)
    await listener.take(late)
    assert listener.absent == [f"http://{listen}"]
    listener.close()


IN_A_NAMESPACE = """
import socket, subprocess
from launcher.proxy.downstream.listener import bind, is_here
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
[sock] = bind("10.86.0.7:8000")
def served():
    try:
        socket.create_connection(("10.86.0.7", 8000), timeout=5).close()
    except OSError:
        return False
    return True
for change in (None, "add", "del", "add"):
    if change is not None:
        subprocess.run(["ip", "address", change, "10.86.0.7/32", "dev", "lo"], check=True)
    print(served(), is_here(sock.family, sock.getsockname()))
"""


def test_an_address_is_served_as_soon_as_it_comes() -> None:
    """Also one that goes and comes back, as a floating address does."""
    words = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", IN_A_NAMESPACE]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=SOON_S)
    assert done.stdout.splitlines() == ["False False", "True True", "False False", "True True"]


def test_the_socket_unit_may_bind_before_its_address_is_there() -> None:
    unit = Path(__file__).parents[3] / "systemd" / "numa-launcher.socket"
    assert "FreeBind=yes" in unit.read_text(encoding="utf-8").splitlines()


async def answer_to(proxy: ProxyUnderTest, request: bytes) -> bytes:
    """All that comes back until the connection is closed."""
    reader, writer = await proxy.raw(request)
    async with asyncio.timeout(SOON_S):
        answer = await reader.read()
    writer.close()
    return answer


def error_of(answer: bytes) -> dict[str, object]:
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: h\r\nA\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: h\r\nX: " + b"y" * 9000 + b"\r\n\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 415),
        (b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nExpect: magic\r\nContent-Length: 2\r\n\r\n{}", 417),
    ],
)  # fmt: skip
async def test_bad_requests_are_refused_in_openais_form_and_closed(
    proxy: ProxyUnderTest, request_: bytes, status: int
) -> None:
    answer = await answer_to(proxy, request_)
    assert answer.split(b" ")[:2] in ([b"HTTP/1.1", b"%d" % status], [b"HTTP/1.0", b"%d" % status]), answer
    assert b"numa-launcher" in answer
    error_of(answer)


async def test_a_head_that_does_not_end_is_given_up(build: Build) -> None:
    proxy = await build(header_timeout_s=0.2)
    reader, writer = await proxy.raw(b"")
    answer = asyncio.create_task(reader.readuntil(b"\r\n"))
    started = time.monotonic()
    async with asyncio.timeout(SOON_S):
        for byte in chain(b"GET /health HTTP/1.1\r\nHost: h\r\nX: ", repeat(ord("y"))):  # as long as it takes
            if answer.done():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.01)
    assert (await answer).startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - started > 0.1


async def test_a_slow_body_is_no_slow_head(build: Build) -> None:
    proxy = await build(header_timeout_s=1.0)
    await proxy.engine(0)
    reader, writer = await proxy.raw(
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 13\r\n\r\n"
    )
    for byte in b'{"model":"m"}':
        writer.write(bytes([byte]))
        await asyncio.sleep(0.09)
    async with asyncio.timeout(SOON_S):
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")


async def test_huge_heads_are_refused_while_they_arrive(proxy: ProxyUnderTest) -> None:
    line = b"X-%d: " + b"y" * 4000 + b"\r\n"
    reader, writer = await proxy.raw(b"GET /health HTTP/1.1\r\nHost: h\r\n")
    try:
        for n in range(100):
            writer.write(line % n)
            await writer.drain()
            await asyncio.sleep(0.001)
        async with asyncio.timeout(SOON_S):
            assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
    except ConnectionError:
        pass  # it was closed while we wrote, which is the point
    async with proxy.client.get("/health") as answer:
        assert answer.status == 503


async def test_requests_in_a_row_on_one_connection(proxy: ProxyUnderTest) -> None:
    await proxy.engine(0)
    one = b"GET /v1/models/m HTTP/1.1\r\nHost: h\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    answer = await answer_to(proxy, one + one + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 3


async def test_http_1_0_streams_until_close(proxy: ProxyUnderTest) -> None:
    await proxy.engine(0)
    body = b'{"model":"m", "stream": true}'
    head = f"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    answer = await answer_to(proxy, head.encode() + body)
    assert b"chunked" not in answer
    assert answer.endswith(b"data: [DONE]\n\n")


async def test_absolute_form_is_taken(proxy: ProxyUnderTest) -> None:
    await proxy.engine(0)
    answer = await answer_to(proxy, b"GET http://h/health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "request_",
    [
        b"CONNECT h:80 HTTP/1.1\r\nHost: h\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
    ],
)
async def test_odd_targets_are_not_there(proxy: ProxyUnderTest, request_: bytes) -> None:
    reader, _ = await proxy.raw(request_)
    async with asyncio.timeout(SOON_S):
        assert (await reader.readuntil(b"\r\n")).startswith(
            (b"HTTP/1.1 404", b"HTTP/1.1 400", b"HTTP/1.1 405")
        )


# --- listening -------------------------------------------------------------------------------------


async def test_unix_and_v6_listeners(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "proxy.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    proxy = await build(listen=(f"unix:{path}", "[::1]:0", "127.0.0.1:0"))
    assert proxy.server.endpoint == f"unix:{path}"
    assert proxy.server.endpoints[1].startswith("http://[::1]:")
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 503")
    writer.close()
    assert path.stat().st_mode & 0o777 == 0o660
    await proxy.server.stop(0)
    assert not path.exists()


async def test_a_port_in_use_is_named(build: Build, tmp_path: Path) -> None:
    proxy = await build()
    taken = proxy.server.endpoint.removeprefix("http://")
    with pytest.raises(LauncherError) as caught:
        await build(listen=("127.0.0.1:0", taken))
    assert caught.value.message == f"cannot listen on '{taken}': address in use"
    assert "[proxy] listen" in caught.value.remedy
    path = f"unix:{tmp_path}/x.sock"
    other = await build(listen=(path,))
    with pytest.raises(LauncherError, match="address in use"):
        bind(path)
    assert other.server.endpoint == path


@pytest.mark.parametrize(
    "listen",
    ["8000", "h:x", "127.0.0.1:99999", "no.such.host.invalid:80", "unix:/no/such/folder/s"],
)
def test_invalid_listen_addresses(listen: str) -> None:
    with pytest.raises(LauncherError) as caught:
        bind(listen)
    assert caught.value.message.startswith(f"cannot listen on '{listen}': ")
    assert caught.value.remedy


def test_unexpected_errors_have_a_remedy() -> None:
    error = _cannot_listen("h:1", OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS)))
    assert error.message == "cannot listen on 'h:1': no buffer space available"
    assert error.remedy == "set [proxy] listen to another address"


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(LauncherError):
        bind(f"unix:{tmp_path}/file")
    assert (tmp_path / "file").read_text() == "precious"


def test_many_clients_at_once_are_taken_in_few_turns_of_the_loop(tmp_path: Path) -> None:
    """Also where a turn takes long, because a thousand streams move."""
    taken: list[asyncio.BaseTransport] = []

    class Client(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            taken.append(transport)

    async def turns() -> int:
        listener = Listener(Client)
        await listener.open(f"unix:{tmp_path}/s")
        clients = [socket.socket(socket.AF_UNIX) for _ in range(64)]
        for client in clients:
            client.connect(f"{tmp_path}/s")
        count = 0
        while len(taken) < len(clients):
            await asyncio.sleep(0)
            count += 1
        for one in (*clients, *taken):
            one.close()
        listener.close()
        return count

    assert uvloop.run(turns()) <= 2 * 64 // ACCEPTS
