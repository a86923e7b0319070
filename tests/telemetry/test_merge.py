"""Pages in, one page out: names kept, labels added, values untouched."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from launcher.telemetry import merge as merge_module
from launcher.telemetry.merge import Merger, Page


def merge(merger: Merger, pages: Iterable[Page]) -> str:
    """The next page of these."""
    merger.begin()
    for page in pages:
        merger.add(page)
    return merger.end()


VLLM = """\
# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# HELP vllm:e2e_seconds Latency.
# TYPE vllm:e2e_seconds histogram
vllm:e2e_seconds_bucket{le="0.5",model_name="a}b,\\"c"} 1.0
vllm:e2e_seconds_bucket{le="+Inf",model_name="a}b,\\"c"} 2.0
vllm:e2e_seconds_count{model_name="a}b,\\"c"} 2.0
vllm:e2e_seconds_sum{model_name="a}b,\\"c"} 0.30000000000000004
# TYPE plain counter
plain_total 1e+06
garbage here is not a sample {
orphan 5
"""


def test_two_instances() -> None:
    merged = merge(
        Merger(), [Page("# TYPE own gauge\nown 1\n"), Page(VLLM, {"slot": "0"}), Page(VLLM, {"slot": "1"})]
    )
    assert merged.count("# TYPE vllm:e2e_seconds histogram") == 1
    assert merged.count("# HELP vllm:num_requests_running") == 1
    assert 'vllm:num_requests_running{slot="1",engine="0",model_name="m"} 3.0' in merged
    assert 'plain_total{slot="0"} 1e+06' in merged
    assert 'vllm:e2e_seconds_sum{slot="0",model_name="a}b,\\"c"} 0.30000000000000004' in merged
    assert "garbage" not in merged
    assert "own 1" in merged
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    assert families["vllm:e2e_seconds"].type == "histogram"
    assert len(families["vllm:e2e_seconds"].samples) == 8
    assert families["orphan"].type == "unknown"


def test_a_label_that_is_taken_is_kept_as_exported() -> None:
    merged = merge(
        Merger(), [Page('x{model="theirs",slot="9",a="model=1"} 1\n', {"slot": "0", "model": 'a"\\\n'})]
    )
    assert 'x{slot="0",model="a\\"\\\\\\n",exported_model="theirs",exported_slot="9",a="model=1"} 1' in merged


def test_nothing_in_nothing_out() -> None:
    assert merge(Merger(), []) == ""
    assert merge(Merger(), [Page("", {"slot": "0"}), Page("# HELP x y\n# TYPE x gauge\n")]) == ""


@settings(deadline=None)  # a busy machine is no fault
@given(st.lists(st.tuples(st.text(max_size=6), st.floats(allow_nan=False)), max_size=5), st.text(max_size=6))
def test_any_page_of_the_client_library_parses_after_the_merge(
    samples: list[tuple[str, float]], label: str
) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("g:x", 'help "\\\n', ["model"], registry=registry)
    Counter("c", "c", registry=registry).inc()
    Histogram("h", "h", registry=registry).observe(0.3)
    for value, number in samples:
        gauge.labels(value).set(number)
    text = generate_latest(registry).decode()
    merged = merge(Merger(), [Page(text, {"slot": label}), Page(text, {"slot": label + "2"})])
    before = sum(len(family.samples) for family in text_string_to_metric_families(text))
    after = list(text_string_to_metric_families(merged))
    assert sum(len(family.samples) for family in after) == 2 * before
    assert {sample.labels["slot"] for family in after for sample in family.samples} == {label, label + "2"}


# --- sums that never fall -----------------------------------------------------------------------

REAL = (Path(__file__).parent / "vllm-0.32.0.metrics.txt").read_text()  # of a small model, after six requests


def page(generation: int, text: str) -> Page:
    return Page(text, {"slot": "0"}, 0, generation)


def counter(value: object, *, gauge: object = 1) -> str:
    return f"# TYPE c counter\nc_total {value}\n# TYPE g gauge\ng {gauge}\n"


def values(text: str) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_go_on_over_a_restart() -> None:
    merger = Merger()
    assert values(merge(merger, [page(1, counter(5))])) == {"c_total": 5, "g": 1}
    assert values(merge(merger, [page(1, counter(7.5))])) == {"c_total": 7.5, "g": 1}
    assert values(merge(merger, [])) == {"c_total": 7.5}  # gone for now: the gauge goes, the sum stands
    assert values(merge(merger, [page(2, counter(0, gauge=3))])) == {"c_total": 7.5, "g": 3}
    assert values(merge(merger, [page(2, counter(9))])) == {"c_total": 16.5, "g": 1}
    assert values(merge(merger, [page(3, "")])) == {"c_total": 16.5}  # a life that has not counted yet
    assert values(merge(merger, [page(3, counter(1))])) == {"c_total": 17.5, "g": 1}


def test_a_restart_is_seen_although_the_value_rose() -> None:
    merger = Merger()
    merge(merger, [page(1, counter(5))])
    assert values(merge(merger, [page(2, counter(6))]))["c_total"] == 11


def test_a_fall_is_a_restart_although_nobody_said_so() -> None:
    merger = Merger()
    merge(merger, [page(1, counter(5))])
    assert values(merge(merger, [page(1, counter(2))]))["c_total"] == 7
    assert values(merge(merger, [page(1, counter(2))]))["c_total"] == 7


def test_histograms_and_summaries_go_on_and_gauges_do_not() -> None:
    text = (
        '# TYPE h histogram\nh_bucket{le="1"} 2\nh_bucket{le="+Inf"} 3\nh_sum 4.5\nh_count 3\n'
        '# TYPE s summary\ns{quantile="0.5"} 9\ns_sum 8\ns_count 2\n# TYPE c_created gauge\nc_created 1e9\n'
    )
    merger = Merger()
    merge(merger, [page(1, text)])
    merged = merge(merger, [page(2, text)])
    for line in ('h_bucket{slot="0",le="1"} 4.0', 'h_bucket{slot="0",le="+Inf"} 6.0', 'h_sum{slot="0"} 9.0'):
        assert line in merged
    for line in ('s{slot="0",quantile="0.5"} 9', 's_sum{slot="0"} 16.0', 'c_created{slot="0"} 1e9'):
        assert line in merged


def test_values_that_were_never_carried_over_are_passed_as_written() -> None:
    text = "# TYPE c counter\nc_total 1e+06\n# TYPE d counter\nd_total 0.30000000000000004\n"
    assert 'c_total{slot="0"} 1e+06\n' in merge(Merger(), [page(1, text)])
    assert 'd_total{slot="0"} 0.30000000000000004\n' in merge(Merger(), [page(1, text)])


@pytest.mark.parametrize(
    "text",
    [
        "c_total 5 1700000000000",
        "c_total\t5",
        "c_total  5",
        "c_total 5 ",
        "c_total 5\r",
        "c_total{} 5",
        "c_total +5",
    ],
)
def test_odd_spacing_is_the_same_series(text: str) -> None:
    merger = Merger()
    for _ in range(2):
        assert values(merge(merger, [page(1, f"# TYPE c counter\n{text}\n")])) == {"c_total": 5}
    assert values(merge(merger, [page(2, counter(1))])) == {"c_total": 6, "g": 1}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "five", "", "0x5", "5 6 7"])
def test_what_is_no_number_is_no_fault(value: str) -> None:
    merger = Merger()
    merge(merger, [page(1, counter(5))])
    merge(merger, [page(1, counter(value))])
    merge(merger, [page(2, counter(value))])
    text_string_to_metric_families(merge(merger, [page(3, counter(1))]))


def test_a_sum_does_not_fall_when_its_labels_change_and_change_back() -> None:
    merger, seen = Merger(), []
    for generation, node, count in ((1, "0", 100), (2, "1", 3), (3, "0", 5)):
        labels = {"slot": "0", "numa_node": node}
        text = f"# TYPE c_total counter\nc_total {count}\n"
        merged = merge(merger, [Page(text, labels, 0, generation)])
        (family,) = text_string_to_metric_families(merged)
        seen.append({sample.labels["numa_node"]: sample.value for sample in family.samples})
    assert seen == [{"0": 100}, {"0": 100, "1": 3}, {"0": 105, "1": 3}]


def test_a_series_comes_once() -> None:
    merged = merge(Merger(), [Page("x 1\nx 2\n", {"slot": "0"})])
    assert merged.count("\nx{") == 1


def test_a_page_that_invents_labels_does_not_eat_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_module, "MAX_SERIES", 3)
    merger = Merger()
    merged = merge(merger, [page(1, "".join(f'x{{id="{number}"}} 1\n' for number in range(9)))])
    assert merged.count("x{") == 3


def test_a_real_page_keeps_every_sample() -> None:
    pages = [Page(REAL, {"slot": str(slot), "model": "m", "numa_node": "0"}, slot, 1) for slot in range(2)]
    merged = merge(Merger(), pages)
    before = {family.name: family for family in text_string_to_metric_families(REAL)}
    after = {family.name: family for family in text_string_to_metric_families(merged)}
    assert {name: family.type for name, family in after.items()} == {
        name: family.type for name, family in before.items()
    }
    assert {name: family.documentation for name, family in after.items()} == {
        name: family.documentation for name, family in before.items()
    }
    assert all(len(after[name].samples) == 2 * len(before[name].samples) for name in before)
    assert "vllm:num_requests_running" in after


def test_a_real_page_of_a_second_life_doubles_the_sums() -> None:
    merger = Merger()
    merge(merger, [page(1, REAL)])
    after = {family.name: family for family in text_string_to_metric_families(merge(merger, [page(2, REAL)]))}
    for family in text_string_to_metric_families(REAL):
        for old, new in zip(family.samples, after[family.name].samples, strict=True):
            grows = family.type in {"counter", "histogram", "summary"} and not old.name.endswith("_created")
            assert new.value == pytest.approx(old.value * (2 if grows else 1)), new


@settings(deadline=None)  # a busy machine is no fault
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50)), max_size=30))
def test_the_sum_is_what_all_lives_counted(steps: list[tuple[int, int]]) -> None:
    """`steps`: whether a life ends (0) before, and what is counted then."""
    merger = Merger()
    generation, value, total, last = 1, 0, 0, 0.0
    for ends, more in steps:
        if ends == 0:
            generation, value = generation + 1, 0
        value += more
        total += more
        shown = values(merge(merger, [page(generation, counter(value))]))["c_total"]
        assert shown == total
        assert shown >= last
        last = shown
