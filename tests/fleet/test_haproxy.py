"""HAProxy with our configuration, between clients and scripted daemons, with a scripted picker."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.ingress_host import (
    CHAT,
    WAIT_S,
    Daemon,
    Picker,
    Site,
    always,
    head,
    program,
    request,
    run,
    until,
)
from support.ports import free_port

from launcher.base.errors import LauncherError, RefusedError
from launcher.fleet import haproxy
from launcher.fleet.config import FleetConfig, Hosts, Ingress
from launcher.fleet.haproxy import Server, Servers, changes
from launcher.fleet.members import Member, MemberState
from launcher.fleet.spoe import Value

MOST = 4
FIRST = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
Start = Callable[..., Awaitable[Site]]


def chunk(event: str) -> bytes:
    """In capitals, as HAProxy writes a size."""
    data = f"data: {event}\n\n".encode()
    return b"%X\r\n%b\r\n" % (len(data), data)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as found:
        yield found
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for other in others:
            other.cancel()
        await asyncio.wait(others, timeout=WAIT_S)


@pytest.fixture
def start(stack: AsyncExitStack) -> Start:
    async def make(
        *pickers: Picker | None,
        cert: Path | None = None,
        ca: Path | None = None,
        members: Sequence[Member] = (),
    ) -> Site:
        """The first picker at 127.0.0.1, the second at 127.0.0.2; None: nobody is there. `members`: known when it starts."""
        port, listen = free_port(3), free_port()
        # Paths of UNIX sockets have 107 bytes: not below pytest's folders.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="an 'ingress")))
        ingress = Ingress(
            hosts=("127.0.0.1", "127.0.0.2"),
            listen=f"127.0.0.1:{listen}",
            picker_port=port,
            tls_cert=str(cert) if cert else None,
            picker_cert=str(cert) if cert else None,
        )
        site = Site(
            FleetConfig(ingress=ingress, hosts=Hosts(most=MOST, ca=str(ca) if ca else None)), folder, stack
        )
        for number, picker in enumerate(pickers, 1):
            if picker:
                await picker.start(f"127.0.0.{number}", port, stack)
        await run(site, *members)
        return site

    return make


@pytest.fixture
async def a(stack: AsyncExitStack) -> Daemon:
    daemon = Daemon("a")
    await daemon.start(stack)
    return daemon


@pytest.fixture
async def b(stack: AsyncExitStack) -> Daemon:
    daemon = Daemon("b")
    await daemon.start(stack)
    return daemon


async def both_up(site: Site, servers: Servers) -> None:
    async def met() -> bool:
        return sum(server.up and not server.unused for server in (await servers.read()).values()) == 2

    await until(met)


# --- the picker's answer ------------------------------------------------------------------------


async def test_the_picker_chooses_host_and_slot(start: Start, a: Daemon, b: Daemon) -> None:
    picker = always(host="b", slot="7")
    site = await start(picker)
    await site.servers(a.member, b.member)
    body = b"x" * 300_000
    assert (await site.send(body, "Authorization: Bearer k\r\nX-Numa-Slot: 0\r\n")).body == b"from b"
    assert [(asked.one("x-numa-slot"), asked.body) for asked in b.asked] == [("7", body)]
    assert not a.asked

    async def both_seen() -> bool:
        return len(picker.seen) == 2

    await until(both_seen)  # HAProxy waits for the second answer for 100 ms only
    (name, pick), (other, first) = picker.seen
    assert (name, other) == ("pick", "first")
    number = first["id"]
    length, shown = len(body), body[:16384]
    assert pick == {
        "id": number,
        "path": CHAT,
        "key": "Bearer k",
        "api-key": None,
        "body": shown,
        "length": length,
        "model": None,
        "stream": None,
    }
    assert first == {"id": number, "status": 200}
    assert (await picker.end())[:4] == ["end", number, "200", "h2"]


async def test_hosts_that_are_known_at_its_start_serve_at_once(start: Start, a: Daemon, b: Daemon) -> None:
    """Clients find the port of an ingress that comes back before its list is applied."""
    draining = Member(host="b", address=b.member.address, state=MemberState.DRAINING)
    site = await start(always(host="a", slot="7"), members=(a.member, draining))
    assert (await site.send()).body == b"from a"
    assert a.asked[0].one("x-numa-slot") == "7"
    before = await Servers(site.folder / "admin.sock").read()
    assert {server.key for server in before.values()} == {"a", None}
    await site.servers(a.member, draining)
    after = await Servers(site.folder / "admin.sock").read()
    assert after["h1"].key == before["h1"].key == "a"
    assert "-b" in {server.key for server in after.values()}
    assert len(after) == MOST


def test_a_configuration_is_the_same_whichever_hosts_are_known() -> None:
    config = FleetConfig(ingress=Ingress(hosts=("127.0.0.1",)), hosts=Hosts(most=2))
    found: dict[str, tuple[str | None, bool]] = {f"h{n}": (f"10.0.0.{n} 8001", True) for n in range(3)}
    none, some, all_ = (
        haproxy.files(config, exporter=False, members=members)["haproxy.cfg"]
        for members in ({}, dict([*found.items()][:1]), found)
    )
    assert "server h2 10.0.0.1:8001\n" in all_
    assert "server h3" not in all_
    assert haproxy.same_settings(none, some)
    assert haproxy.same_settings(none, all_)
    other = FleetConfig(ingress=config.ingress, hosts=Hosts(most=3))
    assert not haproxy.same_settings(none, haproxy.files(other, exporter=False)["haproxy.cfg"])


@pytest.mark.parametrize(("size", "known"), [(0, True), (40_000, True), (60_000, True), (100_000, False)])
async def test_model_and_stream_are_found_behind_a_prompt_that_fits_the_buffer(
    start: Start, a: Daemon, size: int, known: bool
) -> None:
    """OpenAI's own client writes the messages first."""
    picker = always(host="a")
    site = await start(picker)
    await site.servers(a.member)
    messages = [{"role": "user", "content": 'an "other" model \\' + size * "w"}]
    body = json.dumps({"messages": messages, "model": 'm"1', "stream": True}).encode()
    assert (await site.send(body)).status == 200
    assert a.asked[0].body == body
    asked = picker.seen[0][1]
    assert (asked["model"], asked["stream"]) == (('m"1', True) if known else (None, None))


async def test_a_slot_of_the_clients_own_is_removed(start: Start, a: Daemon) -> None:
    site = await start(always())
    await site.servers(a.member)
    await site.send(fields="X-Numa-Slot: 3\r\nx-numa-slot: 4\r\n")
    assert a.asked[0].one("x-numa-slot") is None


async def test_a_late_choice_holds_up_no_other(start: Start, a: Daemon) -> None:
    late = asyncio.Event()

    async def answer(arguments: Mapping[str, Value]) -> Mapping[str, str]:
        if arguments["body"] == b"late":
            await late.wait()
        return {"host": "a"}

    site = await start(Picker(answer))
    await site.servers(a.member)
    held = asyncio.create_task(site.send(b"late"))
    for _ in range(3):
        assert (await site.send()).status == 200
    assert not held.done()
    late.set()
    assert (await held).status == 200


async def test_least_connections_without_a_picker(start: Start, a: Daemon, b: Daemon) -> None:
    on = asyncio.Event()

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await on.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    a.script = b.script = script
    site = await start(None)
    await site.servers(a.member, b.member)
    async with asyncio.TaskGroup() as group:
        for count in range(1, 5):
            group.create_task(site.send())

            async def arrived(count: int = count) -> bool:
                return len(a.asked) + len(b.asked) == count

            await until(arrived)
        assert len(a.asked) == len(b.asked) == 2
        on.set()


async def test_without_a_picker_nobody_waits_for_one(start: Start, a: Daemon) -> None:
    site = await start(None)
    await site.servers(a.member)
    await site.send()  # may find out
    began = asyncio.get_running_loop().time()
    for _ in range(5):
        assert (await site.send()).status == 200
    assert asyncio.get_running_loop().time() - began < 9  # not five times 2 s, timeout processing


async def test_a_picker_that_hangs_delays_but_does_not_stop(start: Start, a: Daemon) -> None:
    async def answer(_: Mapping[str, Value]) -> Mapping[str, str]:
        await asyncio.Event().wait()
        return {}

    site = await start(Picker(answer))
    await site.servers(a.member)
    began = asyncio.get_running_loop().time()
    assert (await site.send()).status == 200
    assert asyncio.get_running_loop().time() - began < 20  # timeout processing is 2 s


async def test_an_unknown_host_of_the_picker_is_not_needed(start: Start, a: Daemon) -> None:
    site = await start(always(host="nobody"))
    await site.servers(a.member)
    assert (await site.send()).status == 200


async def test_the_second_picker_stands_by(start: Start, a: Daemon, b: Daemon, stack: AsyncExitStack) -> None:
    second = always(host="b")
    site = await start(None, second)
    await site.servers(a.member, b.member)

    async def answers(what: bytes) -> bool:
        return (await site.send()).body == what and (await site.send()).body == what

    await until(lambda: answers(b"from b"))
    await always(host="a").start("127.0.0.1", site.config.ingress.picker_port, stack)
    await until(lambda: answers(b"from a"))
    asked = len(second.seen)
    assert [(await site.send()).status for _ in range(5)] == [200] * 5
    assert len(second.seen) == asked


# --- what passes ------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", ["abc-1", "a,b", "!" * 128])
async def test_a_good_request_id_is_kept(start: Start, a: Daemon, sent: str) -> None:
    site = await start(always())
    await site.servers(a.member)
    await site.send(fields=f"X-Request-Id: {sent}\r\n")
    assert a.asked[0].one("x-request-id") == sent


@pytest.mark.parametrize("sent", ["", "X-Request-Id: a b\r\n", "X-Request-Id: a\r\nX-Request-Id: b\r\n"])
async def test_else_a_request_id_is_made(start: Start, a: Daemon, sent: str) -> None:
    picker = always(host="a")
    site = await start(picker)
    await site.servers(a.member)
    await site.send(fields=sent)
    assert a.asked[0].one("x-request-id") == picker.seen[0][1]["id"]
    assert re.fullmatch("[0-9a-f-]{36}", a.asked[0].one("x-request-id") or "")


async def test_a_client_cannot_name_another_address(start: Start, a: Daemon) -> None:
    site = await start(None)
    await site.servers(a.member)
    spoofed = "X-Forwarded-For: 9.9.9.9\r\nX-Forwarded-Proto: https\r\nForwarded: for=9.9.9.9\r\nX-Real-IP: 9.9.9.9\r\n"
    await site.send(fields=spoofed)
    asked = a.asked[0]
    names = ("x-forwarded-for", "x-forwarded-proto", "forwarded", "x-real-ip")
    assert [asked.one(name) for name in names] == ["127.0.0.1", None, None, None]


async def test_events_pass_one_by_one(start: Start, a: Daemon) -> None:
    """The daemon sends an event only when the client has the one before."""
    got = asyncio.Semaphore(0)

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(FIRST)
        for number in range(20):
            writer.write(chunk(str(number)))
            await got.acquire()
        writer.write(b"0\r\n\r\n")

    a.script = script
    site = await start(always(host="a"))
    await site.servers(a.member)
    reader, writer = await site.connect()
    writer.write(request())
    async with asyncio.timeout(WAIT_S):
        await head(reader)
        for number in range(20):
            assert chunk(str(number)) == await reader.readexactly(len(chunk(str(number))))
            got.release()
        assert await reader.readexactly(5) == b"0\r\n\r\n"


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_is_seen_by_the_daemon(start: Start, a: Daemon, begun: bool) -> None:
    left, here = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if begun:
            writer.write(FIRST + chunk("1"))
        here.set()
        with suppress(ConnectionResetError):
            await reader.read(1)
        left.set()

    a.script = script
    picker = always(host="a")
    site = await start(picker)
    await site.servers(a.member)
    reader, writer = await site.connect()
    writer.write(request())
    async with asyncio.timeout(WAIT_S):
        await here.wait()
        if begun:
            await head(reader)
        writer.close()
        await left.wait()
    assert (await picker.end())[6].startswith("C")


async def test_a_cut_stream_has_no_end(start: Start, a: Daemon) -> None:
    """The client sees a chunked body that stops: never a [DONE], and no second response."""

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(FIRST + chunk("1"))
        await writer.drain()
        writer.transport.abort()

    a.script = script
    site = await start(None)
    await site.servers(a.member)
    reader, writer = await site.connect()
    writer.write(request())
    async with asyncio.timeout(WAIT_S):
        rest = b""
        with suppress(ConnectionResetError):
            rest = await reader.read()
    # HAProxy 3.2 may not send what it has, where the end is there already.
    assert rest == b"" or (rest.startswith(b"HTTP/1.1 200 ") and not rest.endswith(b"0\r\n\r\n"))


# --- failures ---------------------------------------------------------------------------------


async def test_a_request_without_a_response_goes_to_another_host(start: Start, a: Daemon, b: Daemon) -> None:
    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    a.script = script
    site = await start(always(host="a"))
    await site.servers(a.member, b.member)
    assert (await site.send(b"x" * 40_000)).body == b"from b"
    assert len(a.asked) == 1


async def test_a_daemon_that_stops_listening_keeps_its_streams(
    start: Start, a: Daemon, b: Daemon, stack: AsyncExitStack
) -> None:
    """Its check fails, new requests go elsewhere; when it listens again it gets some."""
    on = asyncio.Event()

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(FIRST + chunk("1"))
        await on.wait()
        writer.write(chunk("2") + b"0\r\n\r\n")

    a.script = script
    site = await start(always(host="a"))
    servers = await site.servers(a.member, b.member)
    reader, writer = await site.connect()
    writer.write(request())
    async with asyncio.timeout(WAIT_S):
        await head(reader)
        await reader.readexactly(len(chunk("1")))
        a.server.close()

        async def down() -> bool:
            return not (await servers.read())["h1"].up

        await until(down)
        assert (await site.send()).body == b"from b"
        on.set()
        assert await reader.readexactly(len(chunk("2"))) == chunk("2")
    a.script = None
    await a.start(stack)
    await both_up(site, servers)
    assert (await site.send()).body == b"from a"


@pytest.mark.parametrize("members", [0, 1])
async def test_no_host_is_an_error_that_openai_clients_read(start: Start, members: int) -> None:
    site = await start(None)
    gone = Member(host="gone", address=f"127.0.0.1:{free_port()}")
    await site.servers(*[gone][:members])
    answer = await site.send()
    assert (answer.status, answer.fields["content-type"]) == (503, "application/json")
    assert (answer.error["type"], answer.error["code"]) == ("service_unavailable", "no_host_ready")
    assert answer.fields["retry-after"] == "1"


async def test_the_health_page(start: Start, a: Daemon) -> None:
    site = await start(None)
    assert (await site.send(target="/health", method="GET")).error["code"] == "no_host_ready"
    await site.servers(a.member)
    answer = await site.send(target="/health", method="GET")
    assert (answer.status, json.loads(answer.body)) == (200, {"hosts": 1})
    assert not a.asked
    for target in ("/metrics", "/load"):
        answer = await site.send(target=target, method="GET")
        assert (answer.status, answer.error["code"]) == (404, "not_found")


async def test_prometheus_reads_it_on_loopback(start: Start) -> None:
    site = await start(None)
    port = site.config.ingress.picker_port + 2
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    async with asyncio.timeout(WAIT_S):
        text = (await reader.read()).decode()
    writer.close()
    assert 'haproxy_backend_status{proxy="hosts"' in text


# --- TLS --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store() -> Iterator[Path]:
    """ca.pem signs host.pem (certificate and key); other.pem is another authority."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        new = ["openssl", "req", "-x509", *key]
        for one in ("ca", "other"):
            call(
                [*new, "-subj", f"/CN={one}", "-keyout", folder / f"{one}.key", "-out", folder / f"{one}.pem"]
            )
        signed: list[str | Path] = [
            "-CA",
            folder / "ca.pem",
            "-CAkey",
            folder / "ca.key",
            "-addext",
            "subjectAltName=DNS:localhost",
        ]
        call(
            [*new, "-subj", "/CN=host", *signed, "-keyout", folder / "host.key", "-out", folder / "host.crt"]
        )
        (folder / "host.pem").write_text(
            (folder / "host.crt").read_text() + (folder / "host.key").read_text()
        )
        yield folder


def call(command: list[str | Path]) -> None:
    subprocess.run(command, check=True, capture_output=True)


async def tls_site(start: Start, store: Path, ca: str, stack: AsyncExitStack) -> tuple[Site, Daemon]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(store / "host.pem")
    daemon = Daemon("a", tls=context)
    await daemon.start(stack)
    picker = always(host="a", slot="1")
    picker.tls = context
    site = await start(picker, cert=store / "host.pem", ca=store / f"{ca}.pem")
    site.tls = ssl.create_default_context(cafile=store / "ca.pem")
    await site.servers(daemon.member)
    return site, daemon


async def test_tls_from_client_to_daemon(start: Start, store: Path, stack: AsyncExitStack) -> None:
    site, daemon = await tls_site(start, store, "ca", stack)
    assert (await site.send()).body == b"from a"
    assert [daemon.asked[0].one(name) for name in ("x-forwarded-proto", "x-numa-slot")] == ["https", "1"]


async def test_a_daemon_with_a_strangers_certificate_gets_nothing(
    start: Start, store: Path, stack: AsyncExitStack
) -> None:
    site, daemon = await tls_site(start, store, "other", stack)
    assert (await site.send()).status == 503
    assert not daemon.asked


# --- members ----------------------------------------------------------------------------------


async def test_hosts_come_and_go_without_a_reload(start: Start, a: Daemon, b: Daemon) -> None:
    """A host that leaves gets no new requests, its stream ends as it would, then its server is free."""
    on = asyncio.Event()

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(FIRST + chunk("1"))
        await on.wait()
        writer.write(b"0\r\n\r\n")

    a.script = script
    site = await start(always(host="a"))
    servers = Servers(site.folder / "admin.sock")
    await servers.apply([a.member])
    await servers.apply([a.member, b.member])
    reader, writer = await site.connect()
    writer.write(request())
    async with asyncio.timeout(WAIT_S):
        await head(reader)
        await servers.apply([b.member])
        found = (await servers.read())["h1"]
        assert (found.draining, found.streams, found.unused) == (True, 1, False)
        assert (await site.send()).body == b"from b"
        on.set()
        await reader.readexactly(len(chunk("1")) + 5)

    async def freed() -> bool:
        await servers.apply([b.member])
        return (await servers.read())["h1"].unused

    await until(freed)
    await servers.apply([b.member, a.member])
    assert (await servers.read())["h1"].host == "a"


async def test_a_draining_host_gets_nothing_new(start: Start, a: Daemon, b: Daemon) -> None:
    site = await start(always(host="a"))
    servers = await site.servers(a.member, b.member)
    draining = Member(host="a", address=a.member.address, state=MemberState.DRAINING)
    await servers.apply([draining, b.member])
    assert (await site.send()).body == b"from b"
    lost = Member(host="a", address=a.member.address, state=MemberState.LOST)
    await servers.apply([lost, b.member])
    assert (await site.send()).body == b"from a"


async def test_a_new_ingress_process_finds_the_servers_as_they_are(
    start: Start, a: Daemon, b: Daemon
) -> None:
    site = await start(None)
    await site.servers(a.member, b.member)
    before = await Servers(site.folder / "admin.sock").read()
    await Servers(site.folder / "admin.sock").apply([b.member, a.member])
    assert [server.host for server in before.values()] == ["a", "b", None, None]
    assert await Servers(site.folder / "admin.sock").read() == before


async def test_a_haproxy_that_was_restarted_is_told_again(start: Start, a: Daemon, b: Daemon) -> None:
    site = await start(None)
    servers = await site.servers(b.member)
    await servers.apply([a.member, b.member])
    site.folder.joinpath("admin.sock").unlink()
    port = free_port()
    listen = site.config.ingress.listen
    site.config = FleetConfig(
        ingress=Ingress(hosts=("127.0.0.1",), listen=f"127.0.0.1:{port}", picker_port=free_port(3)),
        hosts=site.config.hosts,
    )
    assert listen != site.config.ingress.listen
    await run(site)
    await servers.apply([a.member, b.member])
    assert {server.host for server in (await servers.read()).values()} == {"a", "b", None}
    assert (await site.send()).status == 200


async def test_a_host_with_another_address_keeps_its_server(start: Start, a: Daemon, b: Daemon) -> None:
    site = await start(always(host="a"))
    servers = await site.servers(a.member)
    moved = Member(host="a", address=f"localhost:{b.port}")
    await servers.apply([moved])
    assert [server.unused for server in (await servers.read()).values()] == [False, True, True, True]
    assert (await site.send()).body == b"from b"


@pytest.mark.parametrize(
    ("host", "address", "why"),
    [
        ("x", "no-such-host.invalid:8000", "its address is unknown"),
        ("x", "10.0.0.1:port", "its address is unknown"),
        ("a; show env", "10.0.0.1:8000", "its name is no host name"),
    ],
)
async def test_a_host_that_cannot_be_added_harms_no_other(
    start: Start, a: Daemon, host: str, address: str, why: str
) -> None:
    site = await start(None)
    servers = await site.servers()
    with pytest.raises(LauncherError, match=f"cannot add host '{host}': {why}"):
        await servers.apply([Member(host=host, address=address), a.member])
    assert (await site.send()).status == 200


async def test_a_host_whose_name_has_no_address_for_a_while_keeps_its_own(start: Start, a: Daemon) -> None:
    """A name server that is away must not take hosts out of the fleet."""
    site = await start(None)
    servers = await site.servers(a.member)
    await servers.apply([Member(host="a", address=f"no-such-host.invalid:{a.port}")])
    assert (await site.send()).body == b"from a"


async def test_a_host_is_named_by_an_ipv6_address(start: Start, a: Daemon) -> None:
    """As Ray names it where its node has no name."""
    site = await start(always(host="fd00::1"))
    servers = await site.servers(Member(host="fd00::1", address=a.member.address))
    assert "fd00::1" in {server.host for server in (await servers.read()).values()}
    assert (await site.send()).body == b"from a"


async def test_more_hosts_than_servers(start: Start) -> None:
    site = await start(None)
    members = [Member(host=f"n{number}", address=f"127.0.0.1:{number}") for number in range(1, MOST + 2)]
    with pytest.raises(LauncherError, match=f"cannot add host 'n{MOST + 1}': all {MOST} servers"):
        await site.servers(*members)


async def test_a_full_fleet_can_replace_a_host(start: Start) -> None:
    site = await start(None)
    members = [Member(host=f"n{number}", address=f"127.0.0.1:{number}") for number in range(1, MOST + 2)]
    servers = await site.servers(*members[:-1])
    await servers.apply(members[1:])
    assert {server.host for server in (await servers.read()).values()} == {m.host for m in members[1:]}


async def test_without_haproxy(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="cannot reach HAProxy"):
        await Servers(tmp_path / "admin.sock").apply([])


def test_a_machine_without_haproxy_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(LauncherError) as caught:
        haproxy.binary()
    assert "apt-get install haproxy" in str(caught.value.remedy)


def test_an_old_haproxy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of Ubuntu 22.04."""
    old = tmp_path / "haproxy"
    old.write_text(
        "#!/bin/sh\necho 'HAProxy version 2.4.24-0ubuntu0.22.04.1 2024/10/17 - https://haproxy.org/'\n"
    )
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(LauncherError, match=r"version 2\.4\.24-\S+ is too old"):
        haproxy.has_exporter()


def a_server(**changed: object) -> Server:
    server = Server(key=None, address="10.0.0.1 8000", unused=False, draining=False, up=True, streams=2)
    return replace(server, **changed)


def test_a_server_of_nobody_is_drained_then_freed() -> None:
    assert changes({"h1": a_server()}, {}) == ["set server hosts/h1 state drain"]
    assert changes({"h1": a_server(draining=True)}, {}) == []
    assert changes({"h1": a_server(draining=True, streams=0)}, {}) == ["set server hosts/h1 state maint"]


def test_a_draining_host_that_leaves_stays_drained_until_its_last_stream_ends() -> None:
    assert changes({"h1": a_server(key="-a", draining=True)}, {}) == []
    freed = ["set server hosts/h1 state maint", "del map hosts.map -a"]
    assert changes({"h1": a_server(key="-a", draining=True, streams=0)}, {}) == freed


@pytest.mark.parametrize("hosts", [("10.0.0.1",), ("fd00::1", "10.0.0.2")])
def test_haproxy_takes_the_files(tmp_path: Path, hosts: tuple[str, ...]) -> None:
    config = FleetConfig(ingress=Ingress(hosts=hosts, listen="[::]:8443"), hosts=Hosts(most=1000))
    for name, text in haproxy.files(config, exporter=False).items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [program(), "-c", "-f", "haproxy.cfg"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr


def test_the_ports_to_open_are_those_that_other_hosts_can_reach() -> None:
    """Prometheus got no answer at a port that docs/fleet.md said to open: HAProxy's figures are on the loopback."""
    root = Path(__file__).resolve().parents[2]
    text = haproxy.files(FleetConfig(ingress=Ingress(hosts=("10.0.0.1",))), exporter=True)["haproxy.cfg"]
    bound = dict(re.findall(r"^  bind (\S*):(\d+)", text, re.MULTILINE))
    assert bound == {"0.0.0.0": "8000", "127.0.0.1": "8012"}
    docs = (root / "docs/fleet.md").read_text()
    table = docs.partition("| port | from | to | what |")[2].partition("\n\n")[0]
    opened = {port for row in table.splitlines()[2:] for port in re.findall(r"\d{4}", row.split("|")[1])}
    assert bound["0.0.0.0"] in opened
    assert bound["127.0.0.1"] not in opened
    target = f"127.0.0.1:{bound['127.0.0.1']}"
    assert target in docs
    assert target in (root / "configs/monitoring/prometheus-fleet.yml").read_text()


async def test_a_renewed_certificate_is_used_and_open_streams_stay(
    start: Start, store: Path, stack: AsyncExitStack, tmp_path: Path
) -> None:
    site, daemon = await tls_site(start, store, "ca", stack)
    reader, writer = await site.connect()
    await Servers(site.folder / "admin.sock").renew(
        str(store / "host.pem"),
        (store / "other.pem").read_text() + "\n\n" + (store / "other.key").read_text(),
    )
    site.tls = ssl.create_default_context(cafile=store / "other.pem")
    site.tls.check_hostname = False
    assert (await site.send()).body == b"from a"
    writer.write(request())
    assert (await head(reader))[0] == 200, "of the certificate before"
    assert len(daemon.asked) == 2


async def test_another_authority_of_the_hosts_needs_another_haproxy(
    start: Start, store: Path, stack: AsyncExitStack
) -> None:
    site, _ = await tls_site(start, store, "other", stack)
    servers, path = Servers(site.folder / "admin.sock"), str(store / "other.pem")
    await servers.check_authority(path, (store / "other.pem").read_text())
    with pytest.raises(RefusedError, match=r"cannot give '.*other\.pem' to HAProxy") as caught:
        await servers.check_authority(path, (store / "ca.pem").read_text())
    assert "stop numa-launcher-ingress, then start it" in caught.value.remedy


async def test_a_certificate_that_haproxy_refuses_changes_nothing(
    start: Start, store: Path, stack: AsyncExitStack
) -> None:
    site, _ = await tls_site(start, store, "ca", stack)
    servers = Servers(site.folder / "admin.sock")
    for text in ("nonsense", (store / "other.pem").read_text()):  # without a key
        with pytest.raises(LauncherError, match=r"cannot give '.*host\.pem' to HAProxy: ") as caught:
            await servers.renew(str(store / "host.pem"), text)
        assert "numa-launcher-ingress" in caught.value.remedy
    assert (await site.send()).body == b"from a"
