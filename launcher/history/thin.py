"""Rows of 2 s become one row of a longer step. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from launcher.history.columns import KEPT, STATES, Row, SlotValues, Thin, rounded
from launcher.history.first_tokens import joined, quantile

_PERCENT: Final = {"first_token_p50_s": 50, "first_token_p99_s": 99}
_BADNESS: Final = {state: position for position, state in enumerate(STATES)}


def thin(rows: Sequence[Row], ms: int) -> Row:
    """The row of the step that ends at `ms`. `rows`: all that there are of it, at least one; each counts for its seconds.

    A step that was recorded in part has the values of that part: an hour's gap does not make its rates smaller."""
    streams = joined(row.first_tokens for row in rows)
    host = []
    for position, (name, how) in enumerate(KEPT.items()):
        if how is Thin.QUANTILE:
            host.append(quantile(streams, _PERCENT[name]))
        else:
            host.append(_one(how, [(row.host[position], row.seconds) for row in rows]))
    return Row(ms, sum(row.seconds for row in rows), tuple(map(rounded, host)), tuple(_slots(rows)))


def _slots(rows: Iterable[Row]) -> Iterator[SlotValues]:
    by_slot: dict[int, list[tuple[SlotValues, int]]] = {}
    for row in rows:
        for values in row.slots:
            by_slot.setdefault(values.slot, []).append((values, row.seconds))
    for slot, found in sorted(by_slot.items()):
        yield SlotValues(
            slot,
            _worst(values.state for values, _ in found),
            _one(Thin.MEAN, [(values.tokens_per_s, seconds) for values, seconds in found]),
            _one(Thin.MEAN, [(values.in_flight, seconds) for values, seconds in found]),
            _one(Thin.MAXIMUM, [(values.kv_usage, seconds) for values, seconds in found]),
            _one(Thin.MEAN, [(values.cpu_busy, seconds) for values, seconds in found]),
        )


def _worst(states: Iterable[str | None]) -> str | None:
    return max((state for state in states if state in _BADNESS), key=_BADNESS.__getitem__, default=None)


def _one(how: Thin, values: Iterable[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None]
    if not known:
        return None
    if how is Thin.MAXIMUM:
        return max(value for value, _ in known)
    if how is Thin.MINIMUM:
        return min(value for value, _ in known)
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known)
