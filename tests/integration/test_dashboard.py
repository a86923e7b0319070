"""The dashboard before a real daemon, and behind a real nginx as docs/dashboard.md sets it up."""

from __future__ import annotations

import asyncio
import base64
import getpass
import json
import os
import re
import shutil
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from integration.dashboard_pages import pages
from support.certificates import certify
from support.daemon_process import DaemonProcess, eventually
from support.ports import free_port

PAGE = Path(__file__).parents[2] / "docs" / "dashboard.md"
LOGIN = {"Authorization": "Basic " + base64.b64encode(b"ada:s3cret").decode()}


@contextmanager
def dashboard(control: Path, listen: str) -> Iterator[tuple[str, psutil.Process]]:
    """The link that it prints, and its process."""
    command = [sys.executable, "-m", "launcher", "dashboard", "--socket", str(control), "--listen", listen]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), psutil.Process(process.pid)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


class Page:
    """One open page."""

    def __init__(self, link: str) -> None:
        self._url, _, token = link.partition("#token=")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._items: dict[int, dict[str, Any]] = {}
        self._newest = 0

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(
            urllib.request.Request(f"{self._url}api/{path}", headers=self._headers), timeout=60
        ) as answer:
            return json.load(answer)

    def now(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"now?events_after={self._newest}")
        self._items |= {item["number"]: item for item in found["changes"]}
        self._newest = found["newest_event"]
        return found

    def items(self, **fields: Any) -> list[dict[str, Any]]:
        self.now()
        return [
            item
            for item in self._items.values()
            if all(item[name] == value for name, value in fields.items())
        ]


def test_a_killed_engine_is_one_item(start: Callable[..., DaemonProcess]) -> None:
    daemon = start()
    daemon.wait_ready(2)
    with dashboard(daemon.socket, "127.0.0.1:0") as (link, _):
        page = Page(link)
        # A page that waits longer than a second for the daemon gets a frame without its answer.
        eventually(lambda: page.now()["verdict"]["line"].startswith("OK 2/2 ready"))
        os.kill(daemon.slot(1)["pid"], signal.SIGKILL)

        def crash() -> list[dict[str, Any]]:
            return [item for item in page.items(slot=1) if item["cause"] and "ready again" in item["title"]]

        (item,) = eventually(crash)
        assert len(page.items(slot=1, cause=item["cause"])) == 1
        assert item["remedy"]
        assert item["level"] == "error"
        assert [
            event["fields"]["state"]
            for event in item["events"]
            if "fields" in event and "state" in event["fields"]
        ][-1] == "ready"
        assert len(item["events"]) >= 5
        why = page.get("slots/1")["why"]
        assert (why["cause"]["name"], why["of_generation"]) == (item["cause"], 1)

        daemon.cli("drain", "0")
        (drained,) = eventually(lambda: page.items(slot=0, user=getpass.getuser()))
        assert drained["title"] == f"slot 0: drain by {getpass.getuser()}, draining"
        assert "numa-launcher resume 0" in [
            problem["remedy"] for problem in page.now()["verdict"]["problems"]
        ]

        daemon.process.send_signal(signal.SIGSTOP)
        silent = eventually(lambda: (found := page.now())["answers"] is False and found)
        daemon.process.send_signal(signal.SIGCONT)
        assert silent["verdict"]["line"].startswith("NO ANSWER for ")
        assert silent["status"]["ready"] == 1
        assert silent["age_s"] > 1
        eventually(lambda: page.now()["answers"])


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@pytest.mark.release
def test_twenty_pages_cost_little(start: Callable[..., DaemonProcess]) -> None:
    """Shares of a core, by CPU time; rounds with and without pages alternate."""
    daemon = start()
    daemon.wait_ready(2)
    round_s, rounds = 20.0, 3
    with dashboard(daemon.socket, "127.0.0.1:0") as (link, process):
        asyncio.run(pages(link, 20, 3))
        spent: dict[int, list[tuple[float, float]]] = {0: [], 20: []}
        for count in (0, 20) * rounds:
            before = cpu_s(psutil.Process(daemon.process.pid)), cpu_s(process)
            asyncio.run(pages(link, count, round_s))
            after = cpu_s(psutil.Process(daemon.process.pid)), cpu_s(process)
            spent[count].append(((after[0] - before[0]) / round_s, (after[1] - before[1]) / round_s))
    idle = statistics.median(of_daemon for of_daemon, _ in spent[0])
    of_daemon, of_page = (statistics.median(column) for column in zip(*spent[20], strict=True))
    print(f"20 pages: dashboard {of_page:.2%} of a core, daemon {of_daemon - idle:.2%} more than {idle:.2%}")
    assert of_page <= 0.05
    assert of_daemon - idle <= 0.01


def nginx_configuration(folder: Path, port: int, own: Path) -> Path:
    """The server of docs/dashboard.md, with this test's port and files, in a complete configuration."""
    server = re.search(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert server is not None
    text = server[1].replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
    text = text.replace("/etc/nginx/", f"{folder}/").replace(
        "/run/numa-launcher-dashboard/http.sock", str(own)
    )
    assert str(own) in text
    file = folder / "nginx.conf"
    temporary = "".join(
        f"{kind}_temp_path {folder};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = f"user {getpass.getuser()};\n" if os.geteuid() == 0 else ""
    file.write_text(
        f"{user}daemon off;\npid {folder}/pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}{text}}}\n"
    )
    return file


def status_of(url: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    unverified = ssl._create_unverified_context()  # noqa: S323  the certificate is this test's own
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, method=method, headers=headers), timeout=60, context=unverified
        ) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_behind_nginx(tmp_path: Path) -> None:
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    assert nginx is not None, "apt-get install nginx"
    port, own = free_port(), tmp_path / "http.sock"
    certify(tmp_path, "dashboard")
    hashed = subprocess.run(
        ["openssl", "passwd", "-apr1", "s3cret"], check=True, capture_output=True, text=True
    ).stdout
    (tmp_path / "dashboard.htpasswd").write_text(f"ada:{hashed}")
    configuration = nginx_configuration(tmp_path, port, own)
    url = f"https://127.0.0.1:{port}/"
    with (
        dashboard(tmp_path / "none", f"unix:{own}"),
        subprocess.Popen([nginx, "-p", str(tmp_path), "-c", str(configuration)]) as running,
    ):
        try:
            eventually(lambda: answers(port))
            assert status_of(url)[0] == status_of(f"{url}api/now")[0] == 401
            code, page = status_of(url, **LOGIN)
            assert (code, b"<!doctype html>" in page.lower()) == (200, True)
            code, now = status_of(f"{url}api/now", **LOGIN, **{"Sec-Fetch-Site": "same-origin"})
            assert (code, json.loads(now)["answers"]) == (200, False)
            assert status_of(f"{url}api/now", **LOGIN, **{"Sec-Fetch-Site": "cross-site"})[0] == 403
            assert status_of(f"{url}api/now", "POST", **LOGIN)[0] == 405
            assert status_of(f"{url}static/app.js", **LOGIN)[0] == 200
        finally:
            running.terminate()
