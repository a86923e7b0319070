"""Which requests a figure is of, and which runs have figures at all."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from support.bench_results import POINT

from launcher.measure.bench.outcomes import (
    RequestTimes,
    Sent,
    disagreement,
    figures_of,
    other_work,
    per_answer,
    without_figures,
)
from launcher.measure.bench.result import ClientCost

BUSY = ClientCost(cpu_s=1.9, share=0.95, limited=True)


def sent(tokens: int, *, asked: int | None = 8, error: str | None = None, e2e: float = 1.0) -> Sent:
    times = RequestTimes(ttft=0.5, e2e=e2e, output_tokens=tokens, itl=[0.1] * (tokens - 1))
    return Sent(prompt_tokens=100, asked=asked, times=times, error=error)


def test_figures_are_of_completed_requests() -> None:
    found = figures_of(
        [sent(8, e2e=2.0), sent(8, e2e=4.0), sent(7), sent(8, error="reset"), sent(0, error="")], 10.0
    )
    assert (found.completed, found.failed) == (2, 3)
    assert (found.requests_per_s, found.output_tokens_per_s, found.total_tokens_per_s) == (0.2, 1.6, 21.6)
    assert found.asked_tokens == 40, "a failed request asked, too"
    assert found.e2e_s is not None
    assert (found.e2e_s.mean, found.e2e_s.p50) == (3.0, 3.0)
    assert len(found.requests) == 2


def test_the_most_frequent_reason_is_told() -> None:
    short = [sent(3), sent(3), sent(8, error="reset")]
    assert figures_of(short, 1.0).error == "3 of 8 output tokens came"
    assert figures_of([sent(8, error="")], 1.0).error == "no reason given"


def test_a_longer_answer_is_completed() -> None:
    assert sent(9).failure is None
    assert sent(3, asked=None).failure is None


def test_without_a_completed_request_there_is_no_latency() -> None:
    found = figures_of([sent(1)], 1.0)
    assert (found.ttft_s, found.tpot_s, found.itl_s, found.e2e_s) == (None, None, None, None)
    assert figures_of([], 0.0).requests_per_s == 0.0


@pytest.mark.parametrize(
    ("failed", "seen", "said"), [(0, 0, False), (2, 2, False), (2, 1, False), (1, 2, True)]
)
def test_failures_that_only_the_endpoint_saw_are_the_run_s(failed: int, seen: int, said: bool) -> None:
    assert bool(disagreement(replace(POINT, failed=failed), seen)) is said


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"client": BUSY}, "CLIENT-LIMITED"),
        ({"completed": 0}, "ALL FAILED"),
        ({"fault": "the proxy counts 3"}, "RUN FAILED"),
        ({"fault": "the proxy counts 3", "completed": 0, "client": BUSY}, "RUN FAILED"),
    ],
)
def test_a_run_without_figures(changes: dict[str, Any], why: str) -> None:
    assert without_figures(replace(POINT, **changes)) == why


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"asked_tokens": 2560}, ""),
        ({"asked_tokens": 2585}, ""),
        ({"asked_tokens": 2590}, "2,560 output tokens were completed, 2,590 asked for"),
        ({"asked_tokens": 2530}, "2,560 output tokens were completed, 2,530 asked for"),
        ({"failed": 1}, "20 requests were completed, 21 asked for"),
        ({"completed": 200, "failed": 1}, ""),
        ({"fault": "x"}, "1 of 1 run failed: x"),
    ],
)
def test_beyond_one_per_cent_it_is_other_work(changes: dict[str, Any], why: str) -> None:
    assert other_work([replace(POINT, **changes)]) == why


def test_the_runs_of_a_load_are_judged_together() -> None:
    assert other_work([replace(POINT, failed=1), *[POINT] * 9]) == ""
    assert other_work([]) == ""


def test_answers_of_no_exact_length_have_a_mean() -> None:
    assert per_answer([POINT, POINT]) == 128.0
    assert per_answer([replace(POINT, asked_tokens=2560)]) is None
    assert per_answer([replace(POINT, completed=0)]) is None
