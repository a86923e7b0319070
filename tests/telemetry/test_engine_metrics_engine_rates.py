"""Rates of engines' counters between probes."""

from __future__ import annotations

import pytest

from launcher.telemetry.engine_metrics import EngineCounts, EngineRates, Rates


def counts(at: float, tokens: int, queries: int = 0, hits: int = 0, generation: int = 1) -> EngineCounts:
    return EngineCounts(generation, at, tokens, queries, hits)


def test_a_rate_holds_until_the_next_probe() -> None:
    engines = EngineRates()
    assert engines.rates(0, counts(10, 100), 10) is None
    assert engines.rates(0, counts(15, 150, 20, 5), 15) == Rates(10, 4, 1)
    assert engines.rates(0, counts(15, 150, 20, 5), 19) == Rates(10, 4, 1)
    assert engines.rates(0, counts(20, 150, 20, 5), 21) == Rates(0, 0, 0)


def test_a_late_probe_makes_the_rate_unknown() -> None:
    engines = EngineRates()
    engines.rates(0, counts(10, 100), 10)
    engines.rates(0, counts(15, 150), 15)
    assert engines.rates(0, counts(15, 150), 30) == Rates(10, 0, 0)
    assert engines.rates(0, counts(15, 150), 30.1) is None


@pytest.mark.parametrize("after", [counts(15, 900, generation=2), counts(15, 50), counts(15, 900, -1)])
def test_counters_of_another_process_begin_again(after: EngineCounts) -> None:
    engines = EngineRates()
    engines.rates(0, counts(10, 100), 10)
    assert engines.rates(0, after, 15) is None


def test_a_failed_probe_forgets_the_counters() -> None:
    """Between the counters before and after it is the time of a hang."""
    engines = EngineRates()
    engines.rates(0, counts(10, 100), 10)
    assert engines.rates(0, None, 15) is None
    assert engines.rates(0, counts(20, 150), 20) is None


def test_slots_that_are_gone_are_forgotten() -> None:
    engines = EngineRates()
    for slot in (0, 1):
        engines.rates(slot, counts(10, 100), 10)
    engines.keep(frozenset({1}))
    assert engines.rates(0, counts(15, 150), 15) is None
    assert engines.rates(1, counts(15, 150), 15) is not None
