"""sd_notify against a real datagram socket, as systemd has it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.daemon import process

Heard = Callable[[], str]


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    """The next thing that "systemd" is told."""
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(path)
        systemd.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        yield lambda: systemd.recv(65536).decode()


def test_notifications(heard: Heard) -> None:
    process.notify_ready("2 ready\nat http://x")
    assert heard() == "READY=1\nSTATUS=2 ready at http://x"
    process.status("1 ready,\n1 starting")
    assert heard() == "STATUS=1 ready, 1 starting"
    process.alive()
    assert heard() == "WATCHDOG=1"
    process.stopping()
    assert heard() == "STOPPING=1"
    process.extend_timeout(1.5)
    assert heard() == "EXTEND_TIMEOUT_USEC=1500000"


def test_a_status_can_not_smuggle_a_message(heard: Heard) -> None:
    process.status("x\nMAINPID=1")
    assert heard().count("\n") == 0


def test_a_systemd_that_reads_nothing_stops_nobody_and_is_told_the_latest(heard: Heard) -> None:
    most = 2000  # more than net.unix.max_dgram_qlen, which systemd raises to 512
    for number in range(most):
        process.status(f"{number}")
    process.notify_ready("all")
    process.alive()
    said = [heard()]
    while said[-1] != "WATCHDOG=1":
        said.append(heard())
    statuses = [int(text.removeprefix("STATUS=")) for text in said if text.startswith("STATUS=")]
    assert statuses == sorted(statuses)
    assert statuses[-1] == most - 1
    assert said[-2:] == ["READY=1\nSTATUS=all", "WATCHDOG=1"]


def test_an_abstract_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("")  # a free abstract name (unix(7), autobind)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{systemd.getsockname()[1:].decode()}")
        process.alive()
        assert systemd.recv(100) == b"WATCHDOG=1"


def test_without_systemd_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    process.notify_ready("x")
    process.alive()


@pytest.mark.parametrize("left", [True, False], ids=["nobody reads", "gone"])
def test_a_notify_socket_without_a_reader_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, left: bool
) -> None:
    path = str(tmp_path / "notify")
    if left:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind(path)
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    process.complain.cache_clear()
    with caplog.at_level(logging.WARNING):
        process.stopping()
        process.notify_ready("x")
        process.status("x")
        process.extend_timeout(1.0)
        process.alive()
    (said,) = caplog.messages
    assert said.startswith("cannot notify systemd: "), "once"


def test_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    assert process.watchdog_interval_s() is None
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    assert process.watchdog_interval_s() == 30.0, "half of WatchdogSec="
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert process.watchdog_interval_s() == 30.0
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert process.watchdog_interval_s() is None, "another process's"
    monkeypatch.delenv("WATCHDOG_PID")
    monkeypatch.setenv("WATCHDOG_USEC", "soon")
    assert process.watchdog_interval_s() is None


def test_the_watchdog_is_kicked_when_all_have_moved(heard: Heard) -> None:
    watchdog = process.Watchdog("loop", "slots")
    watchdog.beat("loop")
    assert not watchdog.kick()
    assert watchdog.missing == {"slots"}
    watchdog.beat("slots")
    assert watchdog.kick()
    assert not watchdog.kick(), "each must move again"
    with pytest.raises(ValueError, match="'heart'"):
        watchdog.beat("heart")
    assert heard() == "WATCHDOG=1"
