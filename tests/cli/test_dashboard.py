"""`numa-launcher dashboard` as it is typed."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.daemon_process import eventually
from support.fake_operations import Backstage, FakeOperations

from launcher.cli import main

VERB = [sys.executable, "-m", "launcher", "dashboard"]
LINK = re.compile(r"(http://127\.0\.0\.1:(\d+)/)#token=([\w-]{43})\n")


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*VERB, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_from_start_to_ctrl_c(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a daemon it serves, too, and says so; a daemon that comes later is seen."""
    path = str(tmp_path / "c.sock")
    with running("--listen", "127.0.0.1:0", "--socket", path) as process:
        link = LINK.fullmatch(line(process))
        assert link is not None
        assert f"ssh -L {link[2]}:127.0.0.1:{link[2]} HOST" in line(process)
        assert f"cannot reach numa-launcher on '{path}': no such socket" in line(process)
        assert "start it" in line(process)
        with Backstage(path, FakeOperations()):
            asked = urllib.request.Request(
                f"{link[1]}api/now", headers={"Authorization": f"Bearer {link[3]}"}
            )

            def line_now() -> str:
                with urllib.request.urlopen(asked, timeout=60) as answer:
                    return str(json.load(answer)["verdict"]["line"])

            # A page that waits longer than a second for the daemon gets a frame without its answer.
            eventually(lambda: line_now().startswith("OK 2/2 ready"))
        assert main(["dashboard", "--listen", f"127.0.0.1:{link[2]}"]) == 2
        why, remedy = capsys.readouterr().err.splitlines()
        assert why == f"cannot listen on '127.0.0.1:{link[2]}': address already in use"
        assert "choose another address with --listen" in remedy
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert line(process) == ""


def test_on_a_unix_socket_malformed_requests_are_refused_and_not_logged(tmp_path: Path) -> None:
    """Anyone who reaches the port could fill the log."""
    own = tmp_path / "d.sock"
    malformed = (
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b", b"GET /" + b"a" * 9000 + b" HTTP/1.1", b"FOO / HTTP/1.1",
        b"\x16\x03\x01<img>",
    )  # fmt: skip
    with running("--listen", f"unix:{own}", "--socket", str(tmp_path / "none")) as process:
        said = [line(process) for _ in range(4)]
        assert said[0] == f"unix:{own}\n"
        assert f"ssh -L 8430:{own} HOST" in said[1]
        assert said[2].startswith("cannot reach numa-launcher")
        for request in malformed:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(own))
                client.sendall(request + b"\r\n\r\n")
                assert client.recv(100).startswith(b"HTTP/1.0 400 ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert line(process) == ""
    assert not own.exists()


def test_with_a_fleet(tmp_path: Path) -> None:
    """The link opens the view of all hosts, which says that no ingress runs."""
    config = tmp_path / "fleet.toml"
    config.write_text(f"state = '{tmp_path}'\n[ingress]\nhosts = ['127.0.0.1']\n")
    with running(
        "--listen", "127.0.0.1:0", "--socket", str(tmp_path / "c"), "--fleet", str(config)
    ) as process:
        link = re.fullmatch(r"(\S+/)#token=([\w-]{43})&view=fleet\n", line(process))
        assert link is not None
        asked = urllib.request.Request(f"{link[1]}api/fleet", headers={"Authorization": f"Bearer {link[2]}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            found = json.load(answer)
        assert found["endpoints"] == ["http://127.0.0.1:8000"]
        assert (
            f"cannot reach the ingress on '{tmp_path}/ingress.sock': no such file" in found["verdict"]["line"]
        )


def test_a_wrong_file_of_a_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "--fleet", str(tmp_path / "none.toml")]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["0.0.0.0:8430", "8430", "unix:", "example.com:1"])
def test_a_wrong_address(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "--listen", address]) == 2
    why, remedy = capsys.readouterr().err.splitlines()
    assert why.startswith(f"cannot listen on '{address}': ")
    assert "127.0.0.1:PORT" in remedy
