"""The search, from its first visit to its verdict, by the results of its visits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measure.tune.planted import PlantedMachine, run_search, searched
from support.examples import examples

from launcher.config.schema import Strategy
from launcher.measure.tune.model import (
    Candidate,
    Layout,
    Measurement,
    Settings,
    Standing,
    Verdict,
    Visit,
    VisitResult,
)
from launcher.measure.tune.report import forecast
from launcher.measure.tune.search import VISITS_PER_LAYOUT, next_step, verdict_so_far

NO_REFINEMENTS = Settings(refine=False)
Measure = Callable[[Visit], list[Measurement]]


def candidates(count: int, *, refinements: int = 0) -> list[Candidate]:
    layout = Layout(strategy=Strategy.INTERLEAVED, instances_per_socket=1, reserve_cores=0)
    layouts = [
        Candidate(layout=layout, label=f"layout {i}", is_default=i == 0, plan={}) for i in range(count)
    ]
    refined = [
        Candidate(layout=layout, label=f"layout {i} refined {k}", refines=i, plan={})
        for i in range(count)
        for k in range(refinements)
    ]
    return [*layouts, *refined]


def search(
    its: Sequence[Candidate], measure: Measure, chosen: Settings = NO_REFINEMENTS
) -> tuple[Verdict, list[VisitResult]]:
    """Runs a search to its end; a visit without measurements has failed."""

    def measured(visit: Visit) -> VisitResult:
        measurements = measure(visit)
        return VisitResult(
            visit=visit, started_at="", start_s=60, measure_s=30.0 * len(measurements), measurements=measurements,
            cause=None if measurements else "exited with code 1",
        )  # fmt: skip

    return run_search(its, chosen, measured)


def speeds(*figures: float, noise: float = 0.005) -> Measure:
    """Measurements of layouts with these speeds; 0: it does not start."""
    random = Random(1)  # noqa: S311

    def measure(visit: Visit) -> list[Measurement]:
        figure = figures[visit.candidate]
        return [
            Measurement(output_tokens_per_s=figure * math.exp(random.gauss(0, noise)))
            for _ in range(visit.repeats if figure else 0)
        ]

    return measure


def standing(verdict: Verdict, candidate: int) -> Standing:
    return next(each for each in verdict.standings if each.candidate == candidate)


@pytest.mark.parametrize("seed", range(4))
def test_the_next_step_is_a_function_of_the_history(seed: int) -> None:
    machine, chosen = PlantedMachine(seed), Settings(seed=seed)
    verdict, history = searched(machine, chosen)
    for k in (0, 1, 7, len(history) // 2, len(history) - 1):
        assert next_step(history[:k], machine.candidates, chosen) == history[k].visit
        assert not verdict_so_far(history[:k], machine.candidates, chosen).complete
    assert next_step(history, machine.candidates, chosen) == verdict
    assert verdict_so_far(history, machine.candidates, chosen) == verdict


@st.composite
def any_measurements(draw: st.DrawFn) -> list[Measurement]:
    figure = st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-300, 1.0, 1.0, 1.02, 2.0, 1e300])
    goodput = st.none() | figure
    return draw(
        st.lists(
            st.builds(
                Measurement, output_tokens_per_s=figure, goodput_per_s=goodput, ttft_p99_s=st.none() | figure,
                failed=st.sampled_from([0, 0, 3]),
            ),
            max_size=5,
        )
    )  # fmt: skip


any_settings = st.builds(
    Settings,
    seed=st.integers(0, 3),
    budget_s=st.none() | st.floats(1, 20_000),
    slo=st.sampled_from([{}, {"ttft_p99": 1.5}]),
)


@settings(max_examples=examples(60), deadline=None)
@given(
    pool=st.lists(any_measurements(), min_size=1, max_size=6),
    count=st.integers(1, 9),
    refinements=st.integers(0, 2),
    chosen=any_settings,
    random=st.randoms(use_true_random=False),
)
def test_any_results_end_in_a_verdict_within_the_bound(
    pool: list[list[Measurement]], *, count: int, refinements: int, chosen: Settings, random: Random
) -> None:
    its = candidates(count, refinements=refinements)
    verdict, history = search(its, lambda _: random.choice(pool), chosen)
    assert [each.visit.number for each in history] == [*range(1, len(history) + 1)]
    # Twice each where all fail, and the confirmations of two layouts.
    assert len(history) <= max(VISITS_PER_LAYOUT * count, 2 * count + 10) + 2.5 * (refinements + 1) + 16
    k = random.randint(0, len(history))
    assert next_step(history[:k], its, chosen) == (history[k].visit if k < len(history) else verdict)
    if verdict.interval is not None:
        assert verdict.ratio_to_default is not None
        assert verdict.interval[0] <= verdict.ratio_to_default <= verdict.interval[1]
    if verdict.winner is not None:
        assert verdict.standings[0].candidate == verdict.winner
        assert verdict.standings[0].score is not None
    assert {each.candidate for each in verdict.standings} >= set(range(count))


def test_a_foreign_history_is_refused() -> None:
    its = candidates(9)
    _, history = search(its, speeds(*[100] * 9), Settings(seed=1))
    with pytest.raises(
        ValueError, match=r"the history is not of this search: visit 1 of candidate \d \(race, 6 rep"
    ):
        next_step(history, its, Settings(seed=2))
    with pytest.raises(ValueError, match="expected none, the search has ended"):
        next_step([*history, history[0]], its, Settings(seed=1))


def test_the_faster_layout_wins_and_its_ratio_comes_from_fresh_visits() -> None:
    verdict, history = search(candidates(8), speeds(100, 110, 90, 131, 80, 70, 100, 100))
    assert (verdict.winner, verdict.different, verdict.complete) == (3, True, True)
    fresh = [each for each in history if each.visit.purpose == "confirm"]
    assert Counter(each.visit.candidate for each in fresh) == {0: 4, 3: 4}
    assert verdict.comparison is not None
    assert verdict.comparison.pairs == 4
    assert verdict.ratio_to_default == pytest.approx(1.31, abs=0.01)
    assert verdict.interval is not None
    assert verdict.interval[0] < 1.31 < verdict.interval[1]
    assert standing(verdict, 4).left == "slower than layout 3"
    assert standing(verdict, 3).left is None
    assert [each.candidate for each in verdict.standings][:2] == [3, 1]


def test_layouts_that_visits_do_not_suffice_for_are_not_called_slower() -> None:
    verdict, _ = search(candidates(12), speeds(*[100] * 12, noise=0.03))
    assert "not among the best 4 after round 1" in {each.left for each in verdict.standings}


def test_both_of_a_pair_come_first_equally_often() -> None:
    _, history = search(candidates(3), speeds(100, 120, 90))
    fresh = [each.visit.candidate for each in history if each.visit.purpose == "confirm"]
    assert fresh[:8] == [0, 1, 1, 0, 0, 1, 1, 0]


def test_every_second_round_reverses_the_first() -> None:
    _, history = search(candidates(12), speeds(*[100] * 12, noise=0.05))
    order = [each.visit.candidate for each in history if each.visit.purpose == "race"]
    survivors = order[12 : 12 + len(set(order[12:]))]
    assert survivors == [each for each in reversed(order[:12]) if each in survivors]


def test_the_default_needs_no_confirmation() -> None:
    verdict, history = search(candidates(8), speeds(100, 50, 60, 70, 80, 50, 60, 70))
    assert (verdict.winner, verdict.different, verdict.ratio_to_default) == (0, False, 1.0)
    assert verdict.interval == (1.0, 1.0)
    assert verdict.comparison is None
    assert {each.visit.purpose for each in history} == {"race"}


def test_two_layouts_are_compared_without_a_race() -> None:
    verdict, history = search(candidates(2), speeds(100, 80))
    assert {each.visit.purpose for each in history} == {"confirm"}
    assert (verdict.winner, verdict.different, verdict.complete) == (0, False, True)
    assert verdict.comparison is not None
    assert verdict.comparison.ratio == pytest.approx(0.8, abs=0.01)


def test_a_gain_below_the_least_is_no_difference() -> None:
    verdict, _ = search(candidates(3), speeds(100, 101.2, 90, noise=0.001))
    assert verdict.winner == 1
    assert verdict.interval is not None
    assert verdict.interval[0] > 1
    assert not verdict.different


def test_one_layout_is_measured() -> None:
    verdict, history = search(candidates(1), speeds(100))
    assert len(history) == 1
    assert (verdict.winner, verdict.different, verdict.complete) == (0, False, True)


def test_a_layout_that_does_not_start_is_tried_twice() -> None:
    verdict, history = search(candidates(4), speeds(100, 0, 130, 90))
    assert sum(each.visit.candidate == 1 for each in history) == 2
    assert standing(verdict, 1).left == "failed twice: exited with code 1"
    assert standing(verdict, 1).score is None
    assert (verdict.winner, verdict.complete) == (2, True)


def test_a_start_that_fails_once_is_repeated() -> None:
    good, failures = speeds(100, 120, 90), iter([True])
    verdict, _ = search(
        candidates(3), lambda visit: [] if visit.candidate == 1 and next(failures, False) else good(visit)
    )
    assert (verdict.winner, verdict.different, verdict.complete) == (1, True, True)


def test_a_default_that_does_not_start_has_no_ratio() -> None:
    verdict, _ = search(candidates(4), speeds(0, 100, 130, 90))
    assert (verdict.winner, verdict.different, verdict.ratio_to_default) == (2, True, None)
    assert standing(verdict, 0).left == "failed twice: exited with code 1"


def test_without_any_figure_there_is_no_winner() -> None:
    verdict, history = search(candidates(5), speeds(*[0] * 5))
    assert (verdict.winner, verdict.different, verdict.ratio_to_default) == (None, False, None)
    assert len(history) == 10
    assert {each.left for each in verdict.standings} == {"failed twice: exited with code 1"}
    assert verdict.complete


def test_figures_that_are_no_numbers_are_failures() -> None:
    verdict, _ = search(candidates(2), lambda _: [Measurement(output_tokens_per_s=math.nan)])
    assert verdict.winner is None
    assert standing(verdict, 0).left == "failed twice: no measurement gave a figure above 0"


def test_the_winner_that_fails_in_its_fresh_visits_gives_way_to_the_second() -> None:
    good = speeds(100, 120, 130, 90, 80, 80, 80, 80)
    verdict, _ = search(
        candidates(8), lambda visit: [] if (visit.candidate, visit.purpose) == (2, "confirm") else good(visit)
    )
    assert (verdict.winner, verdict.different) == (1, True)
    assert standing(verdict, 2).left == "failed twice: exited with code 1"


def test_where_both_best_layouts_fail_in_their_fresh_visits_the_next_is_named() -> None:
    good = speeds(125, 120, 130, 90, 140, 80, 80, 80)
    verdict, _ = search(
        candidates(8),
        lambda visit: [] if visit.candidate in {2, 4} and visit.purpose == "confirm" else good(visit),
    )
    assert (verdict.winner, verdict.different, verdict.ratio_to_default) == (0, False, 1.0)


def with_ttft(figures: dict[int, tuple[float, float]]) -> Measure:
    good = speeds(*(figure for figure, _ in figures.values()))
    return lambda visit: [
        Measurement(output_tokens_per_s=each.output_tokens_per_s, ttft_p99_s=figures[visit.candidate][1])
        for each in good(visit)
    ]


def test_layouts_that_break_a_limit_rank_below_the_others() -> None:
    measure = with_ttft({0: (100, 1.0), 1: (200, 2.5), 2: (120, 1.9)})
    verdict, _ = search(candidates(3), measure, Settings(slo={"ttft_p99": 2.0}, refine=False))
    assert (verdict.winner, verdict.different) == (2, True)
    assert standing(verdict, 1).left == "ttft_p99 2.5 s over 2 s"
    assert [each.meets_slo for each in verdict.standings] == [True, True, False]


def test_a_layout_that_keeps_a_limit_differs_from_a_default_that_breaks_it() -> None:
    measure = with_ttft({0: (100, 2.5), 1: (90, 1.0), 2: (80, 1.0)})
    verdict, _ = search(candidates(3), measure, Settings(slo={"ttft_p99": 2.0}, refine=False))
    assert (verdict.winner, verdict.different) == (1, True)
    assert verdict.ratio_to_default == pytest.approx(0.9, abs=0.01)


def test_failed_requests_break_a_limit() -> None:
    def measure(visit: Visit) -> list[Measurement]:
        fast = visit.candidate == 1
        return [Measurement(output_tokens_per_s=200 if fast else 100, failed=3 * fast)] * visit.repeats

    verdict, _ = search(candidates(3), measure)
    assert verdict.winner != 1
    assert standing(verdict, 1).left == "3 requests failed"


def test_goodput_counts_where_limits_are_given_and_it_is_measured() -> None:
    def measure(visit: Visit) -> list[Measurement]:
        goodput = (5.0, 4.0, 6.0)[visit.candidate]
        return [Measurement(output_tokens_per_s=100 / goodput, goodput_per_s=goodput)] * visit.repeats

    assert search(candidates(3), measure)[0].winner == 1
    assert search(candidates(3), measure, Settings(slo={"e2e_p99": 2.0}, refine=False))[0].winner == 2


def test_the_best_layout_is_refined() -> None:
    its = candidates(4, refinements=3)
    figures = [100.0, 120.0, 90.0, 80.0, *[0.0] * 3, 121.0, 140.0, 110.0, *[0.0] * 6]
    verdict, history = search(its, speeds(*figures), Settings())
    assert {each.visit.candidate for each in history if each.visit.purpose == "refine"} == {1, 7, 8, 9}
    assert (verdict.winner, verdict.ratio_to_default) == (8, pytest.approx(1.4, abs=0.02))
    assert {each.candidate for each in verdict.standings} == {0, 1, 2, 3, 7, 8, 9}


def disturbed_once(good: Measure) -> Measure:
    """Another job runs during the first visit of candidate 7."""

    def measure(visit: Visit) -> list[Measurement]:
        if visit.candidate != 7 or visit.number > 8:
            return good(visit)
        return [Measurement(output_tokens_per_s=140 * share) for share in (0.5, 0.8, 0.6, 0.7, 0.55, 0.75)]

    return measure


def test_a_disturbed_visit_counts_if_its_repetition_fails() -> None:
    measure = disturbed_once(speeds(*[100] * 7, 140))
    verdict, history = search(candidates(8), lambda visit: [] if visit.number == 9 else measure(visit))
    assert history[8].visit.candidate == 7
    assert standing(verdict, 7).score == pytest.approx(140 * 0.65, rel=0.02)


def test_a_visit_that_another_job_disturbed_is_repeated() -> None:
    verdict, history = search(candidates(8), disturbed_once(speeds(*[100] * 7, 140)))
    assert [each.visit.candidate for each in history[:9]].count(7) == 2
    assert (verdict.winner, verdict.different) == (7, True)


def test_a_layout_with_more_noise_than_the_others_is_repeated_once() -> None:
    calm, noisy = speeds(*[100] * 8), speeds(*[100] * 8, noise=0.2)
    _, history = search(candidates(8), lambda visit: (noisy if visit.candidate == 3 else calm)(visit))
    blocks = [each.visit.candidate for each in history if each.visit.purpose == "race"]
    assert blocks[:9].count(3) == 2
    assert blocks[9:].count(3) <= len(blocks[9:]) / 2


def test_a_confirmation_that_the_budget_cuts_short_is_incomplete() -> None:
    its, measure, full = candidates(2), speeds(100, 130, noise=0.04), Settings(budget_s=1300)
    verdict, history = search(its, measure, full)
    assert len(history) < 8
    assert (verdict.winner, verdict.complete) == (1, False)


@pytest.mark.parametrize(("budget_s", "visits"), [(180, 2), (210, 2), (179, 1)])
def test_a_first_visit_that_takes_longer_than_assumed_leaves_its_pair_whole(
    budget_s: float, visits: int
) -> None:
    """90 s, assumed 50: what was reserved for later pairs goes to the other visit of this one."""
    chosen = Settings(budget_s=budget_s, refine=False, repeats=1, start_s=30, measure_s=20)
    verdict, history = search(candidates(2), speeds(100, 100), chosen)
    assert len(history) >= visits
    assert len({each.visit.candidate for each in history}) == visits
    assert sum(each.start_s + each.measure_s for each in history) <= budget_s
    assert not verdict.complete


def test_the_forecast_covers_what_follows() -> None:
    its = candidates(9, refinements=3)
    _, history = search(its, speeds(*range(90, 99), *range(80, 107)), Settings())
    for k in range(len(history)):
        left = forecast(history[:k], its, Settings())
        assert left.visits >= len(history) - k
        assert left.seconds == left.visits * left.visit_s
    assert forecast(history, its, Settings()).visits == 0


def test_the_forecast_is_corrected_by_what_was_measured() -> None:
    its, chosen = candidates(9), Settings(start_s=600, measure_s=100)
    _, history = search(its, speeds(*[100] * 9), chosen)
    assert forecast([], its, chosen).visit_s == 600 + 6 * 100
    assert forecast(history[:5], its, chosen).visit_s == 60 + 4 * 30


def test_more_noise_means_more_repeats() -> None:
    def repeats(noise: float) -> int:
        _, history = search(candidates(6), speeds(*[100] * 6, noise=noise))
        return history[-1].visit.repeats

    assert repeats(0.002) == 4
    assert 4 < repeats(0.06) <= 12


def test_repeats_can_be_fixed() -> None:
    _, history = search(candidates(3), speeds(100, 110, 90), Settings(repeats=2, refine=False))
    assert {each.visit.repeats for each in history} == {2}


def test_a_budget_that_is_too_short_leaves_layouts_unmeasured() -> None:
    chosen = Settings(budget_s=2400, refine=False)
    verdict, history = search(candidates(20), speeds(*[100] * 20), chosen)
    assert sum(each.start_s + each.measure_s for each in history) <= 2400
    assert not verdict.complete
    assert {each.left for each in verdict.standings if not each.visits} == {
        "not measured: the budget ended before"
    }


@pytest.mark.parametrize("seed", range(10))
def test_the_budget_is_kept(seed: int) -> None:
    machine, budget_s = PlantedMachine(seed), 3 * 3600
    _, history = searched(machine, Settings(seed=seed, budget_s=budget_s))
    assert sum(each.start_s + each.measure_s for each in history) < 1.03 * budget_s


def test_what_is_known_so_far_has_a_ranking() -> None:
    its, measure = candidates(9), speeds(100, 140, 90, 80, 70, 60, 90, 80, 70)
    _, history = search(its, measure)
    verdict = verdict_so_far(history[:9], its, NO_REFINEMENTS)
    assert (verdict.winner, verdict.different, verdict.complete) == (1, False, False)
    assert verdict.ratio_to_default is None
    assert verdict_so_far([], its, NO_REFINEMENTS).winner is None
