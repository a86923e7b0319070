"""The agent, with a control socket of a daemon and without; Ray is not needed."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from pathlib import Path

import pytest
from support.fake_operations import Backstage, FakeOperations

from launcher.base.errors import LauncherError
from launcher.control.client import UnreachableError
from launcher.fleet.agent import OUTPUT, Agent, tcp_address
from launcher.fleet.config import FleetConfig, Hosts, Ingress
from launcher.fleet.members import MEMBERS, Member, MemberList, Node, read_members, write_members

NODE = Node(id="n1", host="h1", address="10.0.0.1", names=frozenset({"h1", "10.0.0.1"}))
LIST = MemberList(epoch=2, version=3, members=(Member(host="h1", address="10.0.0.1:8000"),))


def agent(folder: Path, *, ingress: str = "10.0.0.1") -> Agent:
    config = FleetConfig(
        state=str(folder / "fleet"), ingress=Ingress(hosts=(ingress,)),
        hosts=Hosts(control=str(folder / "c.sock"), keys=str(folder / "keys")),
    )  # fmt: skip
    return Agent(config, "spec", NODE)


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("http://0.0.0.0:8000", "10.0.0.1:8000"),
        ("http://[::]:8000", "10.0.0.1:8000"),
        ("http://10.0.0.7:80", "10.0.0.7:80"),
        ("http://[fd00::7]:80", "[fd00::7]:80"),
    ],
)
def test_the_daemons_address(endpoint: str, address: str) -> None:
    assert tcp_address(endpoint, "10.0.0.1", tls=False) == address
    assert tcp_address(endpoint.replace("http", "https"), "10.0.0.1", tls=True) == address


@pytest.mark.parametrize(
    ("endpoint", "tls", "why"),
    [
        ("http://127.0.0.1:8000", False, "cannot reach the daemon at 127.0.0.1:8000 from other hosts"),
        ("http://[::1]:8000", False, "from other hosts"),
        ("unix:/run/proxy.sock", False, "cannot use the daemon's listener 'unix:/run/proxy.sock'"),
        ("", False, "cannot use the daemon's listener ''"),
        ("http://10.0.0.1:8000", True, "it is without TLS"),
        ("https://10.0.0.1:8000", False, "it is with TLS"),
    ],
)
def test_a_listener_that_other_hosts_cannot_use(endpoint: str, tls: bool, why: str) -> None:
    with pytest.raises(LauncherError) as error:
        tcp_address(endpoint, "10.0.0.1", tls=tls)
    assert why in error.value.message


def test_an_ingress_host_keeps_the_newest_list(tmp_path: Path) -> None:
    its = agent(tmp_path)
    its.keep(LIST)
    its.keep(MemberList(epoch=2, version=2))
    assert read_members(tmp_path / "fleet" / MEMBERS) == LIST
    assert its.report().kept == LIST


def test_a_file_that_cannot_be_read_is_written_again(tmp_path: Path) -> None:
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet" / MEMBERS).write_text("{")
    its = agent(tmp_path)
    assert its.report().kept == MemberList()
    its.keep(LIST)
    assert read_members(tmp_path / "fleet" / MEMBERS) == LIST


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user: run it as root")
@pytest.mark.parametrize("planted", ["fleet", f"fleet/{MEMBERS}"])
def test_a_list_that_another_user_planted_is_moved_aside_and_said(planted: str, tmp_path: Path) -> None:
    """A director would believe it, and hand it to the other ingress hosts."""
    write_members(tmp_path / "fleet" / MEMBERS, LIST)
    os.chown(tmp_path / planted, 4242, 4242)
    found = agent(tmp_path).report()
    assert found.kept == MemberList()
    assert found.problem == f"another user had made {tmp_path}/{planted}.foreign-1, which is not used"


def test_other_hosts_keep_no_list(tmp_path: Path) -> None:
    assert agent(tmp_path, ingress="10.0.0.9").report().kept is None
    assert not (tmp_path / "fleet").exists()


def test_the_list_has_one_writer(tmp_path: Path) -> None:
    """A host that is in two clusters for a while has two agents."""
    first, second = agent(tmp_path), agent(tmp_path)
    first.keep(LIST)
    with pytest.raises(LauncherError, match="another agent on this host writes it"):
        second.keep(MemberList(epoch=9))
    assert "another agent" in second.report().problem
    assert second.report().kept is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "fleet").write_text("")
    found = agent(tmp_path).report()
    assert found.problem.startswith(f"cannot write '{tmp_path}/fleet/{MEMBERS}': ")
    assert "install -d" in found.remedy


def test_a_daemon_counts_where_the_list_cannot_be_written(tmp_path: Path) -> None:
    """The other ingress host sends requests to it."""
    (tmp_path / "fleet").write_text("")
    with Backstage(str(tmp_path / "c.sock"), FakeOperations(endpoint="http://0.0.0.0:8000")):
        found = agent(tmp_path).report()
    assert found.address == "10.0.0.1:8000"
    assert found.problem.startswith("cannot write ")


def test_a_host_without_a_daemon_is_reported(tmp_path: Path) -> None:
    found = agent(tmp_path).report()
    assert (found.absent, found.address, found.node) == (True, "", "n1")
    assert "no such socket" in found.problem


def test_the_daemon_is_asked_over_its_socket(tmp_path: Path) -> None:
    """The fake's listener is 127.0.0.1, which other hosts cannot use: a finding that is no absence."""
    its = agent(tmp_path, ingress="10.0.0.9")
    with Backstage(str(tmp_path / "c.sock"), FakeOperations()):
        found = its.report()
        assert (found.absent, found.address) == (False, "")
        assert found.problem == "cannot reach the daemon at 127.0.0.1:8000 from other hosts"
        assert its.ask("GET", "/status", b"", 60)["ready"] == 2
        with pytest.raises(LauncherError, match="slot '9'"):
            its.ask("POST", "/slots/9/drain", b"", 60)
    with pytest.raises(UnreachableError):
        its.ask("GET", "/status", b"", 60)


def test_keys_are_those_of_the_configured_file(tmp_path: Path) -> None:
    its = agent(tmp_path)
    assert its.key_stamp() == "0 -"
    assert its.key_file(None) == ""


def test_the_ingress_on_the_host_is_asked(tmp_path: Path) -> None:
    its = agent(tmp_path)
    assert its.ingress() == {}
    (tmp_path / "fleet").mkdir()
    with socket.create_server(str(tmp_path / "fleet" / "ingress.sock"), family=socket.AF_UNIX) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b'{"decides": true}')

        thread = threading.Thread(target=answer)
        thread.start()
        assert its.ingress() == {"decides": True}
        thread.join()


def test_a_command_gives_its_code_and_the_end_of_its_output(tmp_path: Path) -> None:
    assert agent(tmp_path).run(["sh", "-c", "echo out; echo err >&2; exit 3"], 60) == (3, "out\nerr\n")
    code, text = agent(tmp_path).run(["sh", "-c", f"head -c {2 * OUTPUT} /dev/zero | tr '\\0' x"], 60)
    assert (code, text) == (0, "x" * OUTPUT)
    with pytest.raises(LauncherError, match="cannot run 'no-such-program'"):
        agent(tmp_path).run(["no-such-program"], 60)
    with pytest.raises(LauncherError, match=r"cannot run .sleep.: no end within 0\.05 s"):
        agent(tmp_path).run(["sleep", "60"], 0.05)


@pytest.mark.parametrize("kind", [LauncherError, UnreachableError])
def test_errors_reach_the_caller_whole(kind: type[LauncherError]) -> None:
    error = pickle.loads(pickle.dumps(kind("cannot x: y", "do z")))  # noqa: S301
    assert (type(error), error.message, error.remedy) == (kind, "cannot x: y", "do z")


def test_reports_reach_the_director_whole(tmp_path: Path) -> None:
    its = agent(tmp_path)
    its.keep(LIST)
    assert pickle.loads(pickle.dumps(its.report())) == its.report()  # noqa: S301
