"""The screen of `fleet status`, and what it asks of daemons."""

from __future__ import annotations

import contextlib
import http.server
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cloud import Certificate, make_certificate

from launcher.cli.fleet_status import Screen, gather, lines, stragglers, told, well
from launcher.control.client import UnreachableError
from launcher.fleet.config import FleetConfig, Hosts, Ingress
from launcher.fleet.loads import HostLoad, InstanceLoad
from launcher.fleet.members import (
    MEMBERS,
    Decision,
    Member,
    MemberList,
    MemberState,
    Report,
    View,
    write_members,
)


def load(*ready: bool, ttft: float | None = None) -> HostLoad:
    instances = tuple(
        InstanceLoad(slot=slot, generation=1, model="m", ready=its, running=1, waiting=0, concurrency_limit=4)
        for slot, its in enumerate(ready)
    )
    return HostLoad(running=3, waiting=2, predicted_ttft_s=ttft, instances=instances)


def member(host: str, state: MemberState = MemberState.READY, address: str = "10.0.0.1:8000") -> Member:
    return Member(host=host, address=address, state=state)


WELL = Screen(
    endpoints=("http://10.0.0.1:8000",),
    members=MemberList(epoch=7, version=2, members=(member("a"), member("b", MemberState.DRAINING))),
    loads={"a": load(True, False, ttft=0.5), "b": load(True)},
    silent={},
    agents={"a": "", "b": ""},
    heard={"a": 1.2, "b": 0.4},
    ingress={"10.0.0.1": "answers"},
    ray="",
)


def test_one_screen() -> None:
    assert lines(WELL) == [
        "OK 1/2 hosts serving; b draining; 2/3 instances ready; 6 running, 4 waiting",
        "endpoint http://10.0.0.1:8000",
        "HOST  STATE     ADDRESS        READY  RUNNING  WAITING  TTFT    AGENT",
        "a     ready     10.0.0.1:8000  1/2    3        2        0.50 s  1 s ago",
        "b     draining  10.0.0.1:8000  1/1    3        2        -       0 s ago",
        "ingress 10.0.0.1: answers",
        "Ray: answers",
        "member list: 7.2",
    ]
    assert well(WELL)


def picker(address: str, **state: Any) -> dict[str, Any]:
    """An answer of an ingress, as JSON."""
    file = {
        "what": "certificate of the ingress", "path": "/c.pem", "state": "in use", "since": 0.0, "why": "", "remedy": "",
    }  # fmt: skip
    return {"decides": True, "hosts": {}, "addresses": [address], "files": [file | state]}


def test_a_certificate_of_an_ingress_that_has_expired_is_said() -> None:
    expired = picker("10.0.0.2", state="expired", why="it expired", remedy="renew it")
    screen = msgspec.structs.replace(WELL, told=told([{}, picker("10.0.0.1"), expired]))
    assert not well(screen)
    text = lines(screen)
    assert text[0].startswith("DEGRADED 1/2 hosts serving; b draining; ingress 10.0.0.2: it expired (for ")
    [at] = [index for index, line in enumerate(text) if line.startswith("ingress 10.0.0.2: it expired (for ")]
    assert text[at + 1] == "  renew it"
    assert not any("10.0.0.1: certificate" in line for line in text)


def test_a_certificate_that_cannot_be_used_is_a_warning() -> None:
    bad = picker("10.0.0.2", state="unusable", why="cannot use it; the one read before stays in force")
    screen = msgspec.structs.replace(WELL, told=told([bad]))
    assert well(screen)
    assert lines(screen)[0].startswith("OK 1/2 hosts serving, 1 warning; ")
    assert any(line.startswith("ingress 10.0.0.2: cannot use it; ") for line in lines(screen))


def test_what_an_ingress_cannot_do_is_said() -> None:
    trouble = "HAProxy runs with another configuration"
    screen = msgspec.structs.replace(WELL, told=told([picker("10.0.0.2") | {"troubles": [trouble]}]))
    text = lines(screen)
    assert text[0].startswith("OK 1/2 hosts serving, 1 warning; ")
    assert text[text.index(f"ingress 10.0.0.2: {trouble}") + 1] == "  journalctl -u numa-launcher-ingress"


def test_a_forgotten_host_that_is_back_is_said() -> None:
    gone = Decision(host="c", forgotten=True, epoch=7, version=1)
    members = msgspec.structs.replace(WELL.members, decisions=(gone,))
    view = View(spec="", members=members, reports={"c": Report(node="n", address="c:1")}, heard={}, error="")
    text = lines(gather(FleetConfig(ingress=Ingress(hosts=("127.0.0.1",), listen="127.0.0.1:1")), view, ""))
    assert "; c forgotten; " in text[0]
    assert any(line.startswith("  c: was removed by `fleet forget` and is back") for line in text)


def test_what_is_not_well_is_said_below_the_table() -> None:
    screen = msgspec.structs.replace(
        WELL,
        loads={"a": load(True)},
        silent={"b": "its daemon does not answer: connection refused"},
        agents={"a": "", "b": "cannot reach numa-launcher on 'x': no such socket", "c": "cannot start"},
    )
    text = lines(screen)
    assert "b     down       10.0.0.1:8000  -      -        -        -     0 s ago" in text
    assert "c     no daemon  -              -      -        -        -     -" in text
    assert "  b: its daemon does not answer: connection refused" in text
    assert "  b: cannot reach numa-launcher on 'x': no such socket" in text
    assert "  c: cannot start" in text
    assert text[0] == (
        "DEGRADED 1/3 hosts serving; b down; c no daemon; 1/1 instances ready; 3 running, 2 waiting"
    )
    assert not well(screen)


def test_without_ray_the_list_still_counts() -> None:
    screen = msgspec.structs.replace(
        WELL, ray="cannot reach Ray's head at 'h:1': refused", agents={}, heard={}
    )
    assert (
        "Ray: cannot reach Ray's head at 'h:1': refused; requests are served by the member list, changes wait"
        in lines(screen)
    )
    assert "; no news from Ray; " in lines(screen)[0]
    assert not well(screen)


def test_a_closed_ingress_is_not_well() -> None:
    screen = msgspec.structs.replace(WELL, ingress={"10.0.0.1": "does not answer: connection refused"})
    assert "ingress 10.0.0.1: does not answer: connection refused" in lines(screen)
    assert "; ingress 10.0.0.1 does not answer; " in lines(screen)[0]
    assert not well(screen)


def test_a_host_whose_tokens_come_late_is_named_by_the_picker_that_decides() -> None:
    hosts = {"a": {"stragglers": []}, "b": {"stragglers": [1, 3]}}
    idle = {"decides": False, "hosts": {"a": {"stragglers": [0]}}}
    found = stragglers([{}, idle, {"decides": True, "hosts": hosts}])
    assert found == {"b": (1, 3)}
    assert stragglers([{}, idle]) == {}
    screen = msgspec.structs.replace(WELL, stragglers=found)
    assert (
        "  b: slow: slot 1, 3: first tokens come later than from its siblings; gets fewer requests"
        in lines(screen)
    )


@contextlib.contextmanager
def serving(certificate: Certificate | None = None) -> Iterator[str]:
    """The address of a server that answers /load."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = msgspec.json.encode(load(True)) if self.path == "/load" else b"{}"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(certificate.path, certificate.key)
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def daemon() -> Iterator[str]:
    with serving() as address:
        yield address


def test_a_certificate_of_the_fleets_authority_is_enough_whatever_its_name(tmp_path: Path) -> None:
    """As for the ingress: its name is localhost, and 127.0.0.1 is asked."""
    certificate = make_certificate(tmp_path)
    with serving(certificate) as address:
        view = View(
            spec="",
            members=MemberList(members=(member("a", address=address),)),
            reports={},
            heard={},
            error="",
        )
        hosts = Hosts(ca=str(certificate.path))
        screen = gather(FleetConfig(ingress=Ingress(hosts=("127.0.0.1",)), hosts=hosts), view, "")
        other = tmp_path / "other"
        other.mkdir()
        stranger = Hosts(ca=str(make_certificate(other).path))
        refused = gather(FleetConfig(ingress=Ingress(hosts=("127.0.0.1",)), hosts=stranger), view, "")
    assert screen.loads == {"a": load(True)}
    assert "certificate" in refused.silent["a"]


def config(folder: Path, port: str) -> FleetConfig:
    return FleetConfig(state=str(folder), ingress=Ingress(hosts=("127.0.0.1",), listen=f"0.0.0.0:{port}"))


def test_each_daemon_is_asked_and_one_that_is_gone_is_said(tmp_path: Path, daemon: str) -> None:
    members = MemberList(
        epoch=1, version=1, members=(member("a", address=daemon), member("b", address="127.0.0.1:1"))
    )
    view = View(
        spec="", members=members, reports={"a": Report(node="n", address=daemon)},
        heard={"a": time.time()}, error="",
    )  # fmt: skip
    picker = {"decides": True, "hosts": {"a": {"stragglers": [0]}}}
    screen = gather(config(tmp_path, daemon.partition(":")[2]), view, "", [picker])
    assert screen.stragglers == {"a": (0,)}
    assert screen.loads == {"a": load(True)}
    assert screen.silent == {"b": "its daemon does not answer: connection refused"}
    assert screen.ingress == {"127.0.0.1": "answers"}
    assert screen.ray == ""
    assert gather(config(tmp_path, "1"), view, "").ingress == {
        "127.0.0.1": "does not answer: connection refused"
    }


def test_without_ray_the_hosts_are_those_of_the_file(tmp_path: Path, daemon: str) -> None:
    write_members(tmp_path / MEMBERS, MemberList(epoch=1, version=1, members=(member("a", address=daemon),)))
    screen = gather(config(tmp_path, "1"), None, "cannot reach Ray")
    assert (screen.loads, screen.ray) == ({"a": load(True)}, "cannot reach Ray")


def test_without_ray_and_file_it_is_said_where_to_ask(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError) as error:
        gather(config(tmp_path, "1"), None, "cannot reach Ray")
    assert "this host has no member list" in error.value.message
    assert "127.0.0.1" in error.value.remedy
