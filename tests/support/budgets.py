"""Bounds on measured time. Tests with the marker `bounded` use them."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from typing import Any

import pytest

ALONE = os.environ.get("NUMA_LAUNCHER_TEST_BUDGETS") == "1"
"""Set by `scripts/test budgets`, which runs one test after the other on an idle machine."""


def bound(tight: float) -> float:
    """`tight` in the lane budgets. Elsewhere ten times as much: other tests use the cpus, a fault costs more than that."""
    return tight if ALONE else 10 * tight


def partly_gated(cases: Iterable[tuple[Any, ...]], in_gate: Container[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test: those `in_gate` run in every lane, the others in the lane budgets."""
    return [pytest.param(*case, marks=() if case in in_gate else pytest.mark.budget) for case in cases]
