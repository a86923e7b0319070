"""The proxy's clock is fast enough for the shortest deadline."""

from __future__ import annotations

from launcher.config.schema import Proxy
from launcher.proxy.dispatch.registry import TICK_MAX_S, TICK_MIN_S, tick_interval_s


def test_the_shortest_deadline_sets_the_interval() -> None:
    assert tick_interval_s(Proxy()) == TICK_MAX_S
    assert tick_interval_s(Proxy(header_timeout_s=0.2)) == 0.05
    assert tick_interval_s(Proxy(header_timeout_s=0.001)) == TICK_MIN_S
