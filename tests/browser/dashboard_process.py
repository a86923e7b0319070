"""`numa-launcher dashboard` as a child process, with a daemon behind it."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import psutil
from axe_core_python.sync_playwright import Axe
from support.daemon_process import SOON_S, DaemonProcess, eventually
from support.forked_launcher import begin
from support.visits import Visit

LIGHT: Final = {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"}
DARK: Final = {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"}
PHONE: Final = {"viewport": {"width": 375, "height": 800}, "color_scheme": "light", "device_scale_factor": 2}
# One page has them one after the other; a phone's scale is its context's: the first.
WINDOWS: Final = {"phone": PHONE, "light": LIGHT, "dark": DARK}
# By words, not by level: on a machine that others share, a remark about their processes is no fault.
WELL: Final = '[data-verdict]:has-text("OK 2/2 ready")'
TROUBLED: Final = '[data-verdict]:has-text("DEGRADED")'
# Between two requests of a page.
POLL_S: Final = 2.0
T = TypeVar("T")


class DashboardProcess:
    """Serves the page for the daemon behind one control socket, on a free loopback port."""

    def __init__(self, control_socket: Path | str, folder: Path, *more: str) -> None:
        self.log = folder / "dashboard.log"
        words = ["dashboard", "--socket", str(control_socket), "--listen", "127.0.0.1:0", *more]
        with self.log.open("wb") as log:
            self.process = begin(words, log)
        self.link = str(eventually(self._link, what=f"no link, see {self.log}"))

    def _link(self) -> str | None:
        assert self.process.poll() is None, self.log.read_text()
        return next((line for line in self.log.read_text().splitlines() if line.startswith("http")), None)

    @property
    def origin(self) -> str:
        return f"http://{urlsplit(self.link).netloc}"

    @property
    def port(self) -> int:
        return int(urlsplit(self.link).port or 0)

    @property
    def token(self) -> str:
        return urlsplit(self.link).fragment.removeprefix("token=").partition("&")[0]

    def cpu_s(self) -> float:
        """CPU time so far, seconds."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def ask(self, path: str) -> Any:
        """The JSON at a path of the API."""
        asked = urllib.request.Request(self.origin + path, headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(asked, timeout=SOON_S) as response:
            return json.load(response)

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(SOON_S) in {0, -15}, self.log.read_text()


class Running:
    """A daemon with two instances, and its dashboard."""

    def __init__(self, folder: Path, config: str, environ: dict[str, str] | None = None) -> None:
        self.daemon = DaemonProcess(folder, config, environ)
        self.daemon.wait_ready(2)
        self.dashboard = DashboardProcess(self.daemon.socket, folder)

    @property
    def link(self) -> str:
        return self.dashboard.link

    def chat(self, count: int = 1, **more: Any) -> None:
        """Whole answers, one after the other."""
        body = json.dumps({"model": "fake", "messages": [], "max_tokens": 4, **more}).encode()
        for _ in range(count):
            head = {"Content-Type": "application/json"}
            asked = urllib.request.Request(f"{self.daemon.url}/v1/chat/completions", body, head)
            with urllib.request.urlopen(asked) as response:
                response.read()

    def end(self) -> None:
        self.dashboard.end()
        self.daemon.end()


def serious(visit: Visit) -> list[str]:
    """What axe finds that keeps people out."""
    # Elements without a violation are not described: that takes two thirds of the time on a large page.
    found = Axe().run(visit.page, options={"resultTypes": ["violations"]})
    assert found["passes"]
    return [
        f"{each['id']}: {node['html'][:120]}"
        for each in found["violations"]
        if each["impact"] in {"serious", "critical"}
        for node in each["nodes"]
    ]


def in_thread(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine. In this thread Playwright's own event loop runs."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, work).result()
