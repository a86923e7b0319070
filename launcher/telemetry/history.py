"""The rows of all spans: added every 2 s, thinned when a longer step has ended, found by time. Pure.

A row of a longer step is made of the rows of 2 s that are kept, whenever its step has ended: nothing is summed up in memory,
so that a restart in the middle of a step loses none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Final

import msgspec

from launcher.telemetry.history_columns import HIT_RATE, HOST, KEPT, SLOT, Row, thin
from launcher.telemetry.history_file import DAY, HOUR, QUARTER, SPANS, Ring, Store, rings

_LONGER: Final = (DAY, QUARTER)


@dataclass(frozen=True, slots=True)
class Found:
    """Where the rows are that end in (after, until]."""

    ring: Ring
    after: int
    until: int
    """End of the newest row; 0 without one."""
    slots: tuple[int, ...]
    """Slots with values in these rows, perhaps also others."""


class History:
    """Owned by one thread."""

    def __init__(self, store: Store, now_ms: int) -> None:
        """Finds what the store has, and thins what an earlier process did not. Raises OSError."""
        self._rings = rings(store)
        self._newest = {span.name: 0 for span in SPANS}
        self._seen: dict[str, dict[int, int]] = {span.name: {} for span in SPANS}
        """By span and slot: the newest row that has the slot."""
        hour, day, quarter = (self._rings[span.name] for span in SPANS)
        for ring in (day, quarter):
            self._catch_up(ring, now_ms)
        for ring in (hour, day):
            for row in ring.every():
                self._note(ring.span.name, row, now_ms)
        self._newest[QUARTER.name] = quarter.newest(now_ms)

    def _catch_up(self, ring: Ring, now_ms: int) -> None:
        hour, step = self._rings[HOUR.name], ring.span.step_ms
        for places in hour.steps(step):
            by_end: dict[int, list[Row]] = {}
            for row in hour.every(places, slots=ring.span.format.slots):
                by_end.setdefault(ring.span.end_of(row.ms), []).append(row)
            for end, rows in by_end.items():  # several where some rows are of an earlier turn
                if end <= now_ms and not _has(ring, end, rows):
                    ring.put(thin(rows, end))

    def _note(self, span: str, row: Row, now_ms: int) -> None:
        if row.ms > now_ms:
            return  # from before the clock was set back
        self._newest[span] = max(self._newest[span], row.ms)
        for values in row.slots:
            seen = self._seen[span]
            seen[values.slot] = max(row.ms, seen.get(values.slot, 0))

    def add(self, rows: Iterable[Row]) -> None:
        """Rows of 2 s, by time; the longer steps that end with one of them are thinned. Raises OSError."""
        for row in rows:
            before = self._newest[HOUR.name]
            for span in _LONGER:
                left = span.end_of(before)
                if before < left < row.ms:  # first: the new row may have the place of one of these
                    self._thin(self._rings[span.name], left)
            self._put(self._rings[HOUR.name], row)
            for span in _LONGER:
                if row.ms % span.step_ms == 0:
                    self._thin(self._rings[span.name], row.ms)

    def _put(self, ring: Ring, row: Row) -> None:
        ring.put(row)
        self._newest[ring.span.name] = row.ms  # lower than before where the clock was set back
        for values in row.slots:
            self._seen[ring.span.name][values.slot] = row.ms

    def _thin(self, ring: Ring, end: int) -> None:
        """The step that ended at `end`, if it has rows."""
        hour = self._rings[HOUR.name]
        data = hour.read(end - ring.span.step_ms, end)
        rows = list(hour.rows(data, end, slots=ring.span.format.slots))
        if rows:
            self._put(ring, thin(rows, end))

    def find(self, span: str, after: int, now_ms: int) -> Found:
        """Rows that ended after `after`; all of the span where `after` is above the newest: the clock was set back."""
        ring, newest = self._rings[span], self._newest[span]
        step = ring.span.step_ms
        begin = now_ms // step * step - ring.span.length_ms
        after = begin if after > newest else max(begin, after // step * step)
        slots = sorted(slot for slot, ms in self._seen[span].items() if ms > after)
        return Found(ring, after, newest, tuple(slots))

    def take(self, other: History) -> None:
        """What another history has and this one has not. Raises OSError."""
        for name, ring in self._rings.items():
            for row in other.every(name):
                there = ring.at(row.ms)
                if there is None or there.ms < row.ms:
                    ring.put(row)
                    self._note(name, row, row.ms)

    def every(self, span: str) -> Iterable[Row]:
        """All rows, by place."""
        return self._rings[span].every()


def _has(ring: Ring, end: int, rows: Iterable[Row]) -> bool:
    """Whether a step's place has its row, made before some of its rows of 2 s were overwritten, or a later step's."""
    there = ring.at(end)
    return there is not None and (
        there.ms > end or (there.ms == end and there.seconds >= sum(row.seconds for row in rows))
    )


# --- The reply of ``GET /v1/history``, part by part: an hour of 32 slots is 300,000 values. ---

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
