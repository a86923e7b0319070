"""One question to all hosts."""

from __future__ import annotations

import threading

import pytest
from fake_operations import Backstage, FakeOperations

from launcher.control.client import UnreachableError
from launcher.errors import LauncherError
from launcher.fleet.hosts import ask_socket, each


def test_results_and_errors_by_host_in_order() -> None:
    def work(host: str) -> str:
        if host == "b":
            raise LauncherError("cannot do it", "do it otherwise")
        return host.upper()

    done, failed = each(["c", "b", "a"], work)
    assert list(done.items()) == [("c", "C"), ("a", "A")]
    assert [(host, error.message) for host, error in failed.items()] == [("b", "cannot do it")]


def test_all_are_asked_at_once() -> None:
    together = threading.Barrier(20, timeout=30)
    done, failed = each([str(number) for number in range(20)], lambda _: together.wait())
    assert len(done) == 20
    assert not failed


def test_an_agent_answers_what_its_daemon_answers(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("s") / "c.sock")
    with Backstage(path, FakeOperations()):
        assert ask_socket(path, "GET", "/status")["ready"] == 2
        assert ask_socket(path, "POST", "/slots/1/verify", b"{}")["verified"]["ok"]
    with pytest.raises(UnreachableError):
        ask_socket(path, "GET", "/status")
