"""Whether an instance with work moves: looks in, a verdict out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.instances.progress import (
    STARVED_PATIENCE,
    Look,
    Progress,
    canary_is_due,
    observe,
    patience,
    proved,
    stall,
    started,
)
from launcher.telemetry.vllm_metrics import EngineMetrics

COUNTED = EngineMetrics(running=1, waiting=0, generated=10, steps=5)
LLAMA = EngineMetrics(running=1, waiting=2, generated=413, steps=1_234_570)


def look(at: float, counters: EngineMetrics | None = COUNTED, **more: object) -> Look:
    fields: dict[str, object] = {"responsive": True, "in_flight": 1, "relayed": 0} | more
    return Look(at=at, counters=counters, **fields)  # type: ignore[arg-type]


def seen(*looks: Look) -> Progress:
    progress = started(0.0)
    for found in looks:
        progress = observe(progress, found)
    return progress


def test_a_llama_server_that_stands_still_with_work_is_hung() -> None:
    counted = LLAMA
    assert seen(look(10, counted), look(70, counted)).moved_at == 10
    # Its health path answers, its loop does not.
    assert seen(look(10, counted), look(70, None)).moved_at == 10
    stepped = replace(LLAMA, steps=1_234_580)
    assert seen(look(10, counted), look(70, stepped)).moved_at == 70


def test_rounded_counters_that_are_answered_prove_the_loop() -> None:
    counted = replace(LLAMA, steps=123_457_000, rounded=True)
    assert seen(look(10, counted), look(70, counted)).moved_at == 70
    assert seen(look(10, counted), look(70, None)).moved_at == 10


@pytest.mark.parametrize(
    ("second", "moved"),
    [
        (look(100, replace(COUNTED, generated=11)), True),
        (look(100, replace(COUNTED, steps=6)), True),
        (look(100, relayed=3), True),
        (look(100), False),
        (look(100, None, responsive=False), False),
        (look(100, None), False),
        (look(100, replace(COUNTED, running=0), in_flight=0), True),
        (look(100, None, in_flight=0), False),
    ],
)
def test_what_counts_as_progress(second: Look, moved: bool) -> None:
    """The last one: its counters do not answer any more, and it had work when they did."""
    assert (seen(look(1), second).moved_at == 100) is moved


def test_an_engine_without_counters_is_given_the_benefit_while_it_answers() -> None:
    assert seen(look(1, None), look(100, None)).moved_at == 100
    assert seen(look(1, None), look(100, None, responsive=False)).moved_at == 1
    assert seen(look(1, None), look(100, None, responsive=False, relayed=1)).moved_at == 100


def test_silence_after_its_work_was_taken_away_is_no_rest() -> None:
    silent = look(30, None, responsive=False)
    assert seen(look(1, None), silent, replace(silent, at=60, in_flight=0)).moved_at == 1
    assert seen(look(1, None), replace(silent, in_flight=0)).moved_at == 30, "it had answered until then"
    assert seen(look(1, None), silent, look(60, None, in_flight=0)).moved_at == 60
    idle = replace(COUNTED, running=0)
    assert seen(look(1), silent, look(60, idle, in_flight=0, responsive=False)).moved_at == 60


def test_stall_names_everything_that_stood_still() -> None:
    progress = seen(look(1), look(50), look(125))
    assert stall(progress, 120.0, 120.0, 3.0) == ()
    first, counters, relayed, pressure = stall(progress, 125.0, 120.0, 3.0)
    assert first == "1 requests in flight and no progress for 124 s (supervision.stall_timeout_s is 120)"
    assert counters == "its counters stand still: 10 tokens generated, 5 steps, 1 running, 0 waiting"
    assert "relayed 0 events" in relayed
    assert pressure.endswith("not starved")


def test_stall_without_counters_or_pressure() -> None:
    silent = look(10, None, responsive=False)
    *_, pressure = stall(seen(replace(silent, at=1), silent), 200.0, 120.0, None)
    assert "the kernel does not say" in pressure
    gone = seen(look(1), look(130, None, responsive=False))
    assert "do not answer any more" in stall(gone, 130.0, 120.0, None)[1]
    assert stall(Progress(), 1e9, 120.0, None) == ()


def test_a_starved_machine_gets_patience() -> None:
    assert patience(100.0, 90.0) == 100 * STARVED_PATIENCE
    assert patience(100.0, 10.0) == patience(100.0, None) == 100
    progress = seen(look(1), look(150))
    assert stall(progress, 150.0, 120.0, 90.0) == ()
    assert stall(progress, 1000.0, 120.0, 90.0)[-1].endswith(": starved")


def test_canary() -> None:
    idle = replace(COUNTED, running=0)
    progress = seen(look(1, idle, in_flight=0), look(301, idle, in_flight=0))
    assert canary_is_due(progress, 301.0, 300.0)
    assert not canary_is_due(proved(progress, 300.0), 301.0, 300.0)
    assert not canary_is_due(seen(look(1), look(400)), 400.0, 300.0), "busy"
    assert not canary_is_due(Progress(), 1e9, 300.0)


def test_speed() -> None:
    assert seen(look(1), look(11, replace(COUNTED, generated=60))).tokens_per_s == 5.0
    assert seen(look(1)).tokens_per_s is None
    assert seen(look(1), look(11, replace(COUNTED, generated=0))).tokens_per_s == 0
