"""The machine's picture, the charts and the time line with planted state: 2 sockets with 512 cpus, in the browser."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Route, expect

import launcher.dashboard
from launcher.dashboard import server

State = dict[str, Any]

STATIC = Path(launcher.dashboard.__file__).parent / "static"
ORIGIN = "http://127.0.0.1:9"
TYPES = {".js": "text/javascript", ".css": "text/css"}
GIB = 2**30
NODE_BYTES = 768 * GIB
CORES = 256
# 2026-11-23 12:00:00 UTC; rows every 2 s for an hour up to it
NOON = 1_795_435_200
STEP = 2_000
COLUMNS = [
    "requests_per_s",
    "failed_per_s",
    "output_tokens_per_s",
    "first_token_p50_s",
    "ready",
    "memory_free_bytes",
]
HOSTILE = "<img src=x onerror=document.title='run'>"
PAGE = """<!doctype html><html lang="en"><title>-</title><link rel="stylesheet" href="/static/style.css">
<link rel="stylesheet" href="/static/picture.css">
<main><section id="machine"><h2 id="machine-title">Machine</h2></section>
<section id="timeline"><h2 id="timeline-title">What changed</h2></section>
<section id="charts"><h2 id="charts-title">History</h2></section></main></html>"""
MOUNT = """async (state) => {
  const names = ["machine", "timeline", "charts"];
  const [{createStore}, ...views] = await Promise.all(["store", ...names].map((n) => import(`/static/${n}.js`)));
  for (const section of document.querySelectorAll("section")) section.replaceChildren(section.firstChild);
  location.hash = "";
  window.store = createStore();
  views.forEach((view, index) => view.mount(document.getElementById(names[index]), window.store));
  window.store.update(state);
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 20))));
}"""
UPDATE = """async (part) => {
  window.store.update(part);
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 20)));
}"""


def topology() -> State:
    """Core n has cpus n and n + 256; 8 cores share an L3; two cores of each socket are reserved."""
    cores = [
        {"cpus": [core, core + CORES], "node": core // 128, "socket": core // 128, "l3": core // 8}
        for core in range(CORES)
    ]
    return {
        "name": "planted", "cpu_count": 512, "cores": cores, "allowed": "0-511", "reserved": "0-1,128-129,256-257,384-385",
        "sockets": [{"socket": n, "nodes": [n]} for n in (0, 1)],
        "nodes": [{"node": n, "socket": n, "memory_bytes": NODE_BYTES, "cpus": "-"} for n in (0, 1)],
    }  # fmt: skip


def slots() -> list[State]:
    cpus = ("2-65", "66-127", "130-193", "194-255")
    return [
        {
            "slot": n,
            "model": "m",
            "state": "ready",
            "intent": "run",
            "in_flight": 1,
            "cpus": cpus[n],
            "node": n // 2,
        }
        for n in range(4)
    ]


def machine() -> State:
    parts = {
        "weights_bytes": 32,
        "kv_cache_bytes": 400,
        "other_bytes": 40,
        "foreign_bytes": 0,
        "free_bytes": 296,
    }
    nodes = [
        {"node": n, "total_bytes": NODE_BYTES, **{name: size * GIB for name, size in parts.items()}}
        for n in (0, 1)
    ]
    placed = [
        {
            "slot": n,
            "node_bytes": {str(n // 2): 200 * GIB},
            "off_node_bytes": 0,
            "misplaced": [],
            "misplaced_threads": 0,
        }
        for n in range(4)
    ]
    return {"time": NOON, "busy": [0.5] * 512, "nodes": nodes, "slots": placed}


def change(number: int, at: float, level: str = "info", slot: int | None = None, **more: Any) -> State:
    events = [{"number": number, "time": at, "message": f"event {number}", "fields": {}}]
    found = {
        "number": number,
        "time": at,
        "until": at,
        "level": level,
        "slot": slot,
        "title": f"change {number}",
    }
    return found | {"cause": None, "remedy": None, "user": None, "events": events} | more


def killed() -> State:
    evidence = ["Out of memory: Killed process 4000 (VLLM::EngineCor)", HOSTILE]
    events = [
        {
            "number": 2,
            "time": NOON - 1_800,
            "message": f"slot 1: exited {HOSTILE}",
            "fields": {"evidence": evidence},
        },
        {"number": 3, "time": NOON - 1_790, "message": "slot 1: ready", "fields": {}},
    ]
    return change(
        2, NOON - 1_800, "error", 1, until=NOON - 1_730, title=f"slot 1: killed {HOSTILE}", events=events,
        cause="killed_oom", remedy="run `numa-launcher why 1`", user="root",
    )  # fmt: skip


def history(gap: tuple[int, int] = (600, 700)) -> State:
    """An hour of rows every 2 s; those in `gap` are missing. Values are the row's index, or constant."""
    indices = [index for index in range(1800) if not gap[0] <= index < gap[1]]
    rows = [[(NOON - 3_598) * 1000 + index * STEP, index, 0, 3_000, 0.25, 4, 100 * GIB] for index in indices]
    return {"1h": {"columns": COLUMNS, "rows": rows, "step_ms": STEP, "newest": rows[-1][0]}}


def planted() -> State:
    now = {
        "time": NOON,
        "age_s": 0,
        "answers": True,
        "status": {"slots": slots(), "cost": None},
        "machine": machine(),
    }
    changes = [change(1, NOON - 3_000), killed(), change(5, NOON - 600, "warning", 2, user="alice")]
    return {"topology": topology(), "now": now, "history": history(), "changes": changes}


@pytest.fixture(scope="module")
def opened(browser: Browser) -> Iterator[Page]:
    """A page of the three views under the dashboard's headers; each test plants its own state."""

    def answer(route: Route) -> None:
        name = route.request.url.removeprefix(f"{ORIGIN}/static/")
        if name == route.request.url:
            route.fulfill(content_type="text/html", body=PAGE, headers=server.HEADERS)
            return
        file = STATIC / name
        route.fulfill(content_type=TYPES[file.suffix], body=file.read_text(encoding="utf-8"))

    with browser.new_context(timezone_id="UTC", viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        page.route("**/*", answer)
        page.goto(ORIGIN)
        yield page


@pytest.fixture
def page(opened: Page) -> Iterator[Page]:
    errors: list[str] = []

    def failed(error: Error) -> None:
        errors.append(str(error))

    def said(message: ConsoleMessage) -> None:
        if message.type == "error":
            errors.append(message.text)

    opened.on("pageerror", failed)
    opened.on("console", said)
    opened.mouse.move(2, 2)
    opened.evaluate(MOUNT, planted())
    yield opened
    opened.remove_listener("pageerror", failed)
    opened.remove_listener("console", said)
    assert errors == []
    assert opened.title() == "-"


def update(page: Page, **part: Any) -> None:
    page.evaluate(UPDATE, part)


def settle(page: Page) -> None:
    """Waits until what was asked for before is painted."""
    frame = "requestAnimationFrame"
    page.evaluate(f"() => new Promise((done) => {frame}(() => {frame}(() => {frame}(() => done()))))")


def now_with(**part: Any) -> State:
    return planted()["now"] | part


def texts(page: Page, selector: str) -> list[str]:
    return [" ".join(text.split()) for text in page.locator(selector).all_text_contents()]


def test_every_core_is_drawn_with_its_slot(page: Page) -> None:
    labels = page.evaluate(
        "[...document.querySelectorAll('[data-cpus]')].map((core) => core.getAttribute('aria-label'))"
    )
    assert len(labels) == CORES
    assert labels[0].startswith("cpus 0,256 · reserved for proxy and OS")
    assert labels[2].startswith("cpus 2,258 · slot 0, idle SMT sibling")
    assert labels[255].startswith("cpus 255,511 · slot 3, idle SMT sibling")
    signs = "".join(page.locator(".sign").all_text_contents())
    assert {sign: signs.count(sign) for sign in sorted(set(signs))} == {
        "0": 64,
        "1": 62,
        "2": 64,
        "3": 62,
        "=": 4,
    }


def test_a_frame_writes_only_what_differs(page: Page) -> None:
    page.evaluate("""() => {
      window.written = [];
      const named = ({target}) => target.getAttribute?.("class") ?? target.nodeName;
      window.observer = new MutationObserver((records) => window.written.push(...records.map(named)));
      window.observer.observe(document.querySelector(".sockets"),
        {subtree: true, childList: true, attributes: true, characterData: true});
    }""")
    update(page, now=now_with(time=NOON + 2))
    assert page.evaluate("window.written") == []
    busier = machine()
    busier["busy"][2:66] = [0.95] * 64
    update(page, now=now_with(machine=busier))
    assert page.evaluate("window.written") == ["load"]
    assert texts(page, "li[data-slot='0'] .words") == ["● 95 %"]


def test_threads_and_memory_elsewhere_are_marked(page: Page) -> None:
    assert page.locator("[data-misplaced], [data-off-node]").count() == 0
    found = machine()
    found["slots"][1] |= {
        "misplaced": [{"thread": 71, "name": "EngineCore", "cpus": "60-70", "planned": "66-127"}],
        "misplaced_threads": 1,
        "node_bytes": {"0": 200 * GIB, "1": 20 * GIB},
        "off_node_bytes": 20 * GIB,
    }
    update(page, now=now_with(machine=found))
    marked = page.evaluate(
        "[...document.querySelectorAll('[data-cpus][data-misplaced]')].map((c) => c.dataset.cpus)"
    )
    assert marked == [f"{cpu},{cpu + CORES}" for cpu in range(60, 66)]
    assert texts(page, "li[data-slot='1'][data-misplaced][data-off-node] .problem") == [
        "◥ 1 thread off its cpus ◆ 20 GiB off its node"
    ]
    assert page.locator(".numa-node[data-off-node]").get_attribute("data-node") == "1"
    assert texts(page, ".node-problems li") == ["◆ 20 GiB of slot 1 lie here, planned on node 0"]
    page.locator("#machine summary").click()
    row = page.locator("#machine tbody tr").nth(1)
    expect(row).to_contain_text("EngineCore (71) may run on 60-70, planned 66-127")
    update(page, now=planted()["now"])
    assert page.locator("[data-misplaced], [data-off-node]").count() == 0


def test_little_memory_elsewhere_is_not_marked(page: Page) -> None:
    """As `verify` tolerates it: pages that a parent process allocated."""
    found = machine()
    found["slots"][1] |= {"node_bytes": {"0": 200 * GIB, "1": GIB}, "off_node_bytes": GIB}
    update(page, now=now_with(machine=found))
    assert page.locator("[data-off-node]").count() == 0


def test_memory_bars_have_the_whole_node(page: Page) -> None:
    widths = page.evaluate("""[...document.querySelectorAll("[data-node='0'] rect[data-part]")]
        .map((rect) => [rect.dataset.part, parseFloat(rect.getAttribute("width"))])""")
    shares = {
        part: width for part, width in widths if part in {"weights", "kv_cache", "other", "foreign", "free"}
    }
    assert sum(shares.values()) == pytest.approx(100, abs=0.1)
    assert shares["kv_cache"] == pytest.approx(100 * 400 / 768, abs=0.01)
    assert "KV cache 400 GiB" in texts(page, "[data-node='0'] li[data-part='kv_cache']")


def test_arrow_keys_choose_a_core_and_enter_its_slot(page: Page) -> None:
    cores = page.locator("[data-node='0'] svg.cores")
    cores.focus()
    assert cores.get_attribute("aria-activedescendant") == "core-0"
    page.keyboard.press("ArrowRight")
    right = page.locator(f"#{cores.get_attribute('aria-activedescendant')}").bounding_box()
    page.keyboard.press("ArrowDown")
    below = page.locator(f"#{cores.get_attribute('aria-activedescendant')}").bounding_box()
    first = page.locator("#core-0").bounding_box()
    assert first is not None
    assert right is not None
    assert below is not None
    assert (right["x"] > first["x"], right["y"]) == (True, first["y"])
    assert (below["y"] > right["y"], below["x"]) == (True, right["x"])
    page.keyboard.press("End")
    assert texts(page, ".readout") == ["cpus 127,383 · slot 1, idle SMT sibling · 50 % and 50 % busy"]
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#/slot/1"
    update(page, selected={"slot": 1, "request": None})
    assert page.locator("li[data-slot='1'] button").get_attribute("aria-pressed") == "true"
    assert page.locator(".group.slot-1.faded").count() == 0
    assert page.locator(".group.slot-0.faded").count() == 1


@pytest.mark.parametrize("width", [1280, 375])
def test_the_picture_fits_and_its_signs_are_legible(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    settle(page)
    sizes = page.evaluate("""() => {
      const wide = (node) => node.getBoundingClientRect().width;
      const all = (selector) => [...document.querySelectorAll(selector)];
      return [document.documentElement.scrollWidth,
        ...all("svg.cores").map((drawn) => wide(drawn) / drawn.viewBox.baseVal.width), ...all("[data-cpus]").map(wide)];
    }""")
    content, *scales = sizes[:3]
    assert content <= width
    assert scales == [1, 1]
    assert min(sizes[3:]) >= 13  # a sign of 11 px is 7 px wide
    page.set_viewport_size({"width": 1280, "height": 900})


def test_a_daemon_without_topology_has_no_picture(page: Page) -> None:
    page.goto(ORIGIN)
    page.evaluate(
        MOUNT,
        {"now": planted()["now"] | {"machine": None}, "topology": {"trouble": "unknown path", "cores": []}},
    )
    assert texts(page, "#machine .picture-none") == ["unknown path"]
    update(page, topology=topology())
    assert page.locator("[data-cpus]").count() == CORES
    assert not page.locator("#machine .picture-none").is_visible()


def test_the_picture_stays_over_a_restart_of_the_daemon(page: Page) -> None:
    page.locator("[data-node='1'] svg.cores").focus()
    page.keyboard.press("End")
    update(page, topology=topology() | {"ofDaemon": "another"})
    assert texts(page, ".readout")[0].startswith("cpus 255,511")
    other = slots()
    other[3]["cpus"] = "194-253"
    update(page, now=now_with(status={"slots": other}))
    assert page.locator("#core-255").get_attribute("aria-label") == "cpus 255,511 · not used"


def test_gaps_and_changes_are_drawn_in_all_charts(page: Page) -> None:
    charts = page.locator("figure.chart")
    assert charts.count() >= 6
    assert page.locator("figure.chart path[data-gap='1']").count() == charts.count()
    for level in ("info", "warn", "bad"):
        marks = page.evaluate(
            f"[...document.querySelectorAll('.change-{level}')].map((mark) => mark.getAttribute('d'))"
        )
        assert len(marks) == charts.count()
        assert all(marks)
    # An interrupted line begins twice.
    drawn = page.locator("figure[data-chart='tokens'] .traces path").first.get_attribute("d")
    assert drawn is not None
    assert drawn.count("M") == 2


def test_newest_rows_are_awaited_as_a_gap(page: Page) -> None:
    update(page, now=now_with(age_s=600, answers=False))
    assert page.locator("figure[data-chart='ready'] path[data-gap='2']").count() == 1


def test_the_cursor_is_shared_by_all_charts(page: Page) -> None:
    plot = page.locator("figure[data-chart='tokens'] .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 9, box["y"] + 40)
    settle(page)
    lines = page.evaluate(
        "[...document.querySelectorAll('path.cursor')].map((line) => line.getAttribute('d').split('V')[0])"
    )
    assert len(set(lines)) == 1
    value = texts(page, "li[data-column='requests_per_s'] .value")[0]
    assert 1_780 <= float(value.replace(",", "")) <= 1_799
    page.mouse.move(2, 2)


def test_keys_move_the_cursor_zoom_and_pan(page: Page) -> None:
    slider = page.get_by_role("slider")
    slider.focus()

    def shown() -> tuple[int, int, int]:
        settle(page)
        values = [slider.get_attribute(f"aria-value{name}") for name in ("min", "now", "max")]
        return tuple(int(value or 0) for value in values)  # type: ignore[return-value]

    page.keyboard.press("Home")
    assert shown()[1] - shown()[0] <= 2
    page.keyboard.press("Escape")
    page.keyboard.press("+")
    begin, _, end = shown()
    assert end - begin == 1_800
    page.keyboard.press("PageUp")
    assert shown()[2] == end - 450
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Shift+ArrowLeft")
    assert shown()[1] < shown()[2] - 10
    text = slider.get_attribute("aria-valuetext") or ""
    assert "Requests per second: ended" in text
    axes = page.evaluate("""[...document.querySelectorAll("figure.chart")].map((chart) =>
        [...chart.querySelectorAll(".axis text[text-anchor=middle]")].map((label) => label.textContent).join(" "))""")
    assert len(set(axes)) == 1


def test_dragging_and_the_wheel_pan_and_zoom_all_charts(page: Page) -> None:
    plot = page.locator("figure[data-chart='tokens'] .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + 50
    before = page.locator(".chart-readout").text_content()
    page.mouse.move(x, y)
    page.mouse.wheel(0, 10)  # scrolls the page: the charts have no focus
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.up()
    page.mouse.wheel(0, -500)
    settle(page)
    page.mouse.move(2, 2)
    readout = page.locator(".chart-readout")
    expect(readout).to_contain_text("to")
    zoomed = readout.text_content() or ""
    assert zoomed != before
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 60, y, steps=3)
    page.mouse.up()
    page.mouse.move(2, 2)
    expect(readout).to_contain_text("to 23 Nov")  # no longer "to now"
    assert readout.text_content() != zoomed
    page.get_by_role("button", name="Show the last 1 hour").click()
    expect(readout).to_have_text(before or "")


def test_longer_views_ask_for_coarser_rows(page: Page) -> None:
    spans = {"1 day": "1d", "90 days": "90d", "1 hour": "1h"}
    for name, span in spans.items():
        page.get_by_role("button", name=f"Show the last {name}").click()
        assert page.evaluate("window.store.state.span") == span


def test_values_are_in_a_table(page: Page) -> None:
    page.locator("#charts summary").click()
    row = page.locator("#charts tbody tr").first
    expect(row).to_contain_text("12:00:00")
    expect(row).to_contain_text("3,000")
    expect(row).to_contain_text("100 GiB")


def test_a_crash_is_one_line_that_opens(page: Page) -> None:
    assert page.evaluate(
        "[...document.querySelectorAll('[data-change]')].map((line) => line.dataset.change)"
    ) == ["5", "2", "1"]
    line = page.locator("li[data-change='2']")
    assert line.get_attribute("data-level") == "bad"
    assert "killed_oom" in (line.text_content() or "")
    page.locator("#timeline summary").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(line.locator(".evidence")).to_be_visible()
    story = line.inner_text()
    for part in (
        "killed_oom",
        "numa-launcher why 1",
        "root",
        "1m10s",
        "Out of memory: Killed process",
        HOSTILE,
        "slot 1: ready",
    ):
        assert part in story
    assert page.locator("#timeline img").count() == 0
    # It grows: the line stays open, its text follows.
    update(page, changes=[*planted()["changes"][:1], killed() | {"title": "slot 1: killed, ready again"}])
    assert line.locator("details[open]").count() == 1
    assert "ready again" in line.inner_text()
    line.get_by_role("button", name="Show in the charts").click()
    expect(page.locator(".chart-readout")).to_contain_text("11:30:00")


def test_the_time_line_is_filtered(page: Page) -> None:
    shown = "[...document.querySelectorAll('[data-change]')].map((line) => line.dataset.change)"
    page.get_by_label("Of", exact=True).select_option("1")
    assert page.evaluate(shown) == ["2"]
    page.get_by_label("Of", exact=True).select_option("host")
    assert page.evaluate(shown) == ["1"]
    page.get_by_label("Of", exact=True).select_option("")
    page.get_by_label("only problems").check()
    assert page.evaluate(shown) == ["5", "2"]
    update(page, selected={"slot": 2, "request": None})
    assert page.evaluate(shown) == ["5"]


def test_states_of_a_slot_are_drawn(page: Page) -> None:
    part = copy.deepcopy(history()["1h"])
    part["columns"] = [
        *COLUMNS,
        *(f"slot.2.{name}" for name in ("tokens_per_s", "in_flight", "kv_usage", "cpu_busy", "state")),
    ]
    for index, row in enumerate(part["rows"]):
        row += [100, 1, 0.5, 0.9, "failed" if 1_000 <= index < 1_100 else "ready"]
    update(page, history={"1h": part}, selected={"slot": 2, "request": None})
    runs = page.evaluate(
        "[...document.querySelectorAll('rect.state')].map((run) => run.getAttribute('class'))"
    )
    assert runs == ["state state-ready", "state state-ready", "state state-failed", "state state-ready"]
    assert texts(page, "figure[data-chart='slot-tokens_per_s'] .value") == ["100"]


@pytest.mark.release
def test_a_day_of_frames_leaves_heap_and_nodes_flat(page: Page) -> None:
    """43,200 frames of 2 s would be a day; the page gets 2,000, with all that a frame brings. (5,000: the same.)"""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    frames = """async ([first, count]) => {
      const {mergedHistory, mergedChanges} = await import("/static/store.js");
      for (let index = first; index < first + count; index++) {
        const {now, history, changes} = window.store.state;
        const time = now.time + 2;
        const busy = now.machine.busy.map((_, cpu) => ((cpu * 7 + index * 13) % 100) / 100);
        const row = [time * 1000, index % 50, 0, 3000 + (index % 90), 0.25, 4, 1e11];
        const one = {...history["1h"], rows: [row], newest: row[0]};
        const item = {...changes[0], number: 1000 + index, time, until: time};
        window.store.update({now: {...now, time, machine: {...now.machine, time, busy}},
          history: {"1h": mergedHistory(history["1h"], one, 3600000)}, changes: mergedChanges(changes, [item])});
        if (index % 5 === 0) await new Promise((done) => requestAnimationFrame(done));
      }
    }"""

    def measured() -> tuple[float, float]:
        session.send("HeapProfiler.collectGarbage")
        found = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
        return found["JSHeapUsedSize"], found["Nodes"]

    page.evaluate(frames, [0, 500])
    heap, nodes = measured()
    page.evaluate(frames, [500, 2_000])
    later, more = measured()
    assert later < 1.1 * heap
    assert more <= 1.02 * nodes
