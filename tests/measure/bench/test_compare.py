from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.bench_results import point, result

from launcher.measure.bench.compare import Comparison, Finding, compare
from launcher.measure.bench.result import BenchResult

TABLE = [
    "  figure           A        B        B/A    95% interval    finding",
    "  output tokens/s  89.6     72.4     0.808  0.774 to 0.842  worse",
    "  total tokens/s   179      145      0.808  0.774 to 0.842  worse",
    "  requests/s       0.700    0.565    0.808  0.774 to 0.842  worse",
    "  TTFT p50         257 ms   323 ms   1.258  1.158 to 1.365  worse",
    "  TTFT p99         498 ms   570 ms   1.145  0.761 to 1.722  no difference seen",
    "  ITL p50          42.8 ms  53.4 ms  1.246  1.186 to 1.308  worse",
    "  ITL p99          68.1 ms  83.6 ms  1.228  1.098 to 1.373  worse",
    "  e2e p50          5.72 s   7.10 s   1.240  1.188 to 1.295  worse",
    "  e2e p99          6.13 s   7.48 s   1.220  1.158 to 1.285  worse",
]
VERDICT = [
    (
        "4 at once: worse: output tokens/s (0.808), total tokens/s (0.808), requests/s (0.808), TTFT p50 "
        "(1.258), ITL p50 (1.246), ITL p99 (1.228), e2e p50 (1.240), e2e p99 (1.220)"
    ),
    ("by chance alone about 1 in 20 intervals excludes 1; here are 9"),
    (
        "B is worse than A by more than 3 % (4 at once: output tokens/s, total tokens/s, requests/s, TTFT "
        "p50, ITL p50, ITL p99, e2e p50, e2e p99)"
    ),
]


def findings(comparison: Comparison) -> dict[str, Finding]:
    return {row.figure.name: row.finding for row in comparison.rows}


def said(a: BenchResult, b: BenchResult, tolerance: float | None = 0.03) -> Sequence[str]:
    """Everything after the tables."""
    lines = list(compare([a], [b], tolerance).lines())
    return lines[len(lines) - lines[::-1].index("") :]


def test_a_slower_endpoint_is_worse_in_words() -> None:
    comparison = compare([result()], [result(first_seed=10, speed=0.8)], 0.03)
    assert comparison.worse
    assert list(comparison.lines()) == [
        "A  20261122-171200: Llama-3.1-8B, amd-128, 2026-11-22T17:12:00+00:00",
        "B  20261122-171200: Llama-3.1-8B, amd-128, 2026-11-22T17:12:00+00:00",
        "",
        "4 at once (A: 3 runs, B: 3 runs)",
        *TABLE,
        "",
        *VERDICT,
    ]


def test_the_same_endpoint_shows_no_difference() -> None:
    a, b = result(runs=5), result(runs=5, first_seed=20)
    assert said(a, b) == [
        "no difference seen between A and B",
        "these runs cannot show a difference of output tokens/s within 0.978 to 1.047 times",
        "no figure of B is shown to be worse than A's by more than 3 %",
    ]
    assert not compare([a], [b], 0.0).worse


def test_a_difference_is_claimed_as_seldom_as_the_level_allows() -> None:
    """100 comparisons of an endpoint with itself."""
    found = [
        finding
        for n in range(100)
        for finding in findings(
            compare([result(runs=4, first_seed=8 * n)], [result(runs=4, first_seed=8 * n + 4)], None)
        ).values()
    ]
    assert 0.02 < 1 - found.count(Finding.NONE) / len(found) < 0.08


def test_a_faster_endpoint_is_better_in_every_figure() -> None:
    comparison = compare([result()], [result(first_seed=10, speed=2, noise=0.001)], 0.03)
    assert set(findings(comparison).values()) == {Finding.BETTER}
    assert not comparison.worse
    (rate, *_) = comparison.rows
    assert rate.ratio == pytest.approx(2, rel=0.05)


def test_one_run_has_no_interval_of_its_throughput() -> None:
    a, b = result(runs=1, requests=400), result(runs=1, first_seed=5, speed=0.7, requests=400)
    comparison = compare([a], [b], 0.03)
    found = findings(comparison)
    assert found["output tokens/s"] is found["requests/s"] is Finding.UNKNOWN
    assert found["TTFT p50"] is found["e2e p50"] is found["ITL p99"] is Finding.WORSE
    assert comparison.rows[0].why_no_interval == "A and B have one run"
    assert not comparison.rows[0].exceeds(0.03)
    assert "throughput has no interval with one run: measure A and B with --repeats 3 or more" in said(a, b)


@pytest.mark.parametrize(("runs", "why"), [((1, 3), "A has one run"), ((3, 1), "B has one run")])
def test_the_side_with_one_run_is_named(runs: tuple[int, int], why: str) -> None:
    comparison = compare([result(runs=runs[0])], [result(runs=runs[1])], None)
    assert comparison.rows[0].why_no_interval == why


def test_too_few_requests_have_no_p99() -> None:
    comparison = compare([result(runs=1, requests=20)], [result(runs=1, first_seed=1, requests=20)], None)
    (row,) = (row for row in comparison.rows if row.figure.name == "TTFT p99")
    assert row.finding is Finding.UNKNOWN
    assert row.why_no_interval == "20 samples, a p99 needs 368"


def test_requests_that_depend_on_each_other_have_no_p99() -> None:
    """Ten late requests in a row are one event, not ten."""
    late = [0.2] * 390 + [5.0] * 10
    run = result(runs=1, requests=400)
    run = msgspec.structs.replace(run, points=[msgspec.structs.replace(run.points[0], ttft_samples_s=late)])
    comparison = compare([run], [run], None)
    (row,) = (row for row in comparison.rows if row.figure.name == "TTFT p99")
    assert row.why_no_interval == "400 samples, which depend on each other too much"


def test_the_interval_decides_and_not_the_estimate() -> None:
    """Runs that differ by 30 % among themselves show no difference of 5 %."""
    comparison = compare([result(noise=0.3)], [result(first_seed=10, speed=0.95, noise=0.3)], 0.0)
    assert findings(comparison)["output tokens/s"] is Finding.NONE
    assert not comparison.worse


def test_worse_within_the_tolerance_is_said_and_allowed() -> None:
    a, b = result(runs=6, noise=0.001), result(runs=6, first_seed=10, speed=0.97, noise=0.001)
    comparison = compare([a], [b], 0.5)
    assert findings(comparison)["output tokens/s"] is Finding.WORSE
    assert not comparison.worse
    assert said(a, b, 0.5)[-1] == "no figure of B is shown to be worse than A's by more than 50 %"
    assert compare([a], [b], 0.01).worse
    assert not compare([a], [b], None).worse


def test_loads_of_one_side_only_are_named() -> None:
    lines = list(compare([result(concurrencies=(1, 4))], [result(concurrencies=(4, 16))], None).lines())
    assert "1 at once: measured in A only" in lines
    assert "16 at once: measured in B only" in lines


def test_a_limited_client_gives_no_figures() -> None:
    limited = msgspec.structs.replace(point().client, limited=True)
    b = result(runs=1)
    b = msgspec.structs.replace(b, points=[msgspec.structs.replace(b.points[0], client=limited)])
    comparison = compare([result(runs=1)], [b], 0.03)
    assert comparison.rows == []
    assert "4 at once: no figures: CLIENT-LIMITED in B" in list(comparison.lines())


def test_failed_requests_are_worse() -> None:
    a = result(runs=2)
    some = msgspec.structs.replace(
        a, points=[msgspec.structs.replace(p, failed=16, completed=48) for p in a.points]
    )
    comparison = compare([a], [some], 0.03)
    assert comparison.worse
    assert said(a, some)[0] == "4 at once: failed requests: 0.0% in A, 25.0% in B"
    assert (
        said(a, some)[-1] == "B is worse than A by more than 3 % (failed requests; not the same measurement)"
    )
    assert not compare([some], [a], 0.03).worse


def test_all_failed_is_worse_without_a_figure() -> None:
    a = result(runs=1)
    dead = msgspec.structs.replace(a, points=[msgspec.structs.replace(a.points[0], failed=64, completed=0)])
    comparison = compare([a], [dead], 0.03)
    assert comparison.worse
    assert "4 at once: no figures: ALL FAILED in B" in list(comparison.lines())


def changed(found: BenchResult, **fields: Any) -> BenchResult:
    points = [msgspec.structs.replace(each, **fields) for each in found.points]
    return msgspec.structs.replace(found, points=points)


def test_an_engine_that_breaks_half_of_its_streams_is_never_better() -> None:
    """The others had the machine for themselves."""
    a = changed(result(runs=4), asked_tokens=64 * 128)
    b = changed(
        result(runs=4, first_seed=10, speed=2.0),
        asked_tokens=64 * 128,
        completed=32,
        failed=32,
        output_tokens=32 * 128,
    )
    comparison = compare([a], [b], 0.03)
    assert comparison.rows == []
    assert comparison.worse
    lines = list(comparison.lines())
    assert not [line for line in lines if "better" in line]
    assert (
        "4 at once: not the same measurement: 16,384 output tokens were completed, 32,768 asked for in B"
        in lines
    )
    assert lines[-1] == "B is worse than A by more than 3 % (failed requests; not the same measurement)"


def test_answers_of_another_length_are_not_compared() -> None:
    a = changed(result(runs=2), asked_tokens=64 * 128)
    long = changed(result(runs=2, speed=0.5), asked_tokens=64 * 128, output_tokens=64 * 130)
    comparison = compare([a], [long], None)
    assert comparison.rows == []
    assert any(
        "16,640 output tokens were completed, 16,384 asked for in B" in line for line in comparison.lines()
    )
    assert compare([a], [long], 0.5).worse
    assert not compare([long], [a], 0.5).worse
    assert list(compare([long], [a], 0.5).lines())[-1] == "no figure of B was compared with A's"
    within = changed(a, output_tokens=64 * 129)
    assert compare([a], [within], None).rows


def test_shorter_answers_of_a_data_set_are_not_compared() -> None:
    comparison = compare([result(runs=2)], [changed(result(runs=2, speed=3.0), output_tokens=64 * 16)], None)
    assert comparison.rows == []
    assert (
        "4 at once: not the same measurement: 128.0 output tokens for an answer in A, 16.0 in B; "
        "measure both with the same --seed" in list(comparison.lines())
    )


def test_a_failed_run_is_not_compared() -> None:
    b = result(runs=2, speed=3.0)
    first, second = b.points
    b = msgspec.structs.replace(
        b, points=[first, msgspec.structs.replace(second, fault="the proxy counts 3")]
    )
    comparison = compare([result(runs=2)], [b], 0.03)
    assert comparison.rows == []
    assert comparison.worse
    assert any("1 of 2 runs failed: the proxy counts 3 in B" in line for line in comparison.lines())


def test_what_differs_is_said_before_the_figures() -> None:
    lines = list(compare([result()], [result(model="Qwen3-8B")], None).lines())
    start = lines.index("not the same thing was measured:")
    assert lines[start + 1] == "  model: Llama-3.1-8B in A, Qwen3-8B in B"
    assert start < next(index for index, line in enumerate(lines) if line.startswith("4 at once"))


def test_chance_is_named_where_a_difference_is_claimed() -> None:
    assert "by chance alone about 1 in 20 intervals excludes 1; here are 9" in said(
        result(), result(speed=0.8)
    )


def test_goodput_that_falls_to_zero_is_worse() -> None:
    a = result()
    good, none = (
        msgspec.structs.replace(a, points=[msgspec.structs.replace(p, goodput_per_s=rate) for p in a.points])
        for rate in (0.5, 0.0)
    )
    comparison = compare([good], [none], 0.03)
    assert findings(comparison)["goodput requests/s"] is Finding.WORSE
    assert comparison.worse
    assert not compare([none], [good], 0.03).worse
