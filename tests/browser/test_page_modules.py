"""Modules of the dashboard's page by themselves, in the browser, without a daemon."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route

import launcher.dashboard
from launcher.control import verdict
from launcher.dashboard import server

STATIC = Path(launcher.dashboard.__file__).parent / "static"
ORIGIN = "http://127.0.0.1:9"
GIB = 2**30
# 2026-11-23 12:00:00 UTC
NOON = 1_795_435_200
ANSWERS: dict[str, dict[str, Any]] = {
    "good": {"json": {"value": 7}},
    "refused": {"status": 401, "json": {"error": {"message": "-", "remedy": "-"}}},
    "missing": {"status": 404, "json": {"error": {"message": "cannot find it", "remedy": "look elsewhere"}}},
    "proxy": {"status": 502, "body": "<h1>Bad gateway</h1>"},
}
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """An empty page under the dashboard's headers, from which its modules can be imported."""

    def answer(route: Route) -> None:
        if "/api/" in route.request.url:
            route.fulfill(**ANSWERS[route.request.url.rpartition("/")[2]])
            return
        name = route.request.url.removeprefix(f"{ORIGIN}/static/")
        if name == route.request.url:
            route.fulfill(content_type="text/html", body="<title>-</title>", headers=server.HEADERS)
            return
        file = STATIC / name
        route.fulfill(content_type=TYPES[file.suffix], body=file.read_text(encoding="utf-8"))

    with browser.new_context(timezone_id="UTC") as context:
        opened = context.new_page()
        opened.route("**/*", answer)
        opened.goto(ORIGIN)
        yield opened


def run(page: Page, module: str, script: str, argument: Any = None) -> Any:
    """The value of `script`, a function of the module and `argument`."""
    return page.evaluate(
        f"async (argument) => ({script})(await import('/static/{module}.js'), argument)", argument
    )


FORMATS = [
    ("number", 0, "0"), ("number", 1234.5, "1,235"), ("number", 12.34, "12.3"), ("number", 99.97, "100"),
    ("number", 0.0123, "0.012"), ("number", 0.0001, "<0.001"), ("number", None, "–"),
    ("count", 1234567, "1,234,567"), ("count", None, "–"),
    ("share", 0.873, "87 %"), ("share", 0.004, "0.4 %"), ("share", 0, "0 %"), ("share", 1, "100 %"), ("share", None, "–"),
    ("bytes", 0, "0 B"), ("bytes", 1023, "1023 B"), ("bytes", 1536, "1.5 KiB"), ("bytes", 44 << 30, "44 GiB"),
    ("bytes", None, "–"),
    ("seconds", 0.314, "0.31 s"), ("seconds", 0.0124, "12 ms"), ("seconds", 0.0004, "0.4 ms"), ("seconds", 0, "0.00 s"),
    ("seconds", 2.51, "2.5 s"), ("seconds", None, "–"),
    ("clock", 1795408700.9, "04:38:20"), ("day", 1795408700, "23 Nov 04:38"), ("clock", None, "–"),
    ("cpuCount", "0-3,8", 5), ("cpuCount", "", 0),
]  # fmt: skip


def test_formats(page: Page) -> None:
    found = run(page, "format", "(m, cases) => cases.map(([name, value]) => m[name](value))", FORMATS)
    assert found == [expected for _, _, expected in FORMATS]


def test_money_has_its_currency(page: Page) -> None:
    amounts = [[34.2, "USD"], ["0.0013", "EUR"], [None, "USD"]]
    found = run(page, "format", "(m, cases) => cases.map((pair) => m.money(...pair))", amounts)
    assert found == ["34.20 USD", "0.0013 EUR", "–"]


def test_two_times_have_one_unit(page: Page) -> None:
    pairs = [[0.21, 1.23], [0.0041, 0.012], [0.004, 0.31], [0.004, 1.31], [None, None]]
    found = run(page, "format", "(m, pairs) => pairs.map((pair) => m.twoTimes(...pair))", pairs)
    assert found == [
        ["0.21", "1.2", "s"],
        ["4.1", "12", "ms"],
        ["4.0", "310", "ms"],
        ["0.00", "1.3", "s"],
        ["–", "–", ""],
    ]


def test_durations_and_seconds_are_those_of_status(page: Page) -> None:
    times = [0, 0.9, 59, 60, 192, 3599, 3600, 14700, 86399, 86400, 183600]
    assert run(page, "format", "(m, times) => times.map(m.duration)", times) == [
        verdict.duration(time) for time in times
    ]
    values = [0.004, 0.31, 0.999, 2.51, 9.94, 31.4]
    assert run(page, "format", "(m, values) => values.map(m.twoDigits)", values) == [
        verdict.seconds(value) for value in values
    ]


def test_an_item_sent_again_replaces_the_older_one(page: Page) -> None:
    known = [{"number": 1, "time": 1, "title": "a"}, {"number": 5, "time": 5, "title": "old"}]
    sent = [{"number": 5, "time": 5, "title": "new"}, {"number": 3, "time": 3, "title": "b"}]
    found = run(page, "store", "(m, [known, sent]) => m.mergedChanges(known, sent)", [known, sent])
    assert [item["title"] for item in found] == ["a", "b", "new"]


def test_changes_are_bounded(page: Page) -> None:
    script = "(m) => m.mergedChanges([], Array.from({length: 900}, (_, n) => ({number: n, time: n}))).length"
    assert run(page, "store", script) == 500


def merged(page: Page, known: dict[str, Any] | None, answer: dict[str, Any], span_ms: int = 10_000) -> Any:
    script = "(m, [known, answer, span]) => m.mergedHistory(known ?? undefined, answer, span)"
    return run(page, "store", script, [known, answer, span_ms])


def test_history_grows_and_stays_within_its_span(page: Page) -> None:
    first = merged(page, None, {"columns": ["a"], "step_ms": 2000, "rows": [[2000, 1], [4000, 2]]})
    grown = merged(page, first, {"columns": ["a"], "step_ms": 2000, "rows": [[6000, 3], [14_000, 7]]})
    assert grown["rows"] == [[6000, 3], [14_000, 7]]
    assert grown["newest"] == 14_000


def test_history_is_merged_by_the_names_of_columns(page: Page) -> None:
    first = merged(page, None, {"columns": ["a", "slot.0.b"], "step_ms": 2000, "rows": [[2000, 1, 2]]})
    grown = merged(page, first, {"columns": ["slot.1.b", "a"], "step_ms": 2000, "rows": [[4000, 8, 9]]})
    assert grown["columns"] == ["a", "slot.0.b", "slot.1.b"]
    assert grown["rows"] == [[2000, 1, 2, None], [4000, 9, None, 8]]


def test_history_after_the_clock_was_set_back_is_replaced(page: Page) -> None:
    first = merged(page, None, {"columns": ["a"], "step_ms": 2000, "rows": [[8000, 1]]})
    replaced = merged(page, first, {"columns": ["a"], "step_ms": 2000, "rows": [[2000, 5], [4000, 6]]})
    assert replaced["rows"] == [[2000, 5], [4000, 6]]


def test_keyed_nodes_keep_order_and_focus(page: Page) -> None:
    script = """(m) => {
        const list = document.createElement("ul");
        document.body.append(list);
        const show = (items) => m.keyed(list, items, (item) => item.key,
            () => m.element("button"), (node, item) => m.setText(node, item.text));
        show([{key: 1, text: "one"}, {key: 2, text: "two"}]);
        const second = list.children[1];
        second.focus();
        show([{key: 3, text: "three"}, {key: 2, text: "2"}, {key: 4, text: "four"}]);
        const texts = [...list.children].map((node) => node.textContent);
        return [texts, list.children[1] === second, document.activeElement === second];
    }"""
    assert run(page, "dom", script) == [["three", "2", "four"], True, True]


def test_items_with_equal_keys_have_a_node_each(page: Page) -> None:
    script = """(m) => {
        const list = document.createElement("ul");
        const show = (texts) => m.keyed(list, texts, () => "key", () => m.element("li"), m.setText);
        show(["a", "b"]);
        show(["a", "c", "d"]);
        return [...list.children].map((node) => node.textContent);
    }"""
    assert run(page, "dom", script) == ["a", "c", "d"]


def test_unchanged_text_is_not_written(page: Page) -> None:
    script = """async (m) => {
        const node = m.element("p", {id: 7, inert: true}, "same");
        let writes = 0;
        new MutationObserver((records) => { writes += records.length; })
            .observe(node, {subtree: true, childList: true, characterData: true, attributes: true});
        m.setText(node, "same");
        for (const [name, value] of [["id", 7], ["inert", true], ["hidden", false]]) m.setAttribute(node, name, value);
        await null;
        const before = writes;
        m.setText(node, "other");
        await null;
        return [before, writes];
    }"""
    assert run(page, "dom", script) == [0, 1]


COMMANDS = [
    ("none needed: it starts again; `numa-launcher hold 1` keeps it stopped", ["numa-launcher hold 1"]),
    ("numa-launcher logs 3; the daemon restarts it", ["numa-launcher logs 3"]),
    ("numa-launcher resume 2", ["numa-launcher resume 2"]),
    ("send fewer requests", []),
]


def test_commands_in_remedies(page: Page) -> None:
    texts = [text for text, _ in COMMANDS]
    assert run(page, "dom", "(m, texts) => texts.map(m.commandsIn)", texts) == [
        found for _, found in COMMANDS
    ]
    shown = run(
        page,
        "dom",
        """(m, texts) => texts.map((text) => {
            const node = m.element("p");
            m.setMessage(node, text);
            return [...node.querySelectorAll("code")].map((code) => code.textContent);
        })""",
        texts,
    )
    assert shown == [found for _, found in COMMANDS]


def test_markup_in_a_message_is_text(page: Page) -> None:
    script = "(m, text) => { const p = m.element('p'); m.setMessage(p, text); return [p.children.length, p.textContent]; }"
    hostile = "<img src=x onerror=alert(1)>"
    assert run(page, "dom", script, hostile) == [0, hostile]


def test_a_refusal_is_trouble(page: Page) -> None:
    script = "async (m, paths) => Promise.all(paths.map(m.askOrTrouble))"
    found = run(page, "api", script, ["/api/good", "/api/missing"])
    assert found == [{"value": 7}, {"trouble": "cannot find it; look elsewhere"}]


LINK = {"text": "id<1>", "href": "#/request/id%3C1%3E"}


def test_a_table_has_texts_and_links(page: Page) -> None:
    script = """(m, link) => {
        const table = m.dataTable("Name", [["A"], ["B", "right"]]);
        table.show([[link, "1"], ["two", "2"]]);
        const first = table.node.querySelector("tbody th");
        table.show([[link, "3"]]);
        const cells = [...table.node.querySelectorAll("tbody th, tbody td")];
        const href = first.querySelector("a").getAttribute("href");
        return [cells.map((cell) => cell.textContent), href, cells[0] === first];
    }"""
    assert run(page, "parts", script, LINK) == [["id<1>", "3"], LINK["href"], True]


MODELS = [
    {"model": "a", "state": "ready", "in_flight": 2, "tokens_per_s": 10.0, "load": None, "first_token": None},
    {"model": "a", "state": "failed", "in_flight": 0, "tokens_per_s": None, "load": None, "first_token": None},
    {
        "model": "b", "state": "ready", "in_flight": 1, "tokens_per_s": 5.0,
        "load": {"waiting": 3, "kv_usage": 0.5}, "first_token": {"p99_s": 1.5},
    },
]  # fmt: skip


def test_slots_are_summed_by_model(page: Page) -> None:
    assert run(page, "usage_rows", "(m, slots) => m.modelRows(slots)", MODELS) == [
        ["a", "1/2", "2", "–", "10", "–", "–"],
        ["b", "1/1", "1", "3", "5", "1.5 s", "50 %"],
    ]


ASKED = [
    ("good", [7]),
    ("refused", ["cannot read the daemon's state: this address has no valid token", 401]),
    ("missing", ["cannot find it", 404]),
    ("proxy", ["the dashboard process answered with status 502", 502]),
]


@pytest.mark.parametrize(("name", "expected"), ASKED)
def test_answers_and_refusals(page: Page, name: str, expected: list[Any]) -> None:
    script = """async (m, path) => {
        try {
            return [(await m.ask(path)).value];
        } catch (error) {
            return error instanceof m.ApiError ? [error.message, error.status] : [String(error)];
        }
    }"""
    assert run(page, "api", script, f"/api/{name}") == expected


def test_the_token_of_the_address_is_kept_for_the_tab_and_removed(page: Page) -> None:
    script = """(m) => {
        location.hash = "#token=a%2Bb";
        return [m.takeToken(), sessionStorage.getItem("token"), location.hash, m.takeToken()];
    }"""
    assert run(page, "api", script) == [True, "a+b", "#/", False]


@pytest.mark.parametrize(
    ("cores", "caches"), [(1, 1), (2, 1), (60, 1), (96, 12), (128, 16), (7, 3), (144, 1), (256, 32)]
)
def test_cores_fit_any_width_without_overlap(page: Page, cores: int, caches: int) -> None:
    found = run(page, "core_layout", """(m, [count, caches]) => [180, 340, 571, 900, 1240].map((width) => {
      const cores = Array.from({length: count}, (_, n) => ({cpus: [n], l3: Math.floor((n * caches) / count)}));
      return [width, m.arrange(m.blocksOf(cores), width), m.HEIGHT];
    })""", [cores, caches])  # fmt: skip
    for width, drawn, height in found:
        assert len(drawn["cores"]) == cores
        assert drawn["width"] <= width
        assert max(place["x"] + place["width"] for place in drawn["cores"]) <= drawn["width"]
        assert max(place["y"] + height for place in drawn["cores"]) <= drawn["height"]
        rows: dict[float, list[dict[str, Any]]] = {}
        for place in drawn["cores"]:
            rows.setdefault(place["y"], []).append(place)
        for row in rows.values():
            row.sort(key=lambda place: place["x"])
            assert all(one["x"] + one["width"] < other["x"] for one, other in itertools.pairwise(row))


def test_times_of_a_view(page: Page) -> None:
    hour, day = 3_600_000, 86_400_000
    at = NOON * 1000
    found = run(page, "time_view", """(m, [at, hour, day]) => ({
      hour: m.spanOf(m.wholeSpan("1h"), at),
      yesterday: m.spanOf({length: hour, end: at - 20 * hour}, at),
      week: m.spanOf({length: 7 * day, end: null}, at),
      closer: m.zoomed(m.wholeSpan("1h"), at, 0.5, at - hour / 2),
      closest: m.zoomed({length: 30000, end: null}, at, 0.1).length,
      back: m.panned(m.wholeSpan("1h"), at, -hour),
      future: m.panned({length: hour, end: at - hour}, at, 5 * hour),
      ticks: m.timeTicks(at - hour, at, 4).map((tick) => tick.label),
      nights: m.timeTicks(at - 2 * day, at, 4).map((tick) => tick.label),
      gaps: m.gapsOf([[0], [2000], [10000], [12000]], 0, 12000, 2000),
      fitted: [[4, false], [4, true], [600, false], [898, true], [898, false], [3000, false], [3598, false]].map(
        ([age, isPart]) => m.fitted({rows: [[at - age * 1000]], isPart}, at).length / 60000),
      none: m.fitted({rows: []}, at).length,
    })""", [at, hour, day])  # fmt: skip
    assert (found["hour"], found["yesterday"], found["week"]) == ("1h", "1d", "90d")
    assert found["closer"] == {"length": hour / 2, "end": at - hour / 4}
    assert found["closest"] == 30_000
    assert found["back"] == {"length": hour, "end": at - hour}
    assert found["future"] == {"length": hour, "end": None}
    assert found["ticks"] == ["11:00", "11:15", "11:30", "11:45", "12:00"]
    assert found["nights"] == ["12:00", "22 Nov", "12:00", "23 Nov", "12:00"]
    assert found["gaps"] == [[2_000, 8_000]]
    assert found["fitted"] == [5, 5, 15, 60, 15, 60, 60]
    assert found["none"] == hour


@pytest.mark.parametrize(
    ("unit", "most", "ticks"),
    [
        ({"steps": 10}, 7, [0, 5, 10]),
        ({"steps": 10}, 0, [0, 0.5, 1]),
        ({"steps": 10}, 0.3, [0, 0.1, 0.2, 0.3]),
        ({"steps": 10, "least": 1}, 2, [0, 1, 2]),
        ({"steps": 10, "whole": 1}, 0.2, [0, 0.5, 1]),
        ({"steps": 2}, 100 * GIB, [0, 64 * GIB, 128 * GIB]),
    ],
)
def test_lines_of_values_have_round_numbers(
    page: Page, unit: dict[str, Any], most: float, ticks: list[float]
) -> None:
    found = run(page, "history_columns", "(m, [unit, most]) => m.valueTicks(unit, most)", [unit, most])
    assert found == pytest.approx(ticks)


def test_cpulists(page: Page) -> None:
    found = run(page, "marks", """(m) => [m.parseCpus("0-3,8,10-11"), m.parseCpus(""), m.formatCpus([11, 8, 0, 1, 2, 3, 10]),
      [0, 9, 10, 35, 36, 61, 62, "free", "reserved", "idle", "denied"].map(m.sign).join("")]""")  # fmt: skip
    assert found == [[0, 1, 2, 3, 8, 10, 11], [], "0-3,8,10-11", "09azAZ#-=·/"]


def test_every_core_and_node_has_its_box(page: Page) -> None:
    """A node that spans sockets, cores in no node, memory without cpus."""
    cores = [(0, 0, 0), (1, 0, None), (2, 1, 0), (3, 1, 1)]
    topology = {
        "sockets": [{"socket": 0, "nodes": [0]}, {"socket": 1, "nodes": [1]}],
        "nodes": [{"node": node, "socket": socket} for node, socket in ((0, 0), (1, 1), (2, None))],
        "cores": [{"cpus": [cpu], "socket": socket, "node": node} for cpu, socket, node in cores],
    }
    found = run(page, "sockets", """(m, topology) => m.socketsOf(topology).map(({socket, boxes}) => [socket,
      boxes.map(({node, cores, holdsMemory}) => [node?.node ?? null, cores.map((core) => core.cpus[0]), holdsMemory])])""",
      topology)  # fmt: skip
    assert found == [
        [0, [[None, [1], False], [0, [0], True]]],
        [1, [[0, [2], False], [1, [3], True]]],
        [None, [[2, [], True]]],
    ]


@pytest.mark.parametrize(
    ("drawn", "path"),
    [("mean", "M1 7h.5L2 3M4 5h.5"), ("most", "M1 6h.5L2 3M4 5h.5"), ("least", "M1 8h.5L2 3M4 5h.5")],
)
def test_rows_of_a_px_are_one_point_of_a_line(page: Page, drawn: str, path: str) -> None:
    """Values 2 and 4 share a px; null at 3 and a gap before 4 interrupt line and band. Up is 10."""
    frame = {
        "rows": [[0, 2], [1, 4], [2, 7], [3, None], [9, 5]],
        "from": 0, "to": 5, "xs": [1, 1, 2, 3, 4], "breaks": [0, 0, 0, 0, 1],
    }  # fmt: skip
    found = run(
        page,
        "trace_path",
        "(m, [frame, drawn]) => m.linePath(frame, 1, drawn, (v) => 10 - v)",
        [frame, drawn],
    )
    assert found == {"path": path, "band": "M1 6L2 3L2 3L1 8zM4 5L4 5z"}
