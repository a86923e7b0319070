"""The reply of ``GET /v1/history``, part by part: an hour of 32 slots is 300,000 values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Final

import msgspec

from launcher.history.columns import HIT_RATE, HOST, KEPT, SLOT, Row
from launcher.history.history import Found

_QUERIES: Final = list(KEPT).index("prefix_queries_per_s")
_HITS: Final = list(KEPT).index("prefix_hits_per_s")
_RATE: Final = HOST.index(HIT_RATE)
_NO_SLOT: Final = (None,) * len(SLOT)
# Of rows that are decoded and encoded at a time: less than a millisecond.
_PIECE_BYTES: Final = 32_768


class Reply:
    """`slots`: "all", "none", or a slot's number."""

    def __init__(self, found: Found, slots: str) -> None:
        self._ring = found.ring
        self._empty = True
        shown = [slot for slot in found.slots if slots in ("all", str(slot))]
        self._places = {slot: place for place, slot in enumerate(shown)}
        columns = [*HOST, *(f"slot.{slot}.{name}" for slot in shown for name in SLOT)]
        span = found.ring.span
        head = {"span": span.name, "step_ms": span.step_ms, "newest": found.until or None, "columns": columns}
        self.head = msgspec.json.encode(head)[:-1] + b',"rows":['
        step = max(1, _PIECE_BYTES // span.format.size) * span.step_ms
        self.parts = [
            (after, min(after + step, found.until)) for after in range(found.after, found.until, step)
        ]
        """Which rows are read at a time: those that end in (after, until]."""

    def rows(self, data: bytes, until: int) -> bytes:
        """The next part's rows. `data`: what `Ring.read` returns for it."""
        found = self._ring.rows(data, until, slots=bool(self._places))
        lines = [msgspec.json.encode(_values(row, self._places)) for row in found]
        comma = b"" if self._empty or not lines else b","
        self._empty = self._empty and not lines
        return comma + b",".join(lines)

    tail: Final = b"]}\n"


def _values(row: Row, places: Mapping[int, int]) -> list[object]:
    host = list(row.host)
    queries, hits = host[_QUERIES], host.pop(_HITS)
    host[_RATE] = round(hits / queries, 4) if queries and hits is not None else None
    if not places:
        return [row.ms, *host]
    slots: list[tuple[object, ...]] = [_NO_SLOT] * len(places)
    for slot, state, tokens, in_flight, kv_usage, cpu_busy in row.slots:
        if slot in places:
            slots[places[slot]] = (tokens, in_flight, kv_usage, cpu_busy, state)
    return [row.ms, *host, *chain.from_iterable(slots)]
