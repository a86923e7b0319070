"""A least rate without credit."""

from __future__ import annotations

from launcher.proxy.downstream.slow_clients import Pace


def test_pace_has_no_credit() -> None:
    """Bytes that came fast do not pay for a later silence."""
    pace = Pace(100, 0.0)
    assert pace.behind_s(10.0, 1_000_000) == 0.0
    assert pace.behind_s(15.0, 0) == 5.0
    assert pace.behind_s(20.0, 250) == 7.5
    assert pace.behind_s(20.0, -50) == 7.5  # newly written bytes are no progress
    assert pace.behind_s(30.0, 1_000) == 7.5


def test_time_that_was_not_the_peers_is_excused() -> None:
    pace = Pace(100, 0.0)
    assert pace.behind_s(10.0, 200) == 8.0
    pace.excuse(5.0)
    assert pace.behind_s(10.0, 0) == 3.0
    assert pace.paid_until == 7.0
