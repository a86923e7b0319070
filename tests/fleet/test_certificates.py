"""The certificates of an ingress host: their states, and what is renewed while HAProxy runs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from support.cloud import make_certificate
from support.fakes import SOON_S, looked
from support.ports import free_port

from launcher.base.errors import LauncherError, RefusedError, TimedOutError
from launcher.base.watched_file import LOOK_EVERY_S, FileCondition
from launcher.fleet.certificates import Certificates
from launcher.fleet.config import FleetConfig, Hosts
from launcher.fleet.config import Ingress as IngressHosts
from launcher.fleet.haproxy import Servers
from launcher.fleet.ingress import Ingress, read_status
from launcher.fleet.loads import Loads


def pem_of(folder: Path) -> str:
    """A new self-signed certificate with its key."""
    folder.mkdir(exist_ok=True)
    made = make_certificate(folder)
    return made.path.read_text() + made.key.read_text()


def config_of(folder: Path, **ingress: Any) -> FleetConfig:
    hosts = IngressHosts(
        hosts=("127.0.0.1",), listen=f"127.0.0.1:{free_port()}", picker_port=free_port(3), **ingress
    )
    return FleetConfig(state=str(folder), ingress=hosts)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[FleetConfig, Path]]:
    """A whole ingress with HAProxy, whose certificate is not there yet; its configuration and the certificate's path."""
    with tempfile.TemporaryDirectory() as folder:  # paths of UNIX sockets have 107 bytes
        path = tmp_path / "client's cert.pem"
        made = config_of(Path(folder), tls_cert=str(path))
        task = asyncio.create_task(Ingress(made).run())
        yield made, path
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if (pid := Path(folder) / "haproxy.pid").exists():
            for word in pid.read_text().split():
                os.kill(int(word), signal.SIGTERM)


async def file_of(config: FleetConfig, want: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The state of the only file, once it is as wanted."""
    async with asyncio.timeout(SOON_S):
        while True:
            files = (await asyncio.to_thread(read_status, config)).get("files") or [{}]
            if want(files[0]):
                return files[0]  # type: ignore[no-any-return]
            await asyncio.sleep(0.05)


def certificate_at(config: FleetConfig) -> str:
    """PEM of what a client gets; empty where nothing listens."""
    host, _, port = config.ingress.listen.rpartition(":")
    try:
        return ssl.get_server_certificate((host, int(port)))
    except OSError:
        return ""


async def is_served(config: FleetConfig, pem: str) -> None:
    async with asyncio.timeout(SOON_S):
        while True:
            found = (await asyncio.to_thread(certificate_at, config)).strip()
            if found and found in pem:
                return
            await asyncio.sleep(0.05)


async def test_a_certificate_that_comes_late_and_is_renewed(
    served: tuple[FleetConfig, Path], tmp_path: Path
) -> None:
    config, path = served
    found = await file_of(config, lambda file: file.get("state") == "unusable")
    assert found["why"] == f"cannot read the TLS file '{path}': no such file or directory"
    assert "[ingress] tls_cert of fleet.toml" in found["remedy"]
    first, second = pem_of(tmp_path / "1"), pem_of(tmp_path / "2")
    path.write_text(first)
    await is_served(config, first)
    assert (await file_of(config, lambda file: file["state"] == "in use"))[
        "what"
    ] == "certificate of the ingress"
    path.write_text("nonsense")
    found = await file_of(config, lambda file: file["state"] == "unusable")
    assert found["why"].endswith(
        "it lacks a certificate or a key in PEM form; the certificate of the ingress read before stays in force"
    )
    await is_served(config, first)
    path.write_text(second)
    await is_served(config, second)
    await file_of(config, lambda file: file["state"] == "in use")


class Refusing(Servers):
    """HAProxy, which takes no certificate at first, and no other authority until it is started again."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))
        self.refuses = True
        self.taken: list[str] = []
        self.authority = ""

    async def renew(self, path: str, pem: str) -> None:
        if self.refuses:
            raise LauncherError(f"cannot give '{path}' to HAProxy: busy", "restart it")
        self.taken.append(pem)

    async def check_authority(self, path: str, pem: str) -> None:
        self.authority = self.authority or pem
        if self.authority != pem:
            raise RefusedError(f"cannot give '{path}' to HAProxy", "start it again")


async def test_what_haproxy_does_not_take_is_not_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, ca = tmp_path / "c.pem", tmp_path / "ca.pem"
    path.write_text(text := pem_of(tmp_path / "1"))
    ca.write_text(make_certificate(tmp_path).path.read_text())
    ingress = config_of(tmp_path, tls_cert=str(path), picker_cert=str(path)).ingress
    certificates, servers = Certificates(FleetConfig(ingress=ingress, hosts=Hosts(ca=str(ca)))), Refusing()
    certificates.look(0.0)
    assert [(one.what, one.state) for one in certificates.states()] == [
        ("certificate of the ingress", FileCondition.IN_USE),
        ("authority of the hosts", FileCondition.IN_USE),
        ("certificate of the picker", FileCondition.IN_USE),
    ]
    with pytest.raises(LauncherError, match="busy"):
        await certificates.hand_on(servers, 0.0)
    refused, *others = certificates.states()
    assert refused.state is FileCondition.UNUSABLE
    assert (
        refused.why
        == f"cannot give '{path}' to HAProxy: busy; the certificate of the ingress before stays in force"
    )
    assert {one.state for one in others} == {FileCondition.IN_USE}, "the picker reads the same file by itself"
    servers.refuses = False
    for now in (1.0, 2.0):
        await certificates.hand_on(servers, now)
    assert servers.taken == [text], "once"
    assert {one.state for one in certificates.states()} == {FileCondition.IN_USE}
    ca.write_text(make_certificate(tmp_path).path.read_text() + "\n")
    for now in (4.0, 6.0):
        await certificates.hand_on(servers, now)
        await asyncio.to_thread(looked)
    assert [one.state for one in certificates.states()][1] is FileCondition.UNUSABLE
    assert caplog.text.count("start it again") == 1
    certificates.started()
    servers.authority = ""
    await certificates.hand_on(servers, 8.0)
    assert {one.state for one in certificates.states()} == {FileCondition.IN_USE}


class Nobody:
    def report(self, *_: object) -> None: ...
    def lost(self, *_: object) -> None: ...


async def test_another_authority_is_believed_by_the_next_question(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_text(make_certificate(tmp_path).path.read_text())
    config = FleetConfig(ingress=config_of(tmp_path).ingress, hosts=Hosts(ca=str(ca)))
    certificates = Certificates(config)
    before = certificates.authority(0.0)
    assert before is not None
    assert certificates.authority(2.0) is before
    ca.write_text(make_certificate(tmp_path).path.read_text() + "\n")
    assert certificates.authority(4.0) is before
    await asyncio.to_thread(looked)
    after = certificates.authority(4.0)
    assert after is not None
    assert after is not before
    loads = Loads(Nobody(), str(ca))
    loads.believe(after)
    assert loads.tls is after
    await loads.close()


@pytest.mark.parametrize("key", ["picker_cert", "ca"])
def test_what_the_process_itself_reads_and_is_not_there_is_tried_again(key: str, tmp_path: Path) -> None:
    """By systemd: exit code 2 would keep the ingress down."""
    away = str(tmp_path / "mount" / "x.pem")
    made = config_of(tmp_path, picker_cert=away if key == "picker_cert" else None)
    with pytest.raises(TimedOutError, match=f"{key} '{away}': no such file or directory"):
        Certificates(FleetConfig(ingress=made.ingress, hosts=Hosts(ca=away if key == "ca" else None)))


async def test_a_renewed_certificate_of_the_picker_is_used(tmp_path: Path) -> None:
    path = tmp_path / "p.pem"
    path.write_text(first := pem_of(tmp_path / "1"))
    picker = Certificates(config_of(tmp_path, picker_cert=str(path))).picker
    assert picker is not None
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = await asyncio.start_server(
            lambda _, writer: writer.close(), sock=listening, ssl=picker.context
        )
        place = listening.getsockname()
        assert (await asyncio.to_thread(ssl.get_server_certificate, place)).strip() in first
        path.write_text(second := pem_of(tmp_path / "2"))
        for _ in range(2):  # the first looks
            await asyncio.sleep(LOOK_EVERY_S)
            shown = (await asyncio.to_thread(ssl.get_server_certificate, place)).strip()
            await asyncio.to_thread(looked)
        assert shown in second
        server.close()
