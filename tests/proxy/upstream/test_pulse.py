"""Signs that an engine computes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from launcher.proxy.upstream.pulse import Pulse
from launcher.telemetry.engine_metrics import EngineMetrics

COUNTERS = EngineMetrics(running=1, waiting=0, generated=100, steps=50)


@pytest.mark.parametrize(
    ("later", "rises"),
    [
        (COUNTERS, False),
        (replace(COUNTERS, running=2, waiting=3, kv_usage=0.5), False),
        (replace(COUNTERS, generated=101), True),
        (replace(COUNTERS, steps=51), True),
        (replace(COUNTERS, prefix_queries=8), True),
        (replace(COUNTERS, rounded=True), True),
    ],
)
def test_what_moves_is_a_counter_of_work(later: EngineMetrics, rises: bool) -> None:
    pulse = Pulse()
    pulse.observe(COUNTERS, 10.0)
    assert not pulse.may_beat(10.0, 1000.0)
    pulse.observe(later, 15.0)
    assert pulse.may_beat(20.0, 5.0) is rises
    assert not pulse.may_beat(20.1, 5.0)
    assert (pulse.counted_at == 15.0) is rises


def test_a_token_proves_the_engine_not_that_its_counters_rise() -> None:
    pulse = Pulse()
    pulse.proved(3.0)
    assert not pulse.may_beat(5.0, 1.0)
    pulse.asking = True
    assert pulse.may_beat(5.0, 1.0)
    pulse.asking = False
    assert pulse.may_beat(4.0, 1.0)
    assert pulse.counted_at < 0


def test_time_in_which_the_proxy_did_not_run_is_no_silence() -> None:
    pulse = Pulse()
    pulse.observe(COUNTERS, 1.0)
    pulse.observe(replace(COUNTERS, steps=51), 2.0)
    pulse.excuse(100.0)
    assert pulse.may_beat(103.0, 1.0)
    assert pulse.counted_at == 102.0


def test_an_engine_that_could_not_be_asked_is_not_suspected() -> None:
    pulse = Pulse()
    pulse.not_asked(5.0)
    assert pulse.may_beat(6.0, 1.0)
    assert pulse.counted_at < 0  # it has no counters, as far as is known
    pulse.observe(COUNTERS, 7.0)
    pulse.not_asked(8.0)
    assert pulse.counted_at == 8.0
