"""The runner with planted measurements; tests/integration/test_tune.py kills the real thing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from launcher.config.schema import Strategy
from launcher.measure.tune.journal import Journal, RepeatEnded, RunBegan, VisitBegan
from launcher.measure.tune.model import (
    Candidate,
    Layout,
    Measurement,
    MeasurementFailedError,
    NotStartedError,
    Settings,
    Visit,
    VisitResult,
)
from launcher.measure.tune.runner import Runner, StoppedError, repeat_seed

SETTINGS = Settings(seed=3, repeats=2, refine=False, start_s=0.0, measure_s=1.0)


def candidate(count: int) -> Candidate:
    layout = Layout(strategy=Strategy.INTERLEAVED, instances_per_socket=count, reserve_cores=0)
    return Candidate(layout=layout, label=f"interleaved x {count}", is_default=count == 1, plan={"slots": []})


CANDIDATES = [candidate(count) for count in (1, 2, 4)]


class Planted:
    """Visits and Watcher: what was asked for, in order."""

    def __init__(self, *, stop_after: int | None = None) -> None:
        self.started: list[int] = []
        self.measured: list[tuple[int, int, int]] = []
        self.ended_visits: list[VisitResult] = []
        self.asked: list[int] = []
        self._stop_after = stop_after

    @contextlib.contextmanager
    def start(self, candidate: Candidate, visit: Visit) -> Iterator[PlantedSession]:
        self.started.append(visit.number)
        if candidate is CANDIDATES[2]:
            raise NotStartedError("slot 3: killed for lack of memory")
        yield PlantedSession(self, visit)

    def measure(self, visit: Visit, repeat: int, seed: int) -> Measurement:
        if self._stop_after is not None and len(self.measured) >= self._stop_after:
            raise StoppedError
        self.measured.append((visit.number, repeat, seed))
        if visit.number == 1 and repeat == 0:
            raise MeasurementFailedError("none of 20 requests was completed")
        return Measurement(output_tokens_per_s=100.0 * (1 + 0.2 * visit.candidate) + seed % 7 / 10)

    def began(self, visit: Visit) -> None: ...

    def ended(self, result: VisitResult) -> None:
        self.ended_visits.append(result)


class PlantedSession:
    def __init__(self, planted: Planted, visit: Visit) -> None:
        self._planted = planted
        self._visit = visit

    def measure(self, repeat: int, seed: int) -> Measurement:
        return self._planted.measure(self._visit, repeat, seed)

    def answers(self) -> list[str]:
        asked, candidate = self._planted.asked, self._visit.candidate
        asked.append(candidate)
        if candidate != 1 and len(asked) - asked.count(1) == 1:
            raise MeasurementFailedError("the engine is gone")
        return [f"candidate {candidate}"]


def journal(folder: Path) -> Journal:
    return Journal.create(folder / "run", RunBegan(id="run", at="t", options={}, identity={}))


def runner(its: Journal, planted: Planted) -> Runner:
    return Runner(its, CANDIDATES, SETTINGS, planted, planted, clock=lambda: 0.0)


def test_a_run_ends_with_the_fastest_and_every_failure_is_a_result(tmp_path: Path) -> None:
    its, planted = journal(tmp_path), Planted()
    verdict = runner(its, planted).run()
    assert (verdict.winner, verdict.different) == (1, True)
    assert its.history == planted.ended_visits
    causes = {result.visit.candidate: result.cause for result in its.history if not result.measurements}
    assert causes == {2: "slot 3: killed for lack of memory"}
    assert all(len(r.measurements) == 2 for r in its.history if r.visit.candidate != 2 and r.visit.number > 1)


def test_a_stop_gives_the_verdict_so_far_and_the_rest_is_measured_later(tmp_path: Path) -> None:
    whole = runner(journal(tmp_path / "whole"), Planted()).run()
    for stop_after in range(12):
        folder = tmp_path / str(stop_after)
        first, then = Planted(stop_after=stop_after), Planted()
        assert not runner(journal(folder), first).run().complete
        assert runner(Journal.open(folder / "run"), then).run() == whole
        calls = first.measured + then.measured
        assert len(calls) == len(set(calls)), "a repeat was measured twice"


def test_each_of_several_stacks_answers_once(tmp_path: Path) -> None:
    """One that fails is asked at its next visit, and a run that is continued asks none again."""
    layouts = [
        msgspec.structs.replace(each, layout=msgspec.structs.replace(each.layout, stack=stack))
        for each, stack in zip(CANDIDATES, ("vllm", "llama.cpp", "vllm"), strict=True)
    ]
    its, planted = journal(tmp_path), Planted(stop_after=9)  # the third candidate never starts
    Runner(its, layouts, SETTINGS, planted, planted, clock=lambda: 0.0).run()
    again, then = Journal.open(tmp_path / "run"), Planted()
    assert again.answers == its.answers
    assert sorted(its.answers) == ["llama.cpp", "vllm"]
    assert planted.asked.count(1) == 1
    assert len(planted.asked) == 3, "the one that failed was asked at its next visit"
    assert its.answers["llama.cpp"] == ["candidate 1"]
    Runner(again, layouts, SETTINGS, then, then, clock=lambda: 0.0).run()
    assert then.measured
    assert not then.asked
    alone = Planted()
    runner(journal(tmp_path / "alone"), alone).run()
    assert not alone.asked


def test_a_kill_after_the_last_repeat_starts_nothing(tmp_path: Path) -> None:
    first = Planted()
    runner(journal(tmp_path / "a"), first).run()
    visit = first.ended_visits[0].visit
    its = journal(tmp_path / "b")
    its.append(VisitBegan(visit=visit, at="t"))
    for repeat in range(visit.repeats):
        its.append(
            RepeatEnded(repeat=repeat, measure_s=0.0, measurement=Measurement(output_tokens_per_s=100.0))
        )
    then = Planted()
    runner(its, then).run()
    assert visit.number not in then.started


def test_no_two_repeats_of_a_run_have_the_same_seed() -> None:
    seeds = [
        repeat_seed(seed, Visit(number=number, candidate=0, purpose="race", repeats=12), repeat)
        for seed in (0, 1)
        for number in range(1, 200)
        for repeat in range(12)
    ]
    assert len(seeds) == len(set(seeds))
    assert all(0 <= seed < 2**31 for seed in seeds)
