"""The collector of cycles in a process that is up."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from launcher.daemon import process


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


class Knot:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def test_present_objects_are_not_collected_again() -> None:
    process.settle()
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < 1_000


def test_a_cycle_that_is_made_later_is_still_found() -> None:
    process.settle()
    seen = weakref.ref(Knot())
    kept = [[] for _ in range(20 * process.YOUNGEST)]
    assert seen() is None
    assert kept
