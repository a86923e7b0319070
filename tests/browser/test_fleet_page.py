"""The view of all hosts: a real `fleet ingress` with HAProxy before scripted daemons, and a planted fleet of 200."""

from __future__ import annotations

import http.server
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from browser.dashboard_process import DARK, LIGHT, PHONE, POLL_S, DashboardProcess, serious
from browser.planted_fleet import PlantedIngress, planted
from support.fake_operations import Backstage, FakeOperations
from support.fleet_processes import IngressProcess
from support.visits import Open, Visit

from launcher.fleet.members import Member, MemberList, MemberState, write_members

HOSTS: Final = ("host1", "host2", "host10")
HOSTILE: Final = "<img src=x onerror=document.title='run'>"


class Daemon:
    """Answers GET /load with `load`, and requests with ok."""

    def __init__(self, name: str) -> None:
        self.name = name
        slots = ({"slot": slot, "generation": 1, "model": "m", "ready": True} for slot in range(2))
        loads = {"running": 1, "waiting": 0, "concurrency_limit": 4, "kv_usage": 0.5}
        self.load = {
            "running": 2, "waiting": 1, "predicted_ttft_s": 0.25, "instances": [slot | loads for slot in slots],
        }  # fmt: skip
        self._start()

    def _start(self, port: int = 0) -> None:
        daemon = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(json.dumps(daemon.load).encode())

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(b"{}")

            def _answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                self.close_connection = daemon.stopped.is_set()

            def log_message(self, *_: object) -> None: ...

        class Server(http.server.ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """HAProxy resets connections that it checks."""

        self.stopped = threading.Event()
        self.server = Server(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), name=self.name)
        self.thread.start()

    def stop(self) -> None:
        """Open connections end with their next answer."""
        self.stopped.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def restart(self) -> None:
        self._start(self.port)


@dataclass
class Fleet:
    ingress: IngressProcess
    dashboard: DashboardProcess
    daemons: dict[str, Daemon] = field(default_factory=dict)
    version: int = 0

    def members(self, **states: MemberState) -> None:
        self.version += 1
        members = tuple(
            Member(host=host, address=f"127.0.0.1:{daemon.port}", state=states.get(host, MemberState.READY))
            for host, daemon in self.daemons.items()
        )
        found = MemberList(epoch=1, version=self.version, members=members)
        write_members(self.ingress.folder / "members.json", found)

    def ask(self) -> None:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
        url = f"http://127.0.0.1:{self.ingress.port}/v1/chat/completions"
        asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=20) as response:
            assert response.status == 200


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Of three hosts; the daemon behind the dashboard's control socket is a fake."""
    daemons = {host: Daemon(host) for host in HOSTS}
    ingress = IngressProcess(tmp_path)
    try:
        with Backstage(str(tmp_path / "c.sock"), FakeOperations()) as stage:
            dashboard = DashboardProcess(stage.path, tmp_path, "--fleet", str(ingress.config))
            made = Fleet(ingress, dashboard, daemons)
            made.members()
            ingress.wait_open(len(HOSTS))
            yield made
            dashboard.end()
    finally:
        ingress.end()
        for daemon in daemons.values():
            daemon.stop()


def rows(visit: Visit) -> list[dict[str, str]]:
    """The table's rows, as shown."""
    found: list[dict[str, str]] = visit.page.eval_on_selector_all(
        "table[data-fleet] tbody tr",
        "all => all.map(row => Object.fromEntries([...row.children].map(c => [c.dataset.column, c.textContent])))",
    )
    return found


def names(visit: Visit) -> list[str]:
    return [row["HOST"] for row in rows(visit)]


def row(visit: Visit, host: str) -> dict[str, str]:
    return next(found for found in rows(visit) if found["HOST"] == host)


def verdict(visit: Visit) -> str:
    return visit.page.inner_text("[data-verdict]")


def test_what_happens_to_hosts_is_shown(fleet: Fleet, open_page: Open) -> None:
    """Real HAProxy, real ingress: requests, a host that drains, one whose daemon ends, an ingress that is killed."""
    with open_page(fleet.dashboard.link, **LIGHT) as visit:
        visit.soon(lambda: "OK 3/3 hosts serving" in verdict(visit), "a verdict on three hosts")
        assert visit.page.url == f"{fleet.dashboard.origin}/#/fleet"

        def chooses() -> bool:
            """While requests come."""
            fleet.ask()
            return "chooses hosts" in visit.page.inner_text("#fleet")

        visit.soon(chooses, "that this ingress chooses")
        shares = visit.soon(lambda: [s for r in rows(visit) if (s := r["SHARE"]) != "–"], "shares")
        assert len(shares) == 3
        assert sum(int(share.split()[0]) for share in shares) in range(98, 103)
        shown = row(visit, "host2")
        assert (shown["READY"], shown["WAITING"], shown["TTFT"], shown["KV"], shown["SLOW"]) == (
            "2/2", "1", "0.25 s", "50 %", "–",
        )  # fmt: skip

        fleet.members(host1=MemberState.DRAINING)
        fleet.daemons["host2"].stop()
        visit.soon(
            lambda: verdict(visit).startswith("!\nDEGRADED 1/3 hosts serving\nhost2 down · host1 draining"),
            "a host that drains and one that is down",
        )
        assert [(each["HOST"], each["STATE"]) for each in rows(visit)] == [
            ("host2", "✕down"), ("host1", "◑draining"), ("host10", "●ready"),
        ]  # fmt: skip
        assert "host2" in visit.page.inner_text("[data-problem]")

        fleet.ingress.kill()
        visit.soon(lambda: "NO ANSWER" in verdict(visit), "that the ingress does not answer")
        assert "HAProxy goes on without it" in visit.page.inner_text("#verdict")
        assert names(visit) == ["host2", "host1", "host10"]

        fleet.daemons["host2"].restart()
        fleet.members()
        fleet.ingress.start()
        visit.soon(lambda: "OK 3/3 hosts serving" in verdict(visit), "that all is well again")
        assert visit.faults(fleet.dashboard.origin) == {
            "console": [],
            "violations": [],
            "foreign requests": [],
        }


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DashboardProcess, PlantedIngress]]:
    folder = tmp_path_factory.mktemp("large")
    link = {"dashboard": "https://{host}.example.com/"}
    with (
        Backstage(str(folder / "c.sock"), FakeOperations()) as stage,
        PlantedIngress(folder / "i", planted(200), **link) as ingress,
    ):
        made = DashboardProcess(stage.path, folder, "--fleet", str(ingress.config))
        yield made, ingress
        made.end()


def test_the_view_is_accessible_in_both_schemes_and_on_a_phone(large: Any, open_page: Open) -> None:
    """Twelve hosts, each kind among them: axe takes long over 200."""
    dashboard, ingress = large
    ingress.show(planted(12))
    try:
        with open_page(dashboard.link, **LIGHT) as visit:
            visit.page.wait_for_selector("tr[data-host='host12']")
            assert {each["STATE"] for each in rows(visit)} == {"●ready", "◑draining", "✕down"}
            for window in (LIGHT, DARK, PHONE):
                visit.resize(window)
                assert serious(visit) == []
                content, width = visit.overflow()
                assert content <= width
            assert visit.faults(dashboard.origin) == {
                "console": [],
                "violations": [],
                "foreign requests": [],
            }
    finally:
        ingress.show(planted(200))


def test_two_hundred_hosts_are_sorted_by_pointer_and_keyboard(large: Any, open_page: Open) -> None:
    dashboard, _ = large
    with open_page(dashboard.link, **PHONE) as visit:
        page = visit.page
        page.wait_for_selector("tr[data-host='host200']")
        content, width = visit.overflow()
        assert content <= width
        assert names(visit)[:3] == ["host10", "host107", "host8"]  # what needs a look
        page.click("th[data-column='HOST'] button")
        assert names(visit)[:3] == ["host1", "host2", "host3"]
        assert page.get_attribute("th[data-column='HOST']", "aria-sort") == "ascending"
        page.focus("th[data-column='RUNNING'] button")
        page.keyboard.press("Enter")
        running = [each["RUNNING"] for each in rows(visit)]
        assert running[:2] == ["62", "62"]
        assert running[-2:] == ["–", "–"]
        page.keyboard.press("Space")
        running = [each["RUNNING"] for each in rows(visit)]
        assert (running[0], running[-2:]) == ("4", ["–", "–"])
        assert page.eval_on_selector_all("th[aria-sort]", "all => all.map(each => each.ariaSort)") == [
            "ascending"
        ]
        # The head and the names stay in sight.
        box = page.locator(".tall")
        box.evaluate("box => box.scrollTo(300, 3000)")
        assert page.locator("th[data-column='WAITING']").is_visible()
        corner = box.evaluate(
            "box => box.getBoundingClientRect().left - box.querySelector('tbody th')"
            ".getBoundingClientRect().left"
        )
        assert abs(corner) < 2
        assert page.get_attribute("tr[data-host='host3'] a", "href") == "https://host3.example.com/"


def test_pages_share_what_is_asked(large: Any, open_page: Open) -> None:
    dashboard, ingress = large
    with open_page(dashboard.link, **DARK) as visit:
        before, began = ingress.asked, time.monotonic()
        for _ in range(30):
            assert len(dashboard.ask("/api/fleet")["hosts"]) == 200
        assert ingress.asked - before <= 2 + (time.monotonic() - began) / POLL_S
        # The overview asks nothing of the fleet.
        visit.page.keyboard.press("o")
        visit.page.wait_for_selector("#slots:visible")
        visit.requests.clear()
        visit.soon(lambda: sum("api/now" in url for url in visit.requests) >= 2, "two polls")
        assert not [url for url in visit.requests if "api/fleet" in url]
        visit.page.keyboard.press("f")
        visit.page.wait_for_selector("#fleet:visible tr[data-host='host1']")
        assert visit.page.inner_text("h1") == "State of the fleet"


def test_texts_of_others_are_shown_as_text(open_page: Open, tmp_path: Path) -> None:
    status = planted(1)
    status["members"]["members"][0].update(host=HOSTILE, address=HOSTILE, state=HOSTILE)
    status["hosts"] = {HOSTILE: status["hosts"]["host1"]}
    with (
        Backstage(str(tmp_path / "c.sock"), FakeOperations()) as stage,
        PlantedIngress(tmp_path / "i", status, dashboard="https://{host}/") as ingress,
    ):
        dashboard = DashboardProcess(stage.path, tmp_path, "--fleet", str(ingress.config))
        with open_page(dashboard.link, **LIGHT) as visit:
            visit.soon(lambda: HOSTILE in visit.page.inner_text("#fleet"), "the name")
            assert visit.page.query_selector('img[src="x"]') is None
            assert visit.page.title() != "run"
            assert visit.page.evaluate("window.violations") == []
        dashboard.end()


def test_a_dashboard_without_a_fleet_says_so(open_page: Open, tmp_path: Path) -> None:
    with Backstage(str(tmp_path / "c.sock"), FakeOperations()) as stage:
        dashboard = DashboardProcess(stage.path, tmp_path)
        with open_page(dashboard.link, **LIGHT) as visit:
            assert visit.page.query_selector("[data-nav='fleet']:visible") is None
            visit.page.evaluate("location.hash = '#/fleet'")
            visit.soon(lambda: "started without --fleet" in visit.page.inner_text("#verdict"), "why")
        dashboard.end()
