"""The blocking client against a real server."""

from __future__ import annotations

import grp
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_operations import Backstage, FakeOperations

from launcher.base.errors import LauncherError
from launcher.control.client import ControlClient, UnreachableError
from launcher.control.messages import SlotCommand


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Backstage]:
    with Backstage(str(tmp_path / "c.sock"), FakeOperations()) as daemon:
        yield daemon


def test_get_and_post(daemon: Backstage) -> None:
    client = ControlClient(daemon.path)
    assert client.get("/status")["ready"] == 2
    assert client.post("/slots/1/stop")["slot"] == 1
    assert daemon.operations.asked == [(1, SlotCommand.STOP)]


def test_a_page_of_text(daemon: Backstage) -> None:
    assert ControlClient(daemon.path).text("/metrics").endswith("a_total 1\n")


def test_the_daemons_error_is_raised_as_it_is(daemon: Backstage) -> None:
    with pytest.raises(LauncherError) as caught:
        ControlClient(daemon.path).post("/slots/9/stop")
    assert caught.value.message == "cannot use slot '9': no such slot"
    assert caught.value.remedy == "slots are 0, 1"


def test_lines_go_on(daemon: Backstage) -> None:
    lines = ControlClient(daemon.path).lines("/slots/0/logs?tail=1&follow=1")
    assert next(lines)["text"] == "three"
    daemon.say("four")
    assert next(lines)["text"] == "four"
    lines.close()  # type: ignore[attr-defined]


def test_lines_end_with_the_daemon(daemon: Backstage) -> None:
    lines = ControlClient(daemon.path).lines("/slots/0/logs?tail=1&follow=1")
    next(lines)
    daemon.close()
    assert list(lines) == []


def test_no_daemon(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"cannot reach numa-launcher on '.*': no such socket") as caught:
        ControlClient(str(tmp_path / "none")).get("/status")
    assert "--socket" in caught.value.remedy
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    with pytest.raises(UnreachableError, match="connection refused: the daemon has exited") as caught:
        ControlClient(str(tmp_path / "dead")).get("/status")
    assert "journalctl -u numa-launcher" in caught.value.remedy
    with pytest.raises(LauncherError, match="too long"):
        ControlClient(str(tmp_path / ("x" * 200))).get("/status")


def test_a_socket_of_another_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel answers a user who is not in it; test_roles asks the kernel itself."""

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "c.sock").touch()
    monkeypatch.setattr("launcher.control.client._UnixConnection.connect", denied)
    with pytest.raises(LauncherError, match="your user may not use this socket") as caught:
        ControlClient(str(tmp_path / "c.sock")).get("/status")
    group = grp.getgrgid(os.getegid()).gr_name
    assert caught.value.remedy == f"ask an administrator to add you to group '{group}', and log in again"
    with pytest.raises(LauncherError) as caught:
        ControlClient(str(tmp_path / "gone")).get("/status")
    assert "the group of its file" in caught.value.remedy


def test_a_daemon_that_hangs(tmp_path: Path) -> None:
    """The kernel still takes connections for it."""
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(tmp_path / "c.sock"))
        hung.listen()
        with pytest.raises(LauncherError, match=r"no answer within 0\.05 s") as caught:
            ControlClient(str(tmp_path / "c.sock")).get("/status", 0.05)
    assert "the machine hangs" in caught.value.remedy


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 5\r\n\r\nTrace", "cannot GET /status: status 500"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nnot json!", "cannot read the daemon's answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "cannot read the daemon's answer"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "cannot reach numa-launcher"),
        (b"", "cannot reach numa-launcher"),
    ],
)
def test_something_else_answers(tmp_path: Path, answer: bytes, message: str) -> None:
    path = str(tmp_path / "x.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                os.write(peer.fileno(), answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(LauncherError, match=message):
            ControlClient(path).get("/status")
        thread.join()
