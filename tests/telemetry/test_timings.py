"""The histograms: what is observed, and where their bounds lie."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from launcher.telemetry.metrics import render
from launcher.telemetry.timings import FIRST_TOKEN_BOUNDS, Timings


def test_first_tokens_have_a_histogram_for_each_model() -> None:
    timings = Timings()
    timings.take_first_token(0, "a", 0.4, 10.0)
    timings.take_first_token(1, "a", 3.0, 11.0)
    timings.take_first_token(1, 'b"', 0.1, 12.0)
    families = {family.name: family for family in text_string_to_metric_families(render({}, timings))}
    samples = families["numa_launcher_first_token_seconds"].samples
    counts = {
        s.labels["model"]: s.value for s in samples if s.name == "numa_launcher_first_token_seconds_count"
    }
    assert counts == {"a": 2, 'b"': 1}
    assert {
        s.labels["le"]: s.value for s in samples if s.labels["model"] == "a" and s.name.endswith("_bucket")
    }["0.5"] == 1
    found = timings.first_token.quantiles(1, 12.0)
    assert found is not None
    assert found.count == 2


def test_the_bounds_are_those_of_native_histograms() -> None:
    """Powers of two are bounds at every resolution (schema 0 and finer)."""
    assert all(math.log2(bound).is_integer() for bound in FIRST_TOKEN_BOUNDS)
    assert FIRST_TOKEN_BOUNDS[0] < 0.02
    assert FIRST_TOKEN_BOUNDS[-1] >= 512
