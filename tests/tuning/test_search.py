"""The search on planted machines."""

from __future__ import annotations

import pytest
from tuning.planted import PlantedMachine, searched

from launcher.tuning.eta import forecast
from launcher.tuning.model import Settings, Verdict, Visit
from launcher.tuning.search import next_step, verdict_so_far


@pytest.mark.parametrize("seed", range(4))
def test_the_next_step_is_a_function_of_the_history(seed: int) -> None:
    machine, settings = PlantedMachine(seed), Settings(seed=seed)
    verdict, history = searched(machine, settings)
    for k in (0, 1, 7, len(history) // 2, len(history) - 1):
        assert next_step(history[:k], machine.candidates, settings) == history[k].visit
        assert not verdict_so_far(history[:k], machine.candidates, settings).complete
    assert next_step(history, machine.candidates, settings) == verdict
    assert verdict_so_far(history, machine.candidates, settings) == verdict


def test_visits_are_numbered_from_one_without_gaps() -> None:
    _, history = searched(PlantedMachine(1), Settings())
    assert [result.visit.number for result in history] == [*range(1, len(history) + 1)]


def test_a_foreign_history_is_refused() -> None:
    machine = PlantedMachine(1)
    _, history = searched(machine, Settings(seed=1))
    with pytest.raises(ValueError, match=r"history is not of this search: visit 1 of candidate \d+"):
        next_step(history, machine.candidates, Settings(seed=2))


def test_the_first_visit_comes_without_a_history() -> None:
    step = next_step([], PlantedMachine(1).candidates, Settings())
    assert isinstance(step, Visit)
    assert (step.number, step.purpose) == (1, "race")


def test_the_forecast_covers_what_follows() -> None:
    machine, settings = PlantedMachine(3), Settings(refine=False)
    verdict, history = searched(machine, settings)
    assert isinstance(verdict, Verdict)
    for k in range(0, len(history) + 1, 5):
        assert forecast(history[:k], machine.candidates, settings).visits >= len(history) - k
    assert forecast(history, machine.candidates, settings).visits == 0
