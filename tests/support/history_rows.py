"""Rows of the history for tests."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.telemetry.history_columns import KEPT, Row, SlotValues

NONE = tuple(None for _ in KEPT)
# The end of a minute and of ten minutes.
NOON = 1_800_000_000_000


def row(
    ms: int,
    *slots: SlotValues,
    seconds: int = 2,
    first_tokens: Mapping[int, int] | None = None,
    **host: float,
) -> Row:
    """Unnamed columns are unknown."""
    assert host.keys() <= KEPT.keys()
    return Row(ms, seconds, tuple(host.get(name) for name in KEPT), dict(first_tokens or {}), slots)


def slot(number: int, state: str | None = "ready", **values: float) -> SlotValues:
    known = dict.fromkeys(("tokens_per_s", "in_flight", "kv_usage", "cpu_busy")) | values
    return SlotValues(number, state, **known)


def value(of: Row, name: str) -> float | None:
    return of.host[list(KEPT).index(name)]
