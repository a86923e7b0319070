"""How many examples Hypothesis draws for a property."""

from __future__ import annotations

import os

RELEASE = os.environ.get("NUMA_LAUNCHER_TEST_RELEASE") == "1"
"""Set by `scripts/test release`."""


def examples(most: int) -> int:
    """`most` in `scripts/test release`. Elsewhere a third: each takes milliseconds, and most find nothing new."""
    return most if RELEASE else max(most // 3, 10)
