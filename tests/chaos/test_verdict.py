"""Every violated bound is named in the report."""

from __future__ import annotations

from typing import Any

import pytest

from chaos.actions import Notes
from chaos.clients import Result
from chaos.hostile import Pipeliner
from chaos.verdict import Fault, readable
from chaos.verdict import judge as judge_all

FLAT = [100 << 20] * 20
AGREED: dict[str, Any] = {"wrong": []}
SILENT = {"TLS": 12.0, "UNIX": 12.0}


def judge(
    results: list[Result], faults: list[Fault], requests: dict[str, Any], rss: list[int], **noted: Any
) -> dict[str, Any]:
    pipeliner = Pipeliner("")
    return judge_all(
        results,
        faults,
        requests,
        Notes(rss=rss, **noted),
        silent_s=SILENT,
        agreement=AGREED,
        pipeliner=pipeliner,
    )


def result(outcome: str, name: str = "a", arrivals: tuple[float, ...] = ()) -> Result:
    made = Result(name, "chat", streamed=True, plain=True, begun=0.0, outcome=outcome)
    made.arrivals.extend(arrivals)
    return made


def sums(**more: int) -> dict[str, Any]:
    zero = dict.fromkeys(
        ("accepted", "in_flight", "completed", "refused", "client_aborted", "rejected", "failed"), 0
    )
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
def test_a_violated_bound(
    results: list[Result], faults: list[Fault], requests: dict[str, Any], rss: list[int], named: str
) -> None:
    report = judge(results, faults, requests, rss)
    assert len(report["broken"]) == 1
    assert named in report["broken"][0]
    assert readable(report).splitlines()[-1].startswith("BROKEN: ")


@pytest.mark.parametrize(("rejected", "holds"), [(0, True), (1, True), (2, False)])
def test_an_upload_that_the_end_of_the_run_stops_may_just_have_been_refused(
    rejected: int, *, holds: bool
) -> None:
    upload = Result("b", "upload", streamed=False, plain=False, begun=0.0, outcome="aborted")
    counted = sums(accepted=1, client_aborted=1 - min(rejected, 1), rejected=rejected)
    report = judge([upload], [], counted, FLAT)
    assert (report["accounting"]["wrong"] == []) is holds


def test_fail_over_times_are_judged_relative_to_the_machine() -> None:
    usual = [result("exact", f"u{number}", (2.5,)) for number in range(9)]
    late = [Fault("a", "reset", 1.0, 0, "x")]
    report = judge([*usual, result("exact", arrivals=(4.0,))], late, sums(accepted=10, completed=10), FLAT)
    assert report["first_token_without_fault_s"]["p99"] == 2.5
    assert report["first_token_after_failover_s"]["max"] == 3.0
    assert report["broken"] == []


def test_a_fault_before_the_first_token_cuts_no_stream() -> None:
    report = judge([result("exact")], [Fault("a", "kill", 1.0, 0, "x")], sums(accepted=1, completed=1), [])
    assert report["cut_plain_streams"] == 0
    assert report["rss_mib"] is None


def hang(*, replaced: bool = True, cause: str = "hung") -> dict[str, Any]:
    return {
        "slot": 7,
        "generation": 3,
        "model": "whole",
        "counters": False,
        "replaced": replaced,
        "took_s": 9.0,
        "cause": cause,
    }


@pytest.mark.parametrize(
    ("noted", "named"),
    [
        ({"hangs": [hang(replaced=False)]}, "slot 7 (whole, without counters): not replaced after 9.0 s"),
        ({"hangs": [hang(cause="killed")]}, "slot 7 (whole, without counters): killed after 9.0 s"),
        (
            {"failed": ["restart 1: not ready again"]},
            "planned actions failed: ['restart 1: not ready again']",
        ),
        ({"unwatched": ["slot 1 ready: OSError"]}, "not watched: ['slot 1 ready: OSError']"),
        ({"unanswered": ["no answer"]}, "1 looks without an answer: ['no answer']"),
        ({"ended_as_hung": {(1, 2), (1, 3)}}, "ended as hung, and was not: ['slot1-3']"),
        ({"health_s": [0.1, 12.0]}, "/health took 12.0 s"),
    ],
)
def test_a_failure_of_the_daemon_itself(noted: dict[str, Any], named: str) -> None:
    hung = [Fault("", "hang", 1.0, 0, f"1 {instance}") for instance in ("slot1-2", "slot7-3")]
    report = judge([result("exact")], hung, sums(accepted=1, completed=1), FLAT, **noted)
    assert len(report["broken"]) == 1
    assert named in report["broken"][0]
    assert named.partition("[")[0] in readable(report)


def test_an_instance_that_another_fault_ended_first_did_not_hang() -> None:
    killed = [Fault("a", "kill", 1.0, 3, "1 slot7-3"), Fault("", "hang", 2.0, 0, "1 slot7-4")]
    report = judge(
        [result("exact")], killed, sums(accepted=1, completed=1), FLAT, hangs=[hang(cause="killed")]
    )
    assert report["hangs"] == report["broken"] == []


def test_engines_report_missing_probes() -> None:
    blind = Fault("", "unwatched", 1.0, 0, "1 slot1-2")
    report = judge([result("exact")], [blind], sums(accepted=1, completed=1), FLAT)
    assert report["broken"] == ["not watched: ['1 slot1-2: nobody asked for /health']"]


@pytest.mark.parametrize(
    ("kind", "status", "detail", "broken"),
    [("upload", 408, "timeout", 0), ("upload", 503, "no_idea", 1), ("chat", 429, "queue_full", 1)],
)
def test_a_refusal_has_a_stated_reason(kind: str, status: int, detail: str, broken: int) -> None:
    refused = result("refused")
    refused.kind, refused.status, refused.detail = kind, status, detail
    report = judge([refused], [], sums(accepted=1, rejected=1), FLAT)
    assert len(report["broken"]) == broken, report["broken"]


def test_a_silent_connection_kept_too_long() -> None:
    report = judge_all(
        [result("exact")],
        [],
        sums(accepted=1, completed=1),
        Notes(rss=FLAT),
        silent_s={"TLS": 61.0},
        agreement=AGREED,
        pipeliner=Pipeliner(""),
    )
    assert report["broken"] == ["silent connections were kept for {'TLS': 61.0} s"]


def test_a_ledger_that_does_not_agree() -> None:
    agreed = {"wrong": ["/metrics say (1, 0, 1), the entries (2, 0, 1)"]}
    asked = sums(accepted=1, completed=1)
    report = judge_all(
        [result("exact")],
        [],
        asked,
        Notes(rss=FLAT),
        silent_s=SILENT,
        agreement=agreed,
        pipeliner=Pipeliner(""),
    )
    assert report["broken"] == ["tokens: /metrics say (1, 0, 1), the entries (2, 0, 1)"]


@pytest.mark.parametrize(
    ("attempts", "holds"),
    [((10, 10, 32), True), ((10, 11, 11), False), ((10, 10, 33), False)],
    ids=["usual, and one on ending instances", "the median is over 5 attempts", "over all attempts"],
)
def test_attempts_of_poisonous_requests_are_bounded(attempts: tuple[int, ...], holds: bool) -> None:
    told = [
        Result(f"p{number}", "poison", streamed=False, plain=False, begun=0.0, outcome="told")
        for number in range(len(attempts))
    ]
    hits = [
        Fault(f"p{number}", "poison", float(at), 0, f"slot{at}-1")
        for number, count in enumerate(attempts)
        for at in range(count)
    ]
    broken = judge(told, hits, sums(accepted=3, failed=3), FLAT)["broken"]
    assert [text.split(":")[0] for text in broken] == (
        [] if holds else ["poisonous requests got too many attempts"]
    )


def test_pipelined_requests_without_an_answer_are_told() -> None:
    pipeliner = Pipeliner("")
    pipeliner.asked, pipeliner.answered = 3, 2
    report = judge_all(
        [result("exact")], [], sums(accepted=1, completed=1), Notes(rss=FLAT), silent_s=SILENT, agreement=AGREED,
        pipeliner=pipeliner,
    )  # fmt: skip
    (broken,) = report["broken"]
    assert broken.startswith("pipelined requests without an answer")


@pytest.mark.parametrize(
    ("kinds", "outcome", "named"),
    [
        (("held", "given up"), "exact", True),
        (("held",), "exact", False),
        (("held", "given up"), "aborted", False),  # its client left
        (("held", "given up", "kill"), "exact", False),  # nobody could have waited for it
    ],
)
def test_a_request_that_is_taken_from_an_engine_that_computes(
    kinds: tuple[str, ...], outcome: str, *, named: bool
) -> None:
    faults = [Fault("a", kind, 1.0 + at, 0, "x slot1-1") for at, kind in enumerate(kinds)]
    of = "client_aborted" if outcome == "aborted" else "completed"
    report = judge([result(outcome)], faults, sums(accepted=1, **{of: 1}), FLAT)
    assert any("given up while their engines computed" in text for text in report["broken"]) is named
