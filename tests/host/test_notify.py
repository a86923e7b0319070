"""sd_notify against a real datagram socket, as systemd has it."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.host import notify

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
    notify.ready("2 ready\nat http://x")
    assert heard() == "READY=1\nSTATUS=2 ready at http://x"
    notify.status("1 ready,\n1 starting")
    assert heard() == "STATUS=1 ready, 1 starting"
    notify.alive()
    assert heard() == "WATCHDOG=1"
    notify.stopping()
    assert heard() == "STOPPING=1"
    notify.extend_timeout(1.5)
    assert heard() == "EXTEND_TIMEOUT_USEC=1500000"


def test_a_status_can_not_smuggle_a_message(heard: Heard) -> None:
    notify.status("x\nMAINPID=1")
    assert heard().count("\n") == 0


def test_without_systemd_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify.ready("x")
    notify.alive()


@pytest.mark.parametrize("left", [True, False], ids=["nobody reads", "gone"])
def test_a_full_notify_socket_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, left: bool
) -> None:
    path = str(tmp_path / "notify")
    if left:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind(path)
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    notify.complain.cache_clear()
    with caplog.at_level(logging.WARNING):
        notify.stopping()
        notify.ready("x")
        notify.status("x")
        notify.extend_timeout(1.0)
        notify.alive()
    (said,) = caplog.messages
    assert said.startswith("cannot notify systemd: "), "once"


def test_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    assert notify.watchdog_interval_s() is None
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    assert notify.watchdog_interval_s() == 30.0, "half of WatchdogSec="
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert notify.watchdog_interval_s() == 30.0
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert notify.watchdog_interval_s() is None, "another process's"
    monkeypatch.delenv("WATCHDOG_PID")
    monkeypatch.setenv("WATCHDOG_USEC", "soon")
    assert notify.watchdog_interval_s() is None


def test_the_watchdog_is_kicked_when_all_have_moved(heard: Heard) -> None:
    watchdog = notify.Watchdog("loop", "slots")
    watchdog.beat("loop")
    assert not watchdog.kick()
    assert watchdog.missing == {"slots"}
    watchdog.beat("slots")
    assert watchdog.kick()
    assert not watchdog.kick(), "each must move again"
    with pytest.raises(ValueError, match="'heart'"):
        watchdog.beat("heart")
    assert heard() == "WATCHDOG=1"
