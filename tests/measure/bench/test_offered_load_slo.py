"""Limits, and which points and requests meet them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bench_results import POINT

from launcher.measure.bench import offered_load
from launcher.measure.bench.outcomes import RequestTimes
from launcher.measure.bench.result import Percentiles


def test_limits_are_read_in_seconds() -> None:
    assert offered_load.parse("ttft_p99=2s, itl_p99=150ms") == {"ttft_p99": 2.0, "itl_p99": 0.15}


@pytest.mark.parametrize(
    "text", ["", "ttft=2s", "ttft_p99=2", "ttft_p99=0s", "ttft_p90=2s", "x_p99=2s", "ttft_p99=2s,", "ttft_p99=2m",
             "ttft_p99=-2s", "ttft_p99=2s,ttft_p99=3s"],
)  # fmt: skip
def test_wrong_limits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        offered_load.parse(text)


LIMIT_NAMES = [
    f"{figure}_{statistic}" for figure in offered_load.FIGURES for statistic in offered_load.STATISTICS
]


@given(
    st.dictionaries(st.sampled_from(LIMIT_NAMES), st.integers(1, 10**6).map(lambda ms: ms / 1000), min_size=1)
)
def test_format_is_the_inverse_of_parse(limits: dict[str, float]) -> None:
    assert offered_load.parse(offered_load.format_slo(limits)) == pytest.approx(limits, rel=1e-5)


def test_a_point_meets_limits_that_its_percentiles_keep() -> None:
    assert offered_load.meets(POINT, {"ttft_p99": 0.3})
    assert not offered_load.meets(POINT, {"ttft_p99": 0.29})
    assert offered_load.meets(POINT, {"ttft_p50": 0.1, "ttft_p95": 0.2})


def test_a_figure_that_was_not_measured_breaks_its_limit() -> None:
    assert not offered_load.meets(POINT, {"itl_p99": 100.0})


def test_a_failed_request_breaks_every_slo() -> None:
    assert not offered_load.meets(msgspec.structs.replace(POINT, failed=1), {"ttft_p99": 9.0})
    assert not offered_load.meets(msgspec.structs.replace(POINT, completed=0, ttft_s=None), {"ttft_p99": 9.0})


def request(ttft: float = 0.1, gaps: list[float] | None = None) -> RequestTimes:
    its = [0.01] * 10 if gaps is None else gaps
    return RequestTimes(ttft=ttft, e2e=ttft + sum(its), output_tokens=len(its) + 1, itl=its)


def test_requests_that_meet_every_limit_are_counted() -> None:
    requests = [request(), request(ttft=3.0), request(gaps=[0.01] * 9 + [1.0])]
    assert offered_load.good_requests(requests, {"ttft_p99": 2.0}) == 2
    assert offered_load.good_requests(requests, {"ttft_p99": 2.0, "itl_p99": 0.15}) == 1
    assert offered_load.good_requests(requests, {"itl_p50": 0.15}) == 3
    assert offered_load.good_requests(requests, {"e2e_p99": 0.5}) == 1
    assert offered_load.good_requests(requests, {"tpot_mean": 0.05}) == 2


def test_a_response_of_one_token_has_no_gaps_to_break_a_limit() -> None:
    one = RequestTimes(ttft=0.1, e2e=0.1, output_tokens=1, itl=[])
    assert offered_load.good_requests([one], {"itl_p99": 0.01, "tpot_p99": 0.01, "ttft_p99": 0.2}) == 1


def test_a_response_that_was_not_streamed_has_no_ttft_to_meet_a_limit() -> None:
    whole = RequestTimes(ttft=None, e2e=0.1, output_tokens=5, itl=[])
    assert offered_load.good_requests([whole], {"ttft_p99": 9.0}) == 0
    assert offered_load.good_requests([whole], {"e2e_p99": 9.0}) == 1


def test_percentiles_are_named_like_the_limits() -> None:
    assert set(offered_load.STATISTICS) == set(
        msgspec.structs.asdict(Percentiles(mean=0, p50=0, p95=0, p99=0))
    )
