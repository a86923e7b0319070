from __future__ import annotations

import msgspec
import pytest
from support.bench_results import point

from launcher.measure.bench.figures import (
    GOODPUT,
    LATENCIES,
    OUTPUT_TOKENS,
    by_load,
    duration,
    number,
    runs_of,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.7, "0.700"),
        (12.34, "12.3"),
        (99.94, "99.9"),
        (99.96, "100"),
        (1234.5, "1,234"),
        (-0.5, "-0.500"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (5.724, "5.72 s"),
        (0.9996, "1.00 s"),
        (0.0428, "42.8 ms"),
        (0.25, "250 ms"),
        (3e-5, "30.0 µs"),
        (2e-7, "0.200 µs"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_points_of_a_load_are_repeats() -> None:
    loads = by_load(
        [
            point(concurrency=4, seed=0),
            point(concurrency=None, rate=2.5, seed=0),
            point(concurrency=4, seed=1),
        ]
    )
    assert [(runs.label, len(runs.points)) for runs in loads] == [("4 at once", 2), ("2.5/s", 1)]


def test_a_value_is_the_mean_of_its_runs() -> None:
    points = [point(seed=seed) for seed in range(3)]
    (runs,) = by_load(points)
    rates = [each.output_tokens_per_s for each in points]
    assert runs.value(OUTPUT_TOKENS) == pytest.approx(sum(rates) / 3)
    assert runs.values(OUTPUT_TOKENS) == rates
    interval = runs.interval(OUTPUT_TOKENS)
    assert interval is not None
    assert interval.low < min(rates)
    assert runs.value(GOODPUT) is None
    assert runs.interval(GOODPUT) is None


def test_a_latency_has_the_samples_of_all_runs_in_their_order() -> None:
    points = [point(seed=seed) for seed in range(2)]
    (runs,) = by_load(points)
    assert runs.samples(LATENCIES["TTFT p99"]) == points[0].ttft_samples_s + points[1].ttft_samples_s
    assert runs.value(LATENCIES["ITL p95"]) == pytest.approx(
        sum(each.itl_s.p95 for each in points if each.itl_s is not None) / 2
    )
    assert runs.samples(LATENCIES["TPOT p50"]) == []


def test_a_run_that_the_client_limited_has_no_figures() -> None:
    good = point(seed=0)
    limited = point(seed=1, client=msgspec.structs.replace(good.client, limited=True))
    failed = point(seed=2, completed=0, failed=64, ttft_s=None)
    (runs,) = by_load([good, limited, failed])
    assert runs.value(OUTPUT_TOKENS) == good.output_tokens_per_s
    assert runs_of(runs) == "1 of 3 runs"
    assert runs.unusable == ""
    assert by_load([limited])[0].unusable == "CLIENT-LIMITED"
    assert by_load([failed])[0].unusable == "ALL FAILED"
    assert by_load([failed])[0].value(LATENCIES["TTFT p50"]) is None
