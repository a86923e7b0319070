"""The rows of all spans: added every 2 s, thinned when a longer step has ended, found by time. Pure.

A row of a longer step is made of the rows of 2 s that are kept, whenever its step has ended: nothing is summed up in memory,
so that a restart in the middle of a step loses none of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from launcher.history.columns import Row
from launcher.history.rings import DAY, HOUR, QUARTER, SPANS, Ring, Store, rings
from launcher.history.thin import thin

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
