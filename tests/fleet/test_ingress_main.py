"""The process on an ingress host: its sockets and HAProxy's start. With HAProxy itself: tests/integration/test_fleet.py."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import grp
import json
import os
import socket
import ssl
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.cloud import make_certificate
from support.ports import free_port

from launcher.base.errors import LauncherError
from launcher.fleet import haproxy
from launcher.fleet.config import FleetConfig, Hosts
from launcher.fleet.config import Ingress as IngressHosts
from launcher.fleet.ingress import Ingress, read_status
from launcher.fleet.members import MEMBERS, Member, MemberList, write_members

LOCAL = ("127.0.0.1", 9)
SOON_S = 60.0
MANY = 256


def config(folder: Path, *hosts: str) -> FleetConfig:
    return FleetConfig(state=str(folder), ingress=IngressHosts(hosts=hosts, picker_port=free_port(3)))


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
    assert (shown["members"]["members"], shown["servers"], shown["shares"]) == ([], None, {})


async def test_a_busy_picker_refuses_no_connection(running: FleetConfig) -> None:
    """HAProxy takes a picker for gone that it cannot connect to, and connects for each of many requests at once."""
    with contextlib.ExitStack() as stack:
        for _ in range(MANY):  # nothing else runs on the event loop meanwhile
            connection = stack.enter_context(socket.socket())
            connection.settimeout(SOON_S)
            connection.connect(("127.0.0.1", running.ingress.picker_port))


async def test_a_group_may_read_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a socket of its own: the member list's folder is closed."""
    monkeypatch.setattr("launcher.fleet.haproxy.shutil.which", lambda *_, **__: None)
    (tmp_path / "run").mkdir()
    group = grp.getgrgid(os.getgid()).gr_name
    hosts = IngressHosts(hosts=("127.0.0.1",), picker_port=free_port(3), read_group=group)
    daemons = Hosts(control=str(tmp_path / "run/control.sock"))
    made = FleetConfig(state=str(tmp_path / "i"), ingress=hosts, hosts=daemons)
    task = asyncio.create_task(Ingress(made).run())
    shared = tmp_path / "run/ingress.sock"
    async with asyncio.timeout(SOON_S):
        while not shared.exists() or stat.S_IMODE(shared.stat().st_mode) != 0o660:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for path in (shared, tmp_path / "i/ingress.sock"):
        reader, writer = await asyncio.open_unix_connection(path)
        assert json.loads(await reader.read())["hosts"] == {}
        writer.close()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    hosts = IngressHosts(hosts=("127.0.0.1",), picker_port=free_port(3), read_group="no-such-group")
    with pytest.raises(LauncherError, match=r"read_group = 'no-such-group': no such group"):
        await Ingress(FleetConfig(state=str(tmp_path / "i"), ingress=hosts, hosts=daemons)).run()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user: run it as root")
async def test_a_list_that_another_user_planted_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its hosts would get the clients' keys and prompts."""
    monkeypatch.setattr("launcher.fleet.haproxy.shutil.which", lambda *_, **__: None)
    folder = tmp_path / "fleet"
    write_members(folder / MEMBERS, MemberList(epoch=9, members=(Member(host="x", address="192.0.2.66:80"),)))
    for path in (folder, folder / MEMBERS):
        os.chown(path, 4242, 4242)
    made = config(folder, "127.0.0.1")
    task = asyncio.create_task(Ingress(made).run())
    try:
        async with asyncio.timeout(SOON_S):
            while not (shown := await asyncio.to_thread(read_status, made)):  # noqa: ASYNC110 - another task's socket
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert shown["members"]["members"] == []
    assert f"another user had made '{folder}.foreign-1'" in caplog.text


async def test_a_second_ingress_on_the_same_address_is_refused(running: FleetConfig) -> None:
    port = running.ingress.picker_port
    with pytest.raises(LauncherError) as caught:
        await Ingress(running).run()
    assert caught.value.message == f"cannot listen on '127.0.0.1:{port}': address already in use"
    assert "[ingress] picker_port in fleet.toml" in caught.value.remedy


async def test_a_port_beside_the_pickers_that_is_in_use_is_named(tmp_path: Path) -> None:
    made = config(tmp_path, "127.0.0.1")
    port = made.ingress.picker_port + 1
    with socket.socket(type=socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", port))
        with pytest.raises(LauncherError) as caught:
            await Ingress(made).run()
    assert f"cannot listen on '127.0.0.1:{port} (UDP" in caught.value.message
    assert caught.value.message.endswith("': address already in use")
    assert "[ingress] picker_port in fleet.toml" in caught.value.remedy


async def test_an_unusable_folder_or_certificate_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LauncherError, match=r"cannot use the folder '.*/file/i': not a directory"):
        await Ingress(config(tmp_path / "file" / "i", "127.0.0.1")).run()
    for name, why, code in (
        ("none.pem", r"read \[ingress\] picker_cert '.*/none.pem': no such file", 3),  # it may come
        ("file", "use the TLS certificate '.*/file': it lacks a certificate or a key in PEM form", 2),
    ):
        hosts = IngressHosts(hosts=("127.0.0.1",), picker_port=free_port(3), picker_cert=str(tmp_path / name))
        with pytest.raises(LauncherError, match=f"cannot {why}") as caught:
            await Ingress(FleetConfig(state=str(tmp_path), ingress=hosts)).run()
        assert "picker_cert" in caught.value.remedy
        assert caught.value.exit_code == code


async def test_where_it_cannot_listen_now_systemd_tries_again(running: FleetConfig, tmp_path: Path) -> None:
    """Exit code 2 would keep it down: RestartPreventExitStatus. An address may come late at boot."""
    for made in (running, config(tmp_path, "192.0.2.1")):
        with pytest.raises(LauncherError) as caught:
            await Ingress(made).run()
        assert caught.value.exit_code == 3


async def test_a_stranger_is_logged_once(running: FleetConfig, caplog: pytest.LogCaptureFixture) -> None:
    """What comes from an address that [ingress] hosts does not name is ignored, and that is said."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.bind(("127.0.0.9", 0))
        for _ in range(3):
            sender.sendto(b"end r 200 h1 1 2 --", ("127.0.0.1", running.ingress.picker_port + 1))
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", running.ingress.picker_port, local_addr=("127.0.0.9", 0)
    )
    async with asyncio.timeout(SOON_S):
        assert await reader.read() == b""
    writer.close()
    assert caplog.text.count("127.0.0.9 is no ingress host") == 1


async def test_haproxy_is_watched_though_the_list_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = asyncio.Event()

    def start() -> bool:
        loop.call_soon_threadsafe(started.set)
        raise LauncherError("cannot start it here", "")

    loop = asyncio.get_running_loop()
    monkeypatch.setattr("launcher.fleet.haproxy.has_exporter", start)
    (tmp_path / "members.json").write_text("{")
    task = asyncio.create_task(Ingress(config(tmp_path, "127.0.0.1")).run())
    async with asyncio.timeout(SOON_S):
        await started.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert caplog.text.count("members.json") == 1


async def test_a_host_that_is_no_ingress_host_is_told(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"on '192\.0\.2\.1': none of them is an address of this host"):
        await Ingress(config(tmp_path, "192.0.2.1")).run()


async def test_pickers_are_asked_over_tls_where_there_is_a_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.fleet.haproxy.shutil.which", lambda *_, **__: None)
    certificate = make_certificate(tmp_path)
    both = tmp_path / "both.pem"
    both.write_text(certificate.path.read_text() + certificate.key.read_text())
    hosts = IngressHosts(hosts=("127.0.0.1",), picker_port=free_port(3), picker_cert=str(both))
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
        told = await asyncio.to_thread(read_status, made)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert ("another configuration" in caplog.text) is not same
    assert any("another configuration" in trouble for trouble in told["troubles"]) is not same
    assert (tmp_path / "haproxy.cfg").read_text() == (text if same else "")
    assert not (tmp_path / "haproxy.pid").exists()


async def test_a_peer_that_left_already_has_no_name(tmp_path: Path) -> None:
    """uvloop asks the kernel when it is asked, and then there is none."""

    class Left:
        closed = False

        def get_extra_info(self, _name: str) -> None:
            return None

        def close(self) -> None:
            self.closed = True

    writer = Left()
    await Ingress(config(tmp_path, "127.0.0.1"))._answer(asyncio.StreamReader(), writer)  # type: ignore[arg-type]
    assert writer.closed


@pytest.mark.parametrize("turns", range(5))
async def test_a_connection_that_is_made_at_the_end_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    monkeypatch.setattr("launcher.fleet.haproxy.shutil.which", lambda *_, **__: None)
    made = config(tmp_path, "127.0.0.1")
    ingress = asyncio.create_task(Ingress(made).run())
    async with asyncio.timeout(SOON_S):
        while not (tmp_path / "ingress.sock").exists():  # noqa: ASYNC110 - another task's file
            await asyncio.sleep(0.01)
    with socket.create_connection(("127.0.0.1", made.ingress.picker_port)) as connection:
        for _ in range(turns):
            await asyncio.sleep(0)
        ingress.cancel()
        await asyncio.gather(ingress, return_exceptions=True)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:  # as asyncio.run does
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        connection.settimeout(SOON_S)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.to_thread(connection.recv, 1) == b""
    gc.collect()  # warns of what is not closed
