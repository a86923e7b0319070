"""The table of metrics and its text."""

from __future__ import annotations

import re
from pathlib import Path

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from launcher.telemetry import metrics
from launcher.telemetry.machine_metrics import MetricKind
from launcher.telemetry.metrics import render, to_markdown
from launcher.telemetry.timings import Timings

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_names_are_unique_ours_and_explained() -> None:
    names = [spec.name for spec in metrics.TABLE]
    assert len(set(names)) == len(names)
    for spec in metrics.TABLE:
        assert re.fullmatch(r"numa_launcher_[a-z_]+", spec.name)
        assert spec.help.endswith(".")


def test_render() -> None:
    timings = Timings()
    timings.duration.observe(0.3)
    text = render({metrics.ACCEPTED: {(): 3}, metrics.ENDED: {("failed",): 1}}, timings)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["numa_launcher_requests_accepted"].samples[0].value == 3
    assert families["numa_launcher_requests_ended"].samples[0].labels == {"outcome": "failed"}
    assert families["numa_launcher_request_duration_seconds"].type == "histogram"


def test_every_row_renders_with_its_labels() -> None:
    values = {spec.name: {tuple("x" for _ in spec.labels): 2.0} for spec in metrics.TABLE}
    families = {family.name: family for family in text_string_to_metric_families(render(values, Timings()))}
    for spec in metrics.TABLE:
        family = families[spec.name]
        assert family.type == spec.kind
        assert family.documentation == spec.help
        suffix = "_total" if spec.kind is MetricKind.COUNTER else ""
        (sample,) = family.samples
        assert (sample.name, sample.value) == (spec.name + suffix, 2)
        assert set(sample.labels) == set(spec.labels)


@given(st.lists(st.floats(0.0, 1e6) | st.sampled_from([0.005, 1.0, 1800.0])))
def test_histograms_render_as_those_of_the_library(values: list[float]) -> None:
    timings = Timings()
    theirs = prometheus_client.Histogram(
        timings.duration.name, timings.duration.help, buckets=timings.duration.bounds, registry=None
    )
    for value in values:
        timings.duration.observe(value)
        theirs.observe(value)
    registry = prometheus_client.CollectorRegistry()
    registry.register(theirs)
    expected = re.sub(r"_created .*", "_created X", prometheus_client.generate_latest(registry).decode())
    assert re.sub(r"_created .*", "_created X", render({}, timings)).endswith(expected)


@pytest.mark.parametrize("text", ['a"b', "back\\slash", "new\nline", "é", "{}="])
def test_any_key_name_is_a_label(text: str) -> None:
    rendered = render({metrics.KEY_TOKENS: {(text,): 1}}, Timings())
    families = {family.name: family for family in text_string_to_metric_families(rendered)}
    assert families[metrics.KEY_TOKENS].samples[0].labels == {"key": text}


def test_the_names_follow_prometheus() -> None:
    """What `promtool check metrics` wants: a help, no _total in a gauge, base units."""
    for spec in metrics.TABLE:
        assert not spec.name.endswith(("_total", "_count", "_sum", "_bucket", "_ms", "_milliseconds"))
        assert not {"le", "quantile"} & set(spec.labels)
        assert all(re.fullmatch(r"[a-z_]+", label) for label in spec.labels)
    for histogram in Timings().all():
        assert histogram.name.endswith("_seconds")


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text() == to_markdown(), "stale: run scripts/docs"
