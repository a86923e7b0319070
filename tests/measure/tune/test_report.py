"""What `tune` says, and that it claims no more than it measured."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.config.schema import Strategy
from launcher.measure.tune.model import (
    Candidate,
    Candidates,
    Comparison,
    Layout,
    LeftOut,
    Measurement,
    Settings,
    Stack,
    Standing,
    Verdict,
    Visit,
    VisitResult,
)
from launcher.measure.tune.report import Forecast, Report, opening, span, visit_line

SETTINGS = Settings(budget_s=7200.0)


def candidate(count: int, *, is_default: bool = False, stack: Any = None) -> Candidate:
    layout = Layout(strategy=Strategy.INTERLEAVED, instances_per_socket=count, reserve_cores=0, stack=stack)
    slots = [{"socket": 0, "cpus": f"{slot}"} for slot in range(count)]
    return Candidate(
        layout=layout, label=f"interleaved x {count}", is_default=is_default, plan={"slots": slots}
    )


CANDIDATES = [candidate(1, is_default=True), candidate(4)]


def result(number: int, of: int, rate: float, **figures: Any) -> VisitResult:
    return VisitResult(
        visit=Visit(number=number, candidate=of, purpose="race", repeats=1), started_at="t", start_s=31.0, measure_s=9.0,
        measurements=[Measurement(output_tokens_per_s=rate, **figures)],
    )  # fmt: skip


HISTORY = [result(1, 0, 100.0, ttft_p99_s=0.5), result(2, 1, 131.0, ttft_p99_s=0.4)]


def standing(of: int, score: float | None, **more: Any) -> Standing:
    values: dict[str, Any] = {
        "candidate": of, "score": score, "interval": None if score is None else (score - 1, score + 1),
        "meets_slo": None, "visits": 1, "measurements": 1, "left": None,
    }  # fmt: skip
    return Standing(**values | more)


def verdict(
    ratio: float | None = 1.31, interval: tuple[float, float] = (1.27, 1.36), *, winner: int | None = 1,
    different: bool = True, complete: bool = True, standings: list[Standing] | None = None,
) -> Verdict:  # fmt: skip
    compared = None if ratio is None else Comparison(candidate=1, pairs=4, ratio=ratio, interval=interval)
    return Verdict(
        winner=winner, different=different, ratio_to_default=ratio if winner else 1.0, interval=interval if ratio else None,
        comparison=compared, standings=standings or [standing(1, 131.0), standing(0, 100.0)], complete=complete,
    )  # fmt: skip


def report(its: Verdict, settings: Settings = SETTINGS, history: list[VisitResult] = HISTORY) -> Report:
    return Report(its, CANDIDATES, history, settings, lambda plan: len(plan["slots"]), answers={})


def test_answers_of_several_stacks_are_compared() -> None:
    stacks = [candidate(1, is_default=True, stack="vllm"), candidate(1, stack="llama.cpp")]
    answers: dict[Stack, list[str]] = {
        "llama.cpp": ["Paris. It is", "100 degrees"],
        "vllm": ["Paris. It has", "100 degrees"],
    }
    its = Report(verdict(), stacks, HISTORY, SETTINGS, lambda plan: len(plan["slots"]), answers=answers)
    (line,) = [line for line in its.lines(str) if line.startswith("answers")]
    assert line == (
        "answers of llama.cpp: 1 of 2 are those of vllm, to the letter; the others agree for their first 2 words"
    )
    assert its.to_json()["answers"] == answers
    equal: dict[Stack, list[str]] = {"vllm": ["Paris"], "llama.cpp": ["Paris"]}
    its = Report(verdict(), stacks, HISTORY, SETTINGS, lambda plan: len(plan["slots"]), answers=equal)
    assert "answers of llama.cpp: 1 of 1 are those of vllm, to the letter" in its.lines(str)
    assert not [line for line in report(verdict()).lines(str) if line.startswith("answers")]


@pytest.mark.parametrize(
    ("its", "sentence"),
    [
        (verdict(), "interleaved x 4 gives 1.31 (1.27–1.36) times the default's throughput"),
        (
            verdict(1.01, (0.99, 1.03), winner=0, different=False),
            (
                "no layout is faster than the default by more than 3 %: the best other one, interleaved x 4, gives "
                "1.01 (0.99–1.03) times its throughput"
            ),
        ),
        (
            verdict(0.9, (0.85, 0.95), winner=0, different=False),
            (
                "no layout is faster than the default: the best other one, interleaved x 4, gives 0.90 (0.85–0.95) times "
                "its throughput"
            ),
        ),
        (
            verdict(1.05, (0.8, 1.4), winner=0, different=False),
            "no difference seen: interleaved x 4 gives 1.05 (0.80–1.40) times the default's throughput",
        ),
        (
            verdict(None, winner=1, different=False, complete=False),
            "interleaved x 4 is ahead so far; nothing was compared in fresh visits; the search was cut short",
        ),
        (
            verdict(None, winner=0, different=False),
            "no layout was faster in the race than the default, interleaved x 1",
        ),
        (verdict(None, winner=None, different=False), "no layout gave a figure"),
    ],
)
def test_the_sentence_claims_what_the_interval_supports(its: Verdict, sentence: str) -> None:
    assert report(its).sentence() == sentence


def test_a_default_that_did_not_start_is_said() -> None:
    failed = VisitResult(
        visit=Visit(number=1, candidate=0, purpose="race", repeats=1), started_at="t", start_s=3.0, measure_s=0.0,
        measurements=[], cause="slot 0: KV cache too large",
    )  # fmt: skip
    its = verdict(None, winner=1, different=False)
    said = report(its, history=[failed, HISTORY[1]]).sentence()
    assert said == "interleaved x 4 is the fastest that started; the default gave no figure"


def test_an_slo_that_nothing_meets_is_said_and_goodput_is_named() -> None:
    settings = Settings(slo={"ttft_p99": 0.1})
    history = [result(1, 0, 100.0, goodput_per_s=0.0), result(2, 1, 131.0, goodput_per_s=0.0)]
    standings = [standing(1, 0.0, meets_slo=False), standing(0, 0.0, meets_slo=False)]
    its = report(verdict(standings=standings), settings, history)
    assert its.sentence().endswith("times the default's goodput; no layout meets the SLO")
    lines = its.lines(lambda _: "")
    assert "goodput/s" in lines[1]
    assert "breaks the SLO" in lines[2]


def test_the_table_ranks_and_the_fragment_follows() -> None:
    lines = report(verdict()).lines(lambda layout: f"instances_per_socket = {layout.instances_per_socket}\n")
    assert lines[1].split() == [
        "layout",
        "tokens/s",
        "per",
        "core",
        "95",
        "%",
        "TTFT",
        "p99",
        "ITL",
        "p99",
        "measured",
    ]
    assert lines[2].startswith("interleaved x 4            131.0     32.75     130–132  0.400 s")
    assert lines[3].startswith("interleaved x 1 (default)  100.0     100.00    99–101")
    assert "as configured  100.0 tokens/s           131.0 tokens/s  1.31" in lines
    assert "instances_per_socket = 4" in lines


def test_nothing_is_proposed_where_nothing_differs() -> None:
    its = verdict(1.01, (0.99, 1.03), winner=0, different=False)
    assert "fragment" not in report(its).lines(lambda _: "fragment")


def test_the_json_is_the_documented_one() -> None:
    found = json.loads(json.dumps(report(verdict()).to_json()))
    assert found["winner"] == {
        "layout": {"strategy": "interleaved", "instances_per_socket": 4, "reserve_cores": 0, "span_nodes": False},
        "label": "interleaved x 4", "ratio_to_default": 1.31, "interval": [1.27, 1.36],
    }  # fmt: skip
    assert (found["different"], found["complete"]) == (True, True)
    assert [each["output_tokens_per_s"] for each in found["candidates"]] == [131.0, 100.0]
    assert [each["number"] for each in found["visits"]] == [1, 2]
    assert found["visits"][1]["measurements"][0]["output_tokens_per_s"] == 131.0
    assert report(verdict(None, winner=None, different=False)).to_json()["winner"] is None


def test_the_opening_has_candidates_causes_plan_and_budget() -> None:
    left = LeftOut(layout=None, label="interleaved x 8", cause="node 0 is short by 2.1 GiB")
    found = Candidates(entered=CANDIDATES, refused=[left], left_out=[])
    lines = opening(found, Forecast(visits=12, visit_s=100.0), SETTINGS)
    assert lines == [
        "2 candidates:", "  interleaved x 1 (default)", "  interleaved x 4", "refused:",
        "  interleaved x 8: node 0 is short by 2.1 GiB", "plan: at most 12 visits, about 20 min; budget 2 h 00 min",
    ]  # fmt: skip
    assert opening(found, Forecast(visits=0, visit_s=100.0), SETTINGS)[-1] == "plan: nothing left to measure"


def test_a_line_per_visit() -> None:
    left = Forecast(visits=3, visit_s=40.0)
    assert visit_line(HISTORY[0], CANDIDATES[0], left) == (
        "visit 1 (race): interleaved x 1: 100.0 output tokens/s (1 repeat, started in 31 s); at most 3 visits, about "
        "2 min left"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (89.4, "89 s"), (90, "2 min"), (3599, "1 h 00 min"), (7500, "2 h 05 min")],
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text
