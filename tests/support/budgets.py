"""Bounds on measured time. Tests with the marker `bounded` use them."""

from __future__ import annotations

import os

ALONE = os.environ.get("NUMA_LAUNCHER_TEST_BUDGETS") == "1"
"""Set by `scripts/test budgets`, which runs one test after the other on an idle machine."""


def bound(tight: float) -> float:
    """`tight` in the lane budgets. Elsewhere ten times as much: other tests use the cpus, a fault costs more than that."""
    return tight if ALONE else 10 * tight
