"""Whether an instance with work moves: observations in, a verdict out."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from launcher.instances.progress import (
    STARVED_PATIENCE,
    Observation,
    Progress,
    canary_is_due,
    observe,
    patience,
    proved,
    stall,
    started,
)
from launcher.telemetry.engine_metrics import EngineMetrics

COUNTED = EngineMetrics(running=1, waiting=0, generated=10, steps=5)
LLAMA = EngineMetrics(running=1, waiting=2, generated=413, steps=1_234_570)


def seen(at: float, counters: EngineMetrics | None = COUNTED, **more: object) -> Observation:
    fields: dict[str, object] = {"responsive": True, "in_flight": 1, "relayed": 0} | more
    return Observation(at=at, counters=counters, **fields)  # type: ignore[arg-type]


def progress_after(*observations: Observation) -> Progress:
    progress = started(0.0)
    for found in observations:
        progress = observe(progress, found)
    return progress


def test_a_llama_server_that_stands_still_with_work_is_hung() -> None:
    counted = LLAMA
    assert progress_after(seen(10, counted), seen(70, counted)).moved_at == 10
    # Its health path answers, its loop does not.
    assert progress_after(seen(10, counted), seen(70, None)).moved_at == 10
    stepped = replace(LLAMA, steps=1_234_580)
    assert progress_after(seen(10, counted), seen(70, stepped)).moved_at == 70


def test_rounded_counters_that_are_answered_prove_the_loop() -> None:
    counted = replace(LLAMA, steps=123_457_000, rounded=True)
    assert progress_after(seen(10, counted), seen(70, counted)).moved_at == 70
    assert progress_after(seen(10, counted), seen(70, None)).moved_at == 10


@pytest.mark.parametrize(
    ("second", "moved"),
    [
        (seen(100, replace(COUNTED, generated=11)), True),
        (seen(100, replace(COUNTED, steps=6)), True),
        (seen(100, relayed=3), True),
        (seen(100), False),
        (seen(100, None, responsive=False), False),
        (seen(100, None), False),
        (seen(100, replace(COUNTED, running=0), in_flight=0), True),
        (seen(100, None, in_flight=0), False),
    ],
)
def test_what_counts_as_progress(second: Observation, moved: bool) -> None:
    """The last one: its counters no longer answer, and it had work when they did."""
    assert (progress_after(seen(1), second).moved_at == 100) is moved


def test_an_engine_without_counters_is_given_the_benefit_while_it_answers() -> None:
    assert progress_after(seen(1, None), seen(100, None)).moved_at == 100
    assert progress_after(seen(1, None), seen(100, None, responsive=False)).moved_at == 1
    assert progress_after(seen(1, None), seen(100, None, responsive=False, relayed=1)).moved_at == 100


def test_silence_after_its_work_was_taken_away_is_no_rest() -> None:
    silent = seen(30, None, responsive=False)
    assert progress_after(seen(1, None), silent, replace(silent, at=60, in_flight=0)).moved_at == 1
    assert progress_after(seen(1, None), replace(silent, in_flight=0)).moved_at == 30, (
        "it had answered until then"
    )
    assert progress_after(seen(1, None), silent, seen(60, None, in_flight=0)).moved_at == 60
    idle = replace(COUNTED, running=0)
    assert progress_after(seen(1), silent, seen(60, idle, in_flight=0, responsive=False)).moved_at == 60


def test_stall_names_everything_that_stood_still() -> None:
    progress = progress_after(seen(1), seen(50), seen(125))
    assert stall(progress, 120.0, 120.0, 3.0) == ()
    first, counters, relayed, pressure = stall(progress, 125.0, 120.0, 3.0)
    assert first == "1 requests in flight and no progress for 124 s (supervision.stall_timeout_s is 120)"
    assert counters == "its counters do not rise: 10 tokens generated, 5 steps, 1 running, 0 waiting"
    assert "relayed 0 events" in relayed
    assert pressure.endswith("not starved")


def test_stall_without_counters_or_pressure() -> None:
    silent = seen(10, None, responsive=False)
    *_, pressure = stall(progress_after(replace(silent, at=1), silent), 200.0, 120.0, None)
    assert "unknown" in pressure
    gone = progress_after(seen(1), seen(130, None, responsive=False))
    assert "no longer answer" in stall(gone, 130.0, 120.0, None)[1]
    assert stall(Progress(), 1e9, 120.0, None) == ()


def test_a_starved_machine_gets_patience() -> None:
    assert patience(100.0, 90.0) == 100 * STARVED_PATIENCE
    assert patience(100.0, 10.0) == patience(100.0, None) == 100
    progress = progress_after(seen(1), seen(150))
    assert stall(progress, 150.0, 120.0, 90.0) == ()
    assert stall(progress, 1000.0, 120.0, 90.0)[-1].endswith(": starved")


def test_canary() -> None:
    idle = replace(COUNTED, running=0)
    progress = progress_after(seen(1, idle, in_flight=0), seen(301, idle, in_flight=0))
    assert canary_is_due(progress, 301.0, 300.0)
    assert not canary_is_due(proved(progress, 300.0), 301.0, 300.0)
    assert not canary_is_due(progress_after(seen(1), seen(400)), 400.0, 300.0), "busy"
    assert not canary_is_due(Progress(), 1e9, 300.0)


def test_speed() -> None:
    assert progress_after(seen(1), seen(11, replace(COUNTED, generated=60))).tokens_per_s == 5.0
    assert progress_after(seen(1)).tokens_per_s is None
    assert progress_after(seen(1), seen(11, replace(COUNTED, generated=0))).tokens_per_s == 0
