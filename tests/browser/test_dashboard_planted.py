"""The dashboard of a planted machine: 2 sockets, 512 CPUs, and what no test machine can be made to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from browser.dashboard_process import LIGHT, PHONE, WINDOWS, DashboardProcess, serious
from browser.planted import MISPLACED, PlantedMachine
from playwright.sync_api import Route
from support.fake_operations import Backstage
from support.visits import Open

from launcher.engines.causes import Cause, Retry

HOSTILE: Final = "<img src=x onerror=document.title='run'>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("p")


@pytest.fixture(scope="module")
def large(folder: Path) -> Iterator[DashboardProcess]:
    with Backstage(str(folder / "large.sock"), PlantedMachine()) as stage:
        made = DashboardProcess(stage.path, folder)
        yield made
        made.end()


def test_a_large_machine_fits(large: DashboardProcess, open_page: Open) -> None:
    with open_page(large.link, **PHONE) as visit:
        visit.page.wait_for_selector("#machine [data-cpus]")
        for window, given in WINDOWS.items():
            visit.resize(given)
            content, width = visit.overflow()
            assert content <= width, window
            assert visit.page.eval_on_selector_all("#machine [data-cpus]", "all => all.length") == 256, window
            assert window != "dark" or serious(visit) == []  # axe takes long over so many cores
        assert visit.faults(large.origin) == {"console": [], "violations": [], "foreign requests": []}


def test_its_first_view_weighs_little(large: DashboardProcess, open_page: Open) -> None:
    with open_page(large.link, usable=False, **LIGHT) as visit:
        session = visit.page.context.new_cdp_session(visit.page)
        sizes: list[float] = []
        session.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
        session.send("Network.enable")
        session.send("Network.setCacheDisabled", {"cacheDisabled": True})
        visit.page.reload()
        visit.page.wait_for_selector("#machine [data-cpus]")
        visit.page.wait_for_selector("#charts svg")
        visit.page.wait_for_timeout(300)
    print(f"{sum(sizes):.0f} bytes in {len(sizes)} requests")
    assert sum(sizes) <= 100_000


def test_memory_off_its_node_and_a_thread_off_its_cpus_are_marked(
    large: DashboardProcess, open_page: Open
) -> None:
    with open_page(large.link, **LIGHT) as visit:
        visit.page.wait_for_selector(f'tr[data-slot="{MISPLACED}"] [data-misplaced]')
        visit.page.wait_for_selector("#machine [data-cpus][data-misplaced]")
        visit.page.wait_for_selector(".numa-node[data-off-node]")
        problems = visit.page.eval_on_selector_all(
            "[data-problem]", "all => all.map(each => each.textContent)"
        )
        assert any("memory" in text and "87 %" in text for text in problems)
        assert any("thread" in text for text in problems)
        visit.page.evaluate(f"location.hash = '#/slot/{MISPLACED}'")
        differences = visit.page.wait_for_selector("#slot:visible .scroll")
        assert differences is not None
        # A list of 30 CPUs breaks: what was found is not out of sight.
        assert differences.evaluate("box => box.scrollWidth <= box.clientWidth")


def test_keys_have_their_tokens(large: DashboardProcess, open_page: Open) -> None:
    with open_page(large.link, **LIGHT) as visit:
        visit.page.evaluate("location.hash = '#/usage'")
        row = visit.page.wait_for_selector('#usage tr:has-text("chat-ui"):has-text("61,234")')
        assert row is not None
        assert row.inner_text().split() == ["chat-ui", "61,234", "38", "59,000,000", "25,000,000"]


def test_texts_of_others_are_shown_as_text(open_page: Open, folder: Path) -> None:
    """In every place where a daemon repeats what others wrote."""
    cause = Cause(HOSTILE, HOSTILE, HOSTILE, Retry.NOW, (HOSTILE,))
    machine = PlantedMachine(model=HOSTILE, cause=cause, log_lines=(HOSTILE,))
    with Backstage(str(folder / "hostile.sock"), machine) as stage:
        dashboard = DashboardProcess(stage.path, folder)
        with open_page(dashboard.link, **LIGHT) as visit:
            visit.page.wait_for_selector("[data-change]")
            for view in ("#/", "#/slot/3", "#/usage", f"#/request/{HOSTILE}"):
                visit.page.evaluate(f"location.hash = {json.dumps(view)}")
                if view == "#/usage":
                    visit.page.wait_for_selector("#usage:visible [data-view-title]")
                else:
                    visit.soon(lambda: HOSTILE in visit.page.inner_text("main"), view)
                assert visit.page.query_selector('img[src="x"]') is None
            assert visit.page.title() != "run"
            assert visit.page.evaluate("window.violations") == []
        dashboard.end()


# --- a day --------------------------------------------------------------------------------------

POLLS: Final = 120
ROWS_PER_POLL: Final = 360  # of 2 s: 120 polls are a day
# More than the page keeps come in a third of the day.
CHANGES_PER_POLL: Final = 16
# Timers of the page run this much faster.
FASTER: Final = 200
LOOKS: Final = 6


@pytest.mark.long
def test_a_day_in_one_page_takes_no_more_memory(large: DashboardProcess, open_page: Open) -> None:
    """The page polls a clock that is shortened to a day in a few seconds; every answer has new figures and events."""
    machine = PlantedMachine(well=True)
    day = _Day(machine, large)
    with open_page("about:blank", usable=False, **LIGHT) as visit:
        page = visit.page
        page.add_init_script(
            f"const real = setTimeout; window.setTimeout = (what, ms, ...more) => real(what, ms / {FASTER}, ...more);"
        )
        page.route("**/api/**", day.answer)
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        page.goto(large.link)

        def sizes_after(polls: int) -> tuple[float, float]:
            """The least of several looks: an answer that is being read is no leak."""
            while day.polls < polls:
                page.wait_for_timeout(50)
            looks = []
            for _ in range(LOOKS):
                session.send("HeapProfiler.collectGarbage")
                found = {
                    each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]
                }
                looks.append((found["JSHeapUsedSize"], found["Nodes"]))
                page.wait_for_timeout(70)
            heaps, nodes = zip(*looks, strict=True)
            return min(heaps), min(nodes)

        # After a third of the day every list of the page is full.
        heap, nodes = sizes_after(POLLS // 3)
        later_heap, later_nodes = sizes_after(POLLS)
        assert visit.errors == []
    print(f"heap {heap / 1e6:.1f} -> {later_heap / 1e6:.1f} MB, nodes {nodes:.0f} -> {later_nodes:.0f}")
    assert later_heap <= 1.3 * heap
    assert later_nodes <= 1.1 * nodes


class _Day:
    """Answers the page's requests; the clock goes on with each poll."""

    def __init__(self, machine: PlantedMachine, dashboard: DashboardProcess) -> None:
        self.machine = machine
        self.polls = 0
        self.now = dashboard.ask("/api/now")
        self.topology = dashboard.ask("/api/topology")
        self.ms = int(self.now["time"] * 1000) // 2000 * 2000

    def answer(self, route: Route) -> None:
        path = route.request.url.split("/api/", 1)[1]
        if path.startswith("now"):
            self.polls += 1
            self.ms += ROWS_PER_POLL * 2000
            route.fulfill(json=self._now())
        elif path.startswith("history"):
            after = int(path.split("after=", 1)[1].split("&", 1)[0])
            route.fulfill(json=self.machine.rows(after, newest=self.ms))
        else:
            route.fulfill(json=self.topology)

    def _now(self) -> dict[str, Any]:
        newest = self.ms + CHANGES_PER_POLL
        items = [self._item(number) for number in range(self.ms, newest)]
        return {**self.now, "time": self.ms / 1000, "changes": items, "newest_event": newest - 1}

    def _item(self, number: int) -> dict[str, Any]:
        slot, at = number % 8, number / 1000
        event = {
            "number": number,
            "time": at,
            "level": "warning",
            "message": f"event {number}",
            "fields": {"slot": slot},
        }
        return {
            "number": number, "time": at, "until": at, "level": "warning", "slot": slot, "title": f"slot {slot}: {number}",
            "cause": None, "remedy": None, "user": None, "events": [event],
        }  # fmt: skip
