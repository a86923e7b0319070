"""A broken bound is named."""

from __future__ import annotations

from typing import Any

import pytest

from chaos.clients import Result
from chaos.verdict import Fault, judge, readable

FLAT = [100 << 20] * 20


def result(outcome: str, name: str = "a", arrivals: tuple[float, ...] = ()) -> Result:
    made = Result(name, "chat", streamed=True, plain=True, begun=0.0, outcome=outcome)
    made.arrivals.extend(arrivals)
    return made


def sums(**more: int) -> dict[str, Any]:
    zero = dict.fromkeys(("accepted", "in_flight", "completed", "client_aborted", "rejected", "failed"), 0)
    return zero | more


def test_nothing_broken() -> None:
    cut = Fault("a", "fin", 2.0, 3, "slot1")
    report = judge([result("exact", arrivals=(1.0, 2.2, 3.0))], [cut], sums(accepted=1, completed=1), FLAT)
    assert report["broken"] == []
    assert (report["cut_plain_streams"], report["continued_exactly"]) == (1, 1)
    assert report["first_token_after_failover_s"]["max"] == 0.2
    assert readable(report).endswith("all bounds hold")


@pytest.mark.parametrize(
    ("results", "faults", "requests", "rss", "named"),
    [
        ([result("failed")], [], sums(accepted=1, failed=1), FLAT, "1 requests failed before their first byte"),
        ([result("silent")], [], sums(accepted=1, failed=1), FLAT, "1 dishonest answers"),
        ([result("wrong")], [], sums(accepted=1, completed=1), FLAT, "1 dishonest answers"),
        ([result("told")], [Fault("a", "kill", 1.0, 2, "x")], sums(accepted=1, failed=1), FLAT, "0.0 of the cut"),
        ([result("exact")], [], sums(accepted=2, completed=2), FLAT, "accepted = asked"),
        ([result("exact")], [], sums(accepted=1, completed=1), [*FLAT, *[140 << 20] * 10], "RSS grew"),
        ([result("exact", arrivals=(4.0,))], [Fault("a", "reset", 1.0, 0, "x")], sums(accepted=1, completed=1), FLAT,
         "first token after a fail-over is 3.0 s"),
        ([], [], sums(), FLAT, "no request was made"),
    ],
)  # fmt: skip
def test_what_is_broken(
    results: list[Result], faults: list[Fault], requests: dict[str, Any], rss: list[int], named: str
) -> None:
    report = judge(results, faults, requests, rss)
    assert len(report["broken"]) == 1
    assert named in report["broken"][0]
    assert readable(report).splitlines()[-1].startswith("BROKEN: ")


def test_a_slow_machine_is_slow_after_a_fail_over_too() -> None:
    usual = [result("exact", f"u{number}", (2.5,)) for number in range(9)]
    late = [Fault("a", "reset", 1.0, 0, "x")]
    report = judge([*usual, result("exact", arrivals=(4.0,))], late, sums(accepted=10, completed=10), FLAT)
    assert report["first_token_without_fault_s"]["p99"] == 2.5
    assert report["first_token_after_failover_s"]["max"] == 3.0
    assert report["broken"] == []


def test_a_fault_before_the_first_word_cuts_no_stream() -> None:
    report = judge([result("exact")], [Fault("a", "kill", 1.0, 0, "x")], sums(accepted=1, completed=1), [])
    assert report["cut_plain_streams"] == 0
    assert report["rss_mib"] is None
