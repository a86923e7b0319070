"""The process on an ingress host: what HAProxy asks, sockets. With HAProxy itself: tests/integration/test_fleet.py."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from cloud import make_certificate

from launcher.errors import LauncherError
from launcher.fleet import haproxy
from launcher.fleet.config import FleetConfig
from launcher.fleet.config import Ingress as IngressHosts
from launcher.fleet.ingress import Decisions, Ingress
from launcher.fleet.loads import HostLoad, InstanceLoad
from launcher.fleet.picker import HOLD_S

LOCAL = ("127.0.0.1", 9)
SOON_S = 10.0


def idle(host_slots: int = 1, *, limit: int = 1) -> HostLoad:
    instances = tuple(
        InstanceLoad(
            slot=slot, generation=1, model="m", ready=True, running=0, waiting=0, concurrency_limit=limit
        )
        for slot in range(host_slots)
    )
    return HostLoad(running=0, waiting=0, instances=instances)


def message(id_: str, model: str = "m") -> dict[str, str | int | bytes]:
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "x"}], "stream": True}
    ).encode()
    return {"id": id_, "path": "/v1/chat/completions", "key": "", "body": body, "length": len(body)}


@pytest.fixture
async def decisions() -> Decisions:
    """Hosts a and b, with one instance each that runs one request at a time."""
    made = Decisions()
    made.peers = frozenset({"127.0.0.1"})
    made.picker.serve({"a": False, "b": False}, 0.0)
    for host in "ab":
        made.report(host, idle(), asyncio.get_running_loop().time())
    return made


async def ask(decisions: Decisions, id_: str, model: str = "m") -> Mapping[str, str]:
    async with asyncio.timeout(SOON_S):
        return await decisions.handle("pick", message(id_, model))


async def test_the_answer_names_host_and_slot(decisions: Decisions) -> None:
    answers = [await ask(decisions, f"r{n}") for n in range(2)]
    assert sorted(answer["host"] for answer in answers) == ["a", "b"]
    assert {answer["slot"] for answer in answers} == {"0"}


@pytest.mark.parametrize("model", ["other", "\N{SNOWMAN}"])
async def test_what_the_fleet_does_not_know_is_left_to_haproxy(decisions: Decisions, model: str) -> None:
    assert await ask(decisions, "r", model) == {}
    assert await decisions.handle("pick", {}) == {}
    assert await decisions.handle("first", {"id": None, "status": None}) == {}


async def test_an_end_lets_a_held_request_go_there(decisions: Decisions) -> None:
    where = {f"r{n}": (await ask(decisions, f"r{n}"))["host"] for n in range(2)}
    for id_ in where:
        await decisions.handle("first", {"id": id_, "status": 200})
    held = asyncio.create_task(ask(decisions, "late"))
    await asyncio.sleep(0.05)
    assert not held.done()
    decisions.datagram_received(b"<134>x: end r1 200 h7 12 34 --\n", LOCAL)
    assert (await held)["host"] == where["r1"]


async def test_no_request_is_held_longer_than_a_second(decisions: Decisions) -> None:
    for n in range(2):
        await ask(decisions, f"r{n}")
    begun = asyncio.get_running_loop().time()
    assert (await ask(decisions, "late"))["slot"] == "0"
    assert HOLD_S - 0.1 < asyncio.get_running_loop().time() - begun < HOLD_S + 1.0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"end",
        b"end r0 200 h1 1 2",
        b"end r0 x h1 y z --",
        b"end nobody 200 h1 1 2 --",
        b"start r0",
    ],
)
async def test_lines_that_cannot_be_read_change_nothing_else(decisions: Decisions, data: bytes) -> None:
    await ask(decisions, "r0")
    decisions.datagram_received(data, LOCAL)
    assert await ask(decisions, "r1") != {}


async def test_strangers_cannot_end_requests(decisions: Decisions) -> None:
    await ask(decisions, "r0")
    decisions.datagram_received(b"end r0 200 h1 1 2 --", ("10.9.9.9", 9))
    assert sum(host["sent"] == 1 for host in decisions.picker.status().values()) == 1
    decisions.datagram_received(b"end r0 200 h1 1 2 --", LOCAL)
    assert sum(host["sent"] == 1 for host in decisions.picker.status().values()) == 0


async def test_a_question_that_haproxy_gives_up_is_not_held(decisions: Decisions) -> None:
    for n in range(2):
        await ask(decisions, f"r{n}")
    held = asyncio.create_task(ask(decisions, "late"))
    await asyncio.sleep(0.05)
    assert decisions.picker.held == 1
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)
    assert decisions.picker.held == 0
    decisions.datagram_received(b"end late 0 <NOSRV> -1 1 CQ", LOCAL)


# --- the process -----------------------------------------------------------------------------------


def free_port() -> int:
    """Free for TCP, and the next one for UDP."""
    while True:
        with socket.socket() as one, socket.socket(type=socket.SOCK_DGRAM) as other:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            try:
                other.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def config(folder: Path, *hosts: str) -> FleetConfig:
    return FleetConfig(state=str(folder), ingress=IngressHosts(hosts=hosts, picker_port=free_port()))


@pytest.fixture
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FleetConfig]:
    """An ingress on a machine without HAProxy: it answers all the same."""
    monkeypatch.setattr("launcher.fleet.haproxy.shutil.which", lambda *_, **__: None)
    made = config(tmp_path, "127.0.0.1", "192.0.2.1")
    task = asyncio.create_task(Ingress(made).run())
    async with asyncio.timeout(SOON_S):
        while not (tmp_path / "ingress.sock").exists():  # noqa: ASYNC110 - another task's file
            await asyncio.sleep(0.01)
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_status_is_one_object(running: FleetConfig) -> None:
    reader, writer = await asyncio.open_unix_connection(f"{running.state}/ingress.sock")
    shown = json.loads(await reader.read())
    writer.close()
    assert (shown["decides"], shown["asked"], shown["held"], shown["hosts"]) == (False, 0, 0, {})
    assert (shown["members"]["members"], shown["servers"]) == ([], None)


async def test_a_second_ingress_on_the_same_address_is_refused(running: FleetConfig) -> None:
    with pytest.raises(LauncherError, match=r"cannot listen: .*address already in use"):
        await Ingress(running).run()


async def test_a_host_that_is_no_ingress_host_is_told(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"none of 192\.0\.2\.1 is an address of this host"):
        await Ingress(config(tmp_path, "192.0.2.1")).run()


async def test_pickers_are_asked_over_tls_where_there_is_a_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.fleet.haproxy.shutil.which", lambda *_, **__: None)
    certificate = make_certificate(tmp_path)
    both = tmp_path / "both.pem"
    both.write_text(certificate.path.read_text() + certificate.key.read_text())
    hosts = IngressHosts(hosts=("127.0.0.1",), picker_port=free_port(), picker_cert=str(both))
    task = asyncio.create_task(Ingress(FleetConfig(state=str(tmp_path / "i"), ingress=hosts)).run())
    async with asyncio.timeout(SOON_S):
        while not (tmp_path / "i/ingress.sock").exists():  # noqa: ASYNC110 - another task's file
            await asyncio.sleep(0.01)
    context = ssl.create_default_context(cafile=certificate.path)
    _, writer = await asyncio.open_connection(
        "127.0.0.1", hosts.picker_port, ssl=context, server_hostname="localhost"
    )
    writer.close()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("same", [True, False])
async def test_an_haproxy_that_runs_is_adopted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, same: bool
) -> None:
    """Only its configuration may be another one, which is said once."""
    monkeypatch.setattr("launcher.fleet.haproxy.has_exporter", lambda: False)
    made = config(tmp_path, "127.0.0.1")
    text = haproxy.files(made, exporter=False)["haproxy.cfg"]
    (tmp_path / "haproxy.cfg").write_text(text if same else "")
    asked = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readline():
            asked.set()
        writer.close()

    async with await asyncio.start_unix_server(answer, tmp_path / "admin.sock"):
        task = asyncio.create_task(Ingress(made).run())
        async with asyncio.timeout(SOON_S):
            await asked.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert ("another configuration" in caplog.text) is not same
    assert (tmp_path / "haproxy.cfg").read_text() == (text if same else "")
    assert not (tmp_path / "haproxy.pid").exists()
