"""The printed table, the live line and the list."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.bench_results import POINT, RESULT

from launcher.measure.bench import table
from launcher.measure.bench.figures import by_load
from launcher.measure.bench.load_generator import Progress
from launcher.measure.bench.result import BenchResult, ClientCost, Percentiles, Point

LOAD = by_load([POINT])[0].label
ALL_FAILED = by_load([replace(POINT, completed=0)])[0].unusable
BUSY = ClientCost(cpu_s=1.9, share=0.95, wait_share=0.02, limited=True)


def text_of(*points: Point, **more: object) -> str:
    return "\n".join(table.to_text(replace(RESULT, points=list(points), slo={}, **more)))


def row_of(text: str, label: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(label)).removeprefix(label).split()


def test_each_load_has_one_row() -> None:
    text = text_of(POINT, replace(POINT, concurrency=16, output_tokens_per_s=4000.0))
    assert row_of(text, LOAD) == ["20", "0", "10.0", "1,280", "2,560", "640", "-", "-", "0:10", "1:10"]
    assert "4,000" in text


def test_latencies_are_in_milliseconds() -> None:
    assert "100 / 200 / 300" in text_of(POINT)


def test_a_client_limited_row_has_no_figures() -> None:
    text = text_of(replace(POINT, client=BUSY))
    assert row_of(text, LOAD) == ["20", "0", "CLIENT-LIMITED"]
    assert "1,280" not in text
    assert "100 / 200" not in text
    assert "95% of a core" in text


def test_one_limited_repeat_does_not_hide_the_others() -> None:
    text = text_of(POINT, replace(POINT, seed=2, client=BUSY, output_tokens_per_s=1.0))
    assert "1,280" in text
    assert "CLIENT-LIMITED" in text


def test_a_row_of_failures_says_so() -> None:
    text = text_of(replace(POINT, completed=0, failed=20, ttft_s=None))
    assert row_of(text, LOAD)[:3] == ["0", "20", ALL_FAILED.split()[0]]


def test_repeats_are_means() -> None:
    points = [
        replace(POINT, seed=seed, output_tokens_per_s=value)
        for seed, value in ((1, 100.0), (2, 500.0), (3, 120.0))
    ]
    text = text_of(*points)
    assert "240" in row_of(text, LOAD)
    assert "means of 3 repeats" in text


def test_goodput_has_a_column_with_an_slo() -> None:
    result = replace(RESULT, slo={"ttft_p99": 2.0}, points=[replace(POINT, goodput_per_s=7.5)])
    text = "\n".join(table.to_text(result))
    assert "good/s" in text
    assert "7.50" in row_of(text, LOAD)
    assert "good/s" not in text_of(POINT)


def test_tokens_per_core_are_absent_where_the_cores_are_unknown() -> None:
    assert row_of(text_of(POINT, cores=None), LOAD)[5] == "-"


def test_an_interrupted_run_says_so() -> None:
    assert "did not end" in text_of(POINT, complete=False)


def test_notes_are_printed() -> None:
    assert "no reserved cores" in text_of(POINT, notes=["load generator not pinned: no reserved cores"])


@pytest.mark.parametrize("slo", [{}, {"ttft_p99": 1.0}])
def test_any_result_can_be_printed(slo: dict[str, float]) -> None:
    one = Percentiles(mean=1e-7, p50=0.0, p95=12345.6, p99=1e9)
    points = [
        POINT, replace(POINT, completed=0, failed=1), replace(POINT, client=BUSY),
        replace(POINT, concurrency=None, rate=0.5, ttft_s=None, itl_s=one, requests_by_instance=None, kv_use_max=0.5),
    ]  # fmt: skip
    assert table.to_text(replace(RESULT, points=points, slo=slo))


def test_a_list_has_one_line_per_result() -> None:
    other: BenchResult = replace(RESULT, id="20261122-180000-chat", points=[], complete=False)
    lines = table.list_lines([RESULT, other])
    assert len(lines) == 3
    assert "1,280" in lines[1]
    assert "not complete" in lines[2]


def progress(**more: object) -> Progress:
    values: dict[str, object] = {
        "what": "4 at once", "point": 1, "points": 2, "done": 5, "requests": 20, "measuring": True, "elapsed_s": 2.0,
    }  # fmt: skip
    return Progress(**(values | more))  # type: ignore[arg-type]


def test_the_live_line_counts_and_estimates() -> None:
    assert table.live_line(progress(), []) == "point 1/2, 4 at once: 5/20 requests, about 14 s left"
    assert (
        table.live_line(progress(point=2), [100.0]) == "point 2/2, 4 at once: 5/20 requests, about 6 s left"
    )


def test_the_live_line_tells_when_the_load_generator_starts() -> None:
    assert table.live_line(progress(measuring=False), []) == "point 1/2, 4 at once: load generator starting"


def test_a_search_has_no_estimate() -> None:
    assert table.live_line(progress(points=None), []) == "point 1, 4 at once: 5/20 requests"
