"""The page by its content; tests/browser looks at it in a browser."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

import msgspec
import pytest
from support.bench_results import GENOA, point, result

from launcher.measure.bench.figures import number
from launcher.measure.bench.page import html_page

HOSTILE = "<img src=x onerror=alert(1)>\"'&"
PLAN = {
    "strategy": "interleaved",
    "slots": [
        {"slot": slot, "socket": 0, "membind": "0", "kv_cache_bytes": 40 * 1024**3, "cpus": cpus}
        for slot, cpus in enumerate([",".join(map(str, range(0, 126, 2))), "1,3,5"])
    ],
}
PICTURE = '<svg xmlns="http://www.w3.org/2000/svg"><title>cpu 0</title><rect width="9" height="9"/></svg>'


class Page(HTMLParser):
    """Elements and texts of a page; fails on markup that does not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.texts.append(data)

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]


def page_of(*results: object, **fields: object) -> Page:
    return Page(html_page(results or [result(**fields)]))  # type: ignore[arg-type]


def test_the_figures_are_the_results() -> None:
    its = result(concurrencies=(4, 16), runs=1)
    texts = page_of(its).texts
    for each in its.points:
        assert number(each.requests_per_s) in texts
        assert number(each.output_tokens_per_s) in texts
        assert number(each.total_tokens_per_s) in texts
        assert number(each.output_tokens_per_s / 252) in texts
        assert each.ttft_s is not None
        assert f"{each.ttft_s.p99 * 1000:.0f} ms" in texts


def test_the_headline_is_the_load_of_most_output_tokens() -> None:
    page = page_of(concurrencies=(4, 64, 16))
    assert "Load: 64 at once, the most output tokens/s of 3 loads." in page.texts


def test_with_an_slo_the_headline_is_the_load_of_most_goodput() -> None:
    points = [point(concurrency=4, goodput_per_s=0.5), point(concurrency=64, goodput_per_s=0.1)]
    page = page_of(msgspec.structs.replace(result(), points=points, slo={"ttft_p99": 0.5}))
    assert "Load: 4 at once, the most goodput of 2 loads." in page.texts
    assert "SLO: TTFT p99 ≤ 500 ms." in page.texts
    assert "limit 500 ms" in page.texts


def test_runs_have_intervals_and_one_run_says_that_it_has_none() -> None:
    assert "Means over runs; below each its 95% interval." in page_of(runs=3).texts
    assert "One run of each load: no intervals." in page_of(runs=1).texts
    assert "one run: no interval" in page_of(runs=1).texts


@pytest.mark.parametrize(
    "field", ["id", "url", "model", "workload", "driver", "driver_version", "started_at"]
)
def test_every_text_is_escaped(field: str) -> None:
    its = msgspec.structs.replace(result(), **{field: HOSTILE})
    page = page_of(its, its)
    assert not [image for image in page.all("img") if image.get("onerror")]
    assert HOSTILE in " ".join(page.texts)


def test_texts_of_plan_hardware_options_and_instances_are_escaped() -> None:
    its = result(
        hardware=msgspec.structs.replace(GENOA, cpu_model=HOSTILE, governor=HOSTILE),
        plan={
            "strategy": HOSTILE,
            "slots": [{"slot": HOSTILE, "socket": HOSTILE, "membind": HOSTILE, "cpus": "0"}],
        },
        workload_options={HOSTILE: HOSTILE},
        slo={HOSTILE: 1.0},
    )
    named = msgspec.structs.replace(its.points[0], requests_by_instance={HOSTILE: 3})
    page = page_of(msgspec.structs.replace(its, points=[named]))
    assert not page.all("img")
    assert not page.all("script")


def test_the_picture_cannot_run_or_load_anything() -> None:
    page = page_of(
        plan=PLAN, picture_svg='<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
    )
    (image,) = page.all("img")
    assert (image["src"] or "").startswith("data:image/svg+xml;base64,")
    assert not page.all("script")


def test_the_picture_loses_its_tooltips() -> None:
    (image,) = page_of(plan=PLAN, picture_svg=PICTURE).all("img")
    svg = base64.b64decode((image["src"] or "").split(",")[1]).decode()
    assert svg == PICTURE.replace("<title>cpu 0</title>", "")
    assert image["alt"] == "The machine's cores by instance: interleaved: 2 instances, 3 to 63 cpus each"


def test_long_lists_of_cpus_are_abridged() -> None:
    texts = page_of(plan=PLAN).texts
    assert "0,2,4,…,124" in texts
    assert "1,3,5" in texts
    assert "40 GiB" in texts


def test_the_page_stays_small_with_many_pictures() -> None:
    results = [
        result(picture_svg=f"<svg>{'x' * 90_000}{number}</svg>", plan=PLAN, concurrencies=(1, 4, 16, 64))
        for number in range(4)
    ]
    page = html_page(results)
    assert len(page.encode()) < 300_000
    assert page.count("Picture left out to keep this page small") == 3


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    page = page_of(plan=PLAN, picture_svg=PICTURE)
    assert not page.all("script")
    assert not page.all("link")
    sources = [
        value for _, its in page.elements for name, value in its.items() if name in {"src", "data", "srcset"}
    ]
    assert all((value or "").startswith("data:") for value in sources)
    assert not [name for _, its in page.elements for name in its if name.startswith("on")]
    (policy,) = (its["content"] for its in page.all("meta") if its.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert {its["href"] for its in page.all("a")} == {
        "https://blog.rackspacecloud.com/blog/2025/12/17/running_ai_inference_on_amd_epyc_without_a_gpu_in_sight/"
    }


def test_a_run_that_the_client_limited_says_so_instead_of_figures() -> None:
    its = result(runs=1)
    client = msgspec.structs.replace(its.points[0].client, limited=True)
    its = msgspec.structs.replace(its, points=[msgspec.structs.replace(its.points[0], client=client)])
    page = page_of(its)
    assert "CLIENT-LIMITED" in page.texts
    assert "No figures: 4 at once: CLIENT-LIMITED." in page.texts
    assert number(its.points[0].output_tokens_per_s) not in page.texts


def test_a_result_without_points_is_a_page() -> None:
    assert "No figures: nothing was measured." in page_of(msgspec.structs.replace(result(), points=[])).texts


def test_embeddings_have_no_tokens_and_no_first_token() -> None:
    bare = point(
        output_tokens=0, output_tokens_per_s=0.0, ttft_s=None, tpot_s=None, itl_s=None, ttft_samples_s=[],
        itl_samples_s=[],
    )  # fmt: skip
    page = page_of(msgspec.structs.replace(result(), points=[bare]))
    assert "Latency over throughput" not in page.texts
    assert "whole request, p50" in page.texts
    assert "time to first token, p50" not in page.texts


def test_a_foreign_endpoint_has_no_machine() -> None:
    page = page_of(hardware=None, software=None, plan=None, cores=None, url="http://10.0.0.1:8000")
    assert "Machine and plan" not in page.texts
    assert not [text for text in page.texts if text == "output tokens/s per core"]
    assert "workload amd-128 on http://10.0.0.1:8000, 2026-11-22 17:12 UTC" in page.texts


def test_several_results_are_told_apart_and_share_a_plan() -> None:
    a, b = (
        result(plan=PLAN, picture_svg=PICTURE),
        result(plan=PLAN, picture_svg=PICTURE, model="Qwen3-8B", first_seed=9),
    )
    page = page_of(a, b)
    assert "2 results" in page.texts
    assert {"Figures: A", "Figures: B", "Machine and plan: A and B", "A: Llama-3.1-8B", "B: Qwen3-8B"} <= set(
        page.texts
    )
    assert len(page.all("img")) == 1
    assert {"A p50", "A p99", "B p50", "B p99"} <= set(page.texts)


def test_published_rows_of_the_measured_model_are_marked() -> None:
    page = page_of(model="meta-llama/Llama-3.1-8B-Instruct")
    assert page.texts.count("the model measured here") == 1
    assert "3,492" in page.texts
    assert "13.6 per core" in page.texts
    assert "39.8 output · 3.31 per vCPU" in page.texts
    assert "the model measured here" not in page_of(model="tiny").texts


def test_times_of_results_that_are_no_times_stay_as_they_are() -> None:
    assert (
        "workload amd-128 on 2 × AMD EPYC 9755 128-Core Processor, yesterday"
        in page_of(started_at="yesterday").texts
    )
    assert [
        text
        for text in page_of(started_at="2026-11-22T17:12:00.5+02:00").texts
        if text.endswith("17:12 UTC+02:00")
    ]


def test_the_page_is_the_same_every_time() -> None:
    assert html_page([result()]) == html_page([result()])


def test_ids_are_unique_and_heads_in_order() -> None:
    page = page_of(plan=PLAN, picture_svg=PICTURE)
    ids = [its["id"] for _, its in page.elements if "id" in its]
    assert len(set(ids)) == len(ids)
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(level > 1 for level in levels[1:])


def test_notes_and_an_early_end_are_on_the_page() -> None:
    texts = page_of(notes=["load generator not pinned: no reserved cores"], complete=False).texts
    assert "load generator not pinned: no reserved cores" in texts
    assert "Incomplete: the measurement ended before its last load." in texts


def test_a_small_machines_picture_is_not_enlarged() -> None:
    picture = PICTURE.replace("<svg ", '<svg width="310" height="90" ')
    (image,) = page_of(plan=PLAN, picture_svg=picture).all("img")
    assert image["style"] == "max-width:310px;min-width:min(310px,620px)"


def test_a_workload_describes_itself() -> None:
    options = {"name": "chat", "what": "several turns", "turns": 3}
    assert "chat: several turns" in page_of(workload="chat", workload_options=options).texts
    assert "amd-128: input_tokens = 128, output_tokens = 128" in page_of().texts


def test_more_results_than_letters() -> None:
    texts = page_of(*[result(runs=1, requests=6)] * 27).texts
    assert "Figures: Z" in texts
    assert "Figures: A2" in texts
