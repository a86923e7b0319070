"""A daemon of real processes: its configuration, its start, and waiting for what it does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from support.forked_launcher import LauncherProcess, begin
from support.ports import free_port
from support.verbs import run_verb

from launcher.base.errors import LauncherError
from launcher.control.client import ControlClient

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")


# Longest wait of a test for an expected event; generous, because other jobs may use the cpus.
SOON_S = 120.0
# Between two polls of `eventually`: the first pause, and each as a multiple of the one before.
FIRST_PAUSE_S = 0.05
LONGER = 1.2


def eventually(
    check: Callable[[], Any], within_s: float = SOON_S, what: str = "", *, pause_s: float = 0.2
) -> Any:
    """Polls `check` and returns its first true value; fails the test after `within_s`. `pause_s`: the longest pause between
    two polls."""
    deadline = time.monotonic() + within_s
    pause = FIRST_PAUSE_S
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what or check}"
        time.sleep(min(pause, pause_s))
        pause *= LONGER


class DaemonProcess:
    """`numa-launcher serve` as a child process, and its command line."""

    def __init__(
        self,
        folder: Path,
        config: str,
        environ: dict[str, str] | None = None,
        program: tuple[str, ...] = (),
    ) -> None:
        """`program`: the words after Python's own name, for another program than `numa-launcher`."""
        self.folder = folder
        self._program = program
        self.port = free_port()
        self.socket = folder / "c.sock"
        self.config = folder / "config.toml"
        self.config.write_text(
            config
            + f'\n[proxy]\nlisten = ["127.0.0.1:{self.port}"]\n[control]\nsocket = "{self.socket}"\n'
            + '[logging]\nlevel = "debug"\n'
        )
        self.log = folder / "daemon.log"
        self._environ = os.environ | {"STATE_DIRECTORY": str(folder / "state")} | (environ or {})
        self.seen: set[int] = set()
        self.process = self._serve()

    def _serve(self) -> subprocess.Popen[bytes] | LauncherProcess:
        with self.log.open("ab") as log:
            return begin(("serve", "-c", str(self.config)), log, self._environ, self._program)

    def restart(self) -> None:
        """Starts it again after its process has ended."""
        assert self.process.wait(SOON_S) is not None
        self.process = self._serve()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cli(self, *words: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Runs one verb against this daemon; in a process of its own where it has a `timeout`."""
        verb, *rest = words
        told = (verb, *rest, "--socket", str(self.socket))
        if timeout is None:
            return run_verb(*told)
        return subprocess.run(
            [sys.executable, "-m", "launcher", *told],
            check=False, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip

    def get(self, path: str) -> dict[str, Any]:
        """The answer on the control socket. Raises LauncherError."""
        return ControlClient(str(self.socket)).get(path)

    def status(self) -> dict[str, Any]:
        """The output of `status --json`; {} while the daemon does not answer."""
        try:
            return self.get("/status")
        except LauncherError:
            return {}

    def slot(self, slot: int) -> dict[str, Any]:
        return self.status()["slots"][slot]

    def wait_ready(self, count: int, within_s: float = SOON_S) -> dict[str, Any]:
        """Status once `count` slots are ready."""

        def ready() -> dict[str, Any] | None:
            assert self.process.poll() is None, self.log.read_text()
            status = self.status()
            return status if status and status["ready"] == count else None

        status = eventually(ready, within_s, f"{count} ready, see {self.log}")
        self.descendants()
        return status

    def descendants(self) -> set[int]:
        """Pids of the daemon's descendants, now and at earlier calls."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.seen |= {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}
        return self.seen

    def left_over(self) -> list[str]:
        """Descendants that still run."""
        alive = []
        for pid in self.descendants() - {self.process.pid}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(f"{pid} {' '.join(process.cmdline())[:100]}")
        return alive

    def ask(self, path: str, body: dict[str, Any] | None = None, **fields: str | None) -> tuple[int, str]:
        """Status and text of the endpoint's answer to GET, or to POST with a `body`. Raises urllib.error.URLError.

        `fields`: of the head, with "_" for "-"."""
        head = {name.replace("_", "-"): value for name, value in fields.items() if value is not None}
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"} | head,
        )
        try:
            with urllib.request.urlopen(request, timeout=SOON_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def answers(self) -> bool:
        """Whether a chat with the model `fake` gets an answer with a body. Raises urllib.error.URLError."""
        body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        status, text = self.ask("/v1/chat/completions", body)
        return status == 200 and bool(text)

    def metrics(self) -> str:
        """The metrics page of the endpoint."""
        status, page = self.ask("/metrics")
        assert status == 200
        return page

    def post(self, slot: int, path: str, body: dict[str, Any]) -> Any:
        """Sends a request to one instance directly."""
        address = self.slot(slot)["address"].removeprefix("unix:")

        async def ask() -> Any:
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(address)) as session,
                session.post(f"http://localhost{path}", json=body) as response,
            ):
                return await response.json()

        with contextlib.suppress(aiohttp.ClientError):
            return asyncio.run(ask())
        return None

    def end(self) -> None:
        """Stops it and checks that no process is left."""
        self.descendants()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(SOON_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"the daemon did not end: {self.log.read_text()[-3000:]}") from None
            assert self.process.returncode == 0, self.log.read_text()[-3000:]
        self.nothing_left()

    def nothing_left(self) -> None:
        """Waits until every descendant has ended."""
        eventually(lambda: not self.left_over(), what=f"left over: {self.left_over()}")


def fake_config(
    *arguments: str, instances: int = 2, more: str = "", where: str = "--uds", max_num_seqs: int = 64
) -> str:
    """A configuration for the fake engine."""
    command = json.dumps(
        [sys.executable, str(FAKE_ENGINE), where, f"{{{where[2:]}}}", "--model", "{name}", *arguments]
    )
    return f"""
[[models]]
name = "fake"
path = "fake"
max_num_seqs = {max_num_seqs}
[layout]
instances_per_socket = {instances}
[engine]
kind = "command"
command = {command}
{more}
"""
